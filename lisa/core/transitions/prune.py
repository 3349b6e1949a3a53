"""Takes from a topic's journal what the archives have, or what it has no room for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lisa.core.keys import TopicKeys
from lisa.core.transitions.base import Argument, Transition

__all__ = ["ARCHIVE_HOLDS_MS", "NOT_AN_ARCHIVE", "RECORD", "Prune", "Pruned"]

ARCHIVE_HOLDS_MS = 2 * 86_400_000
"""So long after its last report an archive is waited for: one that runs each night is."""

NOT_AN_ARCHIVE = "~"
"""So begin the fields beside the archives' records: what was trimmed, and when."""

RECORD = re.compile(r"([0-9]+-[0-9]+) ([0-9]+) ([0-9]+)")
"""What an archive reports, entry, number and when: one of another form holds nothing back."""


class Pruned(NamedTuple):
    """Events removed, those of them that no archive had taken, those left; whether to go on."""

    removed: int
    lost: int
    left: int
    more: bool


@dataclass(frozen=True, slots=True)
class Prune(Transition[Pruned]):
    """One call takes at most `limit` events. `archives` are the names that have a record.

    With bodies of several KB each event has memory of its own to give back: ten thousand of them
    would hold up the server for 5 to 9 ms.
    """

    script: ClassVar[str] = "prune"
    topic: str
    archives: Sequence[str] = ()
    hold_ms: int = ARCHIVE_HOLDS_MS
    limit: int = 5_000

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return (keys.archived,)

    def args(self) -> Sequence[Argument]:
        return [self.hold_ms, self.limit, len(self.archives), *self.archives]

    def parse(self, reply: Sequence[Any]) -> Pruned:
        removed, lost, left, more = reply
        return Pruned(removed, lost, left, bool(more))
