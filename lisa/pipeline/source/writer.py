"""The writers of the data source: they send a DataFrame's rows as messages.

Tasks receive pickled options, not a client; each task opens its own connection, converts the Arrow
batches of its partition to messages, and sends them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter

from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.model.keys import check_topic, keyed_id
from lisa.core.model.options import PRODUCER_RETRY_TIME
from lisa.core.model.sharding import key_of
from lisa.core.store.store import SyncStore, chunks, grouped
from lisa.core.transitions.enqueue import OnDuplicate, Sent
from lisa.core.transitions.inspect import Inspect
from lisa.pipeline.server import Server
from lisa.pipeline.source import files
from lisa.pipeline.source.columns import check_columns
from lisa.pipeline.source.identity import DIGEST_BYTES, Identity, digest_of, id_of
from lisa.pipeline.source.options import (
    SERVER,
    choice,
    duration,
    number,
    refuse_unknown,
    whole_number,
)
from lisa.pipeline.source.outcome import (
    DuplicateRow,
    TaskResult,
    added,
    corrupt_rows,
    report_of,
    write_report,
    write_unwritten,
)
from lisa.pipeline.source.rows import MessageColumns, read_rows
from lisa.pipeline.source.sending import Sender, WriteOptions

if TYPE_CHECKING:
    from pyspark.sql.datasource import WriterCommitMessage
    from pyspark.sql.types import StructType

OPTIONS = SERVER | {
    "topic",
    "on_duplicate",
    "batch",
    "max_rate",
    "job",
    "dedupe_for",
    "report",
    "refused",
    "mode",
    "patience",
    "body_format",
}
"""The options of a write."""

SHOWN_REASONS = 3
"""Maximum number of reasons in an error."""

QUERY, BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
"""Spark's local properties with the query id, which survives restarts, and the batch number."""

_log = logging.getLogger("lisa.pipeline")


DUPLICATE_BYTES = 4 << 20
"""Maximum size of the duplicate rows that one task returns to the driver."""

SORTED_BYTES = 32 << 20
"""Size of the rows that a task sorts by their due times."""

COMPLETING = -1
"""Used instead of a partition number in the send tokens of `send_missing`."""


def read_options(given: Mapping[str, str], schema: StructType) -> WriteOptions:
    """Parse and check options and columns. Raises ConfigError if they are not valid."""
    refuse_unknown(given, OPTIONS, "write")
    patience = duration(given, "patience")
    server = Server.of(
        given.get("url"),
        given.get("prefix"),
        PRODUCER_RETRY_TIME if patience is None else patience,
    )
    topic, job = given.get("topic"), given.get("job")
    if job is not None and not job.strip():
        raise ConfigError("format(\"lisa\"), option 'job': the name must not be empty")
    check_columns(schema, topic=topic, job=job)
    on_duplicate = OnDuplicate(choice(given, "on_duplicate", list(OnDuplicate), OnDuplicate.KEEP))
    if on_duplicate is not OnDuplicate.KEEP and "id" not in schema.fieldNames():
        raise ConfigError(
            f"format(\"lisa\"), option 'on_duplicate': {on_duplicate.value!r} needs a column "
            "'id': an id derived from a row can only be a duplicate of an equal row"
        )
    for name in ("report", "refused"):
        if given.get(name):
            files.check_target(given[name], name)
    return WriteOptions(
        server=server,
        topic=None if topic is None else check_topic(topic),
        on_duplicate=on_duplicate,
        batch=whole_number(given, "batch"),
        max_rate=number(given, "max_rate"),
        job=job if "id" not in schema.fieldNames() else None,
        dedupe_for=duration(given, "dedupe_for"),
        refused=given.get("refused") or None,
        machine=files.machine(),
        has_local="at_local" in schema.fieldNames(),
        json_text=choice(given, "body_format", ("text", "json"), "text") == "json",
        permissive=choice(given, "mode", ("failfast", "permissive"), "failfast") == "permissive",
    )


def _context() -> TaskContext:
    context = TaskContext.get()
    if context is None:
        raise LisaError("there is no Spark task context; the writer must run in a Spark task")
    return context


def run_task(
    options: WriteOptions, run: str, job: str | None, batches: Iterator[pa.RecordBatch]
) -> TaskResult:
    """Send the rows of one of Spark's tasks; `run` and its partition identify it when repeated."""
    with options.server.open() as store:
        task = Task(options, store, run=run, partition=_context().partitionId(), job=job)
        return task.run(batches)


def finish(
    options: WriteOptions,
    run: str,
    messages: Sequence[WriterCommitMessage | None],
    report: str | None,
    **about: Any,
) -> dict[str, Any]:
    """After all tasks, on the driver: send missing duplicate rows; write and return the report."""
    results = [message for message in messages if isinstance(message, TaskResult)]
    whole = added(results)
    write_unwritten(results)
    try:
        if options.job is not None and not options.together:
            with options.server.open() as store:
                send_missing(options, store, run, results, whole)
    finally:
        document = report_of(whole, run=run, **about)
        if report:
            write_report(report, document)
    return document


def _check_refused(options: WriteOptions, document: Mapping[str, Any], again: str) -> None:
    """Raises LisaError if rows were refused, unless the options say where or that they may be.

    again: how to repeat the write.
    """
    if not document["refused"]:
        return
    if options.refused or options.permissive:
        _log.warning("rows refused: %d: %s", document["refused"], "; ".join(document["reasons"]))
        return
    reasons = " ".join("; ".join(document["reasons"][:SHOWN_REASONS]).split())
    raise LisaError(
        f"{document['refused']} rows were refused, and all others sent: {reasons}. Fix the cause, "
        "or set option 'refused' to a directory for such rows, or option 'mode' to 'permissive' "
        f"to drop them; then {again} (no row is sent twice)"
    )


class LisaWriter(DataSourceArrowWriter):
    """Sends the rows of a DataFrame. Idempotent, as a whole and per task."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        self.options = read_options(given, schema)
        self.report = given.get("report") or None
        self.run = uuid4().hex[:16]
        self.began = time.time()
        # Report an unreachable server immediately, not after every attempt of every task.
        with self.options.server.open() as store:
            store.drive(store.check_schema())

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of one task."""
        return run_task(self.options, self.run, self.options.job, iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Complete the write after all tasks have finished. Raises LisaError for refused rows."""
        seconds = round(time.time() - self.began, 3)
        job, report = self.options.job, self.report
        document = finish(self.options, self.run, messages, report, job=job, seconds=seconds)
        _check_refused(self.options, document, "write them again")

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Keep what was sent: running the job again sends the missing rows."""


class LisaStreamWriter(DataSourceStreamArrowWriter):
    """Sends each batch of a stream; a batch that is repeated after a failure adds nothing."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        # A batch whose rows find no room fails, so that Spark repeats it.
        self.options = replace(read_options(given, schema), fail_if_full=True)
        self.report = given.get("report") or None

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Send the rows of one task of one batch."""
        context = _context()
        run = f"{context.getLocalProperty(QUERY)}-{context.getLocalProperty(BATCH)}"
        return run_task(self.options, run, self._job(run), iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Complete a batch after all of its tasks have finished.

        Raises LisaError for refused rows: the query fails, and repeats the batch when it is
        started again.
        """
        report = files.join(self.report, f"batch-{batchId}.json") if self.report else None
        document = finish(
            self.options, f"batch-{batchId}", messages, report, job=self.options.job, batch=batchId
        )
        _check_refused(self.options, document, "start the query with the same checkpoint")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Keep what was sent: Spark repeats the batch."""

    def _job(self, run: str) -> str | None:
        """The name from which ids are derived; equal rows of two batches are different messages."""
        return None if self.options.job is None else f"{self.options.job}\0{run}"


def by_due(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows in the order of column `due`, if there is one, within some SORTED_BYTES.

    Redis finds the places of messages in a large sorted set faster if they are near each other:
    among five million messages, rows in random order take it twice as long.
    """
    held: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        held.append(batch)
        size += batch.nbytes
        if size >= SORTED_BYTES:
            yield from _sorted(held)
            held, size = [], 0
    yield from _sorted(held)


def _sorted(held: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
    is_large = sum(batch.nbytes for batch in held) > 2 * SORTED_BYTES  # a batch of large bodies
    if not held or is_large or "due" not in held[0].schema.names:
        return held
    table = pa.Table.from_batches(held).combine_chunks().sort_by("due")
    most = max(batch.num_rows for batch in held)
    ordered: list[pa.RecordBatch] = table.combine_chunks().to_batches(most)
    return ordered


class Task:
    """Sends the rows of one partition."""

    def __init__(
        self, options: WriteOptions, store: SyncStore, *, run: str, partition: int, job: str | None
    ) -> None:
        self._options = options
        self._result = TaskResult()
        self._sender = Sender(options, store, run, partition, self._result)
        self._identity = Identity(job) if job is not None else None
        self._digests = bytearray()
        self._duplicate_bytes = 0

    def run(self, batches: Iterable[pa.RecordBatch]) -> TaskResult:
        """Send all rows. Raises LisaError if the server does not answer."""
        with self._sender:
            for batch in by_due(batches):
                self._sender.batch = batch
                self._send(batch)
        self._result.digests = bytes(self._digests)
        return self._result

    def _send(self, batch: pa.RecordBatch) -> None:
        rows = read_rows(batch, json_text=self._options.json_text)
        others: set[int] = set()
        if self._options.due_in is not None:
            low, high = self._options.due_in
            dues = enumerate(map(int, rows.named))
            others = {row for row, due in dues if due and not low < due <= high}
            others -= corrupt_rows(batch).keys()  # their times may be values of other columns
        for row, reason in sorted(rows.refused.items()):
            if row not in others:
                topic = self._options.topic or rows.topics[row]
                self._sender.refuse(topic, row, rows.ids[row] if rows.ids else None, reason)
        rows = rows.good(others)
        if self._identity is not None:
            rows = replace(rows, ids=self._identity.ids(rows))
        for topic, part in self._by_topic(rows):
            for sent, outcomes in self._sender.send(topic, part):
                if self._identity is not None and not self._options.together:
                    self._remember(topic, sent, outcomes)

    def _by_topic(self, rows: MessageColumns) -> Iterator[tuple[str, MessageColumns]]:
        if self._options.topic is not None:
            yield self._options.topic, rows
            return
        positions_of = grouped((topic, index) for index, topic in enumerate(rows.topics))
        for topic, positions in positions_of.items():
            yield topic, rows.picked(positions)

    def _remember(self, topic: str, part: MessageColumns, outcomes: Sequence[Sent]) -> None:
        """Keep the digests of all rows, and the rows that were answered as duplicates.

        If another task has equal rows, the duplicates are sent again with other ordinals.
        """
        self._digests += b"".join(map(digest_of, part.ids))
        if outcomes.count(Sent.ACCEPTED) == len(outcomes):
            return
        for index, outcome in enumerate(outcomes):
            if outcome is Sent.ACCEPTED:
                continue
            self._duplicate_bytes += len(part.tails[index]) + 100
            if self._duplicate_bytes > DUPLICATE_BYTES:
                return
            self._result.duplicates[digest_of(part.ids[index])] = DuplicateRow(
                topic,
                part.dues[index],
                part.tails[index],
                part.ttls_ms[index],
                part.policies[index],
                key_of(part.ids[index]),
            )


def shared_digests(results: Sequence[TaskResult]) -> dict[bytes, tuple[int, int]]:
    """Digest of rows found in several tasks -> highest ordinal sent, and highest ordinal needed."""
    met = [result.digests for result in results if result.digests]
    if len(met) < 2:
        return {}
    tables = []
    for task, digests in enumerate(met):
        count = len(digests) // DIGEST_BYTES
        kind = pa.binary(DIGEST_BYTES)
        column = pa.Array.from_buffers(kind, count, [None, pa.py_buffer(digests)])
        counted = pa.table({"digest": column}).group_by("digest").aggregate([([], "count_all")])
        tables.append(counted.append_column("task", pa.array([task] * len(counted), pa.int32())))
    by_digest = (
        pa.concat_tables(tables)
        .group_by("digest")
        .aggregate([("task", "count"), ("count_all", "max"), ("count_all", "sum")])
    )
    several = by_digest.filter(pc.greater(by_digest["task_count"], 1)).to_pydict()
    ends = zip(several["count_all_max"], several["count_all_sum"], strict=True)
    return dict(zip(several["digest"], ends, strict=True))


def send_missing(
    options: WriteOptions,
    store: SyncStore,
    run: str,
    results: Sequence[TaskResult],
    whole: TaskResult,
) -> None:
    """Send equal rows without ids that several tasks mistook for duplicates; count them in `whole`.

    Each task numbers its equal rows from 1 (see `identity`). If one task has three of them and
    another task two, ids 1, 2, 3 and 1, 2 are sent, and the last two are answered as duplicates.
    There must be five messages, so ids 4 and 5 are sent here. The ids of a job are thus independent
    of how its rows are distributed over tasks.

    Raises LisaError if no task kept a copy of a missing row.
    """
    missing = shared_digests(results)
    if not missing:
        return
    duplicates: dict[bytes, DuplicateRow] = {}
    for result in results:
        duplicates.update(result.duplicates)
    unknown = [
        id_of(digest, ordinal)
        for digest, (reached, end) in missing.items()
        if digest not in duplicates
        for ordinal in range(reached + 1, end + 1)
    ]
    with Sender(options, store, run, COMPLETING, whole) as sender:
        for topic in {duplicates[digest].topic for digest in missing if digest in duplicates}:
            _send(sender, topic, missing, duplicates, whole)
    left = _not_known(store, sorted(whole.topics), unknown)
    if left:
        raise LisaError(
            f"{left} rows were not sent: they equal rows of other tasks, and there are too many of "
            "them to keep. Call lisa.pipeline.schedule with the same job: it sends these rows, and "
            "none twice"
        )


def _send(
    sender: Sender,
    topic: str,
    missing: dict[bytes, tuple[int, int]],
    duplicates: dict[bytes, DuplicateRow],
    whole: TaskResult,
) -> None:
    rows = [
        (keyed_id(row.key, id_of(digest, ordinal)), row.due, row.tail, row.ttl_ms, row.policy)
        for digest, row in duplicates.items()
        if row.topic == topic and digest in missing
        for ordinal in range(missing[digest][0] + 1, missing[digest][1] + 1)
    ]
    # Each of these rows was counted as a duplicate before.
    whole.counts(topic).duplicate -= len(rows)
    ids, dues, tails, ttls_ms, policies = zip(*rows, strict=True)
    for _ in sender.send(
        topic, MessageColumns(range(len(ids)), ids, dues, tails, ttls_ms, policies)
    ):
        pass


def _not_known(store: SyncStore, topics: Sequence[str], ids: Sequence[str]) -> int:
    """How many of these ids the server does not know, neither live nor by a tombstone."""
    left = set(ids)
    for topic in topics:
        for part in chunks(sorted(left), store.batch_size(topic, Inspect)):
            found = store.call_by_id(Inspect(topic, part))
            known = (seen.envelope or seen.tombstone for seen in found)
            left -= {
                message_id for message_id, is_known in zip(part, known, strict=True) if is_known
            }
    return len(left)
