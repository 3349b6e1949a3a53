"""Producers for unit tests without a server: they record what they are given to send."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta, tzinfo
from typing import Any, TypeVar

import msgspec

from lisa.core.model.clock import datetime_ms, duration_ms, ms_datetime
from lisa.core.model.durability import Replicas
from lisa.core.model.envelope import HEAD_BYTES, decode_envelope
from lisa.core.model.keys import WINDOW_HEADER, Keys, check_id, check_key, check_topic
from lisa.core.model.middleware import BaseMiddleware
from lisa.core.model.options import PRODUCER_RETRY_TIME, TopicOptions
from lisa.core.model.recurring.definition import Record
from lisa.core.model.sharding import PLAIN, Layout, Topic
from lisa.core.redis.address import Address
from lisa.core.redis.connection import AsyncConnection, Connection
from lisa.core.redis.flow import Flow, awaiting, blocking
from lisa.core.store.inspection import FoundMessage, State
from lisa.core.store.keyed import KeyFlows, KeyOutcome, in_window, shifted
from lisa.core.store.store import AsyncStore, Store, SyncStore
from lisa.core.transitions.base import ById, HasWindow
from lisa.core.transitions.change import Cancel, Cancelled, Reschedule, Rescheduled
from lisa.core.transitions.coalesce import Coalesce
from lisa.core.transitions.enqueue import Enqueue, OnDuplicate, SendOutcome, Sent
from lisa.core.transitions.schedule import NewOccurrence, Schedule, ScheduleOutcome
from lisa.producer.producer import AsyncProducer, BaseProducer, Producer
from lisa.testing.records import SentMessage, as_enqueue, delay_of, sent_by

Offer = Callable[[str, NewOccurrence], bool]
"""Records an occurrence of a topic; returns whether its id is new."""

T = TypeVar("T")
MAX_BODY_BYTES = TopicOptions().max_body_bytes


class _InMemory(Store):
    """Serves the flows of schedules from memory. Its clock stands still, so no tick ever comes.

    Occurrences that wait for their ticks are not offered: the schedule itself says when it ticks.
    """

    offer: Offer
    _now_us: int = 0
    _records: dict[str, dict[str, bytes]]

    def begin(self, offer: Offer) -> None:
        """Start without schedules; `offer` takes the occurrences besides those of the ticks."""
        self.offer, self._now_us, self._records = offer, time.time_ns() // 1_000, {}
        self.has_nodes = False  # also at the address of a cluster

    def known_layout(self, _topic: Topic) -> Layout | None:
        return PLAIN

    def register(self, _topics: Iterable[str]) -> Flow[bool]:
        yield from ()
        return True

    def options(self, _topic: str, _group: str | None = None) -> Flow[TopicOptions]:
        yield from ()
        return TopicOptions()

    def server_time_us(self, _key: str = "") -> Flow[int]:
        """The time of the start, a millisecond later at each call: ids by time stay distinct."""
        yield from ()
        self._now_us += 1_000
        return self._now_us

    def command(self, *command: str | bytes | float, **_: Any) -> Flow[Any]:
        yield from ()
        name, records = command[0], self._records.get(str(command[1]), {})
        if name == "HGET":
            return records.get(str(command[2]))
        if name == "HSCAN":
            return [b"0", [part for pair in records.items() for part in pair]]
        return None  # the lists of topics with schedules and wall times, which managers read

    def run(self, call: Any, *_: Any) -> Flow[Any]:
        """Do what the script `schedule` does."""
        yield from ()
        assert isinstance(call, Schedule)  # noqa: S101  the flows of schedules run no other script
        records = self._records.setdefault(self.keys.topic(call.topic).schedules, {})
        stored = records.get(call.name)
        fence = Record.decode(stored).fence if stored else ""
        if fence != call.fence:
            return ScheduleOutcome("changed", fence, "")
        if not call.record:
            records.pop(call.name, None)
            return ScheduleOutcome("done", fence, "")
        records[call.name] = call.record
        return ScheduleOutcome("done", fence, "".join(self._create(call)))

    def _create(self, call: Schedule) -> Iterable[str]:
        record = Record.decode(call.record)
        for new in call.creates:
            pending = record.definition.occurrence_id(call.name, record.tick or 0)
            is_pending = record.is_made and new.id == pending
            yield "a" if is_pending or self.offer(call.topic, new) else "d"


class RecordedStore(_InMemory, SyncStore):
    """The store of a `RecordingProducer`."""


class AsyncRecordedStore(_InMemory, AsyncStore):
    """The store of an `AsyncRecordingProducer`."""


class _Recording(BaseProducer):
    """Answers the calls of a producer from its own records.

    Time stands still: every message that was sent can be cancelled or rescheduled.
    """

    _store: RecordedStore | AsyncRecordedStore
    _clock = staticmethod(float)  # 0.0: no time passes until a commit

    def __init__(
        self,
        server: str | Address | None = None,
        *,
        prefix: str | None = None,
        zone: tzinfo | str | None = None,
        patience: timedelta | str = PRODUCER_RETRY_TIME,
        durability: Replicas | None = None,
        middleware: Iterable[BaseMiddleware] = (),
    ) -> None:
        super().__init__(
            server,
            prefix=prefix,
            zone=zone,
            patience=patience,
            durability=durability,
            middleware=middleware,
        )
        self._store.begin(self._offer)
        self.sent: list[SentMessage] = []
        self.cancelled: list[SentMessage] = []
        self._live: dict[tuple[str, str], SentMessage] = {}

    def _open(self) -> Flow[None]:
        return _answer(None)

    def _open_to_send(self, _topic: str) -> Flow[None]:
        return _answer(None)

    def _offer(self, topic: str, new: NewOccurrence) -> bool:
        """Record an occurrence of a schedule, unless its id is known."""
        call = Enqueue(
            topic,
            [new.id],
            [str(new.due_ms)],
            [new.envelope],
            [new.ttl_ms],
            [new.policy],
        )
        (message,) = sent_by(call)
        return self._accept(call.on_duplicate, message) is Sent.ACCEPTED

    def _of_key(self, topic: str, key: str) -> Flow[KeyFlows]:
        messages = self._live.values()
        return _answer(
            _RecordedKey(
                self._store, check_topic(topic), check_key(key), self._write, known=messages
            )
        )

    def _write(self, call: ById[Any], *, on_shard: bool = False) -> Flow[list[Any]]:  # noqa: ARG002  there are no shards
        if isinstance(call, Enqueue):
            _check_sizes(call)
            mode = call.on_duplicate
            return _answer([self._accept(mode, message) for message in sent_by(call)])
        if isinstance(call, Coalesce):
            _check_sizes(call)
            return _answer(list(self._coalesce(call)))
        if isinstance(call, Cancel):
            return _answer([self._end(call.topic, message_id) for message_id in call.ids])
        assert isinstance(call, Reschedule)  # noqa: S101  producers make no other calls
        if not call.is_placed and any(
            self._has_window(call.topic, message_id) for message_id, _ in call.items
        ):
            raise HasWindow(call.topic)
        return _answer([self._move(call.topic, *item) for item in call.items])

    def _has_window(self, topic: str, message_id: str) -> bool:
        found = self._live.get((topic, message_id))
        return found is not None and WINDOW_HEADER in found.headers

    def _read_placing(
        self, topic: str, message_id: str
    ) -> Flow[tuple[Mapping[str, str] | None, str]]:
        found = self._live.get((topic, message_id))
        return _answer((None if found is None else found.headers, ""))

    def _coalesce(self, call: Coalesce) -> Iterator[SendOutcome]:
        for rule, message in zip(call.rules, sent_by(as_enqueue(call)), strict=True):
            mode = OnDuplicate.REPLACE if rule.startswith("d") else OnDuplicate.UPDATE
            yield SendOutcome(message.id, self._accept(mode, message))

    def _accept(self, on_duplicate: OnDuplicate, message: SentMessage) -> Sent:
        key = (message.topic, message.id)
        outcome = Sent.ACCEPTED
        if key in self._live:
            if on_duplicate in (OnDuplicate.KEEP, OnDuplicate.KEEP_LIVE):
                return Sent.DUPLICATE
            if on_duplicate is OnDuplicate.REJECT:
                return Sent.REJECTED
            outcome = Sent.REPLACED
            if on_duplicate is OnDuplicate.UPDATE:
                before, outcome = self._live[key], Sent.UPDATED
                message = msgspec.structs.replace(message, delay=before.delay, due=before.due)
        self._live[key] = message
        self.sent.append(message)
        return outcome

    def _end(self, topic: str, message_id: str) -> Cancelled:
        found = self._live.pop((topic, message_id), None)
        if found is None:
            return Cancelled.UNKNOWN
        self.cancelled.append(found)
        return Cancelled.CANCELLED

    def _move(self, topic: str, message_id: str, due: str) -> Rescheduled:
        found = self._live.get((topic, message_id))
        if found is None:
            return Rescheduled.UNKNOWN
        delay = delay_of(due)
        moved = msgspec.structs.replace(
            found, delay=delay, due=ms_datetime(int(due)) if delay is None else None
        )
        self._live[topic, message_id] = moved
        # Others may be equal, and the test may have cleared the list.
        self.sent[:] = [moved if message is found else message for message in self.sent]
        return Rescheduled.RESCHEDULED

    def _get(self, topic: str, message_id: str) -> Flow[FoundMessage | None]:
        """Look up a message that was sent and not cancelled; its due time is None for a delay."""
        message = self._live.get((check_topic(topic), check_id(message_id)))
        return _answer(None if message is None else _found(message))


class _RecordedKey(KeyFlows):
    """The flows for the messages of a key, `known` being those of all keys and topics."""

    def __init__(self, *args: Any, known: Iterable[SentMessage]) -> None:
        super().__init__(*args)
        self._known = [
            each for each in known if each.topic == self._topic and each.key == self._key
        ]

    def messages(self) -> Flow[list[FoundMessage]]:
        return _answer(list(map(_found, self._known)))

    def count(self) -> Flow[int]:
        return _answer(len(self._known))

    def cancel(self) -> Flow[list[KeyOutcome]]:
        ids = [message.id for message in self._known]
        outcomes = yield from self._write(Cancel(self._topic, ids))
        return list(map(KeyOutcome, ids, outcomes))

    def reschedule(self, due: str) -> Flow[list[KeyOutcome]]:
        return self._move([due] * len(self._known))

    def shift(self, shift_ms: int) -> Flow[list[KeyOutcome]]:
        return self._move([_shifted(message, shift_ms) for message in self._known])

    def _move(self, dues: Sequence[str]) -> Flow[list[KeyOutcome]]:
        items = [
            (message.id, in_window(due, message.headers, ""))
            for message, due in zip(self._known, dues, strict=True)
        ]
        outcomes = yield from self._write(Reschedule(self._topic, items))
        return list(map(KeyOutcome, dict(items), outcomes))


def _shifted(message: SentMessage, shift_ms: int) -> str:
    """The due time of a message, or its delay, moved by a number of milliseconds."""
    if message.due is not None:
        return shifted(datetime_ms(message.due), shift_ms)
    return "+" + shifted(duration_ms(message.delay or timedelta()), shift_ms)


def _found(message: SentMessage) -> FoundMessage:
    return FoundMessage(
        id=message.id,
        topic=message.topic,
        state=State.WAITING,
        due_ms=None if message.due is None else datetime_ms(message.due),
        body=message.body,
        headers=message.headers,
    )


def _check_sizes(call: Enqueue | Coalesce) -> None:
    """Raise InvalidMessage for a body larger than a topic allows by default."""
    for number, envelope in enumerate(call.envelopes, 1):
        if len(envelope) - HEAD_BYTES > MAX_BODY_BYTES:
            size = len(decode_envelope(envelope).body)
            if size > MAX_BODY_BYTES:
                call.refuse([b"LARGE", number, size, MAX_BODY_BYTES])


def _answer(result: T) -> Flow[T]:
    """A flow that needs no server."""
    yield from ()
    return result


class RecordingProducer(_Recording, Producer):
    """A `Producer` without a server, for unit tests: checks and records what it is given.

    sent: the messages in the order of sending; `reschedule` and the like change theirs in place.
    cancelled: the messages that were cancelled.

    The constructor takes the same arguments as that of `Producer`; only `zone` and `middleware`
    have an effect. Methods take the same arguments, raise InvalidMessage for the same mistakes, and
    return the same results; a cancelled id is forgotten. Schedules are kept, but never
    tick: `sent` only has the messages of `run_schedule` and `backfill_schedule`.
    """

    _store: RecordedStore

    get = blocking(_Recording._get)  # noqa: SLF001  a flow of the class above

    @staticmethod
    def _store_on(address: Address, keys: Keys, patience: timedelta) -> RecordedStore:
        return RecordedStore(Connection(address), keys, patience)


class AsyncRecordingProducer(_Recording, AsyncProducer):
    """Asynchronous version of `RecordingProducer`; every method is a coroutine.

    It has no connections, so it may be used in several event loops, one after the other.
    """

    _store: AsyncRecordedStore

    get = awaiting(_Recording._get)  # noqa: SLF001  a flow of the class above

    @staticmethod
    def _store_on(address: Address, keys: Keys, patience: timedelta) -> AsyncRecordedStore:
        return AsyncRecordedStore(AsyncConnection(address), keys, patience)

    def _belong_to_this_loop(self) -> None:
        """Do nothing: web frameworks' test clients run each request in a loop of its own."""
