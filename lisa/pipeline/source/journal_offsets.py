"""Offsets of the journal stream, and the ranges that they describe.

An offset has the last event read from each journal, as in {"orders": {"id": "...", "n": 17}}; each
shard of a sharded topic has its own journal, "orders~3of8". If needed, the offset also describes
the start of the batch that ends there: `from`, if the batch does not start at the end of the
previous one, and `gap`. A batch that is repeated after a crash is therefore identical. A journal
without events in the first batch is included with its start position, which distinguishes it from
journals that are created later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from pyspark.sql.datasource import InputPartition

from lisa.pipeline.source.following import Unread
from lisa.pipeline.source.marks import JournalGap, Mark

Offset = dict[str, dict[str, Any]]

TASK_EVENTS = 5_000
"""Minimum number of events of a task; a task costs some 10 ms."""

JOURNAL_EVENTS = 50
"""Events that take as long to read as the round trip that each range needs."""


@dataclass(frozen=True)
class JournalRange(InputPartition):
    """The events of one journal after `begin` up to `end`; or, if these are equal, a gap."""

    journal: str
    begin: Mark
    end: Mark
    gap: JournalGap | None = None


@dataclass(frozen=True)
class JournalBundle(InputPartition):
    """Ranges of any journals that one task reads one after the other."""

    ranges: tuple[JournalRange, ...]


def bundled(ranges: Sequence[JournalRange], most: int) -> list[JournalBundle]:
    """Distribute ranges over at most `most` tasks of similar size.

    There are fewer tasks if some of them would not be worth starting.
    """
    weights = [JOURNAL_EVENTS + max(0, one.end.number - one.begin.number) for one in ranges]
    count = min(most, len(ranges), max(1, sum(weights) // TASK_EVENTS))
    loads = [(0, number) for number in range(count)]
    bundles: list[list[JournalRange]] = [[] for _ in range(count)]
    by_weight = sorted(zip(weights, ranges, strict=True), key=lambda pair: -pair[0])
    for weight, one in by_weight:
        load, number = heappop(loads)
        bundles[number].append(one)
        heappush(loads, (load + weight, number))
    return [JournalBundle(tuple(one)) for one in bundles if one]


def range_of(journal: str, start: Mapping[str, Any] | None, end: Mapping[str, Any]) -> JournalRange:
    """One journal's part of a batch, derived from its offsets alone."""
    begins = end.get("from") or start
    begin = Mark.of(begins) if begins else Mark.of(end)
    gap = end.get("gap")
    return JournalRange(journal, begin, Mark.of(end), JournalGap(journal, *gap) if gap else None)


def stored_offset(start: Mapping[str, Any] | None, ahead: Unread, end: Mark) -> dict[str, Any]:
    """One journal's part of an offset, in its stored form."""
    stored = end.stored()
    if start is None or Mark.of(start) != ahead.begin:
        stored["from"] = ahead.begin.stored()
    if ahead.gap is not None:
        stored["gap"] = list(ahead.gap[1:])
    return stored
