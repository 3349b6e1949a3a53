"""Reads the events between two positions of a journal, in calls of bounded size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from lisa.core.transitions.journal import Read
from lisa.pipeline.source.events import Events, Item, number_of
from lisa.pipeline.source.following import OLDER, TRIMMED
from lisa.pipeline.source.marks import JournalGap, Mark

if TYPE_CHECKING:
    import pyarrow as pa

    from lisa.core.store.store import SyncStore

BATCH_ROWS = 20_000
BATCH_BYTES = 16 << 20


def read_range(
    store: SyncStore, journal: str, begin: Mark, end: Mark, schema: pa.Schema
) -> Iterator[pa.RecordBatch | JournalGap]:
    """The events after `begin` up to `end`, and each gap between them at its position."""
    events = Events(journal, schema)
    yield from add_range(store, journal, begin, end, events)
    if len(events):
        yield events.take()


def add_range(
    store: SyncStore, journal: str, begin: Mark, end: Mark, events: Events
) -> Iterator[pa.RecordBatch | JournalGap]:
    """As `read_range`, but the last events, too few for a record batch, are left in `events`."""
    here = begin
    events.turn_to(journal)
    for items in read_pages(store, journal, f"({begin.entry}", end.entry):
        numbers = events.add(items)
        if numbers != list(range(here.number + 1, here.number + 1 + len(numbers))):
            yield from _gaps(journal, here, items)
        here = Mark(items[-1][0].decode(), numbers[-1] if numbers else here.number)
        if len(events) >= BATCH_ROWS or events.size >= BATCH_BYTES:
            yield events.take()
    if here.number < end.number:
        yield JournalGap(journal, TRIMMED, here.entry, here.number + 1, end.number, None)


def read_pages(store: SyncStore, journal: str, start: str, end: str) -> Iterator[list[Item]]:
    """The entries of a journal between two ids, in calls of bounded size."""
    is_last = False
    while not is_last:
        is_last, items = store.call(Read(journal, start, end))
        if not items:
            return
        yield items
        start = f"({items[-1][0].decode()}"


def _gaps(journal: str, here: Mark, items: Sequence[Item]) -> Iterator[JournalGap]:
    """The gaps in a page of entries; the first event should be the one after `here`."""
    for item in items:
        number = number_of(item)
        if number is None:
            continue
        entry, wanted = item[0].decode(), here.number + 1
        if number > wanted:
            yield JournalGap(journal, TRIMMED, here.entry, wanted, number - 1, entry)
        elif number < wanted:
            yield JournalGap(journal, OLDER, here.entry, wanted, None, entry)
        here = Mark(entry, number)
