"""Windows of time in which events, and thus messages, are unknown to an archive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lisa.admin.reading import entry_number
from lisa.core.model.clock import datetime_ms

if TYPE_CHECKING:
    from lisa.pipeline.archive import Archive


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


def gap_windows(archive: Archive) -> list[Window]:
    """The windows of the gaps that the archive has recorded."""
    return [
        Window(
            gap.topic,
            _entry_ms(gap.after_id),
            _entry_ms(gap.to_id) or datetime_ms(gap.at),
            gap.reason,
            gap.shard,
        )
        for gap in archive.gaps()
    ]


def _entry_ms(entry: str | None) -> int | None:
    return entry_number(entry)[0] or None if entry else None
