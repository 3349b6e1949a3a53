"""Outcomes of rows: counted per task, added up on the driver, written as a report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec
from pyspark.sql.datasource import WriterCommitMessage

from lisa.pipeline.source import files

REASONS = 10
"""Maximum number of reasons of refused rows in a report."""


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


@dataclass(slots=True)
class TaskResult(WriterCommitMessage):
    """The result of one task.

    digests: concatenated digests of all sent rows whose ids were derived (see `identity`).
    duplicates: digest -> row, for those that were answered as duplicates; limited in size.
    unwritten: file -> its content, for files of a directory on the driver's machine; limited in
        size. The driver writes them.
    """

    topics: dict[str, Counts] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    digests: bytes = b""
    duplicates: dict[bytes, DuplicateRow] = field(default_factory=dict)
    unwritten: dict[str, bytes] = field(default_factory=dict)

    def counts(self, topic: str) -> Counts:
        """The counts of one topic, which callers may change."""
        return self.topics.setdefault(topic, Counts())


def added(results: Iterable[TaskResult]) -> TaskResult:
    """The sum of all tasks' counts, and their reasons and files."""
    whole = TaskResult()
    for one in results:
        for topic, counts in one.topics.items():
            whole.counts(topic).add(counts)
        whole.reasons += one.reasons[: REASONS - len(whole.reasons)]
        whole.files += one.files
    return whole


def report_of(result: TaskResult, **about: Any) -> dict[str, Any]:
    """The JSON document that option `report` writes."""
    total = Counts()
    for counts in result.topics.values():
        total.add(counts)
    return {
        **about,
        **asdict(total),
        "topics": {topic: asdict(counts) for topic, counts in sorted(result.topics.items())},
        "reasons": result.reasons,
        "refused_files": sorted(result.files),
    }


def write_unwritten(results: Iterable[TaskResult]) -> None:
    """Write the files that tasks on other machines could not write. Called on the driver."""
    for one in results:
        for path, content in one.unwritten.items():
            files.write(path, content)


def write_report(target: str, document: dict[str, Any]) -> None:
    """Write a report to a path or URL, atomically. Raises ConfigError if that fails."""
    files.write(target, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
