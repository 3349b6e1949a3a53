"""Takes deliveries for those who want a loop of their own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any

from msgspec.structs import replace

from lisa.consumer.delivery import Delivery
from lisa.consumer.heartbeat import FOLLOW_S
from lisa.consumer.joining import ask_for_group, join, was_emptied
from lisa.consumer.opening import settlement_of, unpack
from lisa.consumer.signalling import Announcer
from lisa.core import presence
from lisa.core.address import Address
from lisa.core.clock import duration_ms
from lisa.core.connection import Connection
from lisa.core.errors import GroupRemoved, InvalidMessage, LisaError, RemovalUnfinished
from lisa.core.failures import ClientError, passes, translated
from lisa.core.message import Message
from lisa.core.options import MAX_ACK_TIMEOUT, MIN_ACK_TIMEOUT
from lisa.core.shards import PLAIN, base
from lisa.core.store import SyncStore
from lisa.core.stream import Entry
from lisa.core.transitions.ack import Ack, Acked, Settlement
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.extend import Extend
from lisa.core.transitions.open import Open
from lisa.core.transitions.pull import Pull, Pulled
from lisa.core.transitions.release import Release
from lisa.core.transitions.retry import Failed, Failure
from lisa.core.transitions.retry import Retry as Fail

__all__ = ["Puller"]

MOST = 500
"""So many may be asked for; a topic with one group gives 250 at once, with several fewer."""

LONGEST_WAIT_S = 60.0
"""One blocking read waits at most so long; then the next one goes on."""

LOOK_AGAIN_S = 0.5

BETWEEN_NODES_S = 0.05
"""How often the places of a topic that is split over several nodes are asked in turn."""


class Puller:
    """Pulls for one consumer. Safe to share between threads."""

    def __init__(
        self, store: SyncStore, address: Address, wanted: str, name: str, announcer: Announcer
    ) -> None:
        self._store = store
        self._waiting = Connection(address.blocking_for(LONGEST_WAIT_S))
        self._wanted = wanted
        self._name = name
        self._announcer = announcer
        self._groups: dict[str, str] = {}
        self._seen: dict[str, float] = {}
        self._followed: dict[str, float] = {}
        self._turn = 0
        self._failing: set[str] = set()

    def pull(
        self, topic: str, batch: int, wait: timedelta, ack_timeout: timedelta | None
    ) -> list[Delivery]:
        """At most `batch` deliveries; waits up to `wait` for the first. Raises LisaError."""
        if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MOST:
            raise InvalidMessage(f"a pull takes 1 to {MOST} messages, not {batch!r}")
        timeout_ms = None if ack_timeout is None else _checked_timeout_ms(ack_timeout)
        ends = time.monotonic() + wait.total_seconds()
        group = self._group(topic, ends)
        if group is None:
            return []
        try:
            return self._pull(topic, group, batch, ends, timeout_ms)
        except GroupRemoved:
            self._groups.pop(topic, None)
            if not self._store.drive(was_emptied(self._store, topic, self._name, group)):
                raise
            for place in list(self._seen):  # other threads may pull
                if base(place) == topic:
                    self._seen.pop(place, None)
            return self.pull(topic, batch, timedelta(seconds=max(0.0, ends - time.monotonic())),
                             ack_timeout)  # fmt: skip

    def _pull(
        self, topic: str, group: str, batch: int, ends: float, timeout_ms: int | None
    ) -> list[Delivery]:
        while True:
            places, empty = self._in_turn(topic), dict[str, Pulled]()
            for place in places:
                try:
                    pulled = self._pull_from(place, group, batch, timeout_ms)
                    found = self._opened(place, group, pulled.entries, timeout_ms)
                except LisaError:
                    self._failing.add(place)
                    raise
                self._failing.discard(place)
                if found:  # given out before another place fails, and nobody gets them
                    return found
                if not pulled.entries:
                    empty[place] = pulled
            left_s = ends - time.monotonic()
            if left_s <= 0:
                return []
            if len(empty) == len(places):
                self._wait(group, empty, left_s)

    def _in_turn(self, topic: str) -> list[str]:
        """A topic's places, each first in its turn; those that failed last time come last."""
        places = self._places(topic)
        self._turn = (self._turn + 1) % len(places)
        rotated = [*places[self._turn :], *places[: self._turn]]
        return sorted(rotated, key=self._failing.__contains__)

    def _places(self, topic: str) -> list[str]:
        """Where a topic's messages are, as was known a second ago at most."""
        now = time.monotonic()
        if now - self._followed.get(topic, -math.inf) > FOLLOW_S:
            self._followed[topic] = now
            self._store.drive(self._store.layout(topic))
        return (self._store.known_layout(topic) or PLAIN).places(topic)

    def _pull_from(self, place: str, group: str, batch: int, timeout_ms: int | None) -> Pulled:
        self._announce(place, group)
        batch = min(batch, self._store.batch_size(place, Pull))
        call = Pull(place, group, self._name, batch, timeout_ms)
        try:
            return self._store.call(call)
        except GroupRemoved:
            whole = base(place)
            if whole == place or group not in self._store.drive(self._store.groups(whole)):
                raise
            try:
                self._store.call(Declare(place, group))  # it is just being told of its groups
            except RemovalUnfinished:  # of an earlier group of that name: another turn, then
                return Pulled(paused=False, last_id="", entries=[])
            return self._store.call(call)

    def close(self, store: SyncStore) -> list[Callable[[], None]]:
        """End; one call for each place, on a store of the caller's, takes the record there away.

        Each raises LisaError.
        """
        self._waiting.close()
        places = list(self._seen)
        self._seen.clear()
        return [
            partial(store.drive, presence.leave_consumer(store, place, self._name))
            for place in places
        ]

    def _group(self, topic: str, ends: float) -> str | None:
        group = self._groups.get(topic)
        if group:
            return group
        asked, pause = False, 0.02
        while (group := self._store.drive(join(self._store, topic, self._wanted))) is None:
            if not asked:
                self._store.drive(ask_for_group(self._store, topic, self._name))
                self._seen[topic] = 0.0
                asked = True
            left_s = ends - time.monotonic()
            if left_s <= 0:
                return None
            time.sleep(min(pause, left_s))
            pause = min(2 * pause, LOOK_AGAIN_S)
        self._groups[topic] = group
        return group

    def _announce(self, place: str, group: str) -> None:
        now = time.monotonic()
        if now - self._seen.get(place, -math.inf) < presence.BEAT.total_seconds():
            return
        self._seen[place] = now
        record = presence.ConsumerPresence(name=self._name, topic=base(place), group=group)
        self._store.drive(presence.announce_consumer(self._store, record, place))

    def _wait(self, group: str, empty: Mapping[str, Pulled], left_s: float) -> None:
        """Until a stream of the group has an entry that nobody was given, or the time is up."""
        if any(pulled.paused for pulled in empty.values()):
            time.sleep(min(LOOK_AGAIN_S, left_s))
            return
        # Not beyond a beat: whoever waits is alive, and should be seen to be.
        block_s = min(left_s, presence.BEAT.total_seconds())
        if len(empty) > 1:  # another place may come up
            block_s = min(block_s, FOLLOW_S)
            if self._waiting.address.kind == "cluster":  # a read waits at one node
                time.sleep(min(BETWEEN_NODES_S, left_s))
                return
        streams = [self._store.keys.topic(place).group(group).ready for place in empty]
        seen = [pulled.last_id or "$" for pulled in empty.values()]
        try:
            self._waiting.execute(
                ("XREAD", "COUNT", 1, "BLOCK", max(1, math.ceil(block_s * 1000)),
                 "STREAMS", *streams, *seen)
            )  # fmt: skip
        except ClientError as error:
            # The next pull is repeated with patience, and says so if the server stays away.
            if not passes(error):
                raise translated(error, self._store.where) from error

    def _opened(
        self, place: str, group: str, entries: list[Entry], timeout_ms: int | None
    ) -> list[Delivery]:
        if not entries:
            return []
        opened = self._store.call(Open(place, group, entries, timeout_ms))
        found = []
        for entry, data, is_past in zip(entries, opened.envelopes, opened.past_ttl, strict=True):
            if data is None:
                continue
            message, fault = unpack(base(place), group, entry, data)
            settlement = settlement_of(message, entry.entry, data, opened.now_us)
            if fault:
                self.fail(message, settlement, fault, "discard")
            elif is_past:
                self.ack(message, settlement, "expired")
            else:
                found.append(Delivery(self, message, settlement, timeout_ms))
        return found

    def ack(self, message: Message, settlement: Settlement, state: str = "acked") -> Acked:
        """Settle one delivery. Raises LisaError."""
        outcome = self._store.call_by_id(Ack(message.topic, message.group, [settlement], state))[0]
        if outcome is not Acked.STALE:
            told = self._announcer.acked if state == "acked" else self._announcer.expired
            self._announcer.fire(told, message)
        return outcome

    def fail(
        self, message: Message, settlement: Settlement, reason: str, delay: Any = None
    ) -> Failed:
        """Give one delivery up for this time. Raises LisaError."""
        failure = Failure(settlement.id, settlement.entry, reason, delay, settlement.lateness)
        retried = self._store.call_by_id(Fail(message.topic, message.group, [failure]))[0]
        if retried.outcome is not Failed.STALE:
            dead = retried.outcome is Failed.DEAD
            told = self._announcer.dead if dead else self._announcer.retrying
            self._announcer.fire(told, replace(message, reason=reason, next_due_ms=retried.due_ms))
        return retried.outcome

    def extend(self, message: Message, settlement: Settlement, timeout_ms: int | None) -> bool:
        """Renew one lease. Raises LisaError."""
        receipt = (settlement.id, settlement.entry)
        call = Extend(message.topic, message.group, self._name, [receipt], timeout_ms)
        return self._store.call_by_id(call)[0]

    def release(self, message: Message, settlement: Settlement) -> bool:
        """Give one delivery back. Raises LisaError."""
        receipt = (settlement.id, settlement.entry)
        return self._store.call_by_id(Release(message.topic, message.group, [receipt]))[0]


def _checked_timeout_ms(value: timedelta) -> int:
    if not MIN_ACK_TIMEOUT <= value <= MAX_ACK_TIMEOUT:
        raise InvalidMessage(f"an ack timeout is {MIN_ACK_TIMEOUT} to {MAX_ACK_TIMEOUT}: {value}")
    return duration_ms(value)
