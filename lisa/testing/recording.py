"""Producers for unit tests without a server: they record what they are given to send."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta, tzinfo
from typing import Any, TypeVar

import msgspec

from lisa.core.model.clock import datetime_ms, ms_datetime
from lisa.core.model.durability import Replicas
from lisa.core.model.envelope import HEAD_BYTES, decode_envelope
from lisa.core.model.keys import WINDOW_HEADER, Keys, check_id, check_topic
from lisa.core.model.middleware import BaseMiddleware
from lisa.core.model.options import PRODUCER_RETRY_TIME, TopicOptions
from lisa.core.redis.address import Address
from lisa.core.redis.connection import AsyncConnection, Connection
from lisa.core.redis.flow import Flow, awaiting, blocking
from lisa.core.store.inspection import FoundMessage, State
from lisa.core.transitions.base import ById, HasWindow
from lisa.core.transitions.change import Cancel, Cancelled, Reschedule, Rescheduled
from lisa.core.transitions.enqueue import Enqueue, OnDuplicate, Sent
from lisa.core.transitions.schedule import NewOccurrence
from lisa.producer.producer import AsyncProducer, BaseProducer, Producer
from lisa.testing.recorded_schedules import AsyncRecordedStore, RecordedStore
from lisa.testing.records import SentMessage, delay_of, sent_by

T = TypeVar("T")

MAX_BODY_BYTES = TopicOptions().max_body_bytes


class _Recording(BaseProducer):
    """Answers the calls of a producer from its own records.

    Time stands still: every message that was sent can be cancelled or rescheduled.
    """

    _store: RecordedStore | AsyncRecordedStore

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

    def _is_to_be_registered(self, _topic: str) -> bool:
        return False

    def _open(self) -> Flow[None]:
        return _answer(None)

    def _open_to_send(self, _topic: str) -> Flow[None]:
        return _answer(None)

    def _offer(self, topic: str, one: NewOccurrence) -> bool:
        """Record an occurrence of a schedule, unless its id is known."""
        call = Enqueue(
            topic, "", [one.id], [str(one.due_ms)], [one.envelope], [one.ttl_ms], [one.policy]
        )
        (message,) = sent_by(call)
        return self._accept(call, message) is Sent.ACCEPTED

    def _write(self, call: ById[Any], _ids: Sequence[str]) -> Flow[list[Any]]:
        if isinstance(call, Enqueue):
            _check_sizes(call)
            return _answer([self._accept(call, one) for one in sent_by(call)])
        if isinstance(call, Cancel):
            return _answer([self._end(call.topic, one) for one in call.ids])
        assert isinstance(call, Reschedule)  # noqa: S101  producers make no other calls
        if not call.is_placed and any(self._has_window(call.topic, one) for one, _ in call.items):
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

    def _note_local(self, _call: Enqueue) -> Flow[None]:
        return _answer(None)

    def _note_new_local(self, *_: object) -> Flow[None]:
        return _answer(None)

    def _accept(self, call: Enqueue, message: SentMessage) -> Sent:
        key = (message.topic, message.id)
        outcome = Sent.ACCEPTED
        if key in self._live:
            if call.on_duplicate in (OnDuplicate.KEEP, OnDuplicate.KEEP_LIVE):
                return Sent.DUPLICATE
            if call.on_duplicate is OnDuplicate.REJECT:
                return Sent.REJECTED
            outcome = Sent.REPLACED
            if call.on_duplicate is OnDuplicate.UPDATE:
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
        self.sent[:] = [moved if one is found else one for one in self.sent]
        return Rescheduled.RESCHEDULED

    def _get(self, topic: str, message_id: str) -> Flow[FoundMessage | None]:
        """Look up a message that was sent and not cancelled; its due time is None for a delay."""
        one = self._live.get((check_topic(topic), check_id(message_id)))
        if one is None:
            return _answer(None)
        due_ms = None if one.due is None else datetime_ms(one.due)
        return _answer(
            FoundMessage(
                id=one.id,
                topic=one.topic,
                state=State.WAITING,
                due_ms=due_ms,
                body=one.body,
                headers=one.headers,
            )
        )


def _check_sizes(call: Enqueue) -> None:
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

    sent: the messages in the order of sending; `reschedule` changes theirs in place.
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
