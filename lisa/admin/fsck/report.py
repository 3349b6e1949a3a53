"""The findings of a check."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TypeVar

from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.model.sharding import Topic, topic_of
from lisa.core.redis.flow import Flow

T = TypeVar("T")

KINDS = {
    "no-place": "a body whose message has no state",
    "no-body": "a record of a message that is not live",
    "entry-lost": "the index names a stream entry that is gone",
    "second-place": "a message in two states at once",
    "leftover": "failed attempts of a message that the group does not have",
    "foreign-entry": "a stream entry that is not in the index",
    "pending-lost": "a delivery on the pending list whose entry is gone",
    "no-stream": "a declared group without a stream",
    "undeclared-group": "keys of a group that is not declared",
    "stray-group": "a group that a shard declares and its topic does not",
    "unregistered": "a topic with messages that managers do not know",
    "bad-id": "an id that no producer can have written",
    "wrong-type": "a key of Lisa's with a wrong type",
}
"""Every kind of finding and its meaning. Journals store these names: do not rename one."""

KEPT = 10_000
"""Maximum number of findings in a report; further ones are only counted."""

REMEMBERED = 1_000_000
"""Maximum number of findings that are remembered, so that each is counted once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One inconsistency; `what` has details and, after a repair, its result."""

    kind: str
    topic: str
    group: str | None = None
    id: str | None = None
    what: str = ""
    repaired: bool = False

    def after(self, repair: object) -> Finding:
        """This finding after an attempted repair: repaired, or with the repair's error."""
        if not isinstance(repair, LisaError):
            return replace(self, repaired=True)
        return replace(self, what=f"{self.what}; not repaired: {repair}".removeprefix("; "))


def attempt(repair: Flow[T]) -> Flow[T | LisaError]:
    """A repair's result or error, so that the check can continue.

    Raises ServerUnavailable, also if the server accepts no writes (out of memory, or a replica).
    """
    try:
        return (yield from repair)
    except ServerUnavailable:
        raise
    except LisaError as error:
        return error


@dataclass(slots=True)
class CheckReport:
    """The findings of a check: all are counted, the first 10,000 are kept."""

    topics: list[Topic] = field(default_factory=list)
    bodies: int = 0
    records: int = 0
    entries: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    repaired: int = 0
    findings: list[Finding] = field(default_factory=list)
    _named: set[tuple[str, str, str]] = field(default_factory=set, repr=False)

    @property
    def total(self) -> int:
        """Number of findings."""
        return self.kinds.total()

    @property
    def ok(self) -> bool:
        """Whether there are no findings, or all are repaired."""
        return self.repaired == self.total

    def add(self, finding: Finding) -> None:
        """Count and keep a finding.

        Findings of the same kind and id count once: several records can name an id, and SCAN can
        return a record more than once.
        """
        if topic_of(finding.topic) != finding.topic:
            what = f"{finding.what}, in shard {finding.topic}".removeprefix(", ")
            finding = replace(finding, topic=topic_of(finding.topic), what=what)
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
