"""When a schedule ticks, and what its manager does at a tick."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from lisa.core.model.clock import MAX_DUE_MS, zone_of
from lisa.core.model.recurring.calendar import next_instant, parse_cron
from lisa.core.model.recurring.definition import (
    MOST_CAUGHT_UP,
    CatchUp,
    Dst,
    Overlap,
    Record,
    ScheduleDefinition,
)

ON_TIME_MS = 10_000
"""A tick this late was not missed: a failover of the server or manager may take this long."""

LOOK_AGAIN_MS = 1_000
"""How often to check whether the occurrence that a queued tick waits for has ended."""

MOST_EARLIER = 10
"""Earlier occurrences that a tick checks for an overlap."""

_WIDEST_WINDOW_MS = 15_000 * 86_400_000
"""Longer than the 40 years within which the rarest date recurs."""


@dataclass(frozen=True, kw_only=True)
class TickStep:
    """What one call of the script does with a schedule.

    record: the new record. score: when a manager looks at the schedule next; None for never.
    creates: ticks of the messages to create, with the number and the previous tick of each.
    drops: ticks whose messages, if still waiting, are removed. swaps: change nothing unless all
    drops still wait. held, held_score: the record and score if an overlap prevents the creation.
    removes: remove the record. has_jitter: whether the jitter moves due times.
    """

    record: Record
    score: int | None
    creates: Sequence[tuple[int, int, int | None]] = ()
    drops: Sequence[int] = ()
    swaps: bool = False
    held: Record | None = None
    held_score: int | None = None
    removes: bool = False
    has_jitter: bool = True


def next_tick(definition: ScheduleDefinition, made_ms: int, after_ms: int) -> int | None:
    """The first tick after an instant; None if none is left.

    Patterns tick from 1970 to 2199, intervals until the year 9999.
    """
    start, until = definition.start_ms, definition.until_ms
    if definition.cron:
        after_s = (after_ms if start is None else max(after_ms, start - 1)) // 1000
        skips = definition.dst is Dst.SKIP
        found = next_instant(
            parse_cron(definition.cron), zone_of(definition.tz), after_s, skips=skips
        )
        tick = None if found is None else found * 1000
    else:
        anchor = made_ms if start is None else start
        tick = anchor
        if after_ms >= anchor:
            tick += ((after_ms - anchor) // definition.every_ms + 1) * definition.every_ms
    last_ms = MAX_DUE_MS if until is None else until
    return None if tick is None or tick > last_ms else tick


def ticks_after(record: Record, after_ms: int, until_ms: int = MAX_DUE_MS) -> Iterator[int]:
    """The ticks after an instant, up to another one, in order."""
    tick = _next(record, after_ms)
    while tick is not None and tick <= until_ms:
        yield tick
        tick = _next(record, tick)


def ticks_between(record: Record, after_ms: int, up_to_ms: int, most: int) -> list[int]:
    """The newest ticks after an instant, up to another one, at most `most` of them."""
    window = 1_000
    while True:
        start = max(after_ms, up_to_ms - window)
        found = list(ticks_after(record, start, up_to_ms))
        if len(found) >= most or start == after_ms or window > _WIDEST_WINDOW_MS * most:
            return found[-most:]
        window *= 4


def tick_before(record: Record, tick_ms: int) -> int | None:
    """The tick before another one; None if that is the first."""
    return next(iter(ticks_between(record, -1, tick_ms - 1, 1)), None)


def due_ms(definition: ScheduleDefinition, name: str, tick_ms: int) -> int:
    """When the occurrence of a tick is due: later by a jitter derived from name and tick."""
    if not definition.jitter_ms:
        return tick_ms
    return tick_ms + zlib.crc32(f"{name}@{tick_ms}".encode()) % (definition.jitter_ms + 1)


def is_overdue(record: Record, now_ms: int) -> bool:
    """Whether a tick has come that no manager has handled yet."""
    return record.tick is not None and record.tick <= now_ms and not record.is_queued


def begin(record: Record, now_ms: int, *, is_split: bool) -> TickStep:
    """The step that starts a new, changed or resumed schedule: from now on, without the past.

    A tick that has come and has no occurrence yet is kept, if the schedule still has that tick.
    """
    tick, drops, after_ms = record.tick, [], now_ms
    if tick is not None and tick <= now_ms:
        after_ms = tick if record.is_made else tick - 1
        record = msgspec.structs.replace(record, last=record.latest)
    elif tick is not None and record.is_made:
        drops = [tick]
        record = msgspec.structs.replace(record, made=record.made - 1)
    last, earlier = record.last, record.earlier
    if record.definition.overlap is not Overlap.ALLOW and last is not None and last not in earlier:
        earlier = (*earlier, last)[-MOST_EARLIER:]
    record = msgspec.structs.replace(record, is_made=False, is_queued=False, earlier=earlier)
    tick = _next(record, after_ms)
    if record.is_paused or tick is None or _is_over(record):
        return TickStep(record=_with_tick(record, None), score=None, drops=drops)
    if not record.definition.is_ahead or is_split or tick <= now_ms:
        return TickStep(record=_with_tick(record, tick), score=tick, drops=drops)
    record, creates = _created_ahead(record, tick)
    return TickStep(record=record, score=tick, creates=creates, drops=drops)


def taken_back(record: Record, ticks: Collection[int]) -> Record:
    """The record after some of the latest occurrences were removed before they were due."""
    made, last = record.made - len(ticks), record.last
    while last is not None and last in ticks:
        last = tick_before(record, last)
    return msgspec.structs.replace(record, made=made, last=last if made else None)


def advance(
    record: Record,
    now_ms: int,
    *,
    is_split: bool,
    may_swap: bool = True,
    most: int | None = None,
) -> TickStep:
    """The step for a schedule whose tick has come; it changes nothing if the tick has not come.

    may_swap: whether missed ticks may replace the occurrence of this one; not if it has begun.
    most: create at most this many occurrences, and none ahead of its tick; the next ticks stay due.
    """
    if record.tick is None or record.tick > now_ms:  # another manager was first
        return TickStep(record=record, score=record.tick)
    if record.is_made:
        return _advance_made(record, now_ms, is_split=is_split, may_swap=may_swap, most=most)
    ticks = _wanted(record, [record.tick - 1, now_ms])
    if record.is_queued:
        max_late_ms = record.definition.max_late_ms
        is_too_late = max_late_ms is not None and record.tick < now_ms - max_late_ms
        ticks = [] if is_too_late else [record.tick]
    if record.definition.overlap is Overlap.ALLOW:
        return _creating(record, ticks, now_ms, is_split=is_split, most=most)
    if not ticks:
        return _creating(record, [], now_ms, is_split=is_split, most=most)
    return _one_at_a_time(record, ticks, now_ms)


def fewer(step: TickStep, now_ms: int) -> int | None:
    """How many occurrences a step should create if the topic has no room for all of its own.

    First the one ahead of its tick waits for the tick. None if not even one has room.
    """
    due = sum(tick <= now_ms for tick, _, _ in step.creates)
    return due if due < len(step.creates) else due // 2 or None


def _advance_made(
    record: Record, now_ms: int, *, is_split: bool, may_swap: bool, most: int | None
) -> TickStep:
    """The occurrence of the tick exists: create those that were missed since, and the next one."""
    tick = record.tick or 0
    missed = _wanted(record, [tick, now_ms])
    late = [tick for tick in missed if tick < now_ms - ON_TIME_MS]
    is_one = record.definition.catch_up is CatchUp.ONE
    drops: list[int] = []
    if may_swap and late and (is_one or len(late) >= record.definition.max_caught_up):
        # The newest missed ticks count.
        drops = [tick]
        record = msgspec.structs.replace(record, made=record.made - 1, is_made=False)
    elif is_one:  # the older one runs instead of them
        missed = missed[len(late) :]
    step = _creating(record, missed, now_ms, is_split=is_split, most=most)
    return replace(step, drops=drops, swaps=bool(drops))


def _one_at_a_time(record: Record, ticks: Sequence[int], now_ms: int) -> TickStep:
    """The first of some ticks, if no earlier occurrence prevents it; the others follow."""
    later = _next(record, now_ms) if record.is_queued or len(ticks) == 1 else ticks[1]
    done, creates = _created(record, ticks[:1])
    done = _with_tick(done, None if _is_over(done) else later)
    if record.definition.overlap is Overlap.QUEUE_ONE:
        held = msgspec.structs.replace(_with_tick(record, ticks[0]), is_queued=True)
        held_score: int | None = now_ms + LOOK_AGAIN_MS
    else:
        held, held_score = _with_tick(record, later), later
    return TickStep(record=done, score=done.tick, creates=creates, held=held, held_score=held_score)


def _creating(
    record: Record, ticks: Sequence[int], now_ms: int, *, is_split: bool, most: int | None
) -> TickStep:
    """The step that creates at most `most` occurrences and moves on to the next tick."""
    record, creates = _created(record, ticks[:most])
    left = [] if most is None else ticks[most:]
    if left and not _is_over(record):
        return TickStep(record=_with_tick(record, left[0]), score=left[0], creates=creates)
    tick = None if _is_over(record) else _next(record, now_ms)
    if tick is None or not record.definition.is_ahead or is_split or most is not None:
        return TickStep(record=_with_tick(record, tick), score=tick, creates=creates)
    record, ahead = _created_ahead(record, tick)
    return TickStep(record=record, score=tick, creates=[*creates, *ahead])


def _created(
    record: Record, ticks: Sequence[int]
) -> tuple[Record, list[tuple[int, int, int | None]]]:
    """The record after some ticks' messages were created, up to the schedule's count; and those."""
    most = record.definition.most
    left = len(ticks) if most is None else max(0, most - record.made)
    record = msgspec.structs.replace(record, last=record.latest, is_made=False)
    creates: list[tuple[int, int, int | None]] = []
    for tick in ticks[:left]:
        creates.append((tick, record.made + 1, record.last))
        record = msgspec.structs.replace(record, made=record.made + 1, last=tick)
    if record.definition.overlap is not Overlap.ALLOW:
        earlier = (*record.earlier, *(tick for tick, _, _ in creates))[-MOST_EARLIER:]
        record = msgspec.structs.replace(record, earlier=earlier)
    return record, creates


def _created_ahead(record: Record, tick: int) -> tuple[Record, list[tuple[int, int, int | None]]]:
    """The record after the message of the next tick was created; and that message."""
    done, creates = _created(record, [tick])
    return _with_tick(
        msgspec.structs.replace(done, last=record.latest), tick, is_made=True
    ), creates


def _next(record: Record, after_ms: int) -> int | None:
    return next_tick(record.definition, record.made_ms, after_ms)


def _is_over(record: Record) -> bool:
    most = record.definition.most
    return most is not None and record.made >= most


def _with_tick(record: Record, tick: int | None, *, is_made: bool = False) -> Record:
    return msgspec.structs.replace(record, tick=tick, is_made=is_made, is_queued=False)


def _wanted(record: Record, span: Sequence[int]) -> list[int]:
    """The ticks after span[0] and up to span[1] (now) that the policies want to run, in order."""
    definition, (after_ms, now_ms) = record.definition, span
    if definition.max_late_ms is not None:
        after_ms = max(after_ms, now_ms - definition.max_late_ms - 1)
    on_time_from = max(after_ms, now_ms - ON_TIME_MS - 1)
    on_time = ticks_between(record, on_time_from, now_ms, MOST_CAUGHT_UP)
    most = {
        CatchUp.NONE: 0,
        CatchUp.ONE: 1,
        CatchUp.ALL: definition.max_caught_up,
    }[definition.catch_up]
    late = ticks_between(record, after_ms, on_time_from, most) if most else []
    return [*late, *on_time]
