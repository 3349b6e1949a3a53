"""The streaming query of the job `archive`: writes batches and reports progress."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lisa.core.model.errors import ServerUnavailable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.query import StreamingQuery

    from lisa.pipeline.archive.base import ArchiveWriter
    from lisa.pipeline.archive.records import ArchiveGap
    from lisa.pipeline.jobs.journal_record import JournalRecord

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
