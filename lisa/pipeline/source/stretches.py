"""Reads the events between two places of a journal, in pages that hold up nobody.

A page's reply stays about a megabyte: the sizes of the entries before say how many the next may
have, and none has so many that the largest of late would keep the server busy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lisa.pipeline.source.events import Events, Item, Size, number_of
from lisa.pipeline.source.following import OLDER, TRIMMED
from lisa.pipeline.source.marks import Gap, Mark

if TYPE_CHECKING:
    import pyarrow as pa

    from lisa.core.store import SyncStore

__all__ = ["Pace", "read_stretch"]

FIRST_PAGE = 4  # within WORST_BYTES for bodies of a megabyte
LARGEST_PAGE = 64  # larger ones are no faster; a jump to large envelopes costs one page
PAGE_BYTES = 1 << 20
WORST_BYTES = 4 << 20  # what a page may have if all its entries were like the largest of late
BATCH_ROWS = 20_000
BATCH_BYTES = 16 << 20


class Pace:
    """How many entries the next page may have."""

    def __init__(self) -> None:
        self.count = FIRST_PAGE
        self._largest = 0.0

    def learn(self, items: int, size: Size) -> None:
        """Take in how large a page was."""
        # A large one is remembered for some pages: where one was, there are more.
        self._largest = max(float(size.largest), self._largest * 0.95)
        mean = size.total / max(items, 1)
        self.count = max(1, min(
            2 * self.count, LARGEST_PAGE, int(PAGE_BYTES / max(mean, 1.0)),
            int(WORST_BYTES / max(self._largest, 1.0)),
        ))  # fmt: skip


def read_stretch(
    store: SyncStore, place: str, begin: Mark, end: Mark, schema: pa.Schema
) -> Iterator[pa.RecordBatch | Gap]:
    """The events behind `begin` up to `end`, and each gap among them where it is found."""
    key = store.keys.topic(place).events
    events, pace = Events(place, schema), Pace()
    here = begin
    while True:
        items = store.ask("XRANGE", key, f"({here.entry}", end.entry, "COUNT", pace.count)
        if not items:
            break
        numbers, size = events.add(items)
        pace.learn(len(items), size)
        if numbers != list(range(here.number + 1, here.number + 1 + len(numbers))):
            yield from _gaps(place, here, items)
        here = Mark(items[-1][0].decode(), numbers[-1] if numbers else here.number)
        if len(events) >= BATCH_ROWS or events.size >= BATCH_BYTES:
            yield events.take()
    if len(events):
        yield events.take()
    if here.number < end.number:
        yield Gap(place, TRIMMED, here.entry, here.number + 1, end.number, None)


def _gaps(place: str, here: Mark, items: Sequence[Item]) -> Iterator[Gap]:
    """The gaps in a page whose first event should be the one after `here`."""
    for item in items:
        number = number_of(item)
        if number is None:
            continue
        entry, wanted = item[0].decode(), here.number + 1
        if number > wanted:
            yield Gap(place, TRIMMED, here.entry, wanted, number - 1, entry)
        elif number < wanted:
            yield Gap(place, OLDER, here.entry, wanted, None, entry)
        here = Mark(entry, number)
