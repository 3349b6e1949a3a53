"""Outcomes of rows: counted per task, added up on the driver, written as a report.

Refused rows, also those that Spark could not read, are written to a file with their reasons.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from io import BytesIO
from typing import Any

import msgspec
import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from lisa.core.model.errors import LisaError
from lisa.core.model.keys import shown_id
from lisa.pipeline.source import files
from lisa.pipeline.source.columns import CORRUPT

REASONS = 10
"""Maximum number of reasons of refused rows in a report."""


_SHOWN = 240
"""Characters that a reason has of a text that cannot be read."""

RETURNED_BYTES = 4 << 20
"""Maximum size of the refused rows that one task returns to the driver."""


@dataclass(slots=True)
class Counts:
    """Number of rows of one topic by outcome."""

    accepted: int = 0
    duplicate: int = 0
    replaced: int = 0
    replaced_in_flight: int = 0
    updated: int = 0
    refused: int = 0

    def add(self, other: Counts) -> None:
        """Add the counts of `other`."""
        for name, number in asdict(other).items():
            setattr(self, name, getattr(self, name) + number)


@dataclass(frozen=True, slots=True)
class DuplicateRow:
    """A row answered as a duplicate; it may be sent again with another ordinal."""

    topic: str
    due: str
    tail: bytes
    ttl_ms: int | None
    policy: str | None
    key: str | None = None


@dataclass(slots=True)
class TaskResult(WriterCommitMessage):
    """The result of one task.

    digests: concatenated digests of all sent rows whose ids were derived (see `identity`).
    duplicates: digest -> row, for those that were answered as duplicates; limited in size.
    is_full: whether rows were refused for lack of room.
    unwritten: file -> its content, for files of a directory on the driver's machine; limited in
        size. The driver writes them.
    """

    topics: dict[str, Counts] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    digests: bytes = b""
    duplicates: dict[bytes, DuplicateRow] = field(default_factory=dict)
    unwritten: dict[str, bytes] = field(default_factory=dict)
    is_full: bool = False

    def counts(self, topic: str) -> Counts:
        """The counts of one topic, which callers may change."""
        return self.topics.setdefault(topic, Counts())

    def total(self) -> Counts:
        """The sum of the counts of all topics."""
        total = Counts()
        for counts in self.topics.values():
            total.add(counts)
        return total


def added(results: Iterable[TaskResult]) -> TaskResult:
    """The sum of all tasks' counts, and their reasons and files."""
    whole = TaskResult()
    for result in results:
        for topic, counts in result.topics.items():
            whole.counts(topic).add(counts)
        whole.reasons += result.reasons[: REASONS - len(whole.reasons)]
        whole.files += result.files
    return whole


def report_of(result: TaskResult, **about: Any) -> dict[str, Any]:
    """The JSON document that option `report` writes."""
    return {
        **about,
        **asdict(result.total()),
        "topics": {topic: asdict(counts) for topic, counts in sorted(result.topics.items())},
        "reasons": result.reasons,
        "refused_files": sorted(result.files),
    }


def write_unwritten(results: Iterable[TaskResult]) -> None:
    """Write the files that tasks on other machines could not write. Called on the driver."""
    for result in results:
        for path, content in result.unwritten.items():
            files.write(path, content)


def write_report(target: str, document: dict[str, Any]) -> None:
    """Write a report to a path or URL, atomically. Raises ConfigError if that fails."""
    files.write(target, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def corrupt_rows(batch: pa.RecordBatch) -> dict[int, str]:
    """Row number -> reason, for the rows that Spark could not read."""
    if CORRUPT not in batch.schema.names:
        return {}
    texts = enumerate(batch.column(CORRUPT).to_pylist())
    return {number: f"cannot be read: {_shown(text)}" for number, text in texts if text is not None}


def _shown(text: str) -> str:
    """The start of a long text, and its end, which may say what is wrong."""
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}"


class Refused:
    """Writes the refused rows of one task to a file of JSON lines `{topic, id, reason, row}`.

    The file name contains run and partition, so a repeated attempt of the task replaces the file.
    Without a directory, only the first reasons are kept, in the result. If the directory is a path
    on the driver's machine, and the task runs on another one, the rows are returned to the driver.

    machine: the driver's, as from `files.machine`; None if it does not matter.
    """

    def __init__(
        self, directory: str | None, name: str, result: TaskResult, *, machine: str | None = None
    ) -> None:
        self._path = files.join(directory, f"{name}.jsonl") if directory else None
        self._is_elsewhere = bool(
            directory and machine and files.is_local(directory) and files.machine() != machine
        )
        self._result = result
        self._stream: Any = None

    def add(
        self,
        batch: pa.RecordBatch | None,
        number: int,
        topic: str,
        message_id: str | None,
        reason: str,
    ) -> None:
        """Add one row of an Arrow batch; batch is None if the row itself is not available."""
        self._result.counts(topic).refused += 1
        if len(self._result.reasons) < REASONS:
            named = f"{topic} {shown_id(message_id)}".strip() if message_id else topic
            self._result.reasons.append(f"{named}: {reason}" if named else reason)
        if self._path is None:
            return
        if self._stream is None:
            self._stream = BytesIO() if self._is_elsewhere else files.open_new(self._path)
            self._result.files.append(self._path)
        row = None
        if batch is not None:
            row = batch.slice(number, 1).to_pylist(maps_as_pydicts="lossy")[0]
        line = {"topic": topic, "id": message_id, "reason": reason, "row": row}
        self._stream.write(msgspec.json.encode(line, enc_hook=str) + b"\n")
        if self._is_elsewhere and self._stream.tell() > RETURNED_BYTES:
            raise LisaError(
                f"option 'refused': a task on {socket.gethostname()} refused more rows than it can "
                f"return to the driver's directory {self._path}; name a directory that all "
                "machines share, as in s3a://bucket/refused, and run the job again"
            )

    def close(self) -> None:
        """Close the file."""
        if self._stream is None:
            return
        if self._is_elsewhere and self._path is not None:
            self._result.unwritten[self._path] = self._stream.getvalue()
        self._stream.close()
