"""What a producer does, written once as flows; `Producer` and `AsyncProducer` run them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta, tzinfo
from typing import Any, TypeVar, Unpack

from lisa.core.clock import parse_zone
from lisa.core.durability import Replicas
from lisa.core.errors import (
    ConfigError,
    DuplicateMessage,
    InvalidMessage,
    LisaError,
    NotReplicated,
)
from lisa.core.flow import Flow
from lisa.core.keys import check_id, check_topic
from lisa.core.options import PRODUCER_RETRY_TIME
from lisa.core.store import Store
from lisa.core.transitions.base import ById
from lisa.core.transitions.cancel import Cancel, Cancelled
from lisa.core.transitions.enqueue import Enqueue, OnDuplicate, Sent
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.reschedule import Reschedule, Rescheduled
from lisa.producer.calls import (
    Encoded,
    Single,
    calls,
    check_iterable,
    encode,
    lone,
    pieces,
    single,
)
from lisa.producer.found import FoundMessage, found
from lisa.producer.plan import NOW, Outgoing, Plan, RetryDelays, SendOptions, due_text
from lisa.producer.report import SendOutcome, SendReport

__all__ = ["Flows", "Sending"]

T = TypeVar("T")

REGISTER_EVERY_S = 20.0
"""A sending producer makes its topics known again within 30 s: some time is left for the call."""


class Sending:
    """The steps that a producer's methods share."""

    def __init__(
        self,
        store: Store,
        *,
        zone: tzinfo | str | None,
        patience: timedelta,
        durability: Replicas | None = None,
    ) -> None:
        self._store = store
        self._durability = durability
        self._zone = None if zone is None else parse_zone(zone)
        self._patience = patience
        self._is_layout_known = False
        self._registered: dict[str, float] = {}

    def _write(self, call: ById[T], ids: Sequence[str]) -> Flow[list[T]]:
        """Run a transition, done once as many replicas have it as this producer asks for."""
        try:
            return (yield from self._store.run_by_id(call, self._durability))
        except NotReplicated as error:
            error.ids = tuple(ids)
            raise

    def _open(self) -> Flow[None]:
        """Look, before all else, whether this build can read what the server holds."""
        if not self._is_layout_known:
            yield from self._store.check_schema()
            self._is_layout_known = True

    def _is_to_be_registered(self, topic: str) -> bool:
        seen = self._registered.get(topic)
        return seen is None or time.monotonic() - seen >= REGISTER_EVERY_S

    def _open_to_send(self, topic: str) -> Flow[None]:
        """Make the topic known to managers, and learn its groups at first."""
        yield from self._open()
        seen, now = self._registered.get(topic), time.monotonic()
        yield from self._store.register([topic])
        if seen is None:
            yield from self._store.groups(topic)
            yield from self._check_retention(topic)
        self._registered[topic] = now

    def _check_retention(self, topic: str) -> Flow[None]:
        """A call repeated for longer than ids are remembered could send twice."""
        if self._patience <= PRODUCER_RETRY_TIME:
            return  # options keep at least twice that, or nothing on purpose
        retention = (yield from self._store.options(topic)).retention
        if retention and retention < 2 * self._patience:
            raise ConfigError(
                f"patience {self._patience} is more than half of topic {topic!r}'s retention "
                f"{retention}, so a repeated send could be taken for a new one: lengthen the "
                "retention, or wait less"
            )

    def _enqueue(
        self, topic: str, on_duplicate: OnDuplicate, messages: Encoded, report: SendReport
    ) -> Flow[None]:
        """Send encoded messages, noting each outcome as it is known."""
        if self._is_to_be_registered(topic):
            yield from self._open_to_send(topic)
        size = self._store.batch_size(topic, Enqueue)
        for call in calls(topic, on_duplicate, messages, size):
            report.add(call.ids, (yield from self._write(call, call.ids)))

    def _send_many(
        self, topic: str, plan: Plan, bodies: Sequence[Any], report: SendReport
    ) -> Flow[None]:
        """Send bodies, as many as one script call may hold."""
        try:
            yield from self._enqueue(topic, plan.on_duplicate, encode(plan, bodies), report)
        except LisaError as error:
            error.sent = len(report)
            raise

    def _send_one(
        self, topic: str, on_duplicate: OnDuplicate, message: Single
    ) -> Flow[SendOutcome]:
        """Send one message, in a script call of its own."""
        if self._is_to_be_registered(topic):
            yield from self._open_to_send(topic)
        call = lone(topic, on_duplicate, message)
        (outcome,) = yield from self._write(call, call.ids)
        return SendOutcome(call.ids[0], outcome)

    def _cancel(self, topic: str, ids: Sequence[str]) -> Flow[list[Cancelled]]:
        """Take back what one script call may name."""
        yield from self._open()
        return (yield from self._write(Cancel(topic, ids), ids))

    def _cancel_one(self, topic: str, message_id: str) -> Flow[Cancelled]:
        return (yield from self._cancel(topic, [message_id]))[0]

    def _piece(self, topic: str, plan: Plan, bodies: Sequence[Any]) -> Flow[list[SendOutcome]]:
        """Send what one script call may hold; its outcomes."""
        report = SendReport()
        yield from self._send_many(topic, plan, bodies, report)
        return list(report)

    def _reschedule(self, topic: str, message_id: str, due: str) -> Flow[Rescheduled]:
        call = Reschedule(check_topic(topic), [(check_id(message_id), due)])
        yield from self._open()
        return (yield from self._write(call, [message_id]))[0]


class Flows(Sending):
    """Every method here ends up, by the same name, on both producers."""

    def send(
        self,
        topic: str,
        body: Any,
        *,
        delay: timedelta | None = None,
        at: datetime | None = None,
        at_ms: int | None = None,
        tz: tzinfo | str | None = None,
        id: str | None = None,  # noqa: A002  the word that users know it by
        ttl: timedelta | None = None,
        retry: RetryDelays | None = None,
        headers: Mapping[str, str] | None = None,
        on_duplicate: OnDuplicate | str = OnDuplicate.KEEP,
    ) -> Flow[str]:
        """Send one message; its id. It is due now, or as one of `delay`, `at`, `at_ms` says.

        body: JSON values, msgspec structs, dataclasses, pydantic models; or str or bytes.
        delay: counted by the server's clock, so that clocks which disagree do no harm.
        at: aware, or naive and read in `tz`, else in the producer's zone; a past one is due now.
        at_ms: epoch milliseconds, an integer. Fractions of a millisecond are rounded up.
        id: one's own, 1 to 256 bytes; a send repeated with it adds nothing while the message is
            live and for the topic's retention after. By default a fresh, time-ordered one.
        ttl: how long after due it is still worth handling.
        retry: this message's own pauses between attempts, `[]` for a single attempt.
        on_duplicate: where the id is known, "keep" the earlier message, "replace" it, or "reject".

        Raises InvalidMessage before anything is sent; DuplicateMessage for "reject"; TopicFull;
        ServerUnavailable after `patience` (NotReplicated: written, but not confirmed by as many
        replicas as `durability` asks for); ConfigError for a password or right that is missing.
        """
        options = SendOptions(
            delay=delay, at=at, at_ms=at_ms, tz=tz, ttl=ttl, retry=retry, headers=headers,
            on_duplicate=on_duplicate,
        )  # fmt: skip
        plan = Plan.of(options, self._zone)
        if isinstance(body, Outgoing):
            raise InvalidMessage("send takes the body itself; Outgoing is for send_many")
        message = single(plan, body if id is None else Outgoing(body, id=id))
        sent = yield from self._send_one(check_topic(topic), plan.on_duplicate, message)
        if sent.outcome is Sent.REJECTED:
            raise DuplicateMessage(f"message {sent.id!r} is already known on topic {topic!r}")
        return sent.id

    def send_many(
        self, topic: str, bodies: Iterable[Any], **options: Unpack[SendOptions]
    ) -> Flow[SendReport]:
        """Send many messages, hundreds a script call; when this returns all are sent.

        `bodies` is an iterable of bodies, or of `Outgoing` where messages differ; the options are
        those of `send`, for all. The report counts and iterates the outcomes.

        Raises what `send` raises, but a known id is an outcome here, "rejected". An error's `sent`
        says how many messages were settled before it: go on with `bodies[error.sent:]`. The call
        that failed may still have arrived where the server gave no answer; messages with ids of
        one's own can be sent again without harm.
        """
        check_iterable(bodies, "bodies")
        check_topic(topic)
        plan = Plan.of(options, self._zone)
        report = SendReport()
        for piece in pieces(bodies, lambda: self._store.batch_size(topic, Enqueue)):
            yield from self._send_many(topic, plan, piece, report)
        return report

    def cancel(self, topic: str, message_id: str) -> Flow[Cancelled]:
        """Take a message back for good; the truth about it.

        "cancelled": it will not be handled. Else nothing was changed, as it is "in_flight", "done"
        (a group is through with it), or "unknown".
        """
        return (yield from self._cancel_one(check_topic(topic), check_id(message_id)))

    def cancel_many(self, topic: str, message_ids: Iterable[str]) -> Flow[list[Cancelled]]:
        """Take messages back; the truth about each, in the order given (see `cancel`)."""
        check_iterable(message_ids, "message_ids")
        check_topic(topic)
        ids = [check_id(message_id) for message_id in message_ids]
        truths: list[Cancelled] = []
        while len(truths) < len(ids):
            piece = ids[len(truths) : len(truths) + self._store.batch_size(topic, Cancel)]
            truths += yield from self._cancel(topic, piece)
        return truths

    def reschedule(
        self,
        topic: str,
        message_id: str,
        *,
        delay: timedelta | None = None,
        at: datetime | None = None,
        at_ms: int | None = None,
        tz: tzinfo | str | None = None,
    ) -> Flow[Rescheduled]:
        """Give a message a new due time, by exactly one of `delay`, `at` and `at_ms` (see `send`).

        "rescheduled", or nothing was changed, as it is "in_flight", "done" (garbage, too), or
        "unknown". A ttl moves with the due time. Where a reply was lost on the way, and the message
        was handed out before the call was repeated, "in_flight" may follow a change that was made.
        """
        due = due_text(delay, at, at_ms, self._zone if tz is None else parse_zone(tz))
        if due is None:
            raise InvalidMessage("reschedule needs delay, at or at_ms; fire_now makes it due now")
        return (yield from self._reschedule(topic, message_id, due))

    def fire_now(self, topic: str, message_id: str) -> Flow[Rescheduled]:
        """Make a message due now; answers as `reschedule` does."""
        return (yield from self._reschedule(topic, message_id, NOW))

    def get(self, topic: str, message_id: str) -> Flow[FoundMessage | None]:
        """A message as it stands, without changing it; None if it is unknown.

        A settled one is known for the topic's retention, without its body.
        """
        call = Inspect(check_topic(topic), [check_id(message_id)])
        yield from self._open()
        return found(topic, message_id, (yield from self._store.run_by_id(call))[0])
