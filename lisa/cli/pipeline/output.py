"""Output that several jobs have: lists of messages, and windows of time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lisa.cli.output import iso, print_table
from lisa.core.model.sharding import shard_named

if TYPE_CHECKING:
    from lisa.pipeline.jobs.windows import Window


def print_messages(
    columns: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    *,
    total: int,
    title: str = "",
) -> None:
    """Print the first rows of a list, and how many more there are.

    names: the row's value of each column; those ending in _ms are shown as times.
    """
    cells = [
        [iso(row[name]) if name.endswith("_ms") else row[name] for name in names] for row in rows
    ]
    more = total - len(rows)
    if more:
        cells.append([f"and {more:,} more", *[""] * (len(names) - 1)])
    print_table(columns, cells, title)


def print_windows(columns: Sequence[str], windows: Sequence[Window], title: str = "") -> None:
    """Print windows of time: topic or shard, begin, end and reason; nothing without windows."""
    if windows:
        rows = [
            (shard_named(one.topic, one.shard), iso(one.after_ms), iso(one.until_ms), one.reason)
            for one in windows
        ]
        print_table(columns, rows, title)


def with_times(windows: Sequence[Window]) -> list[dict[str, Any]]:
    """Windows for JSON, with their times also in ISO 8601."""
    return [
        asdict(one) | {"after": iso(one.after_ms), "until": iso(one.until_ms)} for one in windows
    ]
