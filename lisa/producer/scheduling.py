"""Schedules of recurring messages, as flows; both producers run them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, tzinfo
from typing import TYPE_CHECKING, Any

from lisa.core.model.clock import datetime_ms, ms_datetime
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import check_topic
from lisa.core.redis.flow import Flow, awaiting, blocking
from lisa.producer.flows import Sending
from lisa.producer.plan import Late, RetryDelays

if TYPE_CHECKING:
    from lisa.core.store.schedules import ScheduleInfo


class Scheduling(Sending):
    """The methods of both producers that concern schedules.

    Their code is imported at the first call: few programs that send have schedules.
    """

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
        headers, ttl, retry, late: of each occurrence, see `send`. "collapse after 10m" runs only
            the newest of several late occurrences.
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
        return (yield from _set_paused(self, topic, name, is_paused=True))

    def resume_schedule(self, topic: str, name: str) -> Flow[bool]:
        """Resume a schedule with its next tick from now on; False if it was not paused.

        Ticks during the pause are not caught up. Raises InvalidMessage if there is no such
        schedule.
        """
        return (yield from _set_paused(self, topic, name, is_paused=False))

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


def _set_paused(producer: Sending, topic: str, name: str, *, is_paused: bool) -> Flow[bool]:
    from lisa.core.store import schedules

    topic = check_topic(topic)
    yield from producer._open_to_send(topic)  # noqa: SLF001  a step of its methods
    flow = schedules.set_paused(producer._store, topic, name, is_paused=is_paused)  # noqa: SLF001
    return (yield from flow)


class BlockingSchedules:
    """The methods of `Producer`."""

    schedule = blocking(Scheduling.schedule)
    schedules = blocking(Scheduling.schedules)
    get_schedule = blocking(Scheduling.get_schedule)
    pause_schedule = blocking(Scheduling.pause_schedule)
    resume_schedule = blocking(Scheduling.resume_schedule)
    remove_schedule = blocking(Scheduling.remove_schedule)
    run_schedule = blocking(Scheduling.run_schedule)
    next_ticks = blocking(Scheduling.next_ticks)
    backfill_schedule = blocking(Scheduling.backfill_schedule)


class AwaitedSchedules:
    """The methods of `AsyncProducer`, all coroutines."""

    schedule = awaiting(Scheduling.schedule)
    schedules = awaiting(Scheduling.schedules)
    get_schedule = awaiting(Scheduling.get_schedule)
    pause_schedule = awaiting(Scheduling.pause_schedule)
    resume_schedule = awaiting(Scheduling.resume_schedule)
    remove_schedule = awaiting(Scheduling.remove_schedule)
    run_schedule = awaiting(Scheduling.run_schedule)
    next_ticks = awaiting(Scheduling.next_ticks)
    backfill_schedule = awaiting(Scheduling.backfill_schedule)
