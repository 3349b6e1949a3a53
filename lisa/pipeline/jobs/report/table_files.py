"""Writes the report's tables as files: Parquet for programs, CSV for spreadsheets."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, fields
from datetime import UTC, datetime, tzinfo
from itertools import pairwise
from typing import Any

import pyarrow as pa
from pyarrow import csv, parquet

from lisa.pipeline.archive.base import ArchiveGap
from lisa.pipeline.jobs.report.figures import COUNTED, LATER, OVERDUE, Figures
from lisa.pipeline.source import files

_LATE = ("hand_overs", "early", "within_slo", "p50_us", "p90_us", "p99_us", "p999_us", "max_us")

_TEXTS = {"topic", "hour_local", "reason", "unit", "after_id", "to_id", "shard"}
_TIMES = {"hour", "from", "to", "most_at", "drained_at", "at"}
"""The columns of other types than integer."""


def _type_of(column: str) -> pa.DataType:
    if column in _TEXTS:
        return pa.string()
    return pa.timestamp("ms", tz="UTC") if column in _TIMES else pa.int64()


def write_tables(figures: Figures, to: str) -> tuple[str, ...]:
    """Write each table as NAME.parquet and NAME.csv into a directory; returns their paths.

    Raises ConfigError if a file cannot be written.
    """
    written = []
    for name, (columns, values) in _tables(figures).items():
        schema = pa.schema([(column, _type_of(column)) for column in columns])
        rows = [dict(zip(columns, row, strict=True)) for row in values]
        table = pa.Table.from_pylist(rows, schema=schema)
        for kind, write in (("parquet", parquet.write_table), ("csv", csv.write_csv)):
            content = pa.BufferOutputStream()
            write(table, content)
            path = files.join(to, f"{name}.{kind}")
            files.write(path, content.getvalue().to_pybytes())
            written.append(path)
    return tuple(written)


def _at(epoch_s: int, zone: tzinfo = UTC) -> datetime:
    return datetime.fromtimestamp(epoch_s, zone)


def _tables(figures: Figures) -> dict[str, tuple[tuple[str, ...], Iterable[tuple[Any, ...]]]]:
    """Table -> its columns, and their rows. A null topic means all topics together."""
    ahead, no_late = figures.ahead, (0, 0, 0, *(None,) * 5)
    late, ends = figures.lateness.items(), dict(pairwise(figures.span.edges))
    units, due = {OVERDUE: "overdue", LATER: "later"}, list[tuple[Any, ...]]()
    for topic, demand in figures.demands.items():
        due += ((topic, "minute", ahead(at / 60), n) for at, n in demand.minutes.items())
        for at, n in {OVERDUE: 0, LATER: 0, **demand.hours}.items():
            due.append((topic, units.get(at, "hour"), None if at in units else ahead(at), n))
    return {
        "hourly": (
            ("topic", "hour", "hour_local", *COUNTED, *_LATE),
            [
                (
                    *(topic, _at(hour), _at(hour, figures.zone).isoformat(timespec="minutes")),
                    *(*counts.values(), *(figures.late(topic, "hour", hour) or no_late)),
                )
                for topic, hour, counts in figures.hours()
            ],
        ),
        "topics": (
            ("topic", *COUNTED, "best_hour", "p95_hour", "busy_hours"),
            [
                (topic, *counts.values(), *figures.capacities.get(topic, (None,) * 3))
                for topic, counts in figures.topics().items()
            ],
        ),
        "lateness": (
            ("topic", *_LATE),
            [(topic, *own) for (topic, unit, _), own in late if unit == "all"],
        ),
        "lateness_trend": (
            ("topic", "from", "to", *_LATE),
            [
                (topic, _at(at), _at(ends[at]), *own)
                for (topic, unit, at), own in late
                if unit == "slot"
            ],
        ),
        "handling": (
            ("topic", "messages", *_LATE[3:]),
            [(part[0], took.total, *took[3:]) for part, took in figures.handling.items()],
        ),
        "attempts": (("topic", "attempt", "messages"), figures.attempts),
        "garbage": (("topic", "reason", "messages"), figures.reasons),
        "due": (("topic", "unit", "from", "messages"), due),
        "falling_behind": (
            ("topic", "from", "load", "capacity", "most_left_over", "most_at", "drained_at"),
            [
                (
                    *(found.topic, ahead(found.hour), found.load, found.capacity),
                    *(found.peak, ahead(found.peak_hour + 1), ahead(found.drained)),
                )
                for found in figures.crossings
            ],
        ),
        "gaps": (
            tuple(field.name for field in fields(ArchiveGap)),
            [astuple(gap) for gap in figures.gaps],
        ),
    }
