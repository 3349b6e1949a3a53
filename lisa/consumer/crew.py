"""The threads of one running consumer, and how they start and end together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

from lisa.consumer.abreast import Abreast
from lisa.consumer.dispatcher import Dispatcher
from lisa.consumer.handlers import Handlers
from lisa.consumer.heartbeat import Heartbeat
from lisa.consumer.held import Held
from lisa.consumer.joining import find_group
from lisa.consumer.leaving import LAST_CALLS_S, LastCalls, give_back
from lisa.consumer.metrics import own_numbers
from lisa.consumer.pull import Puller
from lisa.consumer.reader import Reader
from lisa.consumer.settler import Settler
from lisa.consumer.signalling import Announcer
from lisa.consumer.slots import Slots
from lisa.consumer.subscription import Subscription
from lisa.core.address import Address
from lisa.core.connection import Connection
from lisa.core.errors import GroupRemoved, LisaError, ServerUnavailable
from lisa.core.keys import Keys
from lisa.core.metrics.numbers import Numbers
from lisa.core.presence import unique_name
from lisa.core.shards import PLAIN, base
from lisa.core.store import SyncStore, chunks

__all__ = ["Crew", "Wanted"]

log = logging.getLogger("lisa.consumer")

PATIENCE = timedelta(seconds=1)
"""How long one call is repeated; whoever made it goes on trying in a way of its own."""

HEARTBEAT_S = 5.0
"""So long at most a beat that has begun is waited for."""


class Wanted(NamedTuple):
    """A topic to take, the group if one was named, and the first part of the consumer's name."""

    topic: str
    group: str | None
    name: str | None


class Crew:
    """Readers, dispatcher, settler and heartbeat of one consumer. It starts once."""

    def __init__(
        self,
        address: Address,
        keys: Keys,
        handlers: Handlers,
        *,
        name: str | None,
        concurrency: int,
        poll: timedelta,
        cap: int | None,
        failed: Callable[[LisaError], None],
    ) -> None:
        self._address = address
        self._handlers = handlers
        self._poll = poll
        self._cap = cap
        self._failed = failed
        self._name = name
        self._unique_name = unique_name(name)
        self._store = SyncStore(Connection(address), keys, PATIENCE, who="consumer")
        self._patient_store = SyncStore(Connection(address), keys, who="consumer")
        self._slots = Slots(concurrency)
        self._announcer = Announcer(handlers.signals, self._spawn)
        self._settler = Settler(
            self._subscriptions, self._announcer, has_nodes=address.kind == "cluster"
        )
        self._dispatcher = Dispatcher(self._slots, handlers, self._settler)
        self._heartbeat = Heartbeat(
            self._store, self._subscriptions, concurrency, self._drained, self._follow
        )
        self._wanted: dict[tuple[str, str], Wanted] = {}
        self._places: dict[tuple[str, str], set[str]] = {}
        self._abreast: Abreast[Wanted] = Abreast("lisa-follow")
        self._readers: dict[Subscription, Reader] = {}
        self._puller: Puller | None = None
        self._lock = threading.Lock()
        self.is_started = False

    def _spawn(self, awaitable: Awaitable[Any]) -> None:
        self._dispatcher.spawn(awaitable)

    def _subscriptions(self) -> Iterable[Subscription]:
        return list(self._readers)

    def start(self, all_wanted: Iterable[Wanted]) -> None:
        """Start the threads. Raises ConfigError for what is seen to be wrong at once."""
        all_wanted = list(all_wanted)
        try:
            self._store.drive(self._store.check_schema())
            self._store.drive(self._store.layouts([wanted.topic for wanted in all_wanted]))
            for wanted in all_wanted:
                if wanted.group is None:
                    self._store.drive(find_group(self._store, wanted.topic))
        except ServerUnavailable as error:
            log.warning("starting without the server: %s", error)
        self.is_started = True
        self._settler.start()
        self._heartbeat.start()
        for wanted in all_wanted:
            self.take(wanted)

    def take(self, wanted: Wanted) -> None:
        """Begin to read a topic, unless it is read already: each of its places by itself."""
        with self._lock:
            self._wanted.setdefault((wanted.topic, wanted.group or ""), wanted)
        for place in self._places_of(wanted.topic):
            self._take_place(wanted, place)

    def _places_of(self, topic: str) -> list[str]:
        return (self._store.known_layout(topic) or PLAIN).places(topic)

    def _follow(self) -> None:
        """Read what topics were split into meanwhile, and no longer what is done with.

        Raises LisaError at the end, if a node does not answer. A cluster, where one may hang, is
        asked for all topics side by side.
        """
        with self._lock:
            all_wanted = list(self._wanted.values())
        together = 1 if self._address.kind == "cluster" else max(1, len(all_wanted))
        failed: list[LisaError] = []
        parts = list(chunks(all_wanted, together))
        for some in parts[1:]:
            self._abreast.start(some[0], partial(self._follow_some, some, failed))
        for some in parts[:1]:
            self._follow_some(some, failed)
        self._abreast.wait()
        if failed:
            raise failed[0]

    def _follow_some(self, some: Sequence[Wanted], failed: list[LisaError]) -> None:
        try:
            self._store.drive(self._store.layouts([wanted.topic for wanted in some]))
        except LisaError as error:
            failed.append(error)
            return
        for wanted in some:
            self._follow_one(wanted)

    def _follow_one(self, wanted: Wanted) -> None:
        topic, group = wanted.topic, wanted.group or ""
        places = self._places_of(topic)
        with self._lock:
            known = set(self._places.get((topic, group), ()))
        # Nothing is begun anew where the group was removed, and each reader has ended.
        if any(self._reads(place, group) for place in known):
            for place in [one for one in places if one not in known]:
                self._take_place(wanted, place)
        for place in known.difference(places):
            self._leave_place(place, group)

    def _leave_place(self, place: str, group: str) -> None:
        """Nothing is left there: the heartbeat sees to the rest."""
        with self._lock:
            self._places.get((base(place), group), set()).discard(place)
            left = {sub: one for sub, one in self._readers.items()
                    if sub.topic == place and sub.wanted == group}  # fmt: skip
        for sub in left:
            sub.closing.set()
        _interrupt(left.values())

    def _take_place(self, wanted: Wanted, place: str) -> None:
        group = wanted.group or ""
        name = unique_name(wanted.name) if wanted.name else self._unique_name
        sub = Subscription(self._store, place, group, name, self._heartbeat.wake)
        with self._lock:
            is_wanted = (wanted.topic, group) in self._wanted
            if not self.is_started or not is_wanted or self._reads(place, group):
                return
            self._places.setdefault((wanted.topic, group), set()).add(place)
            sub.is_paused_here = any(
                one.is_paused_here for one in self._readers
                if one.whole == wanted.topic and one.wanted == group
            )  # fmt: skip
            reader = self._readers[sub] = Reader(
                sub, self._address, poll=self._poll, cap=self._cap, handlers=self._handlers,
                dispatcher=self._dispatcher, settler=self._settler,
                topics=lambda: len(self._readers), failed=self._failed,
            )  # fmt: skip
            reader.start()

    def _reads(self, place: str, group: str) -> bool:
        return any(
            one.topic == place and not one.closing.is_set() and one.wanted == group
            for one in list(self._readers)
        )

    def let_go(self, topic: str) -> None:
        """Stop reading a topic and give back what is unstarted; the heartbeat sees to the rest."""
        with self._lock:
            self._wanted = {key: one for key, one in self._wanted.items() if key[0] != topic}
            self._places = {key: one for key, one in self._places.items() if key[0] != topic}
            readers = {sub: one for sub, one in self._readers.items() if sub.whole == topic}
        for sub in readers:
            sub.closing.set()
        self._end_reading(readers, LastCalls(self._address))

    def pause(self, topic: str | None, *, paused: bool) -> None:
        """Stop or resume reading, in this consumer only."""
        with self._lock:  # places that are taken up meanwhile follow those that are there
            readers = {sub: one for sub, one in self._readers.items() if topic in (None, sub.whole)}
            for sub in readers:
                sub.is_paused_here = paused
        _interrupt(readers.values())

    def puller(self, group: str | None) -> Puller:
        """What pulls, made at the first use."""
        if self._puller is None:
            self._puller = Puller(
                self._patient_store, self._address, group or "", self._unique_name, self._announcer
            )
        return self._puller

    def owns_this_thread(self) -> bool:
        """Whether the caller is a handler, or a receiver of any other signal."""
        current = threading.current_thread()
        return (
            self._dispatcher.owns_this_thread()
            or self._settler.owns_this_thread()
            or any(reader.thread is current for reader in list(self._readers.values()))
        )

    def health(self) -> Mapping[str, Any]:
        """State by topic."""
        topics: dict[str, dict[str, Any]] = {}
        for sub, reader in list(self._readers.items()):
            state = "unreachable" if reader.is_in_trouble else sub.state
            one = {"state": state, "held": len(sub.held), "handled": sub.handled}
            known = topics.setdefault(f"{sub.whole}/{sub.group or '-'}", one)
            if known is not one:  # another place of the same topic
                known["held"] += one["held"]
                known["handled"] += one["handled"]
                if state not in ("running", "stopping"):
                    known["state"] = state
        failing = any(reader.is_in_trouble for reader in list(self._readers.values()))
        waiting = any(not sub.group for sub in self._subscriptions())
        status = "failing" if failing else "starting" if waiting else "ok"
        return {"status": status, "topics": topics}

    def numbers(self) -> Numbers:
        """What the handlers did and do."""
        readers = [(sub, one.is_in_trouble) for sub, one in list(self._readers.items())]
        return own_numbers(readers, self._slots)

    def close(self, grace_s: float) -> None:
        """Stop reading, give back, let handlers finish, settle, leave."""
        ends = time.monotonic() + grace_s
        with self._lock:
            was_started, self.is_started = self.is_started, False
            readers = dict(self._readers)
        for sub in readers:
            sub.closing.set()
        last = LastCalls(self._address)
        if was_started:
            self._end_reading(readers, last)
            waiting = time.monotonic()
            self._slots.wait_all_free(max(0.0, ends - waiting))
            if time.monotonic() - waiting > LAST_CALLS_S:  # the server may be back
                last = LastCalls(self._address)
            self._take_away(readers, last)
            self._settler.hurry()
            self._settler.close(last.left_s())
            self._heartbeat.close(last.left_s(HEARTBEAT_S))
            self._abreast.close()
            self._dispatcher.close()
        self._leave(readers, last)
        self._store.close()
        self._patient_store.close()

    @staticmethod
    def _end_reading(readers: Mapping[Subscription, Reader], last: LastCalls) -> None:
        taken = {sub: sub.withdraw() for sub in readers}
        last.make(lambda: _interrupt(readers.values()))
        give_back(taken, last)
        ends = time.monotonic() + last.left_s()
        for reader in readers.values():
            if reader.thread is not threading.current_thread():
                last.make(partial(reader.end, ends, is_answered=last.is_answered))
        give_back({sub: sub.withdraw() for sub in readers}, last)

    def _take_away(self, subs: Iterable[Subscription], last: LastCalls) -> None:
        """After the grace time: cancel what can be cancelled; the rest keeps its lease's end."""
        taken: dict[Subscription, list[Held]] = {}
        for sub in subs:
            running = [one for one in list(sub.held.values()) if one.started and not one.ended]
            taken[sub] = cancelled = [one for one in running if one.task is not None]
            for one in cancelled:
                one.ended = True
            if left := len(running) - len(cancelled):
                log.warning("topic %s: %d handlers did not finish in time; their messages come "
                            "back when the leases end", sub.topic, left)  # fmt: skip
        give_back(taken, last)
        self._dispatcher.cancel_tasks()

    def _drained(self, sub: Subscription) -> None:
        """A closing subscription holds nothing any more."""
        reader = self._readers.get(sub)
        if reader is None or reader.thread.is_alive():
            return
        self._leave_one(sub)
        with self._lock:
            self._readers.pop(sub, None)
        self._dispatcher.forget(sub)

    def _leave(self, subs: Iterable[Subscription], last: LastCalls) -> None:
        leaving: list[Callable[[], None]] = [partial(self._leave_one, sub) for sub in subs]
        if self._puller is not None:
            leaving += self._puller.close(self._store)
        for leave in leaving:  # records of who is gone end by themselves
            last.make(partial(self._has_left, leave, last))

    @staticmethod
    def _has_left(leave: Callable[[], None], last: LastCalls) -> bool:
        try:
            leave()
        except LisaError as error:
            if last.is_answered:
                log.warning("left without saying so: %s", error)
            return False
        return True

    def _leave_one(self, sub: Subscription) -> None:
        # Subscribed again while it still drained: the successor lives under the same name.
        has_heir = any(
            one.topic == sub.topic and one.name == sub.name and not one.closing.is_set()
            for one in self._subscriptions()
        )
        try:
            self._heartbeat.leave(sub, keeps_name=has_heir)
        except GroupRemoved:
            log.debug("topic %s: group %s is gone already", sub.topic, sub.group)


def _interrupt(readers: Iterable[Reader]) -> bool:
    """Have readers look up; whether the server helps: once it fails, it is asked no more."""
    readers = list(readers)
    for reader in readers:
        reader.wake()
    return all(reader.interrupt() for reader in readers)
