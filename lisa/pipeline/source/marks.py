"""Marks in a journal, and named gaps between them.

Events carry the numbers 1, 2, 3, ... of their journal, so two marks tell how many events lie
between them, and what is missing has a name. Each place of a topic that is split has a journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, Self

from lisa.admin.reading import entry_number
from lisa.core.shards import base, shard_of

__all__ = ["START", "Gap", "Mark", "after", "before", "shares"]

_LARGEST = 2**63 - 1  # of a sequence number that Spark's bigint can hold; Redis's go further
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

CURE = (
    "To go on without them set the option fail_on_gap=false: each gap is then one row of state "
    "'gap'. So that it does not happen again, read more often, raise the topic's journal_max, or "
    "name this reader with the option archive: the journal then waits for it"
)


class Mark(NamedTuple):
    """A place behind one event: the id of its entry and its number; what follows is not read."""

    entry: str
    number: int

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Self:
        """From its form in an offset."""
        return cls(str(stored["id"]), int(stored["n"]))

    def stored(self) -> dict[str, Any]:
        """Its form in an offset."""
        return {"id": self.entry, "n": self.number}

    @property
    def where(self) -> tuple[int, int]:
        """The entry's id as numbers, which compare as ids do."""
        return entry_number(self.entry)


START = Mark("0-0", 0)
"""Before the first event of all."""


class Gap(NamedTuple):
    """Events that are gone, or that nobody can tell any more.

    `behind` is the last event before them. `first` and `last` are their numbers; `last` is None
    where the server came back empty or older, and so how many there were is unknown. `until` is
    the id of the first event after them, None where there is none yet.
    """

    place: str
    why: str
    behind: str
    first: int
    last: int | None
    until: str | None

    @property
    def where(self) -> tuple[int, int]:
        """A place for the gap in the order of events: right behind the last one before it."""
        return entry_number(after(self.behind))

    def told(self) -> str:
        """The gap in words: numbers, ids, times, and why."""
        if self.last is None:
            what = f"events from {self.first} on, how many is unknown"
        elif self.first == self.last:
            what = f"event {self.first}"
        else:
            what = f"events {self.first} to {self.last}"
        until = f", before {_shown(self.until)}" if self.until else ""
        shard = shard_of(self.place)
        of = f"{base(self.place)!r}, shard {shard}," if shard else repr(self.place)
        return (
            f"the journal of topic {of} lacks {what}: "
            f"behind {_shown(self.behind)}{until}: {self.why}"
        )


def _shown(entry: str) -> str:
    milliseconds = entry_number(entry)[0]
    try:
        at = _EPOCH + timedelta(milliseconds=milliseconds)
    except OverflowError:
        return entry
    return f"{entry} ({at.isoformat(timespec='milliseconds').replace('+00:00', 'Z')})"


def after(entry: str) -> str:
    """The next id that there could be."""
    milliseconds, sequence = entry_number(entry)
    if sequence >= _LARGEST:
        return f"{milliseconds + 1}-0"
    return f"{milliseconds}-{sequence + 1}"


def before(entry: str) -> str:
    """The id before, such that what follows it begins with this one."""
    milliseconds, sequence = entry_number(entry)
    if sequence:
        return f"{milliseconds}-{sequence - 1}"
    return f"{milliseconds - 1}-{_LARGEST}" if milliseconds else "0-0"


def shares(counts: Mapping[str, int], limit: int) -> dict[str, int]:
    """How many of each journal's events fit into `limit`: small ones whole, others alike."""
    given: dict[str, int] = {}
    left = limit
    ordered = sorted(counts.items(), key=lambda pair: (pair[1], pair[0]))
    for i, (place, count) in enumerate(ordered):
        fair = -(-left // (len(ordered) - i))
        given[place] = min(count, fair)
        left -= given[place]
    return given
