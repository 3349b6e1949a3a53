"""The producer's operations, written once as flows; `Producer` and `AsyncProducer` run them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

from lisa.core.model.clock import checked_shift_ms, datetime_ms, ms_datetime, parse_zone
from lisa.core.model.durability import Replicas
from lisa.core.model.errors import (
    ConfigError,
    DuplicateMessage,
    InvalidMessage,
    LisaError,
    NotReplicated,
)
from lisa.core.model.keys import check_id, check_key, check_topic, shown_id
from lisa.core.model.middleware import all_idle
from lisa.core.model.options import PRODUCER_RETRY_TIME
from lisa.core.redis.flow import Flow
from lisa.core.store.presence import ManagerWatch
from lisa.core.store.store import Store
from lisa.core.transitions.base import ById, HasWindow
from lisa.core.transitions.change import Cancel, Cancelled, Reschedule, Rescheduled
from lisa.core.transitions.coalesce import Coalesce
from lisa.core.transitions.enqueue import Enqueue, OnDuplicate, SendOutcome, Sent, WindowChanged
from lisa.producer.calls import (
    Encoded,
    SendCall,
    SendReport,
    Single,
    ThroughMiddleware,
    calls,
    check_iterable,
    encode,
    pieces,
    single,
    single_call,
    with_id,
)
from lisa.producer.plan import (
    NOW,
    DueOptions,
    Late,
    RetryDelays,
    SendOptions,
    SendPlan,
    due_text,
    new_due,
    showing,
)

if TYPE_CHECKING:
    from lisa.core.store.inspection import FoundMessage
    from lisa.core.store.keyed import KeyFlows, KeyOutcome
    from lisa.core.store.schedules import ScheduleInfo

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
        middleware: Sequence[Callable[..., Any]] = (),
    ) -> None:
        self._store = store
        self._durability = durability
        self._middleware = middleware
        self._is_idle = all_idle(middleware)
        self._zone = None if zone is None else parse_zone(zone)
        self._patience = patience
        self._is_layout_known = False
        self._registered: dict[str, float] = {}
        self._opened: set[str] = set()
        self._windows: dict[str, str] = {}
        self._watch = ManagerWatch(store)

    def _write(self, call: ById[T], *, on_shard: bool = False) -> Flow[list[T]]:
        """Run a transition and wait for the replicas that `durability` requires.

        on_shard: its topic is the name of the shard that has its messages.
        """
        try:
            if on_shard:
                return (yield from self._store.run(call, durability=self._durability))
            return (yield from self._store.run_by_id(call, self._durability))
        except NotReplicated as error:
            error.ids = tuple(call.message_ids)
            raise

    def _of_key(self, topic: str, key: str) -> Flow[KeyFlows]:
        """The flows for all messages of a key. Raises InvalidMessage."""
        from lisa.core.store.keyed import KeyFlows  # late: as schedules, below

        topic, key = check_topic(topic), check_key(key)
        yield from self._open()
        return KeyFlows(self._store, topic, key, lambda call: self._write(call, on_shard=True))

    def _put(self, call: Enqueue | Coalesce) -> Flow[tuple[Sequence[str], Sequence[Sent]]]:
        """Send the messages of one call. Returns their ids and outcomes."""
        if isinstance(call, Enqueue):
            return call.ids, (yield from self._put_in_window(call))
        if call.has_local:
            from lisa.core.store.placing import note_coalesced  # late: few messages have wall times

            yield from note_coalesced(self._store, call)
        sent = yield from self._write(call)
        return [one.id for one in sent], [one.outcome for one in sent]

    def _put_in_window(self, call: Enqueue) -> Flow[list[Sent]]:
        """Send the messages of one call, in the topic's window if it has one."""
        if not self._windows and not call.has_local:
            try:
                return (yield from self._write(call))
            except WindowChanged as error:
                self._windows[call.topic] = error.window
        from lisa.core.store.placing import enqueue_placed  # late: few topics have windows

        return (yield from enqueue_placed(self._store, call, self._windows, self._write))

    def _open(self) -> Flow[None]:
        """Before the first call, check that this build can read the server's schema."""
        if not self._is_layout_known:
            self._is_layout_known = yield from self._store.check_schema()

    def _open_to_send(self, topic: str) -> Flow[None]:
        """Register the topic for the managers; on first use, also load its groups."""
        yield from self._open()
        now = time.monotonic()
        is_listed = yield from self._store.register([topic])
        if topic in self._opened:
            yield from self._watch.look([(topic, "")])
        else:
            yield from self._store.groups(topic)
            yield from self._check_retention(topic)
            self._opened.add(topic)
        if is_listed:
            self._registered[topic] = now

    def _register(self, topic: str) -> Flow[None]:
        """Register the topic, unless this was done within the last seconds."""
        if time.monotonic() - self._registered.get(topic, -math.inf) >= REGISTER_EVERY_S:
            yield from self._open_to_send(topic)

    def _check_retention(self, topic: str) -> Flow[None]:
        """Refuse a patience so long that a repeated send could outlive the record of its id."""
        if self._patience <= PRODUCER_RETRY_TIME:
            return  # the options enforce a retention of 0 or at least twice that
        retention = (yield from self._store.options(topic)).retention
        if retention and retention / 2 < self._patience:
            raise ConfigError(
                f"patience {self._patience} is more than half of topic {topic!r}'s retention "
                f"{retention}, so a repeated send could be taken for a new one: lengthen the "
                "retention, or wait less"
            )

    def _enqueue(
        self,
        topic: str,
        on_duplicate: OnDuplicate,
        messages: Encoded,
        report: SendReport,
        token: str | None = None,
    ) -> Flow[None]:
        """Send encoded messages and add each outcome to the report as it arrives."""
        yield from self._register(topic)
        size = self._store.batch_size(topic, Enqueue)
        for call in calls(topic, on_duplicate, messages, size, token):
            report.add(*(yield from self._put(call)))

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
        yield from self._register(topic)
        call = single_call(topic, on_duplicate, message)
        ids, outcomes = yield from self._put(call)
        return SendOutcome(ids[0], outcomes[0])

    def _send_body(
        self, topic: str, body: Any, message_id: str | None, options: SendOptions
    ) -> Flow[SendOutcome]:
        """Check and send one body."""
        plan = SendPlan.of(options, self._zone)
        body = with_id(body, message_id)
        if self._middleware and not self._is_idle():
            return (yield from self._piece(SendCall(topic, [body], options)))[0]
        message = single(plan, body)
        return (yield from self._send_one(check_topic(topic), plan.on_duplicate, message))

    def _cancel(self, topic: str, ids: Sequence[str]) -> Flow[list[Cancelled]]:
        """Cancel the messages of one script call."""
        yield from self._open()
        return (yield from self._write(Cancel(topic, ids)))

    def _cancel_one(self, topic: str, message_id: str) -> Flow[Cancelled]:
        return (yield from self._cancel(topic, [message_id]))[0]

    def _piece(self, call: SendCall) -> Flow[Sequence[SendOutcome]]:
        """Send one list of bodies, through the middleware if there is any."""
        if not self._middleware or self._is_idle():
            return (yield from self._send_all(call))
        count = len(call)
        outcomes = yield ThroughMiddleware(self._middleware, call, self._send_call)
        if not isinstance(outcomes, Sequence) or len(outcomes) != count:
            raise TypeError(
                f"middleware must return the {count} outcomes that call_next returned, "
                f"not {outcomes!r}"
            )
        return outcomes

    def _send_call(self, call: SendCall) -> Flow[Sequence[SendOutcome]]:
        """Check and send what the middleware passed on."""
        if len(call) != 1:
            return (yield from self._send_all(call))
        topic, plan = check_topic(call.topic), SendPlan.of(call.options, self._zone)
        message = single(plan, call.messages[0])
        return [(yield from self._send_one(topic, plan.on_duplicate, message))]

    def _send_all(self, call: SendCall) -> Flow[Sequence[SendOutcome]]:
        """Check and send a list of bodies in as few script calls as possible."""
        topic, plan = check_topic(call.topic), SendPlan.of(call.options, self._zone)
        report = SendReport()
        yield from self._send_many(topic, plan, call.messages, report)
        return list(report)

    def _add_piece(self, call: SendCall, report: SendReport) -> Flow[None]:
        """Send one list of bodies and add the outcomes to the report."""
        try:
            ids, outcomes = zip(*(yield from self._piece(call)), strict=True)
        except LisaError as error:
            error.sent += len(report)
            raise
        report.add(ids, outcomes)

    def _reschedule(
        self, topic: str, message_id: str, due: str, *, is_placed: bool = True
    ) -> Flow[Rescheduled]:
        """Change a due time. Raises HasWindow if it must be placed in the message's window."""
        items = [(check_id(message_id), due)]
        call = Reschedule(check_topic(topic), items, is_placed=is_placed)
        yield from self._open()
        return (yield from self._write(call))[0]

    def _reschedule_by_calendar(
        self,
        topic: str,
        message_id: str,
        due: str | None,
        zone: tzinfo | None,
        options: Mapping[str, Any],
        *,
        now_ms: int | None = None,
    ) -> Flow[Rescheduled]:
        """Change a due time by a wall time or in a window; see `place_again` for the arguments.

        now_ms: when the call was made; by default now.
        """
        # Imported late: few programs use windows.
        from lisa.core.model.windows.placing import clock_ms, place_again
        from lisa.core.store.placing import note_new_local

        yield from self._open()
        headers, window = yield from self._read_placing(check_topic(topic), check_id(message_id))
        due, local = place_again(
            options,
            due,
            zone,
            headers=headers or {},
            topic_window=window,
            now_ms=now_ms or clock_ms(),
        )
        if local is not None and headers is not None:
            yield from note_new_local(self._store, topic, message_id, due, local)
        return (yield from self._reschedule(topic, message_id, due))

    def _read_placing(
        self, topic: str, message_id: str
    ) -> Flow[tuple[Mapping[str, str] | None, str]]:
        """A message's headers, None if it is not live, and the window of its topic."""
        from lisa.core.model.envelope import headers_of
        from lisa.core.transitions.inspect import Inspect

        (seen,) = yield from self._store.run_by_id(Inspect(topic, [message_id]))
        options = yield from self._store.options(topic)
        return (headers_of(seen.envelope) if seen.envelope else None), options.window or ""

    def _set_paused(self, topic: str, name: str, *, is_paused: bool) -> Flow[bool]:
        from lisa.core.store import schedules

        topic = check_topic(topic)
        yield from self._open_to_send(topic)
        return (yield from schedules.set_paused(self._store, topic, name, is_paused=is_paused))


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
            is live and for the topic's retention afterwards. Default: a new, time-ordered id. The
            id of a message with a key begins with the key, and is the one that is returned.
        {options}

        Durations are timedeltas or text ("30m"). Fractions of a millisecond are rounded up.

        Raises InvalidMessage before anything is sent; DuplicateMessage for "reject"; TopicFull;
        ServerUnavailable after `patience` (NotReplicated: written, but not confirmed by as many
        replicas as `durability` requires); ConfigError for a wrong password or missing permission.
        """
        sent = yield from self._send_body(topic, body, id, options)
        if sent.outcome is Sent.REJECTED:
            raise DuplicateMessage(
                f"message {shown_id(sent.id)!r} is already known on topic {topic!r}"
            )
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
        at, zone, calendar = new_due(due, self._zone)
        if at is not None and not calendar:
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

    # Messages of a key: their code is imported at the first call, too.

    def list_key(self, topic: str, key: str) -> Flow[list[FoundMessage]]:
        """The live messages of a key, by due time, as `get` returns each."""
        flows = yield from self._of_key(topic, key)
        return (yield from flows.messages())

    def count_key(self, topic: str, key: str) -> Flow[int]:
        """How many live messages a key has."""
        flows = yield from self._of_key(topic, key)
        return (yield from flows.count())

    def cancel_key(self, topic: str, key: str) -> Flow[list[KeyOutcome]]:
        """Cancel all messages of a key; returns the outcome of each, as `cancel` does for one.

        All messages sent before the call are among them. Up to about 60 messages are cancelled in
        one step, more in several. If a step fails, `outcomes` of the error has those before;
        repeating the call continues.
        """
        flows = yield from self._of_key(topic, key)
        return (yield from flows.cancel())

    def reschedule_key(
        self,
        topic: str,
        key: str,
        *,
        delay: timedelta | str | None = None,
        at: datetime | None = None,
        at_ms: int | None = None,
        shift: timedelta | str | None = None,
    ) -> Flow[list[KeyOutcome]]:
        """Change the due times of all messages of a key; returns the outcome of each.

        delay, at, at_ms: the new due time, as in `reschedule`, which also describes the outcomes.
        shift: by how much each waiting message moves, such as "1h" or "-30m"; the outcome of other
            messages is their state. A due time in the past makes a message due now, and late.

        Give exactly one of these. The messages are changed in the same steps as by `cancel_key`;
        repeating a call with `shift` shifts again.
        """
        due = due_text(delay, at, at_ms, self._zone)
        if (due is None) == (shift is None):
            raise InvalidMessage("reschedule_key needs one of delay, at, at_ms and shift")
        shift_ms = 0 if shift is None else checked_shift_ms(shift)
        flows = yield from self._of_key(topic, key)
        return (yield from flows.shift(shift_ms) if due is None else flows.reschedule(due))

    def fire_key(self, topic: str, key: str) -> Flow[list[KeyOutcome]]:
        """Make all messages of a key due now; returns the outcome of each, as `fire_now` does."""
        flows = yield from self._of_key(topic, key)
        return (yield from flows.reschedule(NOW))

    # Schedules: few programs that send have any, so their code is imported at the first call.

    def schedule(
        self,
        name: str,
        *,
        topic: str,
        body: Any,
        cron: str | None = None,
        every: timedelta | str | None = None,
        tz: tzinfo | str | None = None,
        dst: str = "vixie",
        start: datetime | str | None = None,
        until: datetime | str | None = None,
        count: int | None = None,
        jitter: timedelta | str | None = None,
        catch_up: str = "one",
        max_late: timedelta | str | None = None,
        overlap: str = "allow",
        template: bool = False,
        headers: Mapping[str, str] | None = None,
        ttl: timedelta | str | None = None,
        retry: RetryDelays | None = None,
        late: Late | None = None,
        key: str | None = None,
        cost: int | None = None,
        slack: timedelta | str | None = None,
        if_version: int | None = None,
    ) -> Flow[bool]:
        """Create or change the schedule `name` of a topic; returns whether anything changed.

        Each occurrence is an ordinary message with the id `name@<tick>`, the tick in epoch ms, and
        the headers `lisa-schedule` and `lisa-tick`. Repeating the same call changes nothing and
        keeps the phase; another definition moves the pending occurrence in the same step.

        cron: a pattern of OCPS (`"0 9 * * 1-5"`, `"@daily"`), or with `?` one of Quartz.
        every: an interval of at least a second, counted from `start`, by default the first call.
        tz: the zone of the pattern; by default the producer's zone, or else UTC.
        dst: when a time that a change of the clock skips fires: "vixie", right after, or "skip".
        start, until: the first and the last instant of ticks; a naive one is in `tz`.
        count: how many occurrences are created at most.
        jitter: each occurrence is due up to this much later, by an amount derived from its id.
        catch_up: ticks missed while no manager ran: "none", "one", "all" or "all(max=20)".
        max_late: no tick is caught up later than this; at least 1s.
        overlap: a tick while an earlier occurrence is unfinished: "allow", "skip", "queue_one" or
            "replace_unstarted".
        template: fill `${tick}`, `${tick_ms}`, `${previous}`, `${previous_ms}` and `${count}` into
            the texts of the body.
        headers, ttl, retry, late, cost, slack: of each occurrence, see `send`. "collapse after 10m"
            runs only the newest of several late occurrences.
        key: of each occurrence, see `send`. Occurrences under another key, from before it was
            changed, do not count as earlier ones for `overlap`.
        if_version: change only this version of the schedule; 0: only create it.

        Raises InvalidMessage, and what `send` raises except TopicFull; ScheduleChanged if
        `if_version` is another.
        """
        from lisa.core.model.recurring.definition import ScheduleOptions, define
        from lisa.core.store import schedules

        options = ScheduleOptions(
            cron=cron,
            every=every,
            tz=tz,
            dst=dst,
            start=start,
            until=until,
            count=count,
            jitter=jitter,
            catch_up=catch_up,
            max_late=max_late,
            overlap=overlap,
            template=template,
            headers=headers,
            ttl=ttl,
            retry=retry,
            late=late,
            key=key,
            cost=cost,
            slack=slack,
        )
        definition = define(body, options, self._zone)
        topic = check_topic(topic)
        yield from self._open_to_send(topic)
        flow = schedules.put(self._store, topic, name, definition, if_version=if_version)
        return (yield from flow)

    def schedules(self, topic: str) -> Flow[list[ScheduleInfo]]:
        """All schedules of a topic, sorted by name."""
        from lisa.core.store.schedules import list_all

        yield from self._open()
        return (yield from list_all(self._store, check_topic(topic)))

    def get_schedule(self, topic: str, name: str) -> Flow[ScheduleInfo | None]:
        """One schedule; None if the topic has none of that name."""
        from lisa.core.store import schedules

        yield from self._open()
        return (yield from schedules.get(self._store, check_topic(topic), name))

    def pause_schedule(self, topic: str, name: str) -> Flow[bool]:
        """Pause a schedule and remove its pending occurrence; False if it was paused already.

        Raises InvalidMessage if there is no such schedule.
        """
        return (yield from self._set_paused(topic, name, is_paused=True))

    def resume_schedule(self, topic: str, name: str) -> Flow[bool]:
        """Resume a schedule with its next tick from now on; False if it was not paused.

        Ticks during the pause are not caught up. Raises InvalidMessage if there is no such
        schedule.
        """
        return (yield from self._set_paused(topic, name, is_paused=False))

    def remove_schedule(self, topic: str, name: str) -> Flow[bool]:
        """Remove a schedule and its pending occurrence; False if there was none."""
        from lisa.core.store import schedules

        topic = check_topic(topic)
        yield from self._open_to_send(topic)
        return (yield from schedules.remove(self._store, topic, name))

    def run_schedule(self, topic: str, name: str) -> Flow[str]:
        """Create an occurrence that is due now, besides the ticks; returns its message id.

        Raises InvalidMessage if there is no such schedule, and TopicFull.
        """
        from lisa.core.store import schedules

        topic = check_topic(topic)
        yield from self._open_to_send(topic)
        return (yield from schedules.run_now(self._store, topic, name))

    def next_ticks(self, topic: str, name: str, count: int = 5) -> Flow[list[datetime]]:
        """The next ticks of a schedule, as aware datetimes in UTC.

        Raises InvalidMessage for an unknown schedule, or a `count` that is not 1 to 10,000.
        """
        from lisa.core.store import schedules

        yield from self._open()
        flow = schedules.next_ticks(self._store, check_topic(topic), name, count)
        return [ms_datetime(tick) for tick in (yield from flow)]

    def backfill_schedule(
        self, topic: str, name: str, start: datetime, end: datetime
    ) -> Flow[tuple[int, int]]:
        """Create the occurrences of past ticks from `start` to `end`, both included; due at once.

        Naive datetimes are in the producer's zone. Returns how many were created, and how many were
        known already. Raises InvalidMessage if there is no such schedule, or if `end` is
        before `start`; and TopicFull.
        """
        from lisa.core.store import schedules

        for moment in (start, end):
            if not isinstance(moment, datetime):
                raise InvalidMessage(f"start and end are datetimes, not {moment!r}")
        from_ms, to_ms = datetime_ms(start, self._zone), datetime_ms(end, self._zone)
        topic = check_topic(topic)
        yield from self._open_to_send(topic)
        return (yield from schedules.backfill(self._store, topic, name, from_ms, to_ms))
