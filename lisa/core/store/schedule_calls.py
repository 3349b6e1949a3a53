"""Runs steps of schedules: their records and their occurrences.

On a topic with one shard, a step is one script call. On a topic with several shards, schedules are
stored in the topic's own slot, but occurrences are spread over the shards. Each occurrence is then
created at its tick, by a send that is idempotent by id, before the schedule advances to the next
tick. A crash between the two repeats the send.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lisa.core.model.envelope import encode_head, new_token
from lisa.core.model.errors import LisaError, Misplaced, TopicFull
from lisa.core.model.late import message_policy
from lisa.core.model.options import BYTES_PER_CALL
from lisa.core.model.recurring.definition import (
    MOST_CAUGHT_UP,
    Overlap,
    Record,
    ScheduleDefinition,
    occurrence_id,
)
from lisa.core.model.recurring.ticks import TickStep, advance, due_ms, fewer, ticks_between
from lisa.core.model.sharding import PLAIN, Layout, Topic
from lisa.core.redis.flow import Flow
from lisa.core.store.inspection import State, found
from lisa.core.store.store import Store
from lisa.core.transitions.change import Cancel
from lisa.core.transitions.enqueue import Enqueue, Sent
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.schedule import NewOccurrence, Schedule, ScheduleOutcome

_RUNNING = (State.IN_FLIGHT, State.RETRY)
_UNSTARTED = (State.WAITING, State.READY)


def most_per_call(definition: ScheduleDefinition) -> int:
    """The most occurrences that one call creates; at least one at a tick and one ahead of it."""
    return max(2, BYTES_PER_CALL // max(1, len(definition.body)))


def plan(record: Record, now_ms: int, *, is_split: bool, may_swap: bool = True) -> TickStep:
    """The step for a schedule whose tick has come, within the byte budget of a call."""
    step = advance(record, now_ms, is_split=is_split, may_swap=may_swap)
    most = most_per_call(record.definition)
    if len(step.creates) <= most:
        return step
    return advance(record, now_ms, is_split=is_split, may_swap=may_swap, most=most)


def tick_all(
    store: Store, topic: str, names: Sequence[str], now_ms: int
) -> Flow[list[ScheduleOutcome | LisaError | None]]:
    """Do what is due of some schedules; the result of each, None if nothing was to be done."""
    key = store.keys.topic(topic).schedules
    records = yield from store.command("HMGET", key, *names)
    layout = store.known_layout(Topic(topic)) or PLAIN
    results: list[ScheduleOutcome | LisaError | None] = [None] * len(names)
    calls: dict[int, Schedule] = {}
    steps: dict[int, tuple[Record, TickStep]] = {}
    for i, (name, stored) in enumerate(zip(names, records, strict=True)):
        if stored is None:  # removed meanwhile; or another program deleted the record
            calls[i] = Schedule(topic, name, "", b"")
            continue
        try:
            record = Record.decode(stored)
            step = plan(record, now_ms, is_split=layout.is_split)
            steps[i] = record, step
            if layout.is_split:
                results[i] = yield from run_split(store, topic, name, record, step)
            else:
                calls[i] = step_call(topic, name, record, step)
        except LisaError as error:
            results[i] = error
    number = "" if layout.is_split else str(layout.number)
    done = yield from store.run_many(list(calls.values()), number)
    for i, result in zip(calls, done, strict=True):
        results[i] = result
    for i, (record, step) in steps.items():
        results[i] = yield from _again(
            store, topic, names[i], record, now_ms=now_ms, step=step, result=results[i]
        )
    if any(isinstance(one, Misplaced) for one in results):
        yield from store.layout(Topic(topic))
    return results


def _again(
    store: Store,
    topic: str,
    name: str,
    record: Record,
    *,
    now_ms: int,
    step: TickStep,
    result: ScheduleOutcome | LisaError | None,
) -> Flow[ScheduleOutcome | LisaError | None]:
    """Return the result of a step, replanning it until it can be applied.

    An occurrence that is to be replaced may have begun, and the topic may have no room for all.
    """
    layout = store.known_layout(Topic(topic)) or PLAIN
    may_swap, most = True, None
    while True:
        if isinstance(result, TopicFull):
            most = fewer(step, now_ms)
            if most is None:
                return result
        elif isinstance(result, ScheduleOutcome) and result.state == "gone":
            may_swap = False
        else:
            return result
        if most is None:
            step = plan(record, now_ms, is_split=layout.is_split, may_swap=may_swap)
        else:
            step = advance(record, now_ms, is_split=layout.is_split, may_swap=may_swap, most=most)
        try:
            result = yield from run_step(store, topic, name, record, step, layout=layout)
        except LisaError as error:
            result = error


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
    ids = [occurrence_id(name, tick) for tick in later]
    seen = yield from store.run_by_id(Inspect(topic, ids, bodies=False))
    return [t for t, one in zip(later, seen, strict=True) if one.waiting_due_ms is not None]


def step_call(
    topic: str,
    name: str,
    record: Record | None,
    step: TickStep,
    *,
    removes: bool = False,
    has_jitter: bool = True,
) -> Schedule:
    """The script call of a step on a topic with one shard.

    removes: the step removes the schedule. has_jitter: whether the jitter moves due times.
    """
    definition = step.record.definition
    is_own = step.held is not None
    return Schedule(
        topic,
        name,
        record.fence if record else "",
        b"" if removes else step.record.encode(),
        step.score,
        creates=_occurrences(name, step, new_token(), has_jitter=has_jitter),
        drops=[occurrence_id(name, tick) for tick in step.drops],
        earlier=[occurrence_id(name, t) for t in record.earlier] if record and is_own else [],
        overlap=definition.overlap.value if is_own else Overlap.ALLOW.value,
        held=step.held.encode() if step.held else b"",
        held_score=step.held_score,
        swaps=step.swaps,
    )


def _occurrences(
    name: str, step: TickStep, token: str, *, has_jitter: bool = True
) -> list[NewOccurrence]:
    definition, head = step.record.definition, encode_head(token)
    return [
        NewOccurrence(
            occurrence_id(name, tick),
            due_ms(definition, name, tick) if has_jitter else tick,
            head + definition.body_at(name, tick, previous, number),
            definition.ttl_ms,
            message_policy(definition.policy, definition.late),
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
    removes: bool = False,
    has_jitter: bool = True,
) -> Flow[ScheduleOutcome]:
    """Run a step on a topic of a layout.

    removes, has_jitter: see `step_call`. Raises Misplaced, TopicFull.
    """
    if layout.is_split:
        run = run_split(store, topic, name, record, step, removes=removes, has_jitter=has_jitter)
        return (yield from run)
    call = step_call(topic, name, record, step, removes=removes, has_jitter=has_jitter)
    return (yield from store.run_at(call, str(layout.number), store.patience()))


def run_split(
    store: Store,
    topic: str,
    name: str,
    record: Record | None,
    step: TickStep,
    *,
    removes: bool = False,
    has_jitter: bool = True,
) -> Flow[ScheduleOutcome]:
    """Run a step on a topic with several shards: first the occurrences, then the schedule.

    removes, has_jitter: see `step_call`. Raises Misplaced, TopicFull.
    """
    state, outcomes = "done", ""
    new, score = step.record, step.score
    fence, dropped = record.fence if record else "", [occurrence_id(name, t) for t in step.drops]
    if step.swaps and not (yield from _all_wait(store, topic, dropped)):
        return ScheduleOutcome("gone", fence, "")
    may_be_held = bool(step.creates) and record is not None
    if may_be_held and step.held and (yield from _is_held(store, topic, name, record)):
        state, new, score = "held", step.held, step.held_score
    if state == "done" and step.creates:
        token = new_token()
        made = _occurrences(name, step, token, has_jitter=has_jitter)
        sends = Enqueue(
            topic,
            token,
            [one.id for one in made],
            [str(one.due_ms) for one in made],
            [one.envelope for one in made],
            [one.ttl_ms for one in made],
            [one.policy for one in made],
        )
        sent = yield from store.run_by_id(sends)
        outcomes = "".join("a" if one is Sent.ACCEPTED else "d" for one in sent)
    call = Schedule(topic, name, fence, b"" if removes else new.encode(), score)
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
    return all(one.waiting_due_ms is not None for one in seen)


def _is_held(store: Store, topic: str, name: str, record: Record | None) -> Flow[bool]:
    """Whether earlier occurrences prevent a new one; cancels those that it replaces."""
    ids = [occurrence_id(name, tick) for tick in record.earlier] if record else []
    if record is None or not ids:
        return False
    seen = yield from store.run_by_id(Inspect(topic, ids, bodies=False))
    states = {one: _state(topic, one, what) for one, what in zip(ids, seen, strict=True)}
    overlap = record.definition.overlap
    if overlap is Overlap.REPLACE_UNSTARTED:
        unstarted = [one for one, state in states.items() if state in _UNSTARTED]
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
