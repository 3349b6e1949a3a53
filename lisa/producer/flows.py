"""The producer's operations, written once as flows; `Producer` and `AsyncProducer` run them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta, tzinfo
from typing import Any, TypeVar, Unpack

from lisa.core.model.clock import parse_zone
from lisa.core.model.durability import Replicas
from lisa.core.model.errors import (
    ConfigError,
    DuplicateMessage,
    InvalidMessage,
    LisaError,
    NotReplicated,
)
from lisa.core.model.keys import check_id, check_topic
from lisa.core.model.options import PRODUCER_RETRY_TIME
from lisa.core.redis.flow import Flow
from lisa.core.store.inspection import FoundMessage, found
from lisa.core.store.manager_watch import ManagerWatch
from lisa.core.store.store import Store
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
    pieces,
    single,
    single_call,
)
from lisa.producer.plan import NOW, Outgoing, RetryDelays, SendOptions, SendPlan, due_text
from lisa.producer.report import SendOutcome, SendReport

T = TypeVar("T")

REGISTER_EVERY_S = 20.0
"""A topic must be registered again within 30 s while its producer sends; the call has 10 s left."""


class Sending:
    """Steps shared by a producer's methods."""

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
        self._opened: set[str] = set()
        self._watch = ManagerWatch(store)

    def _write(self, call: ById[T], ids: Sequence[str]) -> Flow[list[T]]:
        """Run a transition and wait for the replicas that `durability` requires."""
        try:
            return (yield from self._store.run_by_id(call, self._durability))
        except NotReplicated as error:
            error.ids = tuple(ids)
            raise

    def _open(self) -> Flow[None]:
        """Before the first call, check that this build can read the server's schema."""
        if not self._is_layout_known:
            self._is_layout_known = yield from self._store.check_schema()

    def _is_to_be_registered(self, topic: str) -> bool:
        seen = self._registered.get(topic)
        return seen is None or time.monotonic() - seen >= REGISTER_EVERY_S

    def _open_to_send(self, topic: str) -> Flow[None]:
        """Register the topic for the managers; on first use, also load its groups."""
        yield from self._open()
        now = time.monotonic()
        is_listed = yield from self._store.register([topic])
        if topic in self._opened:
            yield from self._watch.look(topic)
        else:
            yield from self._store.groups(topic)
            yield from self._check_retention(topic)
            self._opened.add(topic)
        if is_listed:
            self._registered[topic] = now

    def _check_retention(self, topic: str) -> Flow[None]:
        """Refuse a patience so long that a repeated send could outlive the record of its id."""
        if self._patience <= PRODUCER_RETRY_TIME:
            return  # the options enforce a retention of 0 or at least twice that
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
        """Send encoded messages and add each outcome to the report as it arrives."""
        if self._is_to_be_registered(topic):
            yield from self._open_to_send(topic)
        size = self._store.batch_size(topic, Enqueue)
        for call in calls(topic, on_duplicate, messages, size):
            report.add(call.ids, (yield from self._write(call, call.ids)))

    def _send_many(
        self, topic: str, plan: SendPlan, bodies: Sequence[Any], report: SendReport
    ) -> Flow[None]:
        """Encode and send one list of bodies."""
        try:
            yield from self._enqueue(topic, plan.on_duplicate, encode(plan, bodies), report)
        except LisaError as error:
            error.sent = len(report)
            raise

    def _send_one(
        self, topic: str, on_duplicate: OnDuplicate, message: Single
    ) -> Flow[SendOutcome]:
        """Send one message in its own script call."""
        if self._is_to_be_registered(topic):
            yield from self._open_to_send(topic)
        call = single_call(topic, on_duplicate, message)
        (outcome,) = yield from self._write(call, call.ids)
        return SendOutcome(call.ids[0], outcome)

    def _send_body(
        self, topic: str, body: Any, message_id: str | None, options: SendOptions
    ) -> Flow[SendOutcome]:
        """Check and send one body."""
        plan = SendPlan.of(options, self._zone)
        if isinstance(body, Outgoing):
            raise InvalidMessage("send takes the body itself; Outgoing is for send_many")
        message = single(plan, body if message_id is None else Outgoing(body, id=message_id))
        return (yield from self._send_one(check_topic(topic), plan.on_duplicate, message))

    def _cancel(self, topic: str, ids: Sequence[str]) -> Flow[list[Cancelled]]:
        """Cancel the messages of one script call."""
        yield from self._open()
        return (yield from self._write(Cancel(topic, ids), ids))

    def _cancel_one(self, topic: str, message_id: str) -> Flow[Cancelled]:
        return (yield from self._cancel(topic, [message_id]))[0]

    def _piece(self, topic: str, plan: SendPlan, bodies: Sequence[Any]) -> Flow[list[SendOutcome]]:
        """Send one list of bodies and return its outcomes."""
        report = SendReport()
        yield from self._send_many(topic, plan, bodies, report)
        return list(report)

    def _reschedule(self, topic: str, message_id: str, due: str) -> Flow[Rescheduled]:
        call = Reschedule(check_topic(topic), [(check_id(message_id), due)])
        yield from self._open()
        return (yield from self._write(call, [message_id]))[0]


class Flows(Sending):
    """The public methods of both producers."""

    def send(
        self,
        topic: str,
        body: Any,
        *,
        delay: timedelta | str | None = None,
        at: datetime | None = None,
        at_ms: int | None = None,
        tz: tzinfo | str | None = None,
        id: str | None = None,  # noqa: A002  the name that users expect
        ttl: timedelta | str | None = None,
        retry: RetryDelays | None = None,
        headers: Mapping[str, str] | None = None,
        on_duplicate: OnDuplicate | str = OnDuplicate.KEEP,
    ) -> Flow[str]:
        """Send one message and return its id. Without `delay`, `at` or `at_ms` it is due now.

        body: JSON values, msgspec structs, dataclasses, pydantic models, str or bytes.
        delay: a timedelta or text ("30m"), counted from the server's clock, so the client's clock
            does not matter.
        at: an aware datetime, or a naive one in `tz` or else the producer's zone. A time in the
            past is due now; more than ten years ago is refused as a mistake.
        at_ms: epoch milliseconds, an integer. Fractions of a millisecond are rounded up.
        id: a custom id of 1 to 256 bytes. Sending the same id again adds nothing while the message
            is live and for the topic's retention afterwards. Default: a new, time-ordered id.
        ttl: how long after its due time the message is still worth handling; timedelta or text.
        retry: the pauses between attempts for this message; `[]` for a single attempt.
        on_duplicate: if the id is known, "keep" the earlier message, "replace" it, or "reject".

        Raises InvalidMessage before anything is sent; DuplicateMessage for "reject"; TopicFull;
        ServerUnavailable after `patience` (NotReplicated: written, but not confirmed by as many
        replicas as `durability` requires); ConfigError for a wrong password or missing permission.
        """
        options = SendOptions(
            delay=delay,
            at=at,
            at_ms=at_ms,
            tz=tz,
            ttl=ttl,
            retry=retry,
            headers=headers,
            on_duplicate=on_duplicate,
        )
        sent = yield from self._send_body(topic, body, id, options)
        if sent.outcome is Sent.REJECTED:
            raise DuplicateMessage(f"message {sent.id!r} is already known on topic {topic!r}")
        return sent.id

    def send_one(
        self,
        topic: str,
        body: Any,
        *,
        id: str | None = None,  # noqa: A002  the name that users expect
        **options: Unpack[SendOptions],
    ) -> Flow[SendOutcome]:
        """Send one message like `send`, and return what became of it beside its id.

        The outcome is "accepted" for a new message; for a known id "duplicate" (nothing was added),
        "replaced" or, with `on_duplicate="reject"`, "rejected". Raises what `send` raises, except
        DuplicateMessage.
        """
        return (yield from self._send_body(topic, body, id, options))

    def send_many(
        self, topic: str, bodies: Iterable[Any], **options: Unpack[SendOptions]
    ) -> Flow[SendReport]:
        """Send many messages, hundreds per script call. Returns once all are sent.

        `bodies` is an iterable of bodies, or of `Outgoing` where messages differ. The options are
        those of `send` and apply to all messages. The report counts and iterates the outcomes.

        Raises what `send` raises, except that a known id yields the outcome "rejected". The error's
        `sent` is the number of messages settled before it: continue with `bodies[error.sent:]`. If
        the server did not answer, the failed call may still have arrived; messages with custom ids
        can safely be sent again.
        """
        check_iterable(bodies, "bodies")
        check_topic(topic)
        plan = SendPlan.of(options, self._zone)
        report = SendReport()
        for piece in pieces(bodies):
            yield from self._send_many(topic, plan, piece, report)
        return report

    def cancel(self, topic: str, message_id: str) -> Flow[Cancelled]:
        """Cancel a message for good and return the result.

        "cancelled": the message will not be handled. Otherwise nothing changed, because the message
        is "in_flight", "done" (at least one group has finished it) or "unknown".
        """
        return (yield from self._cancel_one(check_topic(topic), check_id(message_id)))

    def cancel_many(self, topic: str, message_ids: Iterable[str]) -> Flow[list[Cancelled]]:
        """Cancel messages; returns one result per id, in the order given (see `cancel`)."""
        check_iterable(message_ids, "message_ids")
        check_topic(topic)
        ids = [check_id(message_id) for message_id in message_ids]
        results: list[Cancelled] = []
        while len(results) < len(ids):
            piece = ids[len(results) : len(results) + self._store.batch_size(topic, Cancel)]
            results += yield from self._cancel(topic, piece)
        return results

    def reschedule(
        self,
        topic: str,
        message_id: str,
        *,
        delay: timedelta | str | None = None,
        at: datetime | None = None,
        at_ms: int | None = None,
        tz: tzinfo | str | None = None,
    ) -> Flow[Rescheduled]:
        """Change a message's due time, given as exactly one of `delay`, `at` and `at_ms`.

        Returns "rescheduled". Otherwise nothing changed, because the message is "in_flight", "done"
        (settled or in garbage) or "unknown". A ttl moves with the due time. If the first reply was
        lost and the message was delivered before the call was repeated, the result can be
        "in_flight" although the change was made. See `send` for the arguments.
        """
        due = due_text(delay, at, at_ms, self._zone if tz is None else parse_zone(tz))
        if due is None:
            raise InvalidMessage("reschedule needs delay, at or at_ms; fire_now makes it due now")
        return (yield from self._reschedule(topic, message_id, due))

    def fire_now(self, topic: str, message_id: str) -> Flow[Rescheduled]:
        """Make a message due now; returns the same results as `reschedule`."""
        return (yield from self._reschedule(topic, message_id, NOW))

    def get(self, topic: str, message_id: str) -> Flow[FoundMessage | None]:
        """Look up a message without changing it; None if it is unknown.

        A settled message is known for the topic's retention, without its body.
        """
        call = Inspect(check_topic(topic), [check_id(message_id)])
        yield from self._open()
        return found(topic, message_id, (yield from self._store.run_by_id(call))[0])
