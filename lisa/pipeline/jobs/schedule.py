"""The job `schedule`: sends the rows of a DataFrame and returns their outcomes."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING
from uuid import uuid4

import msgspec

from lisa.core.model.clock import duration_ms
from lisa.core.model.errors import ConfigError
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.jobs.horizon import Loader, check, due_ms, is_cancelled, reconcile
from lisa.pipeline.paths import absolute
from lisa.pipeline.server import Server
from lisa.pipeline.session import is_remote
from lisa.pipeline.source.columns import with_types
from lisa.pipeline.source.outcome import Counts
from lisa.pipeline.source.sending import WriteOptions
from lisa.pipeline.source.writer import finish, read_options, run_task

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import SparkContext
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.connect.shell.progress import StageInfo
    from pyspark.sql.types import DataType

POLL_S = 0.2
"""Interval of progress updates."""

OBSERVED = "lisa"
"""Name of the counts among the observed metrics of Spark's query."""

_COUNTS = tuple(column.name for column in fields(Counts))
_RESULT = ", ".join(["result binary", *(f"{name} long" for name in _COUNTS)])

Progress = Callable[[int, int], None]
"""Called with the number of finished tasks and the number of known tasks."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Number of a DataFrame's rows by outcome.

    accepted: new messages. duplicate: ids that already existed; nothing was changed. replaced,
    replaced_in_flight, updated: messages that replaced earlier ones, see `Producer.send_one`.
    refused: not sent; `reasons` has the first ten reasons, and `refused_files` the files with all
    refused rows. seconds: duration of the job. rescheduled, cancelled: messages that followed a
    changed row, with `sync`.
    """

    job: str | None
    seconds: float
    accepted: int
    duplicate: int
    replaced: int
    replaced_in_flight: int
    updated: int
    refused: int
    topics: Mapping[str, Counts]
    reasons: tuple[str, ...]
    refused_files: tuple[str, ...]
    rescheduled: int = 0
    cancelled: int = 0


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
    due_within: timedelta | None = None,
    since: datetime | None = None,
    cancelled: str | None = None,
    sync: bool = False,
    progress: Progress | None = None,
) -> Scheduled:
    """Send each row of a DataFrame as a message. Idempotent, also after a failure.

    Columns: `body`; `due` (timestamp, or bigint of epoch milliseconds), `delay` (day-time interval,
    bigint of milliseconds, or text as in "1h30m") or `at_local` (text as in "2026-12-24T09:00", or
    timestamp_ntz) with `tz`, else due now; optionally `id`, `key`, `ttl` (as `delay`), `headers`
    (map<string,string>), `retry` (text as in "0,0,2m", or an array of delays), `late` (text as in
    "skip after 10m"), `cost` (bigint), `slack` (as `delay`), `window` (text as in "mon-fri 9-17"),
    `topic`, `kind` ("j" if the text of the body is JSON, "s", "b").

    topic: topic of all rows, unless they have a column `topic`.
    url, prefix: the server; by default LISA_REDIS_URL, else redis://localhost:6379/0.
    job: required without a column `id`: ids are derived from this name and the rows. Repeating the
        job within `dedupe_for` adds nothing; equal rows of another job are other messages.
    on_duplicate: what to do with an id that exists: "keep", "keep_live" to keep only a message
        that has not ended, "replace", "update" (replace all but the due time), or "reject" to
        refuse the row.
    batch: maximum number of rows per call; limited by the topic's groups (500 with one group).
    max_rate: maximum number of rows per second, over all tasks.
    dedupe_for: minimum time for which ids are deduplicated; raises the topics' option of this name.
    patience: how long to wait for a server that does not answer, or for space in a full topic.
    body_format: "json" if text bodies contain JSON, else "text".
    report: file for the counts, as JSON.
    refused: directory for refused rows, as JSON lines.
    due_within: send only rows due within this time from now, and those that have become due since
        the last run of the loader `job`. Repeat the job more often than this. The topics remember
        ids for an hour longer than this.
    since: with `due_within`, the earliest due time of the loader's first run; by default now.
    cancelled: a further column: Boolean, numbers, text, dates or timestamps. Rows for which it is
        true, or not null, NaN, zero, empty, "no" or the like, are not sent, and not counted.
    sync: with `due_within` and a column `id`, afterwards change the messages that wait as their
        rows have: cancel or reschedule them.
    progress: called from another thread with the numbers of finished and known tasks.

    Raises ConfigError for invalid columns or options, before any row is sent; ServerUnavailable if
    the server does not answer; LisaError if Spark fails.
    """
    if df.isStreaming:
        raise ConfigError(
            'schedule does not accept a stream; write a stream with df.writeStream.format("lisa")'
        )
    check(df.columns, due_within, since, job=job, on_duplicate=str(on_duplicate), sync=sync)
    df = with_types(df)
    rows = df if cancelled is None else df.where(~is_cancelled(df, cancelled)).drop(cancelled)
    given = {
        **Server.of(url, prefix).as_options(),
        "topic": topic,
        "job": job,
        "on_duplicate": str(on_duplicate),
        "batch": batch,
        "max_rate": max_rate,
        "dedupe_for": _duration_text(dedupe_for),
        "patience": _duration_text(patience),
        "body_format": body_format,
        "refused": absolute(refused) if refused else None,
        "report": report,
    }
    options = read_options(
        {name: str(value) for name, value in given.items() if value is not None}, rows.schema
    )
    run, began = uuid4().hex[:16], time.time()
    loader = None
    # Report an unreachable server immediately, not after every attempt of every task.
    with options.server.open() as store:
        store.drive(store.check_schema())
        if due_within is not None and job is not None:
            loader = Loader.begin(store, job, topic or "", due_within, since)
            rows, options = loader.narrowed(rows), loader.limited(options)
    if options.job is not None:
        rows, options = _equal_rows_together(rows), replace(options, together=True)
    what = f"lisa schedule: {job or 'rows'} to {topic or 'their topics'}"
    with unwrapped(), _reporting(df.sparkSession, what, progress):
        # The data source could not return the results to a client of Spark Connect.
        sent = rows.mapInArrow(partial(_send, options, run), _RESULT)
        done = sent.observe(OBSERVED, *_totals()).select("result").collect()
    results = [pickle.loads(row.result) for row in done]  # noqa: S301  from our own tasks
    seconds = round(time.time() - began, 3)
    followed: Mapping[str, int] = {}
    if sync:
        with unwrapped():
            followed = reconcile(df, options, cancelled)
    document = finish(options, run, results, report, job=options.job, seconds=seconds, **followed)
    if loader is not None and not any(result.is_full for result in results):
        with options.server.open() as store:
            loader.end(store)
    return msgspec.convert(document, Scheduled)


def _send(
    options: WriteOptions, run: str, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """One of Spark's tasks: send its rows, and return the result as a row."""
    import pyarrow as pa

    result = run_task(options, run, options.job, batches)
    counts = asdict(result.total())
    yield pa.RecordBatch.from_pylist([{"result": pickle.dumps(result), **counts}])


def _totals() -> list[Column]:
    from pyspark.sql import functions as F  # noqa: N812 - the usual name

    return [F.sum(name).alias(name) for name in _COUNTS]


def _duration_text(value: timedelta | None) -> str | None:
    return None if value is None else f"{duration_ms(value)}ms"


def _equal_rows_together(df: DataFrame) -> DataFrame:
    """Repartition so that equal rows are in one task, which numbers them (see `identity`).

    The partition key may use fewer columns than the row's identity, but never more.
    """
    keys = [_partition_key(df, field.name, field.dataType) for field in df.schema.fields]
    columns = [column for column in keys if column is not None]
    return df.repartition(*columns) if columns else df


def _partition_key(df: DataFrame, name: str, kind: DataType) -> Column | None:
    from pyspark.sql import functions as F  # noqa: N812 - the usual name
    from pyspark.sql.types import MapType, StringType

    column = F.col(name)
    if name == "body":
        if isinstance(kind, MapType) or "map<" in kind.simpleString():
            return F.to_json(F.struct(column))
        return column
    if name == "due":
        # Times before the epoch are equal.
        return F.greatest(due_ms(df), F.lit(0).cast("bigint"))
    if name == "topic" and isinstance(kind, StringType):
        return column
    return None


@contextmanager
def _reporting(spark: SparkSession, what: str, progress: Progress | None) -> Iterator[None]:
    """Report the progress of the jobs in this block, and name them in Spark's UI.

    Only a session of its own process has names for jobs, and a status tracker. Spark Connect
    calls a handler instead.
    """
    if not is_remote(spark):
        with _spark_job_group(spark.sparkContext, what, progress):
            yield
        return
    if progress is None:
        yield
        return

    def handler(
        stages: Iterable[StageInfo] | None,
        inflight_tasks: int,  # noqa: ARG001  Spark's signature
        operation_id: str | None,  # noqa: ARG001
        done: bool,  # noqa: ARG001, FBT001
    ) -> None:
        known = list(stages or ())
        progress(
            sum(stage.num_completed_tasks for stage in known),
            sum(stage.num_tasks for stage in known),
        )

    spark.registerProgressHandler(handler)  # type: ignore[arg-type]  # any callable will do
    try:
        yield
    finally:
        spark.removeProgressHandler(handler)  # type: ignore[arg-type]


@contextmanager
def _spark_job_group(context: SparkContext, what: str, progress: Progress | None) -> Iterator[None]:
    """Name the jobs in Spark's UI, and report their progress."""
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
            context.setLocalProperty(name, value)  # type: ignore[arg-type]  # None removes it


def _watch(context: SparkContext, group: str, progress: Progress, ended: threading.Event) -> None:
    tracker = context.statusTracker()
    last, is_over = (-1, -1), False
    while not is_over:
        is_over = ended.wait(POLL_S)  # then once more, for the last tasks
        jobs = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
        stages = {stage for job in jobs if job is not None for stage in job.stageIds}
        infos = [info for stage in stages if (info := tracker.getStageInfo(stage)) is not None]
        now = (sum(info.numCompletedTasks for info in infos), sum(info.numTasks for info in infos))
        if now != last:
            progress(*now)
            last = now
