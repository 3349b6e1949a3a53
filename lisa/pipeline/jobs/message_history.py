"""The last known state of messages: the archive combined with the tail of the journal.

The tail are the events on the server that are not archived yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf

from lisa.admin.reading import entry_number
from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.model.sharding import Topic, shard_suffix, topic_of, topics_of
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store, SyncStore, grouped
from lisa.pipeline.archive.schemas import EVENT_SCHEMA
from lisa.pipeline.session import parallelism
from lisa.pipeline.source.events import START, JournalGap, Mark, before, number_of
from lisa.pipeline.source.following import TRIMMED, journaled, journals, read_range
from lisa.pipeline.source.read_columns import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lisa.pipeline.archive import Archive
    from lisa.pipeline.server import Server

KEY = ["topic", "id"]


def topics_in(archive: Archive, topics: Sequence[str] | None) -> list[str]:
    """The given topics, by default all topics of the archive, sorted.

    Raises ConfigError if the archive lacks one of them.
    """
    known = {*archive.topics(), *topics_of(archive.offsets())}
    unknown = sorted({*(topics or ())} - known)
    if unknown:
        raise ConfigError(
            f"the archive has no topic {', '.join(unknown)}; "
            f"its topics are {', '.join(sorted(known)) or 'none'}"
        )
    return sorted({*(topics or known)})


def fold_with_archive(archive: Archive, rest: DataFrame) -> DataFrame:
    """Fold the messages concerned by newer events, from archived and newer events: MESSAGES_SCHEMA.

    rest: events after the archive's last ones, rows of EVENT_SCHEMA.
    """
    from lisa.pipeline.archive.fold import fold

    rest = rest.where(sf.col("id").isNotNull())
    earlier = archive.log().join(rest.select(KEY).distinct(), KEY, "left_semi")
    events = EVENT_SCHEMA.names
    return fold(earlier.select(*events).unionByName(rest.select(*events)))


def merged(archive: Archive, fresh: DataFrame | None) -> DataFrame:
    """The archive's messages; rows of `fresh` replace those of the same topic and id."""
    messages = archive.messages()
    if fresh is None:
        return messages
    touched = fresh.select(KEY).distinct()
    return messages.join(touched, KEY, "left_anti").unionByName(fresh.select(*messages.columns))


def latest_lives(
    spark: SparkSession, reopen: Callable[[], Archive], server: Server, ids: DataFrame
) -> DataFrame | None:
    """The lives of some ids (rows of topic, id), MESSAGES_SCHEMA; None without ids.

    Reopens the archive, then reads the tail of the journal: everything that the server forgot
    before this call is in one of them. A life may occur twice, as archived and as it is now.
    """
    topics = [row.topic for row in ids.select("topic").distinct().collect()]
    if not topics:
        return None
    archive = reopen()
    with server.open() as store:
        ahead = store.drive(find_remainders(store, archive, topics))
    rest = read_remainders(spark, server, ahead)
    known = archive.messages().join(ids, KEY, "left_semi")
    if rest is None:
        return known
    behind = rest.join(ids, KEY, "left_semi")
    return known.unionByName(fold_with_archive(archive, behind))


@dataclass(frozen=True, slots=True)
class Remainder:
    """One journal's events that are not archived yet, as entry ids and event numbers.

    after, after_number: the last archived event.
    first, first_number, last, last_number: the first and last event on the server after it; None
        if there are no such events.
    whole: whether no event is missing between the archive and the server's present state.
    """

    journal: str
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
        return topic_of(self.journal)

    @property
    def shard(self) -> str | None:
        """The shard that the journal belongs to; None for the topic's own journal."""
        return shard_suffix(self.journal)

    @property
    def archived_ms(self) -> int | None:
        """Time of the last archived event in epoch ms; None if no event was archived."""
        return entry_number(self.after)[0] or None

    @property
    def first_ms(self) -> int | None:
        """Time of the first event that is not archived, in epoch ms; None without such events."""
        return None if self.first is None else entry_number(self.first)[0]


def find_remainder(store: Store, journal: str, offset: tuple[str, int] | None) -> Flow[Remainder]:
    """The events of a journal after an archive's offset; sends two commands of one entry each.

    The journal is whole if its last event is the one at the offset, if no event was written since
    (an erasure deletes events), or if its next event has the next number: none of these is true
    for a server that came back empty or older.
    """
    after, number = offset or START
    key = store.keys.topic(journal).events
    ahead, latest = yield from store.commands(
        [
            ("XRANGE", key, f"({after}", "+", "COUNT", 1),
            ("XREVRANGE", key, "+", "-", "COUNT", 1),
        ]
    )
    last = latest[0][0].decode() if latest else None
    if not ahead:
        whole = last == after
        if not whole and number:
            whole = (yield from journaled(store, store.keys.topic(journal))) == number
        return Remainder(journal, after, number, None, None, None, None, whole=whole)
    first, first_number = ahead[0][0].decode(), number_of(ahead[0])
    whole = first_number == number + 1
    return Remainder(
        journal, after, number, first, first_number, last, number_of(latest[0]) or 0, whole=whole
    )


def find_remainders(store: Store, archive: Archive, topics: Iterable[str]) -> Flow[list[Remainder]]:
    """The remainders of all journals of some topics, known to the archive or the server.

    Skips journals of earlier shards whose loss the archive has recorded as a gap, unless the topic
    has no others. For a topic without journals, checks the topic's own journal.
    """
    topics = sorted(set(topics))
    if not topics:
        return []
    offsets, found = archive.offsets(), list[Remainder]()
    ends = {
        gap.journal
        for gap in archive.gaps()
        if gap.to_id is None
        and gap.journal in offsets
        and entry_number(gap.after_id or "0-0") >= entry_number(offsets[gap.journal][0])
    }
    there = yield from journals(store, topics)
    layouts = yield from store.layouts(list(map(Topic, topics)))
    names = grouped((topic_of(journal), journal) for journal in sorted({*there, *offsets}))
    for topic, layout in zip(topics, layouts, strict=True):
        current, own, gone = layout.current(Topic(topic)), list[Remainder](), list[Remainder]()
        for journal in names.get(Topic(topic), [topic]):
            one = yield from find_remainder(store, journal, offsets.get(journal))
            left = one.first is None and journal not in current and journal in ends
            (gone if left else own).append(one)
        found += own or gone
    return found


def read_remainders(
    spark: SparkSession, server: Server, remainders: Iterable[Remainder]
) -> DataFrame | None:
    """The events of remainders as rows of EVENT_SCHEMA, read by the workers; None without events.

    Actions on the rows raise LisaError if events were trimmed since the remainders were found.
    """
    spans = []
    for remainder in remainders:
        if remainder.first is None:
            continue
        begin = Mark(remainder.after, remainder.after_number)
        if remainder.first_number is not None:  # callers report events missing before it
            begin = Mark(before(remainder.first), remainder.first_number - 1)
        spans.append((remainder.journal, *begin, remainder.last, remainder.last_number))
    if not spans:
        return None
    columns = "journal string, after string, after_number bigint, last string, last_number bigint"
    planned = spark.createDataFrame(spans, columns)
    planned = planned.repartition(min(len(spans), parallelism(spark)), "journal")

    def events(batches: Iterator[Any]) -> Iterator[Any]:
        schema = arrow_schema(EVENT_SCHEMA)
        with server.open() as store:
            for span in (row for batch in batches for row in batch.to_pylist()):
                begin = Mark(span["after"], span["after_number"])
                end = Mark(span["last"], span["last_number"])
                for found in read_range(store, span["journal"], begin, end, schema):
                    if not isinstance(found, JournalGap):
                        yield found
                    elif _is_trimmed(store, found):
                        raise LisaError(
                            f"the journal of topic {found.journal!r} was trimmed while it was "
                            "read, because an archive has advanced; run this job again"
                        )

    return planned.mapInArrow(events, EVENT_SCHEMA)


def _is_trimmed(store: SyncStore, gap: JournalGap) -> bool:
    """Whether the gap is at the start of the journal, and not a hole inside it."""
    if gap.why != TRIMMED:
        return False
    begins = store.ask("XRANGE", store.keys.topic(gap.journal).events, "-", "+", "COUNT", 1)
    return not begins or entry_number(begins[0][0].decode()) > entry_number(gap.behind)
