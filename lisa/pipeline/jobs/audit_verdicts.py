"""Verdicts on messages, from the archive, the server, and the journal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from pyspark.sql import functions as sf
from pyspark.sql.types import BooleanType, LongType, StringType, StructField, StructType

from lisa.core.model.clock import datetime_ms
from lisa.core.model.envelope import fence_of
from lisa.pipeline.jobs.lookup import Mapped, Row, inspected, mapped_by_topic
from lisa.pipeline.jobs.message_history import latest_lives, selected
from lisa.pipeline.server import Server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lisa.core.store.store import SyncStore
    from lisa.core.transitions.inspect import Inspection
    from lisa.pipeline.archive import Archive

FOUND_SCHEMA = StructType(
    [
        StructField("topic", StringType(), nullable=False),
        StructField("id", StringType(), nullable=False),
        StructField("token", StringType()),
        StructField("standing", StringType(), nullable=False),
        StructField("state", StringType(), nullable=False),
        StructField("sent_ms", LongType()),
        StructField("due_ms", LongType()),
        StructField("stuck", BooleanType(), nullable=False),
    ]
)
"""One message of the range: its verdict (`standing`), and its last known state."""


class AuditScope(NamedTuple):
    """The messages to audit: topics, and sent times from `start` up to but not including `end`."""

    topics: Sequence[str] | None
    start: datetime | None
    end: datetime | None

    def reaches(self, topic: str, after_ms: int, until_ms: int) -> bool:
        """Whether the scope includes a topic and overlaps a range of time (epoch ms)."""
        return (
            (self.topics is None or topic in self.topics)
            and (self.start is None or until_ms >= datetime_ms(self.start))
            and (self.end is None or after_ms < datetime_ms(self.end))
        )


def judge_by_archive(archive: Archive, scope: AuditScope) -> DataFrame:
    """Verdicts based on the archive alone, FOUND_SCHEMA; `open` for messages without an end."""
    lives = selected(archive.messages(), scope.topics)
    sent = sf.coalesce("sent_at", "updated_at")
    if scope.start is not None:
        lives = lives.where(sent >= sf.lit(scope.start))
    if scope.end is not None:
        lives = lives.where(sent < sf.lit(scope.end))
    standing = (
        sf.when(~sf.col("settled"), "open")
        .when(sf.col("state") == "lost", "missing")
        .otherwise(sf.col("state"))
    )
    return lives.select(
        "topic",
        "id",
        "token",
        standing.alias("standing"),
        "state",
        sf.unix_millis("sent_at").alias("sent_ms"),
        sf.unix_millis("due").alias("due_ms"),
        sf.lit(False).alias("stuck"),  # noqa: FBT003
    )


def judge_offline(rows: DataFrame, late_ms: int) -> DataFrame:
    """Verdicts on open messages without a server: all are live; overdue ones are stuck."""
    overdue = (sf.col("state") != "garbage") & (sf.col("due_ms") < late_ms)
    return rows.withColumns(
        {
            "standing": sf.lit("live"),
            "stuck": sf.coalesce(overdue, sf.lit(False)),  # noqa: FBT003
        }
    )


def judging_by_server(server: Server, late_ms: int) -> Mapped:
    """Open messages -> verdicts based on the server's state; `missing` is preliminary."""

    def ask(store: SyncStore, topic: str, rows: list[Row]) -> Iterator[list[Row]]:
        store.drive(store.groups(topic))
        seen = store.drive(inspected(store, topic, [row["id"] for row in rows]))
        yield [_judged_by_server(row, one, late_ms) for row, one in zip(rows, seen, strict=True)]

    return mapped_by_topic(server, FOUND_SCHEMA, ask)


def _judged_by_server(row: Row, seen: Inspection, late_ms: int) -> Row:
    token = row["token"]  # None if the send was not archived: then any token matches
    if seen.envelope and token in (None, fence_of(seen.envelope)[:8]):
        states = {one.state: one.due_ms for one in seen.group_states if one.state != "garbage"}
        if seen.waiting_due_ms is not None:
            states = {"waiting": seen.waiting_due_ms}
        dues = [due for due in states.values() if due is not None]
        # In no state at all: the message is not delivered until `lisa fsck` repairs it.
        nowhere = not seen.group_states and seen.waiting_due_ms is None
        state = next(iter(states), "no-place" if nowhere else "garbage")
        stuck = nowhere or (bool(dues) and min(dues) < late_ms)
        due = min(dues, default=row["due_ms"])
        return row | {"standing": "live", "state": state, "due_ms": due, "stuck": stuck}
    if seen.envelope:
        return row | {"standing": "replaced"}
    stone = seen.tombstone
    if stone is not None and token in (None, stone.token):
        return row | {"standing": stone.state, "state": stone.state}
    return row | {"standing": "missing"}


def correct(
    spark: SparkSession,
    reopen: Callable[[], Archive],
    server: Server,
    found: DataFrame,
    stage: Callable[[str], None],
) -> DataFrame:
    """Correct verdicts with the archive and journal, read after the server was asked.

    A missing message whose end is recorded has ended. If its id is now another message, the journal
    shows whether that message replaced the first, or was sent after the first was lost.
    """
    stage("searching the journal for messages that the server does not have")
    suspects = found.where(sf.col("standing").isin("missing", "replaced"))
    known = latest_lives(spark, reopen, server, suspects.select("topic", "id"))
    if known is None:
        return found
    now = (
        known.where("settled")
        .groupBy(
            sf.col("topic").alias("n_topic"),
            sf.col("id").alias("n_id"),
            sf.col("token").alias("n_token"),
        )
        .agg(
            sf.max(sf.when(sf.col("state") != "lost", sf.col("state"))).alias("n_state"),
        )
    )
    same = [sf.col(name).eqNullSafe(sf.col(f"n_{name}")) for name in ("topic", "id", "token")]
    cleared = (sf.col("standing") == "missing") & sf.col("n_state").isNotNull()
    gone = (
        (sf.col("standing") == "replaced") & sf.col("n_id").isNotNull() & sf.col("n_state").isNull()
    )
    standing = (
        sf.when(cleared, sf.col("n_state")).when(gone, "missing").otherwise(sf.col("standing"))
    )
    joined = found.join(now, same, "left").withColumn("standing", standing)
    return joined.select(*FOUND_SCHEMA.names)
