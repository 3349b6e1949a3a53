"""The producer's operations, written once as flows; `Producer` and `AsyncProducer` run them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Unpack

from lisa.core.model.clock import parse_zone
from lisa.core.model.errors import DuplicateMessage, InvalidMessage
from lisa.core.model.keys import check_id, check_topic
from lisa.core.redis.flow import Flow
from lisa.core.transitions.base import HasWindow
from lisa.core.transitions.change import Cancel, Cancelled, Rescheduled
from lisa.core.transitions.enqueue import Sent
from lisa.producer.calls import check_iterable, pieces
from lisa.producer.plan import (
    NOW,
    DueOptions,
    SendOptions,
    SendPlan,
    check_options,
    due_text,
    showing,
)
from lisa.producer.report import SendOutcome, SendReport
from lisa.producer.send_call import SendCall
from lisa.producer.sending import Sending

if TYPE_CHECKING:
    from lisa.core.store.inspection import FoundMessage


class Flows(Sending):
    """The public methods of both producers."""

    @showing(SendOptions)
    def send(
        self,
        topic: str,
        body: Any,
        *,
        id: str | None = None,  # noqa: A002  the name that users expect
        **options: Unpack[SendOptions],
    ) -> Flow[str]:
        """Send one message and return its id. Without a due time it is due now.

        body: JSON values, msgspec structs, dataclasses, pydantic models, str or bytes.
        id: a custom id of 1 to 256 bytes. Sending the same id again adds nothing while the message
            is live and for the topic's retention afterwards. Default: a new, time-ordered id.
        {options}

        Durations are timedeltas or text ("30m"). Fractions of a millisecond are rounded up.

        Raises InvalidMessage before anything is sent; DuplicateMessage for "reject"; TopicFull;
        ServerUnavailable after `patience` (NotReplicated: written, but not confirmed by as many
        replicas as `durability` requires); ConfigError for a wrong password or missing permission.
        """
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
        """Send one message like `send`, and return its id and its outcome.

        The outcome is "accepted" for a new message; for a known id "duplicate" (nothing was added),
        "replaced", "replaced_in_flight" if a consumer holds the earlier message, whose handler may
        still start, "updated" or, with `on_duplicate="reject"`, "rejected". Raises what `send`
        raises, except DuplicateMessage.
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
        topic = check_topic(topic)
        plan = SendPlan.of(options, self._zone)
        report = SendReport()
        for piece in pieces(bodies):
            if self._middleware:
                yield from self._add_piece(SendCall(topic, piece, options), report)
            else:
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
        topic = check_topic(topic)
        ids = [check_id(message_id) for message_id in message_ids]
        results: list[Cancelled] = []
        while len(results) < len(ids):
            piece = ids[len(results) : len(results) + self._store.batch_size(topic, Cancel)]
            results += yield from self._cancel(topic, piece)
        return results

    @showing(DueOptions)
    def reschedule(
        self, topic: str, message_id: str, **due: Unpack[DueOptions]
    ) -> Flow[Rescheduled]:
        """Change a message's due time: exactly one of `delay`, `at`, `at_ms` and `at_local`.

        Returns "rescheduled". Otherwise nothing changed, because the message is "in_flight", "done"
        (settled or in garbage) or "unknown". A ttl moves with the due time. If the first reply was
        lost and the message was delivered before the call was repeated, the result can be
        "in_flight" although the change was made. Outside the window of the message or of its topic,
        the due time moves to the next opening.

        {options}
        """
        check_options(due, DueOptions)
        zone = self._zone if (tz := due.get("tz")) is None else parse_zone(tz)
        at = due_text(due.get("delay"), due.get("at"), due.get("at_ms"), zone)
        calendar = {name: due.get(name) for name in ("at_local", "fold", "business_days")}
        is_by_calendar = any(one is not None for one in calendar.values())
        if at is None and not is_by_calendar:
            raise InvalidMessage(
                "reschedule needs delay, at, at_ms or at_local; fire_now makes it due now"
            )
        if at is not None and not is_by_calendar:
            with suppress(HasWindow):
                return (yield from self._reschedule(topic, message_id, at, is_placed=False))
        return (yield from self._reschedule_by_calendar(topic, message_id, at, zone, calendar))

    def fire_now(self, topic: str, message_id: str) -> Flow[Rescheduled]:
        """Make a message due now; returns the same results as `reschedule`.

        Outside its window, the message is handed over at the next opening.
        """
        return (yield from self._reschedule(topic, message_id, NOW))

    def get(self, topic: str, message_id: str) -> Flow[FoundMessage | None]:
        """Look up a message without changing it; None if it is unknown.

        A settled message is known for the topic's retention, without its body.
        """
        # Imported late: most programs that send look up nothing.
        from lisa.core.store.inspection import found
        from lisa.core.transitions.inspect import Inspect

        call = Inspect(check_topic(topic), [check_id(message_id)])
        yield from self._open()
        return found(topic, message_id, (yield from self._store.run_by_id(call))[0])
