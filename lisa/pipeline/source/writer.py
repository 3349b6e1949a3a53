"""The writing faces of the data source: a DataFrame's rows become messages.

What is pickled and sent to tasks is a description; each task opens a connection of its own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter

from lisa.core.errors import ConfigError, LisaError
from lisa.core.keys import check_topic
from lisa.core.options import PRODUCER_RETRY_TIME
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.pipeline.source import equal, files
from lisa.pipeline.source.columns import check_columns
from lisa.pipeline.source.options import (
    SERVER,
    choice,
    duration,
    number,
    open_store,
    refuse_unknown,
    server_of,
    whole_number,
)
from lisa.pipeline.source.outcome import TaskResult, added, report_of, write_report
from lisa.pipeline.source.sending import Manner, Task

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

__all__ = ["BATCH", "OPTIONS", "QUERY", "LisaStreamWriter", "LisaWriter", "read_manner"]

OPTIONS = SERVER | {
    "topic", "on_duplicate", "batch", "max_rate", "job", "dedupe_for", "report", "refused",
    "patience", "body_format",
}  # fmt: skip
"""The options of a write."""

QUERY, BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
"""Where a task of a stream finds its query, the same after a restart, and its batch."""

_log = logging.getLogger("lisa.pipeline")


def read_manner(given: Mapping[str, str], schema: StructType) -> Manner:
    """Check options and columns, before any row is sent. Raises ConfigError."""
    refuse_unknown(given, OPTIONS, "write")
    url, prefix = server_of(given)
    topic, job = given.get("topic"), given.get("job")
    if job is not None and not job.strip():
        raise ConfigError("format(\"lisa\"), option 'job': a name is not empty")
    check_columns(schema, topic=topic, job=job)
    on_duplicate = OnDuplicate(choice(given, "on_duplicate", list(OnDuplicate), OnDuplicate.KEEP))
    if on_duplicate is not OnDuplicate.KEEP and "id" not in schema.fieldNames():
        raise ConfigError(
            f"format(\"lisa\"), option 'on_duplicate': {on_duplicate.value!r} needs a column "
            "'id': ids that are made from the row meet only rows that are the same"
        )
    for name in ("report", "refused"):
        if given.get(name):
            files.check_place(given[name], name)
    patience = duration(given, "patience")
    return Manner(
        url=url, prefix=prefix, topic=None if topic is None else check_topic(topic),
        on_duplicate=on_duplicate, batch=whole_number(given, "batch"),
        max_rate=number(given, "max_rate"),
        job=job if "id" not in schema.fieldNames() else None,
        dedupe_for=duration(given, "dedupe_for"), refused=given.get("refused") or None,
        patience=PRODUCER_RETRY_TIME if patience is None else patience,
        json_text=choice(given, "body_format", ("text", "json"), "text") == "json",
    )  # fmt: skip


def _results(messages: Sequence[WriterCommitMessage | None]) -> list[TaskResult]:
    return [one for one in messages if isinstance(one, TaskResult)]


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise LisaError("this is for Spark's tasks, each of which has a context")
    return context


def _run_task(
    manner: Manner, run: str, job: str | None, batches: Iterator[pa.RecordBatch]
) -> TaskResult:
    store = open_store(manner.url, manner.prefix, manner.patience)
    try:
        task = Task(manner, store, run=run, partition=_context().partitionId(), job=job)
        return task.run(batches)
    finally:
        store.close()


def _finish(
    manner: Manner, run: str, messages: Sequence[WriterCommitMessage | None], report: str | None,
    **about: Any,
) -> None:  # fmt: skip
    """On the driver, when all tasks are through: send what is left, and tell what became of it."""
    results = _results(messages)
    whole = added(results)
    try:
        if manner.job is not None:
            store = open_store(manner.url, manner.prefix, manner.patience)
            try:
                equal.complete(manner, store, run, results, whole)
            finally:
                store.close()
    finally:
        document = report_of(whole, run=run, **about)
        if report:
            write_report(report, document)
        if document["refused"]:
            _log.warning("%d rows were refused: %s", document["refused"],
                         "; ".join(whole.reasons))  # fmt: skip


class LisaWriter(DataSourceArrowWriter):
    """Sends the rows of a DataFrame; safe to repeat, whole or in part."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        self.manner = read_manner(given, schema)
        self.report = given.get("report") or None
        self.run = uuid4().hex[:16]
        self.began = time.time()
        # A server that is not there is told of once and at once, not by each attempt of each task.
        store = open_store(self.manner.url, self.manner.prefix, self.manner.patience)
        try:
            store.drive(store.check_schema())
        finally:
            store.close()

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """One task."""
        return _run_task(self.manner, self.run, self.manner.job, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """All tasks are through."""
        seconds = round(time.time() - self.began, 3)
        _finish(self.manner, self.run, messages, self.report,
                job=self.manner.job, seconds=seconds)  # fmt: skip

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Nothing is taken back: the job is to be run again, which adds what is missing."""


class LisaStreamWriter(DataSourceStreamArrowWriter):
    """Sends each batch of a stream; a batch that is repeated after a fall adds nothing."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        self.manner = read_manner(given, schema)
        self.report = given.get("report") or None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """One task of one batch."""
        context = _context()
        run = f"{context.getLocalProperty(QUERY)}-{context.getLocalProperty(BATCH)}"
        return _run_task(self.manner, run, self._job(run), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """One batch is through."""
        report = files.join(self.report, f"batch-{batchId}.json") if self.report else None
        _finish(self.manner, f"batch-{batchId}", messages, report,
                job=self.manner.job, batch=batchId)  # fmt: skip

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Nothing is taken back: Spark repeats the batch."""

    def _job(self, run: str) -> str | None:
        """Equal rows of two batches are two messages."""
        return None if self.manner.job is None else f"{self.manner.job}\0{run}"
