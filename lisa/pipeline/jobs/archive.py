"""The job `archive`: the journal into two tables, exactly once, continuously or up to now."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from lisa.admin import push
from lisa.core import removal
from lisa.core.errors import ConfigError, LisaError, ServerUnavailable
from lisa.core.shards import is_of_layout
from lisa.core.store import pairs
from lisa.core.transitions.base import text
from lisa.pipeline.archive import TopicRecord, default_name
from lisa.pipeline.archive.checkpoint import check_checkpoint
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.jobs.server import Server
from lisa.pipeline.jobs.tables import DatabaseTables, ParquetTables
from lisa.pipeline.source import register
from lisa.pipeline.source.following import journals, record_archived
from lisa.pipeline.source.marks import Mark

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from lisa.pipeline.archive.records import Gap

__all__ = ["Archived", "Progress", "Tables", "archive"]

REPORT_S = 600.0
"""An archive that has nothing to do says so as often: the journal waits for it two days."""

POLL_S = 0.25


@dataclass(frozen=True, slots=True)
class Progress:
    """One batch: its events, how long it took, and how far behind the journal it is then.

    lag_ms: from the batch's last event to the end of its commit; None if it had none.
    """

    batch: int
    events: int
    total: int
    seconds: float
    lag_ms: int | None
    gaps: Sequence[Gap] = ()


@dataclass(frozen=True, slots=True)
class Archived:
    """What one run did. `offsets`: by place, the last event of its journal in the archive."""

    name: str
    where: str
    events: int
    batches: int
    seconds: float
    offsets: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    gaps: Sequence[Gap] = ()


class Tables(Protocol):
    """What takes the events; one for Parquet, one for databases."""

    def write(self, events: DataFrame, batch: int, query: str) -> tuple[int, Sequence[Gap]]:
        """Add a batch exactly once; how many events it had, and which gaps."""

    def offsets(self) -> Mapping[str, tuple[str, int]]:
        """For each journal, by its place, the last event that is there."""

    def gaps(self) -> Sequence[Gap]:
        """What is recorded as gone."""

    def tidy(self, *, last: bool, behind: bool) -> None:
        """Between two batches: fold and compact where that is due.

        last: there is no further one. behind: more waits in the journal than one batch takes.
        """

    def close(self) -> None:
        """Let another process write."""


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
) -> Archived:
    """Follow the journal into the tables `message_log` and `messages`.

    where: a directory or URL that Hadoop knows, or a JDBC URL.
    topics: those named; None is all that have a journal, new ones as they come.
    once: end when all is archived that was there at the start.
    interval: a batch that often. max_events: the most of one batch.
    name: under which the journal knows how far this archive has come, and waits for it.
    on_gap: "fail", or "record" what is gone and go on.
    checkpoint: Spark's own notes; needed for JDBC, else within the directory.
    properties: for JDBC (user, password, ...).
    keep: for how long files that were compacted stay, for those who are reading them.
    progress: told of each batch. stop: once it is set, the batch at work is the last one.

    A run that was killed at any point, or ended, is continued by the next one. Raises ConfigError
    (also for a checkpoint that is ahead of the archive), ServerUnavailable, and LisaError that
    names a gap.
    """
    if on_gap not in ("fail", "record"):
        raise ConfigError(f"on_gap is 'fail' or 'record', not {on_gap!r}")
    register(spark)
    server = _server(url, prefix)
    keeper = _Keeper(server, name or default_name(where))
    with unwrapped():
        tables: Tables
        if where.startswith("jdbc:"):
            if checkpoint is None:
                raise ConfigError("an archive in a database needs a checkpoint: a directory")
            tables = DatabaseTables(spark, where, properties or {}, keeper.topics)
        else:
            checkpoint = checkpoint or f"{where.rstrip('/')}/_lisa/checkpoint"
            tables = ParquetTables(spark, where, keep, keeper.topics)
        try:
            keeper.begin(tables.offsets(), topics)
            check_checkpoint(spark, checkpoint, tables.offsets(), tables.gaps())
            run = _Run(tables, keeper, progress, stop or threading.Event(), max_events)
            query = _start(
                spark, run.batch, checkpoint, once=once, interval=interval,
                options=_options(server, keeper.name, topics, max_events, on_gap),
            )  # fmt: skip
            run.follow(query)
            tables.tidy(last=True, behind=False)
            keeper.report(tables.offsets())
        finally:
            tables.close()
            keeper.close()
    return Archived(
        keeper.name, where, run.events, run.batches, time.monotonic() - run.began,
        dict(tables.offsets()), tuple(run.gaps),
    )  # fmt: skip


def _server(url: str | None, prefix: str | None) -> Server:
    from lisa.pipeline.source.options import server_of

    given = {name: value for name, value in (("url", url), ("prefix", prefix)) if value}
    return Server(*server_of(given))


def _options(
    server: Server, name: str, topics: Sequence[str] | None, max_events: int, on_gap: str
) -> dict[str, str]:
    options = {
        "url": server.url, "prefix": server.prefix, "archive": name,
        "max_events_per_batch": str(max_events), "fail_on_gap": str(on_gap == "fail").lower(),
    }  # fmt: skip
    return options | ({"topic": ",".join(topics)} if topics else {})


def _start(
    spark: SparkSession, write: Callable[[DataFrame, int], None], checkpoint: str, *, once: bool,
    interval: timedelta, options: Mapping[str, str],
) -> StreamingQuery:  # fmt: skip
    from lisa.pipeline.archive.schemas import EVENT_SCHEMA

    # With a schema of its own only these columns are read: bodies stay in their envelopes.
    events = spark.readStream.format("lisa").options(**options).schema(EVENT_SCHEMA).load()
    writer = events.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
    if once:
        return writer.trigger(availableNow=True).start()
    milliseconds = max(1, int(interval.total_seconds() * 1000))
    return writer.trigger(processingTime=f"{milliseconds} milliseconds").start()


class _Stopped(Exception):
    """A batch that came after the last one; it is the first of the next run."""


class _Run:
    """One streaming query, from its start until it ends or is to end."""

    def __init__(
        self, tables: Tables, keeper: _Keeper, progress: Callable[[Progress], None],
        stop: threading.Event, most: int,
    ) -> None:  # fmt: skip
        self.began = time.monotonic()
        self.events = self.batches = 0
        self.gaps: list[Gap] = []
        self.failure: BaseException | None = None
        self._tables, self._keeper = tables, keeper
        self._progress, self._stop, self._most = progress, stop, most
        self._at_work = threading.Lock()

    def batch(self, events: DataFrame, batch: int) -> None:
        """What Spark calls for each batch; one that returns is one that is committed."""
        with self._at_work:
            if self._stop.is_set():
                raise _Stopped
            try:
                self._write(events, batch)
            except BaseException as error:
                self.failure = error
                raise

    def _write(self, events: DataFrame, batch: int) -> None:
        began = time.monotonic()
        context: Any = events.sparkSession.sparkContext
        query = context.getLocalProperty("sql.streaming.queryId") or ""
        count, gaps = self._tables.write(events, batch, query)
        offsets = self._tables.offsets()
        lag = self._keeper.report(offsets)
        self.events += count
        self.batches += 1
        self.gaps += gaps
        if count or gaps:
            seconds = time.monotonic() - began
            self._progress(Progress(batch, count, self.events, seconds, lag, gaps))
        # A batch of a limited size is up to a twentieth smaller than the limit.
        self._tables.tidy(last=False, behind=count >= 0.9 * self._most)

    def follow(self, query: StreamingQuery) -> None:
        """Wait until the query ends, or end it. Raises what ended it."""
        reported = time.monotonic()
        while query.isActive:
            if self._stop.wait(POLL_S):
                with self._at_work:  # the batch at work is finished
                    pass
                with suppress(Exception):  # one that was refused ends it with our own exception
                    query.stop()
                break
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                with suppress(ServerUnavailable):
                    self._keeper.report(self._tables.offsets())
        if self.failure is not None and not isinstance(self.failure, _Stopped):
            raise self.failure
        error = query.exception()
        if error is not None and "_Stopped" not in str(error):
            raise error


class _Keeper:
    """The archive's record in each journal."""

    def __init__(self, server: Server, name: str) -> None:
        self.name = name
        self._opened = server.open()
        self._store = self._opened.__enter__()

    def begin(self, offsets: Mapping[str, tuple[str, int]], topics: Sequence[str] | None) -> None:
        """Let the records say what the archive says, whatever a predecessor was killed at.

        A new archive begins at the journal's first event, also where an earlier one of the same
        name had come further.
        """
        store = self._store
        store.drive(store.check_schema())
        known = {*(topics or ()), *store.drive(journals(store, topics or ()))}
        for place in known - offsets.keys():
            store.ask("HDEL", store.keys.topic(place).archived, self.name)
        self.report(offsets)

    def report(self, offsets: Mapping[str, tuple[str, int]]) -> int | None:
        """Write down how far it has come; how old the newest event in it is, in ms."""
        marks = {place: Mark(*mark) for place, mark in offsets.items()}
        if not marks:
            return None
        self._store.drive(record_archived(self._store, self.name, marks))
        newest = max(mark.where[0] for mark in marks.values())
        return max(0, self._store.drive(self._store.server_time_us()) // 1000 - newest)

    def topics(self, names: Sequence[str]) -> dict[str, TopicRecord]:
        """Options and groups of topics as they are now."""
        store, found = self._store, {}
        commands = [
            (command, getattr(store.keys.topic(name), key))
            for name in names
            for command, key in (("HGETALL", "options"), ("HKEYS", "groups"))
        ]
        replies = store.drive(store.commands(commands)) if commands else []
        for name, options, groups in zip(names, replies[::2], replies[1::2], strict=True):
            told = {text(key): text(value) for key, value in pairs(options).items()}
            # Where a group is pushed stands beside the secret that signs: not for an archive.
            # How a topic was split, and what is being removed, is for the server that it is on.
            told = {
                key: value for key, value in told.items()
                if not (key.startswith(push.FIELD) or is_of_layout(key) or removal.is_mark(key))
            }  # fmt: skip
            found[name] = TopicRecord(told, tuple(sorted(map(text, groups))))
        return found

    def close(self) -> None:
        """Close the connection."""
        with suppress(LisaError):
            self._opened.__exit__(None, None, None)
