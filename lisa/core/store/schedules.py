"""Reads and changes schedules, as flows for producers, managers and the command line."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import TypeAlias

import msgspec

from lisa.core.model.clock import ms_datetime, utc_text
from lisa.core.model.errors import InvalidMessage, Misplaced, ScheduleChanged, TopicFull
from lisa.core.model.recurring.definition import (
    Record,
    ScheduleDefinition,
    check_name,
    occurrence_id,
)
from lisa.core.model.recurring.ticks import (
    TickStep,
    begin,
    is_overdue,
    next_tick,
    taken_back,
    tick_before,
    ticks_after,
)
from lisa.core.model.sharding import PLAIN, Topic
from lisa.core.redis.flow import Flow
from lisa.core.store.schedule_calls import delayed, most_per_call, plan, run_step
from lisa.core.store.schedule_reads import check_range, known
from lisa.core.store.store import Store
from lisa.core.transitions.schedule import Schedule, ScheduleOutcome

BACKFILL_STEP = 100
"""Occurrences that one call of `backfill` creates, unless they are large."""

_FENCE = re.compile(rb"\S*")

Change: TypeAlias = Callable[[Record | None, int, bool], TickStep | None]
"""From the stored record, the time in ms, and whether to create occurrences only at their ticks (in
a topic with several shards, or at its capacity), to the step."""


def put(
    store: Store,
    topic: str,
    name: str,
    definition: ScheduleDefinition,
    *,
    if_version: int | None = None,
    declared: bool = False,
) -> Flow[bool]:
    """Create or change a schedule; returns whether anything changed.

    The same definition changes nothing. declared: a manager's YAML defines it, which changes only
    what a declaration wrote last. Raises InvalidMessage and ScheduleChanged.
    """
    name = check_name(name)
    definition.check()
    yield from _check_size(store, topic, name, definition)
    print_ = definition.fingerprint

    def change(record: Record | None, now_ms: int, is_split: bool) -> TickStep | None:  # noqa: FBT001
        if if_version is not None and if_version != (record.version if record else 0):
            raise ScheduleChanged(
                f"schedule {name!r} has version {record.version if record else 0}, "
                f"not {if_version}; read it again"
            )
        mark = print_ if declared else record.declared if record else ""
        is_new = record is None or record.definition != definition
        if is_new and not (record and is_overdue(record, now_ms)):
            _require_tick(name, definition, now_ms)
        if record is None:
            new = Record(version=1, made_ms=now_ms, definition=definition, declared=mark)
            return begin(new, now_ms, is_split=is_split)
        is_ours = not declared or record.definition.fingerprint == record.declared
        if record.definition == definition or not is_ours:
            if record.declared == mark:
                return None
            noted = msgspec.structs.replace(record, version=record.version + 1, declared=mark)
            return TickStep(record=noted, score=None if record.is_paused else record.tick)
        new = msgspec.structs.replace(
            record, version=record.version + 1, definition=definition, declared=mark
        )
        return begin(new, now_ms, is_split=is_split)

    yield from store.register([topic])
    yield from store.list_scheduled(topic)
    done = yield from _change(store, topic, name, change, settles=True)
    if done is not None:  # a manager may have unlisted the topic before the schedule existed
        yield from store.list_scheduled(topic)
    return done is not None


def _require_tick(name: str, definition: ScheduleDefinition, now_ms: int) -> None:
    """Raise InvalidMessage if a new or changed schedule has no tick left."""
    if next_tick(definition, now_ms, now_ms) is None:
        until_ms = definition.until_ms
        is_past = until_ms is not None and until_ms <= now_ms
        limit = "" if until_ms is None else f" until {utc_text(ms_datetime(until_ms))}"
        why = "that is past" if is_past else f"{definition.rule!r} has no time left"
        raise InvalidMessage(f"schedule {name!r} would never tick{limit}: {why}")


def set_paused(store: Store, topic: str, name: str, *, is_paused: bool) -> Flow[bool]:
    """Pause or resume a schedule; returns whether that changed it. Raises InvalidMessage.

    A pause removes the occurrences that are not due. Ticks during it are not caught up.
    """

    def change(record: Record | None, now_ms: int, is_split: bool) -> TickStep | None:  # noqa: FBT001
        record = known(record, topic, name)
        if record.is_paused == is_paused:
            return None
        new = msgspec.structs.replace(record, version=record.version + 1, is_paused=is_paused)
        return begin(new, now_ms, is_split=is_split)

    flow = _change(store, topic, name, change, settles=True, drops_delayed=is_paused)
    return (yield from flow) is not None


def remove(store: Store, topic: str, name: str, *, only_declared: bool = False) -> Flow[bool]:
    """Remove a schedule and its occurrences that are not due; returns whether it was removed.

    only_declared: keep it unless a declaration wrote its definition last. Otherwise a record that
    cannot be read is removed, too; its occurrences are unknown, and stay.
    """

    def change(record: Record | None, now_ms: int, is_split: bool) -> TickStep | None:  # noqa: ARG001, FBT001
        if record is None:
            return None
        if only_declared and record.declared != record.definition.fingerprint:
            return None
        drops = [record.tick] if record.is_made and record.tick is not None else []
        return TickStep(record=record, score=None, drops=drops)

    flow = _change(store, topic, name, change, removes=True, drops_delayed=True)
    try:
        return (yield from flow) is not None
    except InvalidMessage:
        if only_declared:
            raise
    return (yield from _remove_record(store, topic, name))


def _remove_record(store: Store, topic: str, name: str) -> Flow[bool]:
    """Remove a record, whatever it contains; returns whether there was one."""
    while True:
        stored = yield from store.command("HGET", store.keys.topic(topic).schedules, name)
        if stored is None:
            return False
        fence = _FENCE.match(stored)[0]  # type: ignore[index]  # it matches any bytes
        if (yield from store.run(Schedule(topic, name, fence, b""))).state == "done":
            return True


def align(store: Store, topic: str, name: str) -> Flow[bool]:
    """Compute the next tick again, with this machine's time zone data; returns whether it moved."""

    def change(record: Record | None, now_ms: int, is_split: bool) -> TickStep | None:  # noqa: FBT001
        if record is None or record.tick is None or record.tick <= now_ms or record.is_queued:
            return None
        if next_tick(record.definition, record.made_ms, now_ms) == record.tick:
            return None
        return begin(record, now_ms, is_split=is_split)

    return (yield from _change(store, topic, name, change, settles=True)) is not None


def run_now(store: Store, topic: str, name: str) -> Flow[str]:
    """Create an occurrence that is due now, besides the ticks; returns its id.

    Raises InvalidMessage if there is no such schedule.
    """
    at_ms = 0

    def change(record: Record | None, now_ms: int, is_split: bool) -> TickStep | None:  # noqa: ARG001, FBT001
        nonlocal at_ms
        record, at_ms = known(record, topic, name), max(now_ms, at_ms)
        previous = record.latest if is_overdue(record, now_ms) else record.last
        return _extra(record, [(at_ms, previous)])

    while True:
        done = yield from _change(store, topic, name, change, has_jitter=False)
        if done is None or "d" not in done.outcomes:
            return occurrence_id(name, at_ms)
        at_ms += 1  # another occurrence has this id: run now was called twice in a millisecond


def backfill(
    store: Store, topic: str, name: str, from_ms: int, to_ms: int
) -> Flow[tuple[int, int]]:
    """Create the occurrences of past ticks in a range, both ends included, due at their ticks.

    Returns how many were created, and how many were known already. Raises InvalidMessage if there
    is no such schedule, or if the range ends before it begins; and TopicFull.
    """
    check_range(from_ms, to_ms)
    created = duplicates = 0
    after_ms = from_ms - 1
    while True:
        ticks: list[int] = []

        def change(
            record: Record | None,
            now_ms: int,
            is_split: bool,  # noqa: ARG001, FBT001
            ticks: list[int] = ticks,
            after_ms: int = after_ms,
        ) -> TickStep | None:
            record = known(record, topic, name)
            found = ticks_after(record, after_ms, min(to_ms, now_ms))
            ticks[:] = islice(found, min(BACKFILL_STEP, most_per_call(record.definition)))
            if not ticks:
                return None
            return _extra(record, zip(ticks, [tick_before(record, ticks[0]), *ticks], strict=False))

        try:
            done = yield from _change(store, topic, name, change, has_jitter=False)
        except TopicFull as error:
            if not created:
                raise
            raise TopicFull(f"{error} more; {created} occurrences were created before") from None
        if done is None:
            return created, duplicates
        created += done.outcomes.count("a")
        duplicates += done.outcomes.count("d")
        after_ms = ticks[-1]


def _extra(record: Record, ticks: Iterable[tuple[int, int | None]]) -> TickStep:
    """Occurrences besides those of the schedule, which stays as it is.

    ticks: with the tick before each.
    """
    return TickStep(
        record=record,
        score=None if record.is_paused else record.tick,
        creates=[(tick, record.made, previous) for tick, previous in ticks],
    )


def _check_size(store: Store, topic: str, name: str, definition: ScheduleDefinition) -> Flow[None]:
    limit = (yield from store.options(topic)).max_body_bytes
    size = len(definition.body_at(name, 0, None, 1))
    if size > limit:
        raise InvalidMessage(
            f"the body of schedule {name!r} has {size} bytes; topic {topic!r} allows at most "
            f"{limit} (its option max_body_bytes)"
        )


def _change(
    store: Store,
    topic: str,
    name: str,
    change: Change,
    *,
    removes: bool = False,
    has_jitter: bool = True,
    settles: bool = False,
    drops_delayed: bool = False,
) -> Flow[ScheduleOutcome | None]:
    """Apply a change to the stored record; retry if another process changed the record first.

    settles: whether to do first what is due, as a manager would, so that no tick is lost. On a
    full topic, this and the next occurrence are left to the managers. drops_delayed: whether to
    drop also the occurrences that a jitter delays. Returns None if there was nothing to change.
    """
    key = store.keys.topic(topic).schedules
    patience, may_swap, is_full = store.patience(), True, False
    while True:
        layout = store.known_layout(Topic(topic)) or PLAIN
        stored = yield from store.command("HGET", key, name)
        now_ms = yield from store.server_time_ms(key)
        record = None if stored is None else Record.decode(stored)
        step = change(record, now_ms, layout.is_split or is_full)
        if step is None:
            return None
        is_due = settles and not is_full and record is not None and is_overdue(record, now_ms)
        if is_due and record is not None:
            step = plan(record, now_ms, is_split=layout.is_split, may_swap=may_swap)
        elif drops_delayed and record is not None:
            late = yield from delayed(store, topic, name, record, now_ms)
            kept = taken_back(step.record, late)
            step = replace(step, record=kept, drops=[*step.drops, *late])
        try:
            done = yield from run_step(
                store,
                topic,
                name,
                record,
                step,
                layout=layout,
                removes=removes,
                has_jitter=has_jitter,
            )
        except Misplaced:
            if patience.next_pause() is None:
                raise
            yield from store.layout(Topic(topic))
            continue
        except TopicFull:
            if is_full or not settles:
                raise
            is_full = True
            continue
        may_swap = done.state != "gone"
        if done.state != "changed" and not is_due:
            return done
