"""The job `archive`: writes the journal to two tables, exactly once, continuously or once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING

from lisa.core.model.errors import ConfigError, LisaError
from lisa.pipeline.archive import default_name
from lisa.pipeline.archive.base import ArchiveWriter
from lisa.pipeline.archive.checkpoint import check_checkpoint
from lisa.pipeline.archive.writing import FileWriter
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.jobs.archive_run import ArchiveRun, Progress
from lisa.pipeline.jobs.journal_record import JournalRecord
from lisa.pipeline.paths import absolute
from lisa.pipeline.server import Server
from lisa.pipeline.session import parallelism
from lisa.pipeline.source import register
from lisa.pipeline.source.marks import ADVICE, ARCHIVE_ADVICE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from lisa.pipeline.archive.records import ArchiveGap


@dataclass(frozen=True, slots=True)
class ArchiveResult:
    """The result of one run.

    offsets: journal -> entry id and number of its last archived event.
    """

    name: str
    where: str
    events: int
    batches: int
    seconds: float
    offsets: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    gaps: Sequence[ArchiveGap] = ()


def archive(
    spark: SparkSession,
    where: str,
    *,
    url: str | None = None,
    prefix: str | None = None,
    topics: Sequence[str] | None = None,
    once: bool = False,
    interval: timedelta = timedelta(seconds=5),
    max_events: int = 500_000,
    name: str | None = None,
    on_gap: str = "fail",
    checkpoint: str | None = None,
    properties: Mapping[str, str] | None = None,
    keep: timedelta = timedelta(hours=1),
    progress: Callable[[Progress], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> ArchiveResult:
    """Write the events of the journal to the tables `message_log` and `messages`.

    where: a directory, a URL that Hadoop supports, or a JDBC URL.
    topics: topics to archive; None means all topics with a journal, including new ones.
    once: stop after archiving all events that exist at the start.
    interval: time between two batches. max_events: maximum number of events in a batch.
    name: the name under which the archive reports its progress; the journal keeps events until
        they are archived.
    on_gap: "fail", or "record" to record gaps and continue.
    checkpoint: directory of Spark's checkpoint; required for JDBC, otherwise in the archive.
    properties: for JDBC (user, password, ...).
    keep: how long replaced files are kept for running readers.
    progress: called after each batch.
    stop: when set, the run ends after the current batch.

    A later run continues where this one stopped, even if it was killed at any point.

    Raises ConfigError for invalid arguments or if the checkpoint is ahead of the archive,
    ServerUnavailable if the server does not answer, and LisaError for a gap.
    """
    if on_gap not in ("fail", "record"):
        raise ConfigError(f"on_gap must be 'fail' or 'record', not {on_gap!r}")
    if where.startswith("jdbc:") and checkpoint is None:
        raise ConfigError("an archive in a database needs a checkpoint directory")
    register(spark)
    server = Server.of(url, prefix)
    record = JournalRecord(server, name or default_name(where))
    options = _options(server, record.name, topics, max_events, on_gap)
    options["partitions"] = str(parallelism(spark))
    with (
        _own_advice(),
        unwrapped(),
        closing(record),
        closing(_writer(spark, where, keep, properties or {}, record)) as writer,
    ):
        record.begin(writer.offsets(), topics)
        checkpoint = checkpoint or f"{where.rstrip('/')}/_lisa/checkpoint"
        check_checkpoint(spark, checkpoint, writer.offsets(), writer.gaps())
        run = ArchiveRun(writer, record, progress, stop or threading.Event(), max_events)
        run.follow(
            lambda: _start(
                spark, run.batch, checkpoint, once=once, interval=interval, options=options
            )
        )
        writer.tidy(last=True, behind=False)
        record.report(writer.offsets())
    return ArchiveResult(
        record.name,
        where,
        run.events,
        run.batches,
        time.monotonic() - run.began,
        dict(writer.offsets()),
        tuple(run.gaps),
    )


@contextmanager
def _own_advice() -> Iterator[None]:
    """Replace the data source's option in the error of a gap by the option of this job."""
    try:
        yield
    except LisaError as error:
        if ADVICE not in str(error):
            raise
        raise LisaError(str(error).replace(ADVICE, ARCHIVE_ADVICE)) from error


def _writer(
    spark: SparkSession,
    where: str,
    keep: timedelta,
    properties: Mapping[str, str],
    record: JournalRecord,
) -> ArchiveWriter:
    if where.startswith("jdbc:"):
        from lisa.pipeline.archive.jdbc import JdbcWriter

        return JdbcWriter(spark, where, properties, topics=record.topics)
    return FileWriter(spark, where, keep=keep, topics=record.topics)


def _options(
    server: Server, name: str, topics: Sequence[str] | None, max_events: int, on_gap: str
) -> dict[str, str]:
    options = {
        **server.as_options(),
        "archive": name,
        "report_progress": "false",  # this job reports the archive's offsets, not the stream's
        "max_events_per_batch": str(max_events),
        "fail_on_gap": str(on_gap == "fail").lower(),
    }
    return options | ({"topic": ",".join(topics)} if topics else {})


def _start(
    spark: SparkSession,
    write: Callable[[DataFrame, int], None],
    checkpoint: str,
    *,
    once: bool,
    interval: timedelta,
    options: Mapping[str, str],
) -> StreamingQuery:
    from lisa.pipeline.archive.schemas import EVENT_SCHEMA

    # With an explicit schema only these columns are read, and envelopes are not decoded.
    events = spark.readStream.format("lisa").options(**options).schema(EVENT_SCHEMA).load()
    writer = events.writeStream.foreachBatch(write).option(
        "checkpointLocation", absolute(checkpoint)
    )
    if once:
        return writer.trigger(availableNow=True).start()
    milliseconds = max(1, int(interval.total_seconds() * 1000))
    return writer.trigger(processingTime=f"{milliseconds} milliseconds").start()
