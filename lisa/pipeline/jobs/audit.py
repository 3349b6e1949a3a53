"""The job `audit`: whether every message that was sent reached an end or is live."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
from pyspark.sql import functions as sf
from pyspark.sql.types import BooleanType, LongType, StringType, StructField, StructType

from lisa.admin.reading import entry_number
from lisa.core.clock import datetime_ms, duration_ms
from lisa.core.envelope import fence_of
from lisa.core.shards import bases
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.jobs import remaining
from lisa.pipeline.jobs.lists import Folder
from lisa.pipeline.jobs.lives import by_now, chosen
from lisa.pipeline.jobs.server import Server, check_layout, now_ms
from lisa.pipeline.jobs.standing import by_topic, inspected
from lisa.pipeline.source.read_columns import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lisa.core.transitions.inspect import Inspection
    from lisa.pipeline.archive import Archive

__all__ = ["ENDS", "Audit", "Gap", "audit"]

ENDS = ("acked", "cancelled", "expired", "purged", "replaced", "live", "missing")
"""How a message of the range may stand: it ended, or was sent anew; it is live; or neither."""

FIRST_LINES = 20


@dataclass(frozen=True, slots=True)
class Gap:
    """Events of a topic that no archive has: between two epoch ms (None: from the beginning).

    shard: that of the topic whose journal lacks them, None for the topic's own.
    """

    topic: str
    after_ms: int | None
    until_ms: int
    reason: str
    shard: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Audit:
    """What an audit found.

    counts: messages by how they stand, a key of ENDS; by_topic: the same for each topic.
    missing, stuck: how many; the first of them stand in `first`, all of them in the lists.
    gaps: of the journal, inside the range, in the archive or between it and the server. With one
        the proof is bounded: what was sent in it is not known here, and what ended in it may be
        called missing.
    checked: whether the server was asked; without it, live is what the archive has seen no end of.
    """

    start: datetime | None
    end: datetime | None
    counts: Mapping[str, int]
    by_topic: Mapping[str, Mapping[str, int]]
    missing: int
    stuck: int
    gaps: Sequence[Gap]
    checked: bool
    seconds: float
    where: str | None = None
    first: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict, repr=False)

    @property
    def sent(self) -> int:
        """Messages in the range."""
        return sum(self.counts.values())

    @property
    def proven(self) -> bool:
        """Nothing is missing, and no gap bounds the proof."""
        return self.missing == 0 and not self.gaps


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
"""One message of the range: how it stands, and the state last known."""


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
    """Judge every life of a message that was sent from `start` on and before `end` (None: all).

    reopen: gives the archive as it is at that moment; it is asked again and again, for an archive
        that is being written moves on while the server is asked.
    server: None judges by the archive alone.
    stuck_after: live, and overdue by more than this, is listed as stuck (not in garbage).
    to: a new directory for the lists of what is missing and stuck, and `summary.json`.

    Raises ConfigError and ServerUnavailable.
    """
    began = time.monotonic()
    folder = Folder(spark, to) if to is not None else None
    scope = _Scope(topics, start, end)
    archive = reopen()
    stage("reading the archive")
    rows = _judged(archive, scope)
    still_open = rows.where(sf.col("standing") == "open")
    if server is None:
        settled = rows.where(sf.col("standing") != "open")
        late_ms = int(time.time() * 1000) - duration_ms(stuck_after)
        found = asked = _offline(still_open, late_ms)
        behind = []
    else:
        with server.open() as store:
            store.drive(check_layout(store))
            late_ms = store.drive(now_ms(store)) - duration_ms(stuck_after)
        stage("asking the server")
        # Lost may be said too early: the end may be in a journal that is archived behind another.
        settled = rows.where(~sf.col("standing").isin("open", "missing"))
        lost = rows.where(sf.col("standing") == "missing")
        asked = still_open.mapInArrow(_asking(server, late_ms), FOUND_SCHEMA)
        asked = asked.unionByName(lost).cache()
        found = _looked_up(spark, reopen, server, asked, stage)
        behind = _gaps_behind(reopen, server, archive, scope)
    stage("counting")
    everything = settled.unionByName(found).cache()
    result = _counted(everything, folder)
    everything.unpersist()
    asked.unpersist()
    result = replace(
        result, start=start, end=end, gaps=[*_gaps(archive, scope), *behind],
        checked=server is not None, seconds=round(time.monotonic() - began, 3),
    )  # fmt: skip
    if folder is not None:
        summary = asdict(result) | {"sent": result.sent, "proven": result.proven}
        del summary["first"]
        folder.write_summary(summary)
    return result


class _Scope(NamedTuple):
    """What is audited: topics, and the sent times from `start` on and before `end`."""

    topics: Sequence[str] | None
    start: datetime | None
    end: datetime | None

    def reaches(self, topic: str, after_ms: int, until_ms: int) -> bool:
        """Whether a topic is in it, and a stretch of time reaches into it."""
        return (
            (self.topics is None or topic in self.topics)
            and (self.start is None or until_ms >= datetime_ms(self.start))
            and (self.end is None or after_ms < datetime_ms(self.end))
        )


def _judged(archive: Archive, scope: _Scope) -> DataFrame:
    """FOUND_SCHEMA rows by the archive alone; `open` where it has seen no end."""
    lives = chosen(archive.messages(), scope.topics)
    sent = sf.coalesce("sent_at", "updated_at")
    if scope.start is not None:
        lives = lives.where(sent >= sf.lit(scope.start))
    if scope.end is not None:
        lives = lives.where(sent < sf.lit(scope.end))
    standing = (
        sf.when(~sf.col("settled"), "open").when(sf.col("state") == "lost", "missing")
        .otherwise(sf.col("state"))
    )  # fmt: skip
    return lives.select(
        "topic", "id", "token", standing.alias("standing"), "state",
        sf.unix_millis("sent_at").alias("sent_ms"), sf.unix_millis("due").alias("due_ms"),
        sf.lit(False).alias("stuck"),  # noqa: FBT003
    )  # fmt: skip


def _offline(rows: DataFrame, late_ms: int) -> DataFrame:
    overdue = (sf.col("state") != "garbage") & (sf.col("due_ms") < late_ms)
    return rows.withColumns({
        "standing": sf.lit("live"), "stuck": sf.coalesce(overdue, sf.lit(False)),  # noqa: FBT003
    })  # fmt: skip


def _asking(server: Server, late_ms: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Open messages -> how they stand by the server's word; `missing` is a first suspicion."""

    def ask(batches: Iterator[Any]) -> Iterator[Any]:
        with server.open() as store:
            for batch in batches:
                parts = by_topic(batch.to_pylist(), lambda row: str(row["topic"]))
                for topic, rows in parts.items():
                    store.drive(store.groups(topic))
                    seen = store.drive(inspected(store, topic, [row["id"] for row in rows]))
                    told = [_told_by(row, one, late_ms)
                            for row, one in zip(rows, seen, strict=True)]  # fmt: skip
                    yield pa.RecordBatch.from_pylist(told, schema=arrow_schema(FOUND_SCHEMA))

    return ask


def _told_by(row: dict[str, Any], seen: Inspection, late_ms: int) -> dict[str, Any]:
    token = row["token"]  # None where the archive has not seen it sent: then any will do
    if seen.envelope and token in (None, fence_of(seen.envelope)[:8]):
        states = {place.state: place.due_ms for place in seen.places if place.state != "garbage"}
        if seen.waiting_due_ms is not None:
            states = {"waiting": seen.waiting_due_ms}
        dues = [due for due in states.values() if due is not None]
        # Nowhere at all: nobody will ever be given it, before `lisa fsck` puts it back.
        nowhere = not seen.places and seen.waiting_due_ms is None
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


def _looked_up(
    spark: SparkSession, reopen: Callable[[], Archive], server: Server, found: DataFrame,
    stage: Callable[[str], None],
) -> DataFrame:  # fmt: skip
    """Ask the journal, read after the server was asked, about what the server no longer has.

    It clears of suspicion what it saw end. And it tells of an id that is another message now
    whether that one replaced the first, or was sent because the first was gone.
    """
    stage("looking for the ends of those that are not there")
    suspects = found.where(sf.col("standing").isin("missing", "replaced"))
    known = by_now(spark, reopen, server, suspects.select("topic", "id"))
    if known is None:
        return found
    now = known.where("settled").groupBy(
        sf.col("topic").alias("n_topic"), sf.col("id").alias("n_id"),
        sf.col("token").alias("n_token"),
    ).agg(
        sf.max(sf.when(sf.col("state") != "lost", sf.col("state"))).alias("n_state"),
    )  # fmt: skip
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


def _counted(rows: DataFrame, folder: Folder | None) -> Audit:
    """Count the judged, and list what is missing or stuck; range and gaps are still to be told."""
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
        start=None, end=None, counts=counts, by_topic=by_topic, missing=counts["missing"],
        stuck=stuck, gaps=(), checked=False, seconds=0.0, where=folder.where if folder else None,
        first=first,
    )  # fmt: skip


def _gaps(archive: Archive, scope: _Scope) -> list[Gap]:
    """The archive's gaps that reach into the range."""
    found = []
    for gap in archive.gaps():
        after = entry_number(gap.after_id)[0] if gap.after_id else 0
        until = entry_number(gap.to_id)[0] if gap.to_id else datetime_ms(gap.at)
        if scope.reaches(gap.topic, after, until):
            found.append(Gap(gap.topic, after or None, until, gap.reason, gap.shard))
    return found


def _gaps_behind(
    reopen: Callable[[], Archive], server: Server, archive: Archive, scope: _Scope
) -> list[Gap]:
    """Where the server's journals do not go on where the archive's end."""
    found = []
    with server.open() as store:
        now = store.drive(now_ms(store))
        topics = bases(archive.offsets())
        torn = {
            one.place for one in store.drive(remaining.look_at(store, archive, topics))
            if not one.whole
        }  # fmt: skip
        again = bases(torn)  # or did the archive move on, and the journal with it?
        seen = store.drive(remaining.look_at(store, reopen(), again)) if again else []
        for one in seen:
            after, until = one.archived_ms or 0, one.first_ms or now
            lost = one.place in torn and not one.whole
            if lost and scope.reaches(one.topic, after, until):
                reason = "not archived, and gone: the server came back empty or older, or trimmed"
                found.append(Gap(one.topic, after or None, max(after, until), reason, one.shard))
    return found
