"""What became of rows: counted by task, added up on the driver, written as a report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec
from pyspark.sql.datasource import WriterCommitMessage

from lisa.pipeline.source import files

__all__ = ["REASONS", "Counts", "Spare", "TaskResult", "added", "report_of", "write_report"]

REASONS = 10
"""How many reasons of refused rows a report quotes."""


@dataclass(slots=True)
class Counts:
    """Rows of one topic by outcome."""

    accepted: int = 0
    duplicate: int = 0
    replaced: int = 0
    refused: int = 0

    def add(self, other: Counts) -> None:
        """Count another's too."""
        self.accepted += other.accepted
        self.duplicate += other.duplicate
        self.replaced += other.replaced
        self.refused += other.refused

    def as_dict(self) -> dict[str, int]:
        """By name."""
        return {
            "accepted": self.accepted, "duplicate": self.duplicate,
            "replaced": self.replaced, "refused": self.refused,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Spare:
    """A row that can be sent once more under another ordinal."""

    topic: str
    due: str
    tail: bytes
    ttl_ms: int | None
    policy: str | None


@dataclass(slots=True)
class TaskResult(WriterCommitMessage):
    """What one task did.

    digests: of the rows that were given ids and sent, one behind the other (see `identity`).
    spares: of those of them that were known already, by digest, as many as may be kept.
    """

    topics: dict[str, Counts] = field(default_factory=dict)
    reasons: list[str] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    digests: bytes = b""
    spares: dict[bytes, Spare] = field(default_factory=dict)

    def counts(self, topic: str) -> Counts:
        """Those of one topic, to be added to."""
        return self.topics.setdefault(topic, Counts())


def added(results: Iterable[TaskResult | None]) -> TaskResult:
    """All tasks' counts, reasons and files together."""
    whole = TaskResult()
    for one in results:
        if one is None:
            continue
        for topic, counts in one.topics.items():
            whole.counts(topic).add(counts)
        whole.reasons += one.reasons[: REASONS - len(whole.reasons)]
        whole.files += one.files
    return whole


def report_of(result: TaskResult, **about: Any) -> dict[str, Any]:
    """The document that option `report` asks for."""
    total = Counts()
    for counts in result.topics.values():
        total.add(counts)
    return {
        **about,
        **total.as_dict(),
        "topics": {topic: counts.as_dict() for topic, counts in sorted(result.topics.items())},
        "reasons": result.reasons,
        "refused_files": sorted(result.files),
    }


def write_report(place: str, document: dict[str, Any]) -> None:
    """Write a report where it is wanted, whole or not at all. Raises ConfigError."""
    files.write(place, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
