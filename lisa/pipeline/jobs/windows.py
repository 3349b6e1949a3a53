"""A job's scope, and windows of time in which events, and thus messages, are unknown."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from lisa.admin.reading import entry_number
from lisa.core.model.clock import datetime_ms
from lisa.core.model.errors import InvalidMessage
from lisa.pipeline.archive.batches import is_new
from lisa.pipeline.archive.schemas import GAP_STATE, journal_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lisa.pipeline.archive import ArchiveGap


@dataclass(frozen=True, slots=True)
class Window:
    """A range of time with missing events; messages may have been accepted in it.

    after_ms, until_ms: epoch ms; `after_ms` is the time of the last known event before it, None
        if there is none.
    shard: the shard whose journal has the gap; None for the topic's own journal.
    """

    topic: str
    after_ms: int | None
    until_ms: int
    reason: str
    shard: str | None = None


@dataclass(frozen=True, slots=True)
class JobScope:
    """What a job considers: from `start` up to but not including `end`, both aware datetimes.

    topics: None or empty means all. start, end: None means unbounded.

    Raises InvalidMessage for a time without zone, or an end that is not after start.
    """

    topics: Sequence[str] | None = None
    start: datetime | None = None
    end: datetime | None = None

    def __post_init__(self) -> None:
        start, end = self.start, self.end
        for moment in (start, end):
            if moment is not None and moment.utcoffset() is None:
                raise InvalidMessage(f"{moment.isoformat()} has no time zone")
        if start is not None and end is not None and end <= start:
            raise InvalidMessage(f"end {end.isoformat()} is not after start {start.isoformat()}")

    def reaches(self, window: Window) -> bool:
        """Whether the scope includes a part of a window, and its topic."""
        return (
            (not self.topics or window.topic in self.topics)
            and (self.start is None or window.until_ms >= datetime_ms(self.start))
            and (self.end is None or (window.after_ms or 0) < datetime_ms(self.end))
        )

    def includes(self, at: Column) -> Column:
        """Whether a time is in the scope."""
        since = sf.expr("true") if self.start is None else at >= sf.lit(self.start)
        return since if self.end is None else since & (at < sf.lit(self.end))


def gap_windows(gaps: Sequence[ArchiveGap], log: Callable[[], DataFrame]) -> list[Window]:
    """The windows of the gaps of an archive, in their order; log: returns every event.

    A gap that was found before any event followed it ends with the next archived event; without
    one, it has not ended yet.
    """
    followed = _next_events_ms([gap for gap in gaps if gap.to_id is None], log)
    now_ms = int(time.time() * 1000)
    return [
        Window(
            gap.topic,
            _entry_ms(gap.after_id),
            _entry_ms(gap.to_id) or followed.get(gap, now_ms),
            gap.reason,
            gap.shard,
        )
        for gap in gaps
    ]


def _next_events_ms(
    gaps: Sequence[ArchiveGap], log: Callable[[], DataFrame]
) -> dict[ArchiveGap, int]:
    """Gap -> time of the first archived event after it; lacks gaps without one."""
    if not gaps:
        return {}
    at_ms, is_event = sf.unix_millis("at"), sf.col("state") != GAP_STATE
    firsts = []
    for gap in gaps:
        behind = is_new({gap.journal: (gap.after_id or "0-0", 0)})
        follows = is_event & (journal_of() == gap.journal) & behind
        firsts.append(sf.min(sf.when(follows, at_ms)))
    [found] = log().select(*firsts).collect()
    return {gap: ms for gap, ms in zip(gaps, found, strict=True) if ms is not None}


def _entry_ms(entry: str | None) -> int | None:
    return entry_number(entry)[0] or None if entry else None
