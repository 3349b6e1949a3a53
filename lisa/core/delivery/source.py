"""Takes messages of one group from the shards of its topic: pull, open, and wait for more.

`Consumer.pull` and the gateway's long polls and pushes drive these flows. Consumer threads read
with XREADGROUP instead, and share the other modules of this package.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

from lisa.core.delivery.opening import Opening, Undecodable, unpack
from lisa.core.delivery.pace import AHEAD_BYTES, BodySize
from lisa.core.model.errors import GroupRemoved, LisaError, RemovalUnfinished, ServerUnavailable
from lisa.core.model.message import Message
from lisa.core.model.options import MIN_ACK_TIMEOUT
from lisa.core.model.sharding import Shard, Topic, own_shard
from lisa.core.model.stream import Entry
from lisa.core.redis.flow import Command, Flow
from lisa.core.store import presence
from lisa.core.store.store import LAYOUT_AGE_S, Store, chunks
from lisa.core.transitions.ack import Ack, Acked, Settlement, settlement_of
from lisa.core.transitions.delivery import Open, Opened, Pull, Pulled
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.lease import Release
from lisa.core.transitions.retry import Fail, Failure, Retried

MOST = 500
"""Maximum number of messages per pull; the server returns up to 250 per call."""

LOOK_AGAIN_S = 0.5
"""Interval of checks that no blocking read can replace, such as whether a topic is still paused."""

BETWEEN_NODES_S = 0.05
"""Interval at which the shards of a topic on several cluster nodes are polled."""

LATE_S = MIN_ACK_TIMEOUT.total_seconds() / 3
"""Leases older than this are restarted when their entries are opened."""


CUT_SHORT = (ServerUnavailable, asyncio.CancelledError, KeyboardInterrupt)
"""Errors after which a pull may have taken messages without returning them."""


class Taken(NamedTuple):
    """Entries from one shard; or, if `entries` is empty, the reply of each shard in `empty`."""

    call: Pull | None
    entries: list[Entry]
    asked_at: float
    empty: Mapping[Shard, Pulled]


class Delivered(NamedTuple):
    """An opened entry of this group's consumer.

    `fault` tells why the body cannot be decoded, and is otherwise None. `is_expired`: the message
    is past its time to live. Neither kind is for a handler.
    """

    message: Message
    settlement: Settlement
    size: int
    fault: Undecodable | None
    is_expired: bool

    @property
    def is_for_handler(self) -> bool:
        """Whether a handler may see the message."""
        return not self.fault and not self.is_expired


class GroupSource:
    """Takes messages of one group of one topic for one consumer. Threads may share it.

    `announce` runs before each pull from a shard.
    """

    def __init__(
        self,
        store: Store,
        topic: Topic,
        group: str,
        consumer: str,
        announce: Callable[[Shard], Flow[None]] | None = None,
    ) -> None:
        self._store = store
        self.topic = topic
        self.group = group
        self._consumer = consumer
        self._announce = announce
        self._turn = 0
        self._failing: set[Shard] = set()
        self._unanswered: dict[Shard, deque[Pull]] = {}
        self._size = BodySize()
        self._opening = Opening(store)

    @property
    def may_hold_some(self) -> bool:
        """Whether pulls without a reply may have taken messages; the next ones return them."""
        return any(list(self._unanswered.values()))

    def take(self, most: int, ack_timeout_ms: int | None = None) -> Flow[Taken]:
        """Pull up to `most` messages from the first shard that has any.

        A pull without a reply, or cancelled, may have taken messages; the next `take` repeats it
        under the same call id, so it may return more than `most`. With 0, `take` does nothing else.
        Raises LisaError.
        """
        layout = yield from self._store.recent_layout(self.topic)
        shards = layout.active(self.topic)
        for shard in set(self._unanswered).difference(shards):  # removed meanwhile
            self._unanswered.pop(shard, None)
        empty = dict[Shard, Pulled]()
        owing = [shard for shard, calls in list(self._unanswered.items()) if calls]
        for shard in self._in_turn(shards if most else owing):
            known, asked_at = self._next_unanswered(shard), time.monotonic()
            call = known or self._new_call(shard, most, ack_timeout_ms)
            try:
                pulled = yield from self._pull(call)
            except CUT_SHORT:
                self._repeat(call)
                raise
            except LisaError:
                self._failing.add(shard)
                raise
            self._failing.discard(shard)
            if pulled.entries:
                return Taken(call, pulled.entries, -math.inf if known else asked_at, {})
            empty[shard] = pulled
        return Taken(None, [], 0.0, empty)

    def open(
        self,
        taken: Taken,
        entries: Sequence[Entry],
        ack_timeout_ms: int | None,
        limit: int = AHEAD_BYTES,
    ) -> Flow[list[Delivered | None]]:
        """Open entries in order until their bodies reach `limit` bytes.

        Returns one item per opened entry, None where the delivery is no longer held. After an error
        the deliveries opened before it are returned; raises LisaError if there are none.
        """
        assert taken.call is not None  # noqa: S101  there are entries, so there was a call
        shard = taken.call.topic
        found: list[Delivered | None] = []
        total = 0
        while len(found) < len(entries) and total < limit:
            part = entries[len(found) : len(found) + self._store.batch_size(shard, Open)]
            late = self._consumer if time.monotonic() - taken.asked_at > LATE_S else ""
            try:
                call = Open(shard, self.group, part, ack_timeout_ms, late)
                opened = yield from self._opening.open(call)
            except LisaError:
                if not found:
                    raise
                break
            size = sum(len(data or b"") for data in opened.envelopes)
            total += size
            self._size.measured(size, len(opened.envelopes))
            found += self._delivered(part[: len(opened.envelopes)], opened)
        return found

    def settle_unfit(
        self, opened: Iterable[Delivered | None]
    ) -> Flow[list[tuple[Delivered, Acked | Retried]]]:
        """Settle messages that cannot be decoded, and messages past their time to live.

        Returns each of them with its outcome. Raises LisaError.
        """
        unfit = [
            delivered
            for delivered in opened
            if delivered is not None and not delivered.is_for_handler
        ]
        faulty = [delivered for delivered in unfit if delivered.fault]
        expired = [delivered for delivered in unfit if not delivered.fault]
        outcomes: list[Acked | Retried] = []
        if faulty:
            failures = [
                Failure.of(delivered.settlement, *delivered.fault)
                for delivered in faulty
                if delivered.fault
            ]
            outcomes += yield from self._store.run_by_id(Fail(self.topic, self.group, failures))
        if expired:
            settlements = [delivered.settlement for delivered in expired]
            call = Ack(self.topic, self.group, settlements, "expired")
            outcomes += yield from self._store.run_by_id(call)
        return list(zip([*faulty, *expired], outcomes, strict=True))

    def repeat(self, taken: Taken) -> None:
        """Let a later `take` repeat the pull: its messages were not handed out."""
        if taken.call is not None:
            self._repeat(taken.call)

    def _repeat(self, call: Pull) -> None:
        shard = Shard(call.topic)
        self._unanswered.setdefault(shard, deque()).append(call)
        self._failing.add(shard)

    def _next_unanswered(self, shard: Shard) -> Pull | None:
        try:
            return self._unanswered[shard].popleft()
        except (KeyError, IndexError):
            return None

    def give_back(self, store: Store) -> Flow[None]:
        """Release, in calls of `store`, what pulls without a reply took. Raises LisaError."""
        for shard in list(self._unanswered):
            while (call := self._next_unanswered(shard)) is not None:
                with suppress(GroupRemoved):  # and its deliveries with it
                    pulled = yield from store.run(call)
                    receipts = [(entry.id, entry.entry) for entry in pulled.entries]
                    for part in chunks(receipts, store.batch_size(shard, Release)):
                        yield from store.run(Release(shard, self.group, part))

    def wait_for(
        self, empty: Mapping[Shard, Pulled], longest_s: float
    ) -> tuple[float, Command | None]:
        """How to wait for the next message: up to how many seconds, with which blocking read.

        Without a command the caller pauses for that time.
        """
        if any(pulled.paused for pulled in empty.values()):
            return min(LOOK_AGAIN_S, longest_s), None
        # At most one heartbeat, because a waiting consumer must renew its presence record.
        block_s = min(longest_s, presence.BEAT.total_seconds())
        if len(empty) > 1:  # shards may be added
            block_s = min(block_s, LAYOUT_AGE_S)
            if self._store.has_nodes:  # a read blocks on one node
                return min(BETWEEN_NODES_S, longest_s), None
        streams = [self._store.keys.topic(shard).group(self.group).ready for shard in empty]
        after = [pulled.last_id or "$" for pulled in empty.values()]
        block_ms = max(1, math.ceil(block_s * 1000))
        read: Command = ("XREAD", "COUNT", 1, "BLOCK", block_ms, "STREAMS", *streams, *after)
        return block_s, read

    def _in_turn(self, shards: list[Shard]) -> list[Shard]:
        """Shards in rotation; those that failed last time come last."""
        self._turn = (self._turn + 1) % max(1, len(shards))
        rotated = [*shards[self._turn :], *shards[: self._turn]]
        return sorted(rotated, key=self._failing.__contains__)

    def _new_call(self, shard: Shard, most: int, ack_timeout_ms: int | None) -> Pull:
        most = min(most, MOST, self._store.batch_size(shard, Pull), self._size.fitting())
        return Pull(shard, self.group, self._consumer, most, ack_timeout_ms)

    def _pull(self, call: Pull) -> Flow[Pulled]:
        shard, group = Shard(call.topic), call.group
        if self._announce is not None:
            yield from self._announce(shard)
        try:
            return (yield from self._store.run(call))
        except GroupRemoved:
            if shard == own_shard(self.topic) or group not in (
                yield from self._store.groups(self.topic)
            ):
                raise
        # A new shard may lack some groups: the declarations follow its creation.
        try:
            yield from self._store.run(Declare(shard, group))
        except RemovalUnfinished:  # of an earlier group of the same name
            return Pulled(paused=False, last_id="", entries=[])
        return (yield from self._store.run(call))

    def _delivered(self, entries: Sequence[Entry], opened: Opened) -> list[Delivered | None]:
        found: list[Delivered | None] = []
        for entry, data, is_past in zip(entries, opened.envelopes, opened.past_ttl, strict=True):
            if data is None:
                found.append(None)
                continue
            message, fault = unpack(self.topic, self.group, entry, data)
            settlement = settlement_of(message, entry.entry, data, opened.now_us)
            found.append(Delivered(message, settlement, len(data), fault, is_past))
        return found
