"""The report's tables as files: Parquet for programs, CSV for spreadsheets."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv, parquet

from lisa.pipeline.jobs.report.figures import Figures
from lisa.pipeline.jobs.report.tables import COUNTED, Percentiles

__all__ = ["TABLES", "replace", "write_tables"]

_WHEN = pa.timestamp("ms", tz="UTC")
_LATE = {"hand_overs": pa.int64(), "early": pa.int64(), "p50_us": pa.int64(), "p90_us": pa.int64(),
         "p99_us": pa.int64(), "p999_us": pa.int64(), "max_us": pa.int64()}  # fmt: skip
_COUNTS = {name: pa.int64() for name in COUNTED}

TABLES: dict[str, dict[str, Any]] = {
    "hourly": {"topic": pa.string(), "hour": _WHEN, "hour_local": pa.string(), **_COUNTS, **_LATE},
    "topics": {"topic": pa.string(), **_COUNTS, "best_hour": pa.int64(), "p95_hour": pa.int64(),
               "busy_hours": pa.int64()},
    "lateness": {"topic": pa.string(), **_LATE},
    "lateness_trend": {"topic": pa.string(), "from": _WHEN, "to": _WHEN, **_LATE},
    "handling": {"topic": pa.string(), "messages": pa.int64(), "p50_us": pa.int64(),
                 "p90_us": pa.int64(), "p99_us": pa.int64(), "p999_us": pa.int64(),
                 "max_us": pa.int64()},
    "attempts": {"topic": pa.string(), "attempt": pa.int64(), "messages": pa.int64()},
    "garbage": {"topic": pa.string(), "reason": pa.string(), "messages": pa.int64()},
    "due": {"topic": pa.string(), "unit": pa.string(), "from": _WHEN, "messages": pa.int64()},
    "falling_behind": {"topic": pa.string(), "from": _WHEN, "load": pa.int64(),
                       "capacity": pa.int64(), "most_left_over": pa.int64(), "most_at": _WHEN,
                       "drained_at": _WHEN},
    "gaps": {"topic": pa.string(), "after_id": pa.string(), "after_number": pa.int64(),
             "to_id": pa.string(), "to_number": pa.int64(), "reason": pa.string(), "at": _WHEN,
             "shard": pa.string()},
}  # fmt: skip
"""Names, columns and their types. A null topic is all topics together."""


def write_tables(figures: Figures, to: Path) -> dict[str, Path]:
    """Write each table as NAME.parquet and NAME.csv into `to`; their paths by file name."""
    to.mkdir(parents=True, exist_ok=True)
    written: dict[str, Path] = {}
    for name, columns in TABLES.items():
        schema = pa.schema(list(columns.items()))
        rows = [dict(zip(columns, row, strict=True)) for row in _ROWS[name](figures)]
        table = pa.Table.from_pylist(rows, schema=schema)
        for kind, write in (("parquet", parquet.write_table), ("csv", csv.write_csv)):
            path = to / f"{name}.{kind}"
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            write(table, str(beside))
            beside.replace(path)
            written[path.name] = path
    return written


def replace(path: Path, text: str) -> None:
    """Write a file that a reader finds either as it was or whole."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text, "utf-8")
    beside.replace(path)


Row = Iterable[Any]


def _late(one: Percentiles | None) -> tuple[int | None, ...]:
    if one is None:
        return (0, 0, *(None,) * 5)
    return (one.count, one.early, one.p50, one.p90, one.p99, one.p999, one.max)


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
            yield (topic, *(datetime.fromtimestamp(edges[i], UTC) for i in (slot, slot + 1)),
                   *_late(one))  # fmt: skip


def _handling(figures: Figures) -> Iterator[Row]:
    for part, one in sorted(figures.handling.items(), key=str):
        yield (
            part[1] if part[0] else None,
            one.count,
            one.p50,
            one.p90,
            one.p99,
            one.p999,
            one.max,
        )


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
    if figures.now is None:
        return
    for one in figures.crossings:
        hours = [None if number is None else figures.now + timedelta(hours=number)
                 for number in (one.hour, one.peak_hour + 1, one.drained)]  # fmt: skip
        yield (one.topic, hours[0], one.load, one.capacity, one.peak, hours[1], hours[2])


def _gaps(figures: Figures) -> Iterator[Row]:
    for gap in figures.gaps:
        yield (gap.topic, gap.after_id, gap.after_number, gap.to_id, gap.to_number, gap.reason,
               gap.at, gap.shard)  # fmt: skip


_ROWS = {
    "hourly": _hourly, "topics": _topics, "lateness": _lateness, "lateness_trend": _trend,
    "handling": _handling, "attempts": lambda figures: figures.attempts,
    "garbage": lambda figures: figures.reasons, "due": _due, "falling_behind": _falling_behind,
    "gaps": _gaps,
}  # fmt: skip
