"""The job `audit`: checks that every message sent has ended or is live.

Verdicts come from the archive, the server, and the journal, in this order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf
from pyspark.sql.types import BooleanType, LongType, StringType, StructField, StructType

from lisa.core.model.clock import duration_ms
from lisa.core.model.envelope import fence_of
from lisa.core.model.sharding import topics_of
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.jobs.lists import OutputFolder
from lisa.pipeline.jobs.lookup import Mapped, Row, inspected, mapped_by_topic
from lisa.pipeline.jobs.message_history import (
    find_remainders,
    latest_lives,
    topics_in,
)
from lisa.pipeline.jobs.windows import JobScope, Window, gap_windows
from lisa.pipeline.server import Server, check_layout
from lisa.pipeline.session import persisted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lisa.core.store.store import SyncStore
    from lisa.core.transitions.inspect import Inspection
    from lisa.pipeline.archive import Archive

ENDS = ("acked", "cancelled", "expired", "skipped", "purged", "replaced", "live", "missing")
"""Possible verdicts: the message ended, was replaced by another send, is live, or is missing."""

FIRST_LINES = 20


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """The result of an audit.

    counts: number of messages by verdict (see ENDS). by_topic: topic -> these counts.
    missing, stuck: numbers of messages; `first` has the first rows, the lists have every row.
    gaps: gaps of the journal within the range, in the archive or between archive and server.
        Messages sent in a gap are unknown, and messages that ended in a gap may count as missing.
    checked: whether the server was asked. If not, messages without an archived end count as live.
    seconds: duration of the audit.
    where: the directory with the lists, None if none was requested.
    """

    start: datetime | None
    end: datetime | None
    counts: Mapping[str, int]
    by_topic: Mapping[str, Mapping[str, int]]
    missing: int
    stuck: int
    gaps: Sequence[Window]
    checked: bool
    seconds: float
    where: str | None = None
    first: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict, repr=False)

    @property
    def sent(self) -> int:
        """Number of messages in the range."""
        return sum(self.counts.values())

    @property
    def proven(self) -> bool:
        """Whether no message is missing and there are no gaps."""
        return self.missing == 0 and not self.gaps


@unwrapped()
def audit(
    spark: SparkSession,
    reopen: Callable[[], Archive],
    server: Server | None,
    *,
    topics: Sequence[str] | None = None,
    start: datetime | None = None,
    end: datetime | None = None,
    stuck_after: timedelta = timedelta(hours=1),
    to: str | None = None,
    stage: Callable[[str], None] = lambda _: None,
) -> Audit:
    """Check all messages sent at or after `start` and before `end`.

    An id that was used again counts as several messages.

    reopen: opens the current version of the archive. It is called several times, because an
        archive that is being written advances during the audit.
    server: None to use the archive alone.
    topics: only these topics; None means all.
    start, end: aware datetimes; None means unbounded.
    stuck_after: live messages that are overdue by more than this are listed as stuck, unless they
        are in garbage.
    to: a new directory for the lists of missing and stuck messages, and `summary.json`.
    stage: called with a description of each stage.

    Raises ConfigError for invalid arguments and topics that the archive lacks, InvalidMessage for
    a range that `JobScope` refuses, ServerUnavailable if the server does not answer.
    """
    began = time.monotonic()
    scope = JobScope(topics, start, end)
    folder = OutputFolder(spark, to) if to is not None else None
    archive = reopen()
    topics_in(archive, topics)
    stage("reading the archive")
    rows = judge_by_archive(archive, scope)
    still_open = rows.where(sf.col("standing") == "open")
    if server is None:
        settled = rows.where(sf.col("standing") != "open")
        late_ms = int(time.time() * 1000) - duration_ms(stuck_after)
        found = asked = judge_offline(still_open, late_ms)
        behind = []
    else:
        with server.open() as store:
            store.drive(check_layout(store))
            late_ms = store.drive(store.server_time_ms()) - duration_ms(stuck_after)
        stage("asking the server")
        # "missing" may be premature: the end may be in the journal of another shard, whose archived
        # part ends earlier.
        settled = rows.where(~sf.col("standing").isin("open", "missing"))
        lost = rows.where(sf.col("standing") == "missing")
        asked = still_open.mapInArrow(judging_by_server(server, late_ms), FOUND_SCHEMA)
        asked = persisted(asked.unionByName(lost))
        found = correct(spark, reopen, server, asked, stage)
        behind = _gaps_behind(reopen, server, archive, scope)
    stage("counting")
    everything = persisted(settled.unionByName(found))
    result = _counted(everything, folder)
    everything.unpersist()
    asked.unpersist()
    result = replace(
        result,
        start=start,
        end=end,
        gaps=[*_gaps(archive, scope), *behind],
        checked=server is not None,
        seconds=round(time.monotonic() - began, 3),
    )
    if folder is not None:
        summary = asdict(result) | {"sent": result.sent, "proven": result.proven}
        del summary["first"]
        folder.write_summary(summary)
    return result


def _counted(rows: DataFrame, folder: OutputFolder | None) -> Audit:
    """Count the verdicts, and list missing and stuck messages; range and gaps are not set."""
    counts = dict.fromkeys(ENDS, 0)
    by_topic: dict[str, dict[str, int]] = {}
    stuck = 0
    counted = rows.groupBy("topic", "standing").agg(
        sf.count("*").alias("n"), sf.count_if("stuck").alias("stuck")
    )
    for topic, standing, number, late in counted.collect():
        counts[standing] = counts.get(standing, 0) + number
        by_topic.setdefault(topic, dict.fromkeys(ENDS, 0))[standing] = number
        stuck += late
    lists = {"missing": rows.where(sf.col("standing") == "missing"), "stuck": rows.where("stuck")}
    first = {}
    for name, listed in lists.items():
        ordered = listed.orderBy("topic", "sent_ms", "id")
        first[name] = [row.asDict() for row in ordered.limit(FIRST_LINES).collect()]
        if folder is not None:
            listed.write.parquet(folder.path(name))
            folder.write_csv(ordered.coalesce(1), "csv", name)
    return Audit(
        start=None,
        end=None,
        counts=counts,
        by_topic=by_topic,
        missing=counts["missing"],
        stuck=stuck,
        gaps=(),
        checked=False,
        seconds=0.0,
        where=folder.where if folder else None,
        first=first,
    )


def _gaps(archive: Archive, scope: JobScope) -> list[Window]:
    """The archive's gaps that overlap the range."""
    return [window for window in gap_windows(archive.gaps(), archive.log) if scope.reaches(window)]


def _gaps_behind(
    reopen: Callable[[], Archive], server: Server, archive: Archive, scope: JobScope
) -> list[Window]:
    """Gaps between the archive's last events and the server's journals."""
    found = []
    with server.open() as store:
        now = store.drive(store.server_time_ms())
        topics = topics_of(archive.offsets())
        torn = {
            remainder.journal
            for remainder in store.drive(find_remainders(store, archive, topics))
            if not remainder.whole
        }
        # Check again: the archive may have advanced, and the journal with it.
        again = topics_of(torn)
        seen = store.drive(find_remainders(store, reopen(), again)) if again else []
        for remainder in seen:
            after, until = remainder.archived_ms or 0, remainder.first_ms or now
            reason = "not archived and lost: the server came back empty or older, or trimmed"
            window = Window(
                remainder.topic, after or None, max(after, until), reason, remainder.shard
            )
            if remainder.journal in torn and not remainder.whole and scope.reaches(window):
                found.append(window)
    return found


def judge_by_archive(archive: Archive, scope: JobScope) -> DataFrame:
    """Verdicts based on the archive alone, FOUND_SCHEMA; `open` for messages without an end."""
    sent = sf.coalesce("sent_at", "updated_at")
    lives = archive.messages(scope.topics).where(scope.includes(sent))
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
        states = {
            group_state.state: group_state.due_ms
            for group_state in seen.group_states
            if group_state.state != "garbage"
        }
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
