"""Writes the report's tables as files: Parquet for programs, CSV for spreadsheets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, fields
from datetime import UTC, datetime, timedelta
from typing import Any

import pyarrow as pa
from pyarrow import csv, parquet

from lisa.pipeline.archive.base import ArchiveGap
from lisa.pipeline.jobs.report.counts import COUNTED, Percentiles
from lisa.pipeline.jobs.report.figures import Figures
from lisa.pipeline.source import files

_LATE = ("hand_overs", "early", "within_slo", "p50_us", "p90_us", "p99_us", "p999_us", "max_us")

_TEXTS = {"topic", "hour_local", "reason", "unit", "after_id", "to_id", "shard"}
_TIMES = {"hour", "from", "to", "most_at", "drained_at", "at"}
"""The columns of other types than integer."""


Row = Iterable[Any]


def _type_of(column: str) -> pa.DataType:
    if column in _TEXTS:
        return pa.string()
    return pa.timestamp("ms", tz="UTC") if column in _TIMES else pa.int64()


def write_tables(figures: Figures, to: str) -> tuple[str, ...]:
    """Write each table as NAME.parquet and NAME.csv into a directory; returns their paths.

    Raises ConfigError if a file cannot be written.
    """
    written = []
    for name, (columns, rows_of) in TABLES.items():
        schema = pa.schema([(column, _type_of(column)) for column in columns])
        rows = [dict(zip(columns, row, strict=True)) for row in rows_of(figures)]
        table = pa.Table.from_pylist(rows, schema=schema)
        for kind, write in (("parquet", parquet.write_table), ("csv", csv.write_csv)):
            content = pa.BufferOutputStream()
            write(table, content)
            path = files.join(to, f"{name}.{kind}")
            files.write(path, content.getvalue().to_pybytes())
            written.append(path)
    return tuple(written)


def _late(one: Percentiles | None) -> tuple[int | None, ...]:
    return (0, 0, 0, *(None,) * 5) if one is None else astuple(one)


def _hourly(figures: Figures) -> Iterator[Row]:
    for topic, hour, counts in figures.hours:
        when = datetime.fromtimestamp(hour, UTC)
        late = figures.lateness.get((("topic", "hour"), topic, hour))
        local = when.astimezone(figures.zone).isoformat(timespec="minutes")
        yield (topic, when, local, *(counts[name] for name in COUNTED), *_late(late))


def _topics(figures: Figures) -> Iterator[Row]:
    for topic, sums in figures.totals().items():
        yield (topic, *sums.values(), *figures.capacities.get(topic, (None, None, None)))


def _lateness(figures: Figures) -> Iterator[Row]:
    for part, one in sorted(figures.lateness.items(), key=str):
        if part[0] in ((), ("topic",)):
            yield (part[1] if part[0] else None, *_late(one))


def _trend(figures: Figures) -> Iterator[Row]:
    edges = figures.span.edges if figures.span else ()
    for part, one in sorted(figures.lateness.items(), key=str):
        if part[0] in (("slot",), ("topic", "slot")):
            slot, topic = part[-1], part[1] if len(part) == 3 else None
            yield (
                topic,
                *(datetime.fromtimestamp(edges[i], UTC) for i in (slot, slot + 1)),
                *_late(one),
            )


def _handling(figures: Figures) -> Iterator[Row]:
    for part, one in sorted(figures.handling.items(), key=str):
        count, _early, _within, *times = astuple(one)
        yield (part[1] if part[0] else None, count, *times)


def _due(figures: Figures) -> Iterator[Row]:
    now = figures.now
    for topic, demand in figures.demands.items():
        parts: Mapping[str, Mapping[int, int]] = {"minute": demand.minutes, "hour": demand.hours}
        yield (topic, "overdue", None, demand.overdue)
        for unit, counts in parts.items():
            length = timedelta(**{f"{unit}s": 1})
            for number, n in sorted(counts.items()):
                yield (topic, unit, None if now is None else now + number * length, n)
        yield (topic, "later", None, demand.later)


def _falling_behind(figures: Figures) -> Iterator[Row]:
    for crossing in figures.crossings:
        begins, peaks = figures.ahead(crossing.hour), figures.ahead(crossing.peak_hour + 1)
        drained = figures.ahead(crossing.drained)
        yield (
            crossing.topic,
            begins,
            crossing.load,
            crossing.capacity,
            crossing.peak,
            peaks,
            drained,
        )


TABLES: dict[str, tuple[tuple[str, ...], Callable[[Figures], Iterable[Row]]]] = {
    "hourly": (("topic", "hour", "hour_local", *COUNTED, *_LATE), _hourly),
    "topics": (("topic", *COUNTED, "best_hour", "p95_hour", "busy_hours"), _topics),
    "lateness": (("topic", *_LATE), _lateness),
    "lateness_trend": (("topic", "from", "to", *_LATE), _trend),
    "handling": (("topic", "messages", *_LATE[3:]), _handling),
    "attempts": (("topic", "attempt", "messages"), lambda figures: figures.attempts),
    "garbage": (("topic", "reason", "messages"), lambda figures: figures.reasons),
    "due": (("topic", "unit", "from", "messages"), _due),
    "falling_behind": (
        ("topic", "from", "load", "capacity", "most_left_over", "most_at", "drained_at"),
        _falling_behind,
    ),
    "gaps": (
        tuple(field.name for field in fields(ArchiveGap)),
        lambda figures: [astuple(gap) for gap in figures.gaps],
    ),
}
"""Table -> its columns, and their rows. A null topic means all topics together."""
