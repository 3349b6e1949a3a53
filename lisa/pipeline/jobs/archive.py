"""The job `archive`: writes the journal to two tables, exactly once, continuously or once.

Spark continues after the last batch that its checkpoint marks as committed. If the archive lacks
that batch (it was restored from a backup, its database failed over to an older replica, or the
checkpoint belongs to another archive), the events in between would be skipped silently, and the
journal would trim them. So `check_checkpoint` compares both first.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lisa.admin import push
from lisa.admin.reading import entry_number
from lisa.core.model.errors import ConfigError, LisaError, ServerUnavailable
from lisa.core.model.sharding import Shard, is_of_layout
from lisa.core.store import group_removal, limits
from lisa.core.store.reshard import states_of
from lisa.pipeline.archive import TopicRecord, default_name, open_writer
from lisa.pipeline.archive.base import KEEP, ArchiveWriter
from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.errors import unwrapped
from lisa.pipeline.server import Server
from lisa.pipeline.session import parallelism
from lisa.pipeline.source import register
from lisa.pipeline.source.events import ADVICE, ARCHIVE_ADVICE, Mark
from lisa.pipeline.source.following import journals, record_archived

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from lisa.pipeline.archive.base import ArchiveGap


REPORT_S = 600.0
"""How often an idle archive reports its progress: the journal stops waiting for it after two days
without a report."""

TIDY_S = 60.0
"""How often an idle archive brings its tables up to date."""

POLL_S = 0.25

STARTS_FOR_S = 180.0

SLOW_START = "Python worker failed to connect back"
"""Spark gives the Python process that plans the batches ten seconds to connect, a limit that cannot
be set. On a busy machine that is too short."""

logger = logging.getLogger(__name__)


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
    keep: timedelta = KEEP,
    progress: Callable[[Progress], None] = lambda _: None,
    stop: threading.Event | None = None,
) -> ArchiveResult:
    """Write the events of the journal to the tables `message_log` and `messages`.

    where: a directory, its URL, or a JDBC URL.
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
        closing(open_writer(spark, where, properties, keep=keep, topics=record.topics)) as writer,
    ):
        record.begin(writer.offsets(), topics)
        checkpoint = Folder(spark, checkpoint or f"{where.rstrip('/')}/_lisa/checkpoint").url()
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
    writer = events.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
    if once:
        return writer.trigger(availableNow=True).start()
    milliseconds = max(1, int(interval.total_seconds() * 1000))
    return writer.trigger(processingTime=f"{milliseconds} milliseconds").start()


@dataclass(frozen=True, slots=True)
class Progress:
    """One batch.

    batch: its number. events: events in this batch. total: events of the run so far.
    seconds: duration of the batch.
    lag_ms: time from the newest archived event to the end of the commit; None without events.
    """

    batch: int
    events: int
    total: int
    seconds: float
    lag_ms: int | None
    gaps: Sequence[ArchiveGap] = ()


class _Stopped(Exception):
    """Raised in a batch that starts after `stop` was set; the next run repeats the batch."""


class ArchiveRun:
    """A streaming query, until it ends or is stopped."""

    def __init__(
        self,
        tables: ArchiveWriter,
        record: JournalRecord,
        progress: Callable[[Progress], None],
        stop: threading.Event,
        most: int,
    ) -> None:
        self.began = time.monotonic()
        self.events = self.batches = 0
        self.gaps: list[ArchiveGap] = []
        self.failure: BaseException | None = None
        self._tables, self._record = tables, record
        self._progress, self._stop, self._most = progress, stop, most
        self._at_work = threading.Lock()

    def batch(self, events: DataFrame, batch: int) -> None:
        """Write one batch; called by Spark, which commits the batch when this returns."""
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
        lag = self._record.report(offsets)
        self.events += count
        self.batches += 1
        self.gaps += gaps
        if count or gaps:
            seconds = time.monotonic() - began
            self._progress(Progress(batch, count, self.events, seconds, lag, gaps))
        # A batch that reaches its limit may be up to 5 % smaller than the limit.
        self._tables.tidy(last=False, behind=count >= 0.9 * self._most)

    def follow(self, start: Callable[[], StreamingQuery]) -> None:
        """Start the query and wait until it ends, or stop it. Raises the error that ended it.

        A query whose Python process was slow to start is started again, for `STARTS_FOR_S` in all.
        """
        began = time.monotonic()
        while True:
            query = start()
            self._wait(query)
            if self.failure is not None and not isinstance(self.failure, _Stopped):
                raise self.failure
            error = query.exception()
            if error is None or "_Stopped" in str(error):
                return
            is_late = time.monotonic() - began > STARTS_FOR_S or self._stop.is_set()
            if SLOW_START not in str(error) or is_late:
                raise error
            logger.warning(
                "Spark's Python process took too long to start; starting the query again"
            )

    def _wait(self, query: StreamingQuery) -> None:
        """Wait until the query ends, or stop it; keep the tables of an idle archive up to date."""
        reported = tidied = time.monotonic()
        while query.isActive:
            if self._stop.wait(POLL_S):
                with self._at_work:  # wait for the running batch
                    pass
                with suppress(Exception):  # a refused batch raises _Stopped
                    query.stop()
                break
            if time.monotonic() - tidied > TIDY_S:
                try:
                    with self._at_work:
                        self._tables.tidy(last=False, behind=False)
                except Exception as error:  # noqa: BLE001  `follow` raises it
                    self.failure = error
                    query.stop()
                    break
                tidied = time.monotonic()
            if time.monotonic() - reported > REPORT_S:
                reported = time.monotonic()
                with suppress(ServerUnavailable):
                    self._record.report(self._tables.offsets())


class JournalRecord:
    """The archive's progress, as recorded on the server for each journal."""

    def __init__(self, server: Server, name: str) -> None:
        self.name = name
        self._store = server.connect()
        self._limits: dict[str, tuple[str, dict[str, str]]] = {}  # the number of the change, limits

    def begin(self, offsets: Mapping[str, tuple[str, int]], topics: Sequence[str] | None) -> None:
        """Set the recorded progress to the archive's offsets, and delete all other records.

        A new archive thus begins at the first event of each journal, even if an earlier archive of
        the same name had advanced further.
        """
        store = self._store
        store.drive(store.check_schema())
        known = {*(topics or ()), *store.drive(journals(store, topics or ()))}
        for journal in known - offsets.keys():
            store.ask("HDEL", store.keys.topic(journal).archived, self.name)
        self.report(offsets)

    def report(self, offsets: Mapping[str, tuple[str, int]]) -> int | None:
        """Record the archive's offsets; returns the age of its newest event in ms."""
        marks = {journal: Mark(*mark) for journal, mark in offsets.items()}
        if not marks:
            return None
        self._store.drive(record_archived(self._store, self.name, marks))
        newest = max(mark.where[0] for mark in marks.values())
        return max(0, self._store.drive(self._store.server_time_ms()) - newest)

    def topics(self, names: Sequence[str]) -> dict[str, TopicRecord]:
        """Topic -> its present options, with the limits of keys, and groups."""
        store, found = self._store, {}
        states = store.drive(states_of(store, list(map(Shard, names)))) if names else []
        for name, state in zip(names, states, strict=True):
            # Push targets contain secrets, and are not archived. Shard layout and pending removals
            # only apply to the present server.
            kept = {
                key: value
                for key, value in state.options.items()
                if not (
                    key.startswith(push.FIELD) or is_of_layout(key) or group_removal.is_mark(key)
                )
            }
            kept |= self._limits_of(name, state.options.get(limits.FIELD, ""))
            found[name] = TopicRecord(kept, tuple(sorted(state.groups)))
        return found

    def _limits_of(self, topic: str, number: str) -> Mapping[str, str]:
        """The limits of a topic's keys as options; read again once their number has changed."""
        if number and self._limits.get(topic, ("", {}))[0] != number:
            own = self._store.drive(limits.read(self._store, topic))
            named = {limits.ARCHIVED + name: value for name, value in own.items()}
            self._limits[topic] = number, named
        return self._limits[topic][1] if number else {}

    def close(self) -> None:
        """Close the connection."""
        with suppress(LisaError):
            self._store.close()


def check_checkpoint(
    spark: SparkSession,
    checkpoint: str,
    offsets: Mapping[str, tuple[str, int]],
    gaps: Sequence[ArchiveGap],
) -> None:
    """Raises ConfigError if a checkpoint is ahead of the archive.

    offsets: journal -> entry id and number of the archive's last event. gaps: the archive's
    recorded gaps; a gap after the last event explains why the checkpoint is ahead.
    """
    for journal, one in _committed(Folder(spark, checkpoint)).items():
        if journal not in offsets and _is_beginning(one):
            continue  # no batch had events of this journal
        entry = str(one["id"])
        mine = offsets[journal][0] if journal in offsets else "0-0"
        is_recorded = any(
            gap.journal == journal and entry_number(gap.after_id or "0-0") >= entry_number(mine)
            for gap in gaps
        )
        if entry_number(mine) < entry_number(entry) and not is_recorded:
            raise ConfigError(
                f"checkpoint {checkpoint} is ahead of the archive: for topic {journal!r} it is at "
                f"{entry}, the archive at {mine}. The checkpoint belongs to another archive, or "
                "the archive was restored from an older state. Remove the checkpoint, or use a new "
                "one; the archive then continues after its own last event"
            )


def _committed(checkpoint: Folder) -> dict[str, dict[str, Any]]:
    """Journal -> its offset at the end of the last batch that Spark committed."""
    batches = [int(name) for name in checkpoint.names("commits") if name.isdigit()]
    text = checkpoint.read(f"offsets/{max(batches)}") if batches else None
    last = text.strip().rpartition("\n")[2] if text else "{}"
    found: dict[str, dict[str, Any]] = json.loads(last) if last.startswith("{") else {}
    return found


def _is_beginning(offset: Mapping[str, Any]) -> bool:
    """Whether an offset is the start of its journal, so that no event was read yet."""
    return "gap" not in offset and offset.get("from") == {"id": offset["id"], "n": offset["n"]}
