"""Builds the lists of a restore: one row per message and outcome."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from lisa.pipeline.jobs import journal_tail
from lisa.pipeline.jobs.lists import OutputFolder
from lisa.pipeline.jobs.message_history import fold_with_archive, latest_lives, merged, selected
from lisa.pipeline.jobs.restore_tasks import (
    LIST_SCHEMA,
    PLAN_SCHEMA,
    cancelling,
    planning,
    restoring,
    reviving,
)
from lisa.pipeline.jobs.restore_topics import Survey, shard_counts
from lisa.pipeline.server import Server

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

    from lisa.pipeline.archive import Archive

PLANNED = "missing"
"""Outcome used only in the plan: the message must be restored."""


class RestoreLists:
    """Compares the archive with the server; the plan and intermediate rows are kept in files.

    Raises LisaError if the journal was trimmed since the survey.
    """

    def __init__(
        self,
        spark: SparkSession,
        archive: Archive,
        server: Server,
        folder: OutputFolder,
        survey: Survey,
        *,
        ids: Sequence[str] | None,
    ) -> None:
        self._spark, self._server, self._folder = spark, server, folder
        self._survey, self._ids = survey, ids
        self._topics = sorted(survey.groups)
        # The events that are not archived yet are copied, because the journal may be trimmed.
        self._rest = journal_tail.read(spark, server, survey.remainders)
        self._fresh: DataFrame | None = None
        if self._rest is not None:
            self._rest = folder.work_copy(self._rest, "rest")
            self._fresh = folder.work_copy(fold_with_archive(archive, self._rest), "fresh")
        self._lives = selected(merged(archive, self._fresh), self._topics, ids)

    def plan(self, *, expire: bool) -> None:
        """Plan each unsettled message; written to files, because computing it is expensive."""
        survey = self._survey
        judging = planning(
            self._server,
            survey.groups,
            shard_counts(survey.remainders),
            survey.now,
            expire=expire,
        )
        rows = _unsettled(self._lives).mapInArrow(judging, PLAN_SCHEMA)
        self._plan = self._folder.work_copy(rows, "plan")

    def parts(
        self, reopen: Callable[[], Archive], *, settle_revived: bool, dry_run: bool
    ) -> list[DataFrame]:
        """The lists, rows of LIST_SCHEMA. Unless `dry_run`, writing them restores the messages.

        reopen: opens the present version of the archive.
        settle_revived: cancel messages that are live although they had ended.
        """
        missing = self._plan.where(sf.col("outcome") == PLANNED)
        parts = []
        ended = None if self._survey.is_empty else self._ended(reopen, missing)
        if ended is not None:
            same = [missing[name].eqNullSafe(ended[name]) for name in ("topic", "id", "token")]
            settled = missing.join(ended, same, "left_semi")
            parts.append(_listed(settled, "settled", sf.lit("settled while the job ran")))
            missing = missing.join(ended, same, "left_anti")
        parts.append(_listing(self._plan.where(sf.col("outcome") != PLANNED)))
        if dry_run:
            parts.append(_listing(missing.withColumn("outcome", sf.lit("restored"))))
        else:
            with self._server.open() as store:
                begun = store.drive(store.server_time_ms())
            parts.append(missing.mapInArrow(restoring(self._server, begun), LIST_SCHEMA))
        if self._fresh is not None and self._rest is not None:
            parts.append(_settled_since(selected(self._fresh, self._topics, self._ids), self._rest))
        if not self._survey.is_empty:
            parts.append(self._revived(settle=settle_revived and not dry_run))
        return parts

    def _ended(self, reopen: Callable[[], Archive], missing: DataFrame) -> DataFrame | None:
        """The lives unknown to the server that ended since the journal was read.

        Planning may take longer than tombstones are kept: a message may have been handled, and its
        tombstone may have expired, before the server was asked. The journal, read again, shows its
        end.
        """
        known = latest_lives(self._spark, reopen, self._server, missing.select("topic", "id"))
        if known is None:
            return None
        ended = known.where("settled").select("topic", "id", "token")
        return self._folder.work_copy(ended, "ended")

    def _revived(self, *, settle: bool) -> DataFrame:
        """Messages that are live on the server although their life has ended."""
        live = self._spark.read.format("lisa").options(**self._server.as_options())
        live = live.option("topic", ",".join(self._topics))
        here = live.schema("topic string, id string").load().distinct()
        ended = self._lives.where("settled").select(
            "topic", "id", "token", "state", "attempts", sf.unix_millis("due").alias("due_ms")
        )
        found = ended.join(here, ["topic", "id"], "left_semi")
        revived = found.mapInArrow(reviving(self._server), LIST_SCHEMA)
        return revived.mapInArrow(cancelling(self._server), LIST_SCHEMA) if settle else revived


def _unsettled(lives: DataFrame) -> DataFrame:
    """The input of the plan."""
    groups = sf.transform(
        "groups",
        lambda one: sf.struct(
            one["group"].alias("group"),
            one["state"].alias("state"),
            one["attempts"].alias("attempts"),
            one["reason"].alias("reason"),
            sf.unix_millis(one["due"]).alias("due_ms"),
            sf.unix_millis(one["at"]).alias("at_ms"),
        ),
    )
    return lives.where(~sf.col("settled")).select(
        "topic",
        "id",
        "token",
        "state",
        "policy",
        "attempts",
        "kind",
        "headers",
        "body",
        sf.unix_millis("due").alias("due_ms"),
        sf.unix_millis("expires").alias("expires_ms"),
        groups.alias("groups"),
    )


def _settled_since(fresh: DataFrame, rest: DataFrame) -> DataFrame:
    """The messages settled by an event that is not archived yet; fresh: their folded rows."""
    ends = rest.where("settled").select("topic", "id", sf.col("at").alias("settled_at"))
    ended = fresh.where("settled").join(ends, ["topic", "id", "settled_at"], "left_semi")
    ended = ended.withColumn("due_ms", sf.unix_millis("due"))
    return _listed(ended, "settled", sf.concat(sf.lit("journal: "), "state"))


def _listed(rows: DataFrame, outcome: str, reason: Column) -> DataFrame:
    return _listing(rows.withColumn("outcome", sf.lit(outcome)).withColumn("reason", reason))


def _listing(rows: DataFrame) -> DataFrame:
    return rows.select(*LIST_SCHEMA.names)
