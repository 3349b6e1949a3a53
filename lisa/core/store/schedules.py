"""Schedules, as flows for producers, managers and the command line: reads, steps and changes.

A step writes a schedule's record and its occurrences. On a topic with one shard, it is one script
call. On a topic with several shards, schedules are stored in the topic's own slot, but occurrences
are spread over the shards. Each occurrence is then created at its tick, by a send that is
idempotent by id, before the schedule advances to the next tick. A crash between the two repeats the
send.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import msgspec

from lisa.core.model.clock import ms_datetime, utc_text
from lisa.core.model.envelope import encode_head, new_token
from lisa.core.model.errors import InvalidMessage, LisaError, Misplaced, ScheduleChanged, TopicFull
from lisa.core.model.options import BYTES_PER_CALL
from lisa.core.model.recurring.definition import (
    MOST_CAUGHT_UP,
    Overlap,
    Record,
    ScheduleDefinition,
    check_name,
)
from lisa.core.model.recurring.ticks import (
    TickStep,
    advance,
    begin,
    due_ms,
    fewer,
    is_overdue,
    next_tick,
    taken_back,
    tick_before,
    ticks_after,
    ticks_between,
)
from lisa.core.model.sharding import PLAIN, Layout, Topic
from lisa.core.redis.flow import Flow
from lisa.core.store.inspection import State, found
from lisa.core.store.store import Store
from lisa.core.transitions.base import text
from lisa.core.transitions.change import Cancel
from lisa.core.transitions.enqueue import Enqueue, Sent
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.schedule import NewOccurrence, Schedule, ScheduleOutcome

PAGE = 500

MOST_TICKS = 10_000
"""The most ticks that `next_ticks` computes: half a second's work."""
TOPICS_PER_PAGE = 500
_CURSOR = re.compile("[0-9]{1,20}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleInfo:
    """A schedule as it is stored.

    next_ms: the next tick in epoch ms; None if it is paused or has none left. made: occurrences
    created so far. last_ms: the tick of the latest of them.
    """

    topic: str
    name: str
    version: int
    definition: ScheduleDefinition
    is_paused: bool
    next_ms: int | None
    made: int
    last_ms: int | None

    @property
    def next(self) -> datetime | None:
        """The next tick, aware, UTC."""
        return None if self.next_ms is None else ms_datetime(self.next_ms)

    @property
    def last(self) -> datetime | None:
        """The tick of the latest occurrence, aware, UTC."""
        return None if self.last_ms is None else ms_datetime(self.last_ms)

    @classmethod
    def of(cls, topic: str, name: str, record: Record) -> ScheduleInfo:
        """The public view of a record."""
        return cls(
            topic=topic,
            name=name,
            version=record.version,
            definition=record.definition,
            is_paused=record.is_paused,
            next_ms=record.tick,
            made=record.made,
            last_ms=record.latest,
        )


def get(store: Store, topic: str, name: str) -> Flow[ScheduleInfo | None]:
    """One schedule; None if there is none of that name."""
    record = yield from get_record(store, topic, name)
    return None if record is None else ScheduleInfo.of(topic, name, record)


def get_record(store: Store, topic: str, name: str) -> Flow[Record | None]:
    """The record of one schedule; None if there is none of that name. Raises InvalidMessage."""
    stored = yield from store.command("HGET", store.keys.topic(topic).schedules, name)
    return None if stored is None else Record.decode(stored)


def record_page(
    store: Store, topic: str, cursor: str | None = None, count: int = PAGE
) -> Flow[tuple[dict[str, Record], str | None]]:
    """Some of a topic's records by name, and the cursor of the next page; None at the end.

    In no particular order; unreadable records are left out. count: about how many.
    """
    key = store.keys.topic(topic).schedules
    reply = yield from store.command("HSCAN", key, cursor or "0", "COUNT", count)
    following, flat = text(reply[0]), reply[1]
    records = _readable(zip(flat[::2], flat[1::2], strict=True))
    return records, None if following == "0" else following


def get_records(store: Store, topic: str, names: Sequence[str]) -> Flow[dict[str, Record]]:
    """The records of some schedules by name, without missing and unreadable ones."""
    stored = yield from store.command("HMGET", store.keys.topic(topic).schedules, *names)
    return _readable(zip(names, stored, strict=True))


def _readable(stored: Iterable[tuple[str | bytes, bytes | None]]) -> dict[str, Record]:
    records: dict[str, Record] = {}
    for name, record in stored:
        with suppress(InvalidMessage):
            if record is not None:
                records[text(name)] = Record.decode(record)
    return records


def is_cursor(cursor: str) -> bool:
    """Whether the server accepts a cursor of `record_page`: an unsigned number of 64 bits."""
    return _CURSOR.fullmatch(cursor) is not None and int(cursor) < 1 << 64


def list_all(store: Store, topic: str) -> Flow[list[ScheduleInfo]]:
    """All schedules of a topic, sorted by name."""
    records: dict[str, Record] = {}
    cursor: str | None = None
    while True:
        some, cursor = yield from record_page(store, topic, cursor)
        records |= some
        if cursor is None:
            return [ScheduleInfo.of(topic, name, records[name]) for name in sorted(records)]


class RecordPage(NamedTuple):
    """Some schedules by topic and name, and the cursor of the next page; None at the end."""

    records: dict[str, dict[str, Record]]
    cursor: str | None


def page_of_topics(
    store: Store, topics: Sequence[str], cursor: str | None = None, count: int = PAGE
) -> Flow[RecordPage]:
    """Some schedules of several topics, in the order of the topics; see `record_page`.

    Looks at `TOPICS_PER_PAGE` topics at most. A cursor is that of a topic, `@`, and its name.
    """
    position, _, first = (cursor or "").partition("@")
    found: dict[str, dict[str, Record]] = {}
    total = 0
    for i, topic in enumerate(sorted(topic for topic in topics if topic >= first)):
        if i >= TOPICS_PER_PAGE or total >= count:
            return RecordPage(found, f"0@{topic}")
        at = position if topic == first else None
        found[topic], following = yield from record_page(store, topic, at, count)
        total += len(found[topic])
        if following is not None:
            return RecordPage(found, f"{following}@{topic}")
    return RecordPage(found, None)


def upcoming(record: Record, now_ms: int, count: int) -> Iterator[int]:
    """The next ticks: at most `count`, and at most as many as the schedule may still create."""
    most = record.definition.most
    if most is not None:
        count = min(count, most - record.made + record.is_made)
    return islice(ticks_after(record, now_ms), max(0, count))


def next_ticks(store: Store, topic: str, name: str, count: int) -> Flow[list[int]]:
    """The next ticks of a schedule, in epoch ms. Raises InvalidMessage, also if there is none."""
    if type(count) is not int or not 1 <= count <= MOST_TICKS:
        raise InvalidMessage(f"count is a number from 1 to {MOST_TICKS:,}, not {count!r}")
    record = known((yield from get_record(store, topic, name)), topic, name)
    now_ms = yield from store.server_time_ms(store.keys.topic(topic).schedules)
    return list(upcoming(record, now_ms, count))


def scheduled_topics(store: Store) -> Flow[list[str]]:
    """The topics that may have schedules."""
    reply = yield from store.command("ZRANGE", store.keys.scheduled, 0, -1)
    return [text(name) for name in reply]


def check_range(from_ms: int, to_ms: int) -> None:
    """Check the range of a backfill. Raises InvalidMessage."""
    if to_ms < from_ms:
        first, last = (ms_datetime(instant).isoformat() for instant in (from_ms, to_ms))
        raise InvalidMessage(f"a backfill from {first} to {last} ends before it begins")


def known(record: Record | None, topic: str, name: str) -> Record:
    """The record, or raise InvalidMessage if there is none."""
    if record is None:
        raise InvalidMessage(f"topic {topic!r} has no schedule {name!r}")
    return record


_RUNNING = (State.IN_FLIGHT, State.RETRY)
_UNSTARTED = (State.WAITING, State.READY)


def most_per_call(definition: ScheduleDefinition) -> int:
    """The most occurrences that one call creates; at least one at a tick and one ahead of it."""
    return max(2, BYTES_PER_CALL // max(1, len(definition.body)))


def plan(
    record: Record,
    now_ms: int,
    *,
    is_split: bool,
    may_swap: bool = True,
    most: int | None = None,
) -> TickStep:
    """As `advance`, within the byte budget of a call."""
    step = advance(record, now_ms, is_split=is_split, may_swap=may_swap, most=most)
    limit = most_per_call(record.definition)
    if len(step.creates) <= limit:
        return step
    return advance(record, now_ms, is_split=is_split, may_swap=may_swap, most=limit)


def tick_all(
    store: Store, topic: str, names: Sequence[str], now_ms: int
) -> Flow[list[ScheduleOutcome | LisaError]]:
    """Do what is due of some schedules; the result of each."""
    key = store.keys.topic(topic).schedules
    records = yield from store.command("HMGET", key, *names)
    layout = store.known_layout(Topic(topic)) or PLAIN
    results: dict[int, ScheduleOutcome | LisaError] = {}
    calls: dict[int, Schedule] = {}
    steps: dict[int, tuple[Record, TickStep]] = {}
    for i, (name, stored) in enumerate(zip(names, records, strict=True)):
        if stored is None:  # removed meanwhile; or another program deleted the record
            calls[i] = Schedule(topic, name, "", b"")
            continue
        try:
            record = Record.decode(stored)
            step = plan(record, now_ms, is_split=layout.is_split)
            if not layout.is_split:
                calls[i] = step_call(topic, name, record, step)
            steps[i] = record, step
        except LisaError as error:
            results[i] = error
    number = "" if layout.is_split else str(layout.number)
    done = yield from store.run_many(list(calls.values()), number)
    results.update(zip(calls, done, strict=True))
    for i, (record, step) in steps.items():
        results[i] = yield from _applied(
            store, topic, names[i], record, now_ms=now_ms, step=step, result=results.get(i)
        )
    if any(isinstance(result, Misplaced) for result in results.values()):
        yield from store.layout(Topic(topic))
    return [results[i] for i in range(len(names))]


def _applied(
    store: Store,
    topic: str,
    name: str,
    record: Record,
    *,
    now_ms: int,
    step: TickStep,
    result: ScheduleOutcome | LisaError | None,
) -> Flow[ScheduleOutcome | LisaError]:
    """The result of a step, which is planned again until it can be applied.

    An occurrence that is to be replaced may have begun, and the topic may have no room for all.

    result: of the step as it is, if it was called already.
    """
    layout = store.known_layout(Topic(topic)) or PLAIN
    may_swap, most = True, None
    while True:
        if result is None:
            try:
                result = yield from run_step(store, topic, name, record, step, layout=layout)
            except LisaError as error:
                result = error
        if isinstance(result, TopicFull):
            most = fewer(step, now_ms)
            if most is None:
                return result
        elif isinstance(result, ScheduleOutcome) and result.state == "gone":
            may_swap = False
        else:
            return result
        step = plan(record, now_ms, is_split=layout.is_split, may_swap=may_swap, most=most)
        result = None


def delayed(store: Store, topic: str, name: str, record: Record, now_ms: int) -> Flow[list[int]]:
    """The ticks that have come whose occurrences still wait, because of the schedule's jitter.

    At most the latest `MOST_CAUGHT_UP` ticks.
    """
    definition, latest = record.definition, record.latest
    if not definition.jitter_ms or latest is None:
        return []
    after_ms = max(record.made_ms, now_ms - definition.jitter_ms)
    came = ticks_between(record, after_ms, min(now_ms, latest), MOST_CAUGHT_UP)
    later = [tick for tick in came if due_ms(definition, name, tick) > now_ms]
    if not later:
        return []
    ids = [definition.occurrence_id(name, tick) for tick in later]
    seen = yield from store.run_by_id(Inspect(topic, ids, bodies=False))
    return [t for t, one in zip(later, seen, strict=True) if one.waiting_due_ms is not None]


def step_call(topic: str, name: str, record: Record | None, step: TickStep) -> Schedule:
    """The script call of a step on a topic with one shard."""
    definition = step.record.definition
    before = record.definition if record else definition
    is_own = step.held is not None
    return Schedule(
        topic,
        name,
        record.fence if record else "",
        b"" if step.removes else step.record.encode(),
        step.score,
        creates=_occurrences(name, step, new_token()),
        drops=[before.occurrence_id(name, tick) for tick in step.drops],
        earlier=[before.occurrence_id(name, t) for t in record.earlier]
        if record and is_own
        else [],
        overlap=definition.overlap.value if is_own else Overlap.ALLOW.value,
        held=step.held.encode() if step.held else b"",
        held_score=step.held_score,
        swaps=step.swaps,
    )


def _occurrences(name: str, step: TickStep, token: str) -> list[NewOccurrence]:
    definition, head = step.record.definition, encode_head(token)
    return [
        NewOccurrence(
            definition.occurrence_id(name, tick),
            due_ms(definition, name, tick) if step.has_jitter else tick,
            head + definition.body_at(name, tick, previous, number),
            definition.ttl_ms,
            definition.message_policy,
        )
        for tick, number, previous in step.creates
    ]


def run_step(
    store: Store,
    topic: str,
    name: str,
    record: Record | None,
    step: TickStep,
    *,
    layout: Layout,
) -> Flow[ScheduleOutcome]:
    """Run a step on a topic of a layout. Raises Misplaced, TopicFull."""
    if layout.is_split:
        return (yield from run_split(store, topic, name, record, step))
    call = step_call(topic, name, record, step)
    return (yield from store.run(call, str(layout.number)))


def run_split(
    store: Store, topic: str, name: str, record: Record | None, step: TickStep
) -> Flow[ScheduleOutcome]:
    """Run a step on a topic with several shards: first the occurrences, then the schedule.

    Raises Misplaced, TopicFull.
    """
    state, outcomes = "done", ""
    new, score = step.record, step.score
    fence, before = record.fence if record else "", (record or new).definition
    dropped = [before.occurrence_id(name, tick) for tick in step.drops]
    if step.swaps and not (yield from _all_wait(store, topic, dropped)):
        return ScheduleOutcome("gone", fence, "")
    may_be_held = bool(step.creates) and record is not None
    if may_be_held and step.held and (yield from _is_held(store, topic, name, record)):
        state, new, score = "held", step.held, step.held_score
    if state == "done" and step.creates:
        token = new_token()
        made = _occurrences(name, step, token)
        sends = Enqueue(
            topic,
            [occurrence.id for occurrence in made],
            [str(occurrence.due_ms) for occurrence in made],
            [occurrence.envelope for occurrence in made],
            [occurrence.ttl_ms for occurrence in made],
            [occurrence.policy for occurrence in made],
        )
        sent = yield from store.run_by_id(sends)
        outcomes = "".join("a" if outcome is Sent.ACCEPTED else "d" for outcome in sent)
    call = Schedule(topic, name, fence, b"" if step.removes else new.encode(), score)
    done = yield from store.run(call)
    if done.state == "done" and dropped:
        layout = store.known_layout(Topic(topic)) or PLAIN
        for shard in layout.active(Topic(topic)):
            # No schedule has an empty name, so this only drops: without tombstones, which would
            # prevent that the same tick is created again, and nothing that is ready.
            yield from store.run(Schedule(shard, "", "", b"", drops=dropped))
    return done if done.state == "changed" else ScheduleOutcome(state, done.fence, outcomes)


def _all_wait(store: Store, topic: str, ids: Sequence[str]) -> Flow[bool]:
    """Whether all these messages wait."""
    seen = yield from store.run_by_id(Inspect(topic, ids, bodies=False))
    return all(state.waiting_due_ms is not None for state in seen)


def _is_held(store: Store, topic: str, name: str, record: Record | None) -> Flow[bool]:
    """Whether earlier occurrences prevent a new one; cancels those that it replaces."""
    if record is None or not record.earlier:
        return False
    ids = [record.definition.occurrence_id(name, tick) for tick in record.earlier]
    seen = yield from store.run_by_id(Inspect(topic, ids, bodies=False))
    states = {
        message_id: _state(topic, message_id, what)
        for message_id, what in zip(ids, seen, strict=True)
    }
    overlap = record.definition.overlap
    if overlap is Overlap.REPLACE_UNSTARTED:
        unstarted = [message_id for message_id, state in states.items() if state in _UNSTARTED]
        if unstarted:
            yield from store.run_by_id(Cancel(topic, unstarted))
        return False
    blocking = _RUNNING if overlap is Overlap.SKIP else (*_RUNNING, *_UNSTARTED)
    return any(state in blocking for state in states.values())


def _state(topic: str, message_id: str, seen: Any) -> State | None:
    """The state of an occurrence; a retry that is ready again counts as a retry."""
    message = found(topic, message_id, seen)
    if message is None:
        return None
    if message.state is State.READY and message.attempts:
        return State.RETRY
    return message.state


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
        return TickStep(record=record, score=None, drops=drops, removes=True)

    flow = _change(store, topic, name, change, drops_delayed=True)
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
    at_ms, made_id = 0, ""

    def change(record: Record | None, now_ms: int, is_split: bool) -> TickStep | None:  # noqa: ARG001, FBT001
        nonlocal at_ms, made_id
        record, at_ms = known(record, topic, name), max(now_ms, at_ms)
        made_id = record.definition.occurrence_id(name, at_ms)
        previous = record.latest if is_overdue(record, now_ms) else record.last
        return _extra(record, [(at_ms, previous)])

    while True:
        done = yield from _change(store, topic, name, change)
        if done is None or "d" not in done.outcomes:
            return made_id
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
            done = yield from _change(store, topic, name, change)
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
        has_jitter=False,
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
            done = yield from run_step(store, topic, name, record, step, layout=layout)
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
