"""The job `restore`: restores unsettled messages to a Redis that came back empty or older."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf

from lisa.pipeline.errors import unwrapped
from lisa.pipeline.jobs.lists import OutputFolder
from lisa.pipeline.jobs.restore_lists import RestoreLists
from lisa.pipeline.jobs.restore_tasks import LIST_SCHEMA
from lisa.pipeline.jobs.restore_topics import Survey, survey
from lisa.pipeline.jobs.windows import Window, gap_windows
from lisa.pipeline.paths import literal
from lisa.pipeline.server import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from lisa.pipeline.archive import Archive

OUTCOMES = {
    "restored": "restored to its last state",
    "live": "already live on this server, not changed",
    "settled": "settled since, according to its tombstone or the journal",
    "expired": "past its ttl, not restored (use --expire)",
    "unrestorable": "cannot be restored; the list has the reason",
    "revived": "live on this server, but ended according to the archive",
}
"""Outcome of a message -> explanation."""

FIRST_LINES = 5
"""Number of rows of each list in the result; the directory has all rows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Restoration:
    """The result of a restore, or of a dry run.

    counts: number of messages by outcome (see OUTCOMES); in a dry run, `restored` counts messages
        that would be restored.
    by_topic: topic -> these counts.
    possibly_lost: windows in which messages may have been lost; empty without gaps in the journal.
    where: the directory with the exact lists.
    seconds: duration of the restore.
    first: outcome -> the first rows of its list.
    """

    dry_run: bool
    counts: Mapping[str, int]
    by_topic: Mapping[str, Mapping[str, int]]
    possibly_lost: Sequence[Window]
    where: str
    seconds: float
    first: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict, repr=False)


@unwrapped()
def restore(
    spark: SparkSession,
    archive: Archive,
    server: Server,
    to: str,
    *,
    topics: Sequence[str] | None = None,
    ids: Sequence[str] | None = None,
    expire: bool = False,
    settle_revived: bool = False,
    dry_run: bool = False,
    reopen: Callable[[], Archive] | None = None,
    stage: Callable[[str], None] = lambda _: None,
) -> Restoration:
    """Restore every archived message that was not settled.

    Restores id, due time, failed attempts, ttl, retry policy and send token. Messages that the
    server knows, live or by a tombstone, are not changed: restore is idempotent, and may run while
    managers, consumers and producers are running.

    to: a new directory for the lists: `lists` (Parquet), `csv`, `summary.json`.
    topics, ids: only these topics or ids; None means all.
    expire: also restore messages past their ttl, without that ttl.
    settle_revived: cancel messages that are live although they had ended.
    dry_run: only judge and list; do not change the server.
    reopen: opens the present version of the archive, if the archive may advance meanwhile.
    stage: called with a description of each stage.

    Raises ConfigError for invalid arguments, ServerUnavailable if the server does not answer, and
    LisaError if the journal is trimmed meanwhile; the restore may then be repeated.
    """
    began = time.monotonic()
    folder = OutputFolder(spark, to)
    stage("reading the archive's offsets")
    found = survey(server, archive, topics, dry_run=dry_run)
    stage("comparing the archive with the server")
    lists = RestoreLists(spark, archive, server, folder, found, ids=ids)
    lists.plan(expire=expire)
    stage("listing messages to restore" if dry_run else "restoring messages")
    parts = lists.parts(reopen or (lambda: archive), settle_revived=settle_revived, dry_run=dry_run)
    reduce(DataFrame.unionByName, parts).write.parquet(folder.path("lists"))
    folder.remove("work")
    stage("writing the lists")
    return _result(spark, folder, _windows(archive, found), began, dry_run=dry_run)


def _windows(archive: Archive, survey: Survey) -> list[Window]:
    """The windows in which messages may have been lost."""
    found = []
    for one in survey.remainders:
        after = one.archived_ms
        if not one.whole:
            ends = [survey.now if one.first_ms is None else one.first_ms]
            ends += [survey.started] if survey.started > (after or 0) else []
            reason = "between the last archived event and the server's return"
            until = max(min(ends), after or 0)
            found.append(Window(one.topic, after, until, reason, one.shard))
    names = {one.topic for one in survey.remainders}
    return found + [one for one in gap_windows(archive.gaps(), archive.log) if one.topic in names]


def _result(
    spark: SparkSession, folder: OutputFolder, windows: list[Window], began: float, *, dry_run: bool
) -> Restoration:
    """Count the lists, write them as CSV, and write the summary."""
    rows = spark.read.schema(LIST_SCHEMA).parquet(literal(folder.path("lists")))
    folder.write_csv(rows.coalesce(1), "csv", by="outcome")
    counted = rows.groupBy("topic", "outcome").count().collect()
    counts = dict.fromkeys(OUTCOMES, 0)
    by_topic: dict[str, dict[str, int]] = {}
    for topic, outcome, number in counted:
        counts[outcome] += number
        by_topic.setdefault(topic, dict.fromkeys(OUTCOMES, 0))[outcome] = number
    first = {
        outcome: [
            row.asDict()
            for row in rows.where(sf.col("outcome") == outcome).limit(FIRST_LINES).collect()
        ]
        for outcome, number in counts.items()
        if number and outcome != "live"
    }
    result = Restoration(
        dry_run=dry_run,
        counts=counts,
        by_topic=by_topic,
        possibly_lost=windows,
        where=folder.where,
        seconds=round(time.monotonic() - began, 3),
        first=first,
    )
    summary = asdict(result)
    del summary["first"]
    folder.write_summary(summary)
    return result
