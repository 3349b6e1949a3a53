"""What a check found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from lisa.core.errors import LisaError, ServerUnavailable
from lisa.core.flow import Flow
from lisa.core.shards import base

__all__ = ["KINDS", "Finding", "Report", "attempt"]

T = TypeVar("T")

KINDS = {
    "no-place": "a body whose message stands nowhere",
    "no-body": "a record of a message that is not live",
    "entry-lost": "the index names a stream entry that is gone",
    "second-place": "a message in two places at once",
    "leftover": "failures remembered of a message that the group does not owe",
    "foreign-entry": "a stream entry that the index does not name",
    "pending-lost": "a delivery on the pending list whose entry is gone",
    "no-stream": "a declared group without its stream",
    "undeclared-group": "keys of a group that is not declared",
    "stray-group": "a group that a shard declares and its topic does not",
    "unregistered": "a topic with messages that no manager can know of",
    "bad-id": "an id that no sender of ours can have written",
    "wrong-type": "a key of another type where one of Lisa's belongs",
}
"""Every kind of finding, and what it means."""

KEPT = 10_000
REMEMBERED = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing that is wrong. `what` says where, or what was done about it."""

    kind: str
    topic: str
    group: str | None = None
    id: str | None = None
    what: str = ""
    repaired: bool = False

    def after(self, repair: object) -> Finding:
        """The same once its repair was tried: repaired, or with the error that it ended in."""
        if not isinstance(repair, LisaError):
            return replace(self, repaired=True)
        return replace(self, what=f"{self.what}; not repaired: {repair}".removeprefix("; "))


def attempt(repair: Flow[T]) -> Flow[T | LisaError]:
    """What a repair answers, or its error: the check goes on.

    Raises ServerUnavailable, also where the server takes no writes (full, or a replica).
    """
    try:
        return (yield from repair)
    except ServerUnavailable:
        raise
    except LisaError as error:
        return error


@dataclass(slots=True)
class Report:
    """All that was found: every finding is counted, the first 10,000 are kept."""

    found: Callable[[Finding], None] | None = None
    topics: list[str] = field(default_factory=list)
    bodies: int = 0
    records: int = 0
    entries: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    repaired: int = 0
    findings: list[Finding] = field(default_factory=list)
    _named: set[tuple[str, str, str]] = field(default_factory=set, repr=False)

    @property
    def total(self) -> int:
        """How many findings there are."""
        return self.kinds.total()

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong (any more)."""
        return self.repaired == self.total

    def add(self, finding: Finding) -> None:
        """Count a finding, keep it if there is room, and tell whoever listens.

        An id is met in several places, and by SCAN more than once: it is named once a kind.
        """
        if base(finding.topic) != finding.topic:
            what = f"{finding.what}, in shard {finding.topic}".removeprefix(", ")
            finding = replace(finding, topic=base(finding.topic), what=what)
        if finding.id is not None:
            name = (finding.kind, finding.topic, finding.id)
            if name in self._named:
                return
            if len(self._named) < REMEMBERED:
                self._named.add(name)
        self.kinds[finding.kind] += 1
        self.repaired += finding.repaired
        if len(self.findings) < KEPT:
            self.findings.append(finding)
        if self.found is not None:
            self.found(finding)
