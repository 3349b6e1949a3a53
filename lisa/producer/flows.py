"""The producer's operations, written once as flows; `Producer` and `AsyncProducer` run them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime, time, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, Unpack

from lisa.core.model.clock import parse_zone
from lisa.core.model.errors import DuplicateMessage, InvalidMessage
from lisa.core.model.keys import check_id, check_topic
from lisa.core.redis.flow import Flow
from lisa.core.transitions.base import HasWindow
from lisa.core.transitions.cancel import Cancel, Cancelled
from lisa.core.transitions.enqueue import OnDuplicate, Sent
from lisa.core.transitions.reschedule import Rescheduled
from lisa.producer.calls import check_iterable, pieces
from lisa.producer.plan import NOW, Late, RetryDelays, SendOptions, SendPlan, due_text
from lisa.producer.report import SendOutcome, SendReport
from lisa.producer.send_call import SendCall
from lisa.producer.sending import Sending

if TYPE_CHECKING:
    from lisa.core.store.inspection import FoundMessage


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
        at_local: datetime | time | str | None = None,
        tz: tzinfo | str | None = None,
        fold: int | None = None,
        business_days: int | None = None,
        window: str | None = None,
        id: str | None = None,  # noqa: A002  the name that users expect
        ttl: timedelta | str | None = None,
        retry: RetryDelays | None = None,
        late: Late | None = None,
        headers: Mapping[str, str] | None = None,
        on_duplicate: OnDuplicate | str = OnDuplicate.KEEP,
    ) -> Flow[str]:
        """Send one message and return its id. Without a due time it is due now.

        body: JSON values, msgspec structs, dataclasses, pydantic models, str or bytes.
        delay: a timedelta or text ("30m"), counted from the server's clock, so the client's clock
            does not matter.
        at: an aware datetime, or a naive one in `tz` or else the producer's zone. A time in the
            past is due now; more than ten years ago is refused as a mistake.
        at_ms: epoch milliseconds, an integer. Fractions of a millisecond are rounded up.
        at_local: a wall time in `tz`, as in "2026-12-24T09:00": the message is due when that clock
            shows it, also if the zone's rules change until then. A time that a change of the clock
            skips is due at the end of the gap; of a time that occurs twice, `fold=1` selects the
            second.
        business_days: with `at_local="10:00"`: at that time on the n-th business day after today;
            0 is today or the next one. The days on which `window` opens, else Monday to Friday.
        window: when the message may be handed over, as in "mon-fri 9-17"; outside it, the
            message moves to the next opening. It takes precedence over the topic's window.
        id: a custom id of 1 to 256 bytes. Sending the same id again adds nothing while the message
            is live and for the topic's retention afterwards. Default: a new, time-ordered id.
        ttl: how long after its due time the message is still worth handling; timedelta or text.
        retry: the pauses between attempts for this message; `[]` for a single attempt.
        late: what to do if a manager promotes the message too late, as after an outage:
            `{"after": "10m", "then": "skip"}` or "skip after 10m"; also "garbage", or "run".
            Default: the topic's option.
        on_duplicate: if the id is known, "keep" the earlier message, "keep_live" (keep it only if
            it has not ended), "replace" it, "update" it (replace all but its due time), or
            "reject".

        Raises InvalidMessage before anything is sent; DuplicateMessage for "reject"; TopicFull;
        ServerUnavailable after `patience` (NotReplicated: written, but not confirmed by as many
        replicas as `durability` requires); ConfigError for a wrong password or missing permission.
        """
        options = SendOptions(
            delay=delay,
            at=at,
            at_ms=at_ms,
            at_local=at_local,
            tz=tz,
            fold=fold,
            business_days=business_days,
            window=window,
            ttl=ttl,
            retry=retry,
            late=late,
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

    def reschedule(
        self,
        topic: str,
        message_id: str,
        *,
        delay: timedelta | str | None = None,
        at: datetime | None = None,
        at_ms: int | None = None,
        at_local: datetime | time | str | None = None,
        tz: tzinfo | str | None = None,
        fold: int | None = None,
        business_days: int | None = None,
    ) -> Flow[Rescheduled]:
        """Change a message's due time: exactly one of `delay`, `at`, `at_ms` and `at_local`.

        Returns "rescheduled". Otherwise nothing changed, because the message is "in_flight", "done"
        (settled or in garbage) or "unknown". A ttl moves with the due time. If the first reply was
        lost and the message was delivered before the call was repeated, the result can be
        "in_flight" although the change was made. See `send` for the arguments. Outside the window
        of the message or of its topic, the due time moves to the next opening.
        """
        zone = self._zone if tz is None else parse_zone(tz)
        due = due_text(delay, at, at_ms, zone)
        options = {"at_local": at_local, "fold": fold, "business_days": business_days}
        is_by_calendar = any(one is not None for one in options.values())
        if due is None and not is_by_calendar:
            raise InvalidMessage(
                "reschedule needs delay, at, at_ms or at_local; fire_now makes it due now"
            )
        if due is not None and not is_by_calendar:
            with suppress(HasWindow):
                return (yield from self._reschedule(topic, message_id, due, is_placed=False))
        return (yield from self._reschedule_by_calendar(topic, message_id, due, zone, options))

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
