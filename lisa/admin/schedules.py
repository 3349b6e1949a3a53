"""What became of the latest occurrences of schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lisa.admin.reading import ask_all
from lisa.core.model.clock import duration_ms
from lisa.core.model.recurring.definition import Record
from lisa.core.model.recurring.ticks import is_overdue, ticks_between
from lisa.core.redis.flow import Flow
from lisa.core.store.inspection import FoundMessage, found
from lisa.core.store.presence import OVERDUE
from lisa.core.store.store import Store, chunks
from lisa.core.transitions.inspect import Inspect

TOPICS_PER_STEP = 500


@dataclass(frozen=True, slots=True)
class PastTick:
    """A tick that has come, and its message.

    message: None if none was created, or if its tombstone has expired.
    """

    tick_ms: int
    id: str
    message: FoundMessage | None


class LateTicks(NamedTuple):
    """A topic's schedules whose next tick no manager has handled in time.

    since_ms: the oldest of these ticks.
    """

    schedules: int
    since_ms: int


def late(store: Store, topics: Sequence[str], now_ms: int) -> Flow[dict[str, LateTicks]]:
    """The late schedules of each topic that has some."""
    found: dict[str, LateTicks] = {}
    for part in chunks(topics, TOPICS_PER_STEP):
        keys = [store.keys.topic(topic).ticks for topic in part]
        until = now_ms - duration_ms(OVERDUE)
        heads = [("ZRANGE", key, 0, 0, "WITHSCORES") for key in keys]
        counts = [("ZCOUNT", key, "-inf", until) for key in keys]
        replies = yield from ask_all(store, [*heads, *counts])
        for topic, head, n in zip(part, replies, replies[len(part) :], strict=False):
            if head and n:
                found[topic] = LateTicks(n, int(float(head[1])))
    return found


def is_late(record: Record, now_ms: int) -> bool:
    """Whether a tick has come that a running manager would have handled by now."""
    return is_overdue(record, now_ms - duration_ms(OVERDUE))


def past(
    store: Store, topic: str, records: Mapping[str, Record], now_ms: int, count: int
) -> Flow[dict[str, list[PastTick]]]:
    """The latest ticks of schedules by name, at most `count` each, the newest first."""
    ticks = {
        name: ticks_between(record, record.made_ms, _newest(record, now_ms), count)[::-1]
        for name, record in records.items()
    }
    made = {name: record.definition.occurrence_id for name, record in records.items()}
    ids = [made[name](name, tick) for name, part in ticks.items() for tick in part]
    seen = (yield from store.run_by_id(Inspect(topic, ids, bodies=False))) if ids else []
    messages = {
        message_id: found(topic, message_id, what)
        for message_id, what in zip(ids, seen, strict=True)
    }
    return {
        name: [
            PastTick(tick, message_id := made[name](name, tick), messages[message_id])
            for tick in part
        ]
        for name, part in ticks.items()
    }


def _newest(record: Record, now_ms: int) -> int:
    """The instant up to which the schedule had ticks."""
    is_over = record.tick is None and not record.is_paused
    if is_over and record.last is not None:
        return min(now_ms, record.last)
    return now_ms
