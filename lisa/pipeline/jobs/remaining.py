"""What is left of the journal: the events on the server that no archive has taken yet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lisa.admin.reading import entry_number
from lisa.core.errors import LisaError
from lisa.core.flow import Flow
from lisa.core.shards import base, shard_of
from lisa.core.store import Store, SyncStore
from lisa.pipeline.archive.schemas import EVENT_SCHEMA
from lisa.pipeline.jobs.standing import by_topic
from lisa.pipeline.source.events import number_of
from lisa.pipeline.source.following import TRIMMED, journals
from lisa.pipeline.source.marks import START, Gap, Mark, before
from lisa.pipeline.source.read_columns import arrow_schema
from lisa.pipeline.source.stretches import read_stretch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lisa.pipeline.archive import Archive
    from lisa.pipeline.jobs.server import Server

__all__ = ["Remainder", "look", "look_at", "read"]

MOST_ENTRIES = 500
REPLY_BYTES = 512 * 1024
"""A reply of about this size keeps the server for a millisecond or two."""


@dataclass(frozen=True, slots=True)
class Remainder:
    """One journal's events behind the archive. Entry ids, and the events' running numbers.

    after, after_number: how far the archive has come.
    first, first_number, last, last_number: of the events on the server behind it; None where
        there are none.
    whole: nothing is missing between the archive and the server's present state.
    """

    place: str
    after: str
    after_number: int
    first: str | None
    first_number: int | None
    last: str | None
    last_number: int | None
    whole: bool

    @property
    def topic(self) -> str:
        """The topic that the journal belongs to."""
        return base(self.place)

    @property
    def shard(self) -> str | None:
        """The topic's shard that the journal belongs to."""
        return shard_of(self.place)

    @property
    def archived_ms(self) -> int | None:
        """When the last archived event happened; None if there is none."""
        return entry_number(self.after)[0] or None

    @property
    def first_ms(self) -> int | None:
        """When the first event behind it happened."""
        return None if self.first is None else entry_number(self.first)[0]


def look(store: Store, place: str, offset: tuple[str, int] | None) -> Flow[Remainder]:
    """How a journal goes on behind an archive's offset: two commands of one entry each.

    It is whole only where the server still has the event at the offset as its last one, or goes on
    with the next number: a server that came back empty or older can do neither.
    """
    after, number = offset or START
    key = store.keys.topic(place).events
    ahead, latest = yield from store.commands([
        ("XRANGE", key, f"({after}", "+", "COUNT", 1), ("XREVRANGE", key, "+", "-", "COUNT", 1),
    ])  # fmt: skip
    last = latest[0][0].decode() if latest else None
    if not ahead:
        return Remainder(place, after, number, None, None, None, None, whole=last == after)
    first, first_number = ahead[0][0].decode(), number_of(ahead[0])
    whole = first_number == number + 1
    return Remainder(
        place, after, number, first, first_number, last, number_of(latest[0]) or 0, whole=whole
    )


def look_at(store: Store, archive: Archive, topics: Iterable[str]) -> Flow[list[Remainder]]:
    """The same for all journals of some topics: those that the archive knows, or the server.

    Not those of earlier shards that went with a server, and whose loss the archive has recorded,
    unless a topic has no others. A topic without any is looked at in its own place.
    """
    topics = sorted(set(topics))
    if not topics:
        return []
    offsets, found = archive.offsets(), list[Remainder]()
    ends = {
        gap.place for gap in archive.gaps()
        if gap.to_id is None and gap.place in offsets
        and entry_number(gap.after_id or "0-0") >= entry_number(offsets[gap.place][0])
    }  # fmt: skip
    there = yield from journals(store, topics)
    layouts = yield from store.layouts(topics)
    places = by_topic(sorted({*there, *offsets}), base)
    for topic, layout in zip(topics, layouts, strict=True):
        current, own, gone = layout.current(topic), list[Remainder](), list[Remainder]()
        for place in places.get(topic, [topic]):
            one = yield from look(store, place, offsets.get(place))
            left = one.first is None and place not in current and place in ends
            (gone if left else own).append(one)
        found += own or gone
    return found


def read(spark: SparkSession, server: Server, remainders: Iterable[Remainder]) -> DataFrame | None:
    """These events as rows of EVENT_SCHEMA, read by the workers; None if there are none.

    Whoever acts on the rows gets a LisaError if some were trimmed since the look at them.
    """
    spans = []
    for one in remainders:
        if one.first is None:
            continue
        begin = Mark(one.after, one.after_number)
        if one.first_number is not None:  # what is missing before it is told by whoever looked
            begin = Mark(before(one.first), one.first_number - 1)
        spans.append((one.place, *begin, one.last, one.last_number))
    if not spans:
        return None
    columns = "place string, after string, after_number bigint, last string, last_number bigint"
    planned = spark.createDataFrame(spans, columns).repartition(len(spans), "place")

    def events(batches: Iterator[Any]) -> Iterator[Any]:
        schema = arrow_schema(EVENT_SCHEMA)
        with server.open() as store:
            for span in (row for batch in batches for row in batch.to_pylist()):
                begin = Mark(span["after"], span["after_number"])
                end = Mark(span["last"], span["last_number"])
                for found in read_stretch(store, span["place"], begin, end, schema):
                    if not isinstance(found, Gap):
                        yield found
                    elif _is_trimmed(store, found):
                        raise LisaError(
                            f"the journal of topic {found.place!r} was trimmed while it was read: "
                            "an archive has moved on; run this again"
                        )

    return planned.mapInArrow(events, EVENT_SCHEMA)


def _is_trimmed(store: SyncStore, gap: Gap) -> bool:
    """Whether events went from the journal's beginning on: not a hole that was there before."""
    if gap.why != TRIMMED:
        return False
    begins = store.ask("XRANGE", store.keys.topic(gap.place).events, "-", "+", "COUNT", 1)
    return not begins or entry_number(begins[0][0].decode()) > entry_number(gap.behind)
