"""Summarizes a batch of the journal: its last events, new events, and gaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from lisa.core.model.clock import ms_datetime
from lisa.core.model.sharding import shard_named
from lisa.pipeline.archive.base import ArchiveGap
from lisa.pipeline.archive.schemas import GAP_STATE, journal_of

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Row


@dataclass(frozen=True, slots=True)
class BatchSummary:
    """The content of a batch.

    journals: names of the journals with events or gaps in the batch.
    events: number of events.
    offsets: journal -> entry id and number of its last event; lacks journals with gaps only.
    first_ms: time of the earliest event or gap; 0 without any.
    """

    journals: tuple[str, ...]
    events: int
    offsets: dict[str, tuple[str, int]]
    gaps: tuple[ArchiveGap, ...]
    first_ms: int = 0


def summarize(rows: DataFrame) -> BatchSummary:
    """Summarize the rows of a batch."""
    is_gap = _is_gap()
    grouped = rows.groupBy(journal_of().alias("journal")).agg(
        sf.max(sf.when(~is_gap, _numbered_position())).alias("last"),
        sf.count_if(~is_gap).alias("events"),
        sf.count_if(is_gap).alias("gaps"),
        sf.min(sf.unix_millis("at")).alias("first_ms"),
    )
    found = grouped.collect()
    lasts = {row["journal"]: _offset(row["last"]) for row in found}
    return BatchSummary(
        tuple(lasts),
        sum(row["events"] for row in found),
        {journal: last for journal, last in lasts.items() if last is not None},
        _gaps(rows) if any(row["gaps"] for row in found) else (),
        min((row["first_ms"] for row in found), default=0),
    )


def _is_gap() -> Column:
    return sf.col("state") == GAP_STATE


def _numbered_position() -> Column:
    return sf.struct(sf.unix_millis("at").alias("ms"), "seq", "number")


def _offset(position: Row | None) -> tuple[str, int] | None:
    return None if position is None else (f"{position['ms']}-{position['seq']}", position["number"])


def _gaps(rows: DataFrame) -> tuple[ArchiveGap, ...]:
    """The gaps in a batch, each with the event that follows it."""
    found = []
    is_gap, position = _is_gap(), _numbered_position()
    asked = ("topic", "shard", position.alias("position"), "reason")
    for gap in rows.where(is_gap).select(*asked).collect():
        ms, seq, number = gap["position"]
        before, journal = f"{ms}-{seq - 1}", shard_named(gap["topic"], gap["shard"])
        behind = rows.where(~is_gap & (journal_of() == journal))
        behind = behind.where(is_new({journal: (before, 0)}))
        follows = _offset(behind.agg(sf.min(position).alias("first")).collect()[0]["first"])
        to_id, to_number = follows or (None, None)
        first = number <= 1
        found.append(
            ArchiveGap(
                gap["topic"],
                None if first else before,
                None if first else number - 1,
                to_id,
                to_number,
                gap["reason"],
                ms_datetime(ms),
                gap["shard"],
            )
        )
    return tuple(found)


def is_new(offsets: Mapping[str, tuple[str, int]]) -> Column:
    """Whether an event comes after the last archived event of its journal."""
    if not offsets:
        return sf.lit(True)  # noqa: FBT003  a literal
    parts = [part for p, (entry, _) in offsets.items() for part in (sf.lit(p), _position(entry))]
    last = sf.element_at(sf.create_map(*parts), journal_of())
    here = sf.struct(sf.unix_millis("at").alias("ms"), sf.col("seq").alias("seq"))
    return last.isNull() | (here > last)


def _position(entry: str) -> Column:
    ms, _, seq = entry.partition("-")
    return sf.struct(
        sf.lit(int(ms)).cast("long").alias("ms"), sf.lit(int(seq)).cast("long").alias("seq")
    )
