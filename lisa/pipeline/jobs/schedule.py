"""Sends the rows of a DataFrame, and tells what became of them."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import msgspec

from lisa.core.clock import duration_ms
from lisa.core.errors import ConfigError
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.source import register
from lisa.pipeline.source.columns import check_columns
from lisa.pipeline.source.files import write as write_file
from lisa.pipeline.source.options import server_of

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType

__all__ = ["Scheduled", "ScheduledTopic", "schedule"]

POLL_S = 0.2
"""How often progress is asked for."""

Progress = Callable[[int, int], None]
"""Told tasks that are done, and all that are known of."""


@dataclass(frozen=True, slots=True)
class ScheduledTopic:
    """Rows of one topic by what became of them."""

    accepted: int
    duplicate: int
    replaced: int
    refused: int


@dataclass(frozen=True, slots=True)
class Scheduled:
    """What became of a DataFrame's rows.

    accepted: new messages. duplicate: their ids were known, nothing was changed. replaced: they
    took the place of earlier ones. refused: not sent; `reasons` quotes the first ten, and
    `refused_files` names the files that hold all of them.
    """

    job: str | None
    seconds: float
    accepted: int
    duplicate: int
    replaced: int
    refused: int
    topics: Mapping[str, ScheduledTopic]
    reasons: tuple[str, ...]
    refused_files: tuple[str, ...]


def schedule(
    df: DataFrame,
    *,
    topic: str | None = None,
    url: str | None = None,
    prefix: str | None = None,
    job: str | None = None,
    on_duplicate: OnDuplicate | str = OnDuplicate.KEEP,
    batch: int | None = None,
    max_rate: float | None = None,
    dedupe_for: timedelta | None = None,
    patience: timedelta | None = None,
    body_format: str = "text",
    report: str | None = None,
    refused: str | None = None,
    progress: Progress | None = None,
) -> Scheduled:
    """Send each row of a DataFrame as a message; safe to repeat, whole or after a failure.

    Columns: `body`; `due` (timestamp, or bigint of epoch milliseconds) or `delay` (day-time
    interval, or bigint of milliseconds), else due now; optionally `id`, `ttl` (as `delay`),
    `headers` (map<string,string>), `retry` (text as in "0,0,2m", or an array of delays), `topic`.

    topic: for all rows, where there is no such column.
    url, prefix: the server; by default LISA_REDIS_URL, else redis://localhost:6379/0.
    job: needed where there is no column `id`: ids are made from it and the rows. The same job
        sent again adds nothing for `dedupe_for`; equal rows of another job are other messages.
    on_duplicate: "keep", "replace" or "reject" (which refuses the row) where an id is known.
    batch: rows of one script call, at most what the topic's groups allow, 500 for one group.
    max_rate: rows a second, all tasks together.
    dedupe_for: how long ids are remembered; lengthens the topics' option of this name.
    patience: how long to wait for a server that does not answer, or for room in a full topic.
    body_format: "json" where bodies of text are JSON already.
    report, refused: a file for the counts; a directory for rows that were not sent, as JSON lines.
    progress: called now and then with tasks done and tasks known of, from another thread.

    Raises ConfigError before a row is sent for columns and options that do not fit,
    ServerUnavailable, and LisaError where Spark fails.
    """
    if df.isStreaming:
        raise ConfigError(
            'schedule is for tables; write a stream with df.writeStream.format("lisa")'
        )
    check_columns(df.schema, topic=topic, job=job)
    register(df.sparkSession)
    with tempfile.TemporaryDirectory(prefix="lisa-schedule-") as own:
        counts = Path(own) / "report.json"
        server = {name: one for name, one in (("url", url), ("prefix", prefix)) if one}
        # Asked here: what this program's environment says, Spark's workers may not know.
        where, below = server_of(server)
        options: dict[str, Any] = {
            "topic": topic, "url": where, "prefix": below, "job": job,
            "on_duplicate": str(on_duplicate), "batch": batch, "max_rate": max_rate,
            "dedupe_for": _text(dedupe_for), "patience": _text(patience),
            "body_format": body_format, "refused": refused, "report": str(counts),
        }  # fmt: skip
        given = {name: str(value) for name, value in options.items() if value is not None}
        what = f"lisa schedule: {job or 'rows'} to {topic or 'their topics'}"
        with unwrapped(), _shown(df.sparkSession.sparkContext, what, progress):
            together = df if "id" in df.columns else _equal_rows_together(df)
            together.write.format("lisa").options(**given).mode("append").save()
        document = counts.read_bytes()
    if report is not None:
        write_file(report, document)
    return _scheduled(msgspec.json.decode(document))


def _text(value: timedelta | None) -> str | None:
    return None if value is None else f"{duration_ms(value)}ms"


def _scheduled(told: dict[str, Any]) -> Scheduled:
    topics = {topic: ScheduledTopic(**counts) for topic, counts in told["topics"].items()}
    return Scheduled(
        told["job"], told["seconds"], told["accepted"], told["duplicate"], told["replaced"],
        told["refused"], topics, tuple(told["reasons"]), tuple(told["refused_files"]),
    )  # fmt: skip


def _equal_rows_together(df: DataFrame) -> DataFrame:
    """The same rows, equal ones in one partition: there they are numbered (see `identity`).

    What is looked at may be less than the whole row, never more than what makes rows equal.
    """
    looked_at = [_for_equality(one.name, one.dataType) for one in df.schema.fields]
    columns = [column for column in looked_at if column is not None]
    return df.repartition(*columns) if columns else df


def _for_equality(name: str, kind: DataType) -> Column | None:
    from pyspark.sql import functions as F  # noqa: N812 - as everybody calls it
    from pyspark.sql.types import MapType, StringType, TimestampType

    column = F.col(name)
    if name == "body":
        if isinstance(kind, MapType) or "map<" in kind.simpleString():
            return F.to_json(F.struct(column))
        return column
    if name == "due":
        # Sent in milliseconds, rounded up; all that is past is one instant.
        if isinstance(kind, TimestampType):
            micros = F.unix_micros(column)
            column = (micros + F.pmod(-micros, F.lit(1000))) / 1000
        return F.greatest(column.cast("bigint"), F.lit(0).cast("bigint"))
    if name == "topic" and isinstance(kind, StringType):
        return column
    return None


@contextmanager
def _shown(context: SparkContext, what: str, progress: Progress | None) -> Iterator[None]:
    """Name Spark's jobs in its UI, and tell how far they are."""
    names = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")
    before = {name: context.getLocalProperty(name) for name in names}
    group = f"lisa-{uuid4().hex[:8]}"
    context.setJobGroup(group, what)
    ended = threading.Event()
    watcher = threading.Thread(
        target=_watch, args=(context, group, progress, ended), daemon=True, name="lisa-progress"
    )
    if progress is not None:
        watcher.start()
    try:
        yield
    finally:
        ended.set()
        if progress is not None:
            watcher.join()
        for name, value in before.items():
            context.setLocalProperty(name, value)  # type: ignore[arg-type]  # None takes it away


def _watch(context: SparkContext, group: str, progress: Progress, ended: threading.Event) -> None:
    tracker = context.statusTracker()
    last = (-1, -1)
    while not ended.wait(POLL_S):
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
        stages = {stage for job in jobs if job is not None for stage in job.stageIds}
        infos = [info for stage in stages if (info := tracker.getStageInfo(stage)) is not None]
        now = (sum(one.numCompletedTasks for one in infos), sum(one.numTasks for one in infos))
        if now != last:
            progress(*now)
            last = now
