"""Positions in a journal, and gaps between events.

Events of a journal are numbered 1, 2, 3, ..., so the number of events between two positions is
known, and missing events can be named. Each shard of a sharded topic has its own journal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from lisa.admin.reading import entry_number
from lisa.core.model.clock import ms_datetime, utc_text
from lisa.core.model.sharding import shard_suffix, topic_of

_LARGEST = 2**63 - 1  # largest sequence number in Spark's bigint; Redis allows larger ones

ARCHIVE_ADVICE = (
    "To record this gap and continue, run the archive again with --on-gap record (in a program: "
    "on_gap='record'). To prevent gaps, run the archive more often, or raise the topic's "
    "journal_max"
)
"""The advice of the job `archive`, instead of `ADVICE`."""

ADVICE = (
    "To continue without these events, set option fail_on_gap=false: each gap is then one row of "
    "state 'gap'. To prevent gaps, read more often, raise the topic's journal_max, or set option "
    "archive to a name: the journal then keeps events until this reader has read them"
)


class Mark(NamedTuple):
    """A position in a journal, right after an event: the event's entry id and number."""

    entry: str
    number: int

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Self:
        """Convert from the form stored in an offset."""
        return cls(str(stored["id"]), int(stored["n"]))

    def stored(self) -> dict[str, Any]:
        """The form stored in an offset."""
        return {"id": self.entry, "n": self.number}

    @property
    def where(self) -> tuple[int, int]:
        """The entry id as milliseconds and sequence number, which compare like ids."""
        return entry_number(self.entry)


START = Mark("0-0", 0)
"""The position before the first event."""


class JournalGap(NamedTuple):
    """Missing events of a journal.

    why: the reason. behind: entry id of the last event before the gap. first, last: numbers of the
    first and last missing event; `last` is None if the server came back empty or older, so that
    their number is unknown. until: entry id of the first event after the gap, None if there is none
    yet.
    """

    journal: str
    why: str
    behind: str
    first: int
    last: int | None
    until: str | None

    @property
    def where(self) -> tuple[int, int]:
        """The gap's position in the order of events: right after the event before it."""
        return entry_number(after(self.behind))

    def describe(self) -> str:
        """The gap as text: event numbers, entry ids with times, and the reason."""
        if self.last is None:
            what = f"an unknown number of events from {self.first} on"
        elif self.first == self.last:
            what = f"event {self.first}"
        else:
            what = f"events {self.first} to {self.last}"
        until = f", before {_shown(self.until)}" if self.until else ""
        shard = shard_suffix(self.journal)
        of = f"{topic_of(self.journal)!r}, shard {shard}," if shard else repr(self.journal)
        return (
            f"the journal of topic {of} lacks {what}: "
            f"after {_shown(self.behind)}{until}: {self.why}"
        )


def _shown(entry: str) -> str:
    try:
        at = ms_datetime(entry_number(entry)[0])
    except OverflowError:
        return entry
    return f"{entry} ({utc_text(at)})"


def after(entry: str) -> str:
    """The smallest id greater than `entry`."""
    milliseconds, sequence = entry_number(entry)
    if sequence >= _LARGEST:
        return f"{milliseconds + 1}-0"
    return f"{milliseconds}-{sequence + 1}"


def before(entry: str) -> str:
    """The largest id smaller than `entry`."""
    milliseconds, sequence = entry_number(entry)
    if sequence:
        return f"{milliseconds}-{sequence - 1}"
    return f"{milliseconds - 1}-{_LARGEST}" if milliseconds else "0-0"


def shares(counts: Mapping[str, int], limit: int) -> dict[str, int]:
    """Split `limit` fairly: journal -> number of events; small journals are read whole."""
    given: dict[str, int] = {}
    left = limit
    ordered = sorted(counts.items(), key=lambda pair: (pair[1], pair[0]))
    for i, (journal, count) in enumerate(ordered):
        fair = -(-left // (len(ordered) - i))
        given[journal] = min(count, fair)
        left -= given[journal]
    return given
