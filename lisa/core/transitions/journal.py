"""Reads a topic's journal, and removes its oldest events."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lisa.core.model.keys import TopicKeys
from lisa.core.transitions.base import Argument, Transition, text

MOST_EVENTS = 250


class EventPage(NamedTuple):
    """Events in the form of XRANGE, and whether they include the last one."""

    is_last: bool
    items: list[Any]


@dataclass(frozen=True)
class Read(Transition[EventPage]):
    """Read the first events between two entries, or the last ones if `backwards`.

    start, end: as for XRANGE: `-`, `+`, an entry, or `(` and an entry.
    """

    script: ClassVar[str] = "read"
    fixed_groups: ClassVar[tuple[str, ...]] = ()
    start: str
    end: str
    backwards: bool = False
    most: int = MOST_EVENTS

    def args(self) -> Sequence[Argument]:
        return (self.start, self.end, int(self.backwards), min(self.most, MOST_EVENTS))

    def parse(self, reply: Sequence[Any]) -> EventPage:
        is_last, *items = reply
        return EventPage(bool(is_last), items)


ARCHIVE_HOLDS_MS = 2 * 86_400_000
"""How long events are kept for an archive after its last report; allows for a nightly run."""

NOT_AN_ARCHIVE = "~"
"""Prefix of the fields that are not archive records: what was trimmed, and when."""

_RECORD = re.compile(r"([0-9]+-[0-9]+) ([0-9]+) ([0-9]+)")


class ArchiveRecord(NamedTuple):
    """The last event that an archive has stored, and when it reported this, in epoch ms."""

    entry: str
    number: int
    reported_ms: int


def archive_records(archived: Mapping[bytes, bytes]) -> dict[str, ArchiveRecord]:
    """The records of archives by name, sorted. Other values do not hold events back."""
    found = {}
    for name, value in sorted((text(name), text(value)) for name, value in archived.items()):
        fields = _RECORD.fullmatch(value)
        if fields is not None and not name.startswith(NOT_AN_ARCHIVE):
            found[name] = ArchiveRecord(fields[1], int(fields[2]), int(fields[3]))
    return found


class Pruned(NamedTuple):
    """Events removed, how many of them were not archived, events left, and whether to continue."""

    removed: int
    lost: int
    left: int
    more: bool


@dataclass(frozen=True)
class Prune(Transition[Pruned]):
    """Remove at most `limit` events per call. `archives` are the names of archives with a record.

    With bodies of several KB each event frees its own memory: ten thousand of them would block the
    server for 5 to 9 ms.
    """

    script: ClassVar[str] = "prune"
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
