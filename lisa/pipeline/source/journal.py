"""`spark.readStream.format("lisa")`: reads the journal, exactly once.

An offset has the last event read from each journal, as in {"orders": {"id": "...", "n": 17}}; each
shard of a sharded topic has its own journal, "orders~3of8". If needed, the offset also describes
the start of the batch that ends there: `from`, if the batch does not start at the end of the
previous one, and `gap`. A batch that is repeated after a crash is therefore identical. A journal
without events in the first batch is included with its start position, which distinguishes it from
journals that are created later.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Self

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from lisa.core.model.errors import ConfigError, LisaError
from lisa.core.model.keys import check_topic
from lisa.core.model.sharding import topic_of, topics_of
from lisa.pipeline.server import Server
from lisa.pipeline.source import options
from lisa.pipeline.source.events import ADVICE, START, Events, JournalGap, Mark, gap_batch, shares
from lisa.pipeline.source.following import (
    Unread,
    add_range,
    archived,
    earliest,
    find_unread,
    journals,
    latest,
    mark_at,
    raise_last_id,
    record_archived,
)
from lisa.pipeline.source.read_columns import arrow_schema, checked

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from lisa.core.store.store import SyncStore

_EVENTS_PER_TASK = 25_000  # without option `partitions`
_LIST_JOURNALS_EVERY_S = 1.0  # Spark calls latestOffset a hundred times per second
_log = logging.getLogger("lisa.pipeline")


_NAMES = options.SERVER | {
    "topic",
    "starting",
    "max_events_per_batch",
    "partitions",
    "fail_on_gap",
    "archive",
    "report_progress",
}

_MAX_EVENTS = 500_000

Offset = dict[str, dict[str, Any]]

TASK_EVENTS = 5_000
"""Minimum number of events of a task; a task costs some 10 ms."""

JOURNAL_EVENTS = 50
"""Events that take as long to read as the round trip that each range needs."""


class JournalReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the journals of some topics. Raises ConfigError for invalid options."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        self._options = JournalOptions.parse(given)
        self._schema = checked(schema)
        self._fence: dict[str, Mark] | None = None
        self._news: Offset | None = None
        self._journals: list[str] = []
        self._listed_at = float("-inf")
        self._open: SyncStore | None = None

    def __getstate__(self) -> dict[str, Any]:
        """The state without the connection; workers open their own."""
        return {**self.__dict__, "_open": None}

    @property
    def _store(self) -> SyncStore:
        if self._open is None:
            self._open = self._options.server.connect()
        return self._open

    def initialOffset(self) -> Offset:  # noqa: N802  Spark's names
        """The start offset of a new query.

        Journals without an offset start after the last event recorded by their archive, or at their
        first event, when they are first seen.
        """
        if self._options.from_earliest:
            return {}
        store, offset = self._store, {}
        lasts = store.drive(latest(store, self._known_journals()))
        for journal in sorted({*lasts, *self._options.topics}):
            last = lasts.get(journal)
            recorded = self._recorded(journal)
            if recorded is None and self._is_followed(journal):
                recorded = START
            offset[journal] = (recorded or last or START).stored()
        return offset

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """At most `max_events_per_batch`, summed over all topics."""
        return ReadMaxRows(self._options.max_events)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Remember the present last events; nothing after this fence is read."""
        store = self._store
        lasts = store.drive(latest(store, self._known_journals()))
        self._fence = {journal: last for journal, last in lasts.items() if last is not None}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """The end offset of the next batch; equal to `start` if there are no new events.

        Raises LisaError if there is a gap and `fail_on_gap` is set.
        """
        store = self._store
        names = sorted({*self._known_journals(), *start})
        lasts = store.drive(latest(store, names))
        self._news = {journal: last.stored() for journal, last in lasts.items() if last is not None}
        ahead: dict[str, Unread] = {}
        for journal in names:
            found = self._ahead(journal, start, lasts[journal])
            if found is not None:
                ahead[journal] = found
        ends = self._ends(ahead, limit, start)
        offset = dict(start)
        for journal, end in ends.items():
            offset[journal] = stored_offset(start.get(journal), ahead[journal], end)
        return dict(sorted(offset.items()))

    def _ahead(self, journal: str, start: Offset, last: Mark | None) -> Unread | None:
        """The unread events of one journal, up to the fence. Raises LisaError for a gap."""
        store = self._store
        begin = Mark.of(start[journal]) if journal in start else self._begin(journal, start)
        if begin is None:
            return None
        found = store.drive(find_unread(store, journal, begin, last))
        if found is None:
            return None
        if found.gap is not None:
            self._handle_gap(found.gap)
            if found.older:
                store.drive(raise_last_id(store, journal, found.begin))
        return found if self._fence is None else self._fenced(found, self._fence.get(journal))

    def _begin(self, journal: str, start: Offset) -> Mark | None:
        """The start position of a journal that was not read before; None if it is empty.

        If this reader or its archive already follows another journal of the topic, a new journal
        starts at event number 1, so that trimmed events are reported as a gap.
        """
        recorded = self._recorded(journal)
        if recorded is not None:
            return recorded
        if topic_of(journal) in topics_of(start) or self._is_followed(journal):
            return START
        return self._store.drive(earliest(self._store, journal))

    def _fenced(self, found: Unread, fence: Mark | None) -> Unread | None:
        """The unread events up to the fence; only the gap if all events are after the fence."""
        if fence is not None and fence.where >= found.last.where:
            return found
        # After the server came back older or empty, the fence may be from before its return.
        inside = fence is not None and found.begin.where < fence.where
        if inside and fence is not None and found.begin.number < fence.number:
            return found._replace(last=fence)
        return found._replace(last=found.begin) if found.gap is not None else None

    def _ends(
        self, ahead: Mapping[str, Unread], limit: ReadLimit, start: Offset
    ) -> dict[str, Mark]:
        """The end of the next batch in each journal, within the limit."""
        ends = {journal: one.last for journal, one in ahead.items()}
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        counts = {
            journal: one.last.number - one.begin.number
            for journal, one in ahead.items()
            if one.last.number > one.begin.number
        }
        if most is None or sum(counts.values()) <= most:
            return ends
        store = self._store
        for journal, share in shares(counts, most).items():
            one = ahead[journal]
            if share < counts[journal]:
                wanted, slack = one.begin.number + share, share // 20
                end = store.drive(mark_at(store, journal, (one.begin, one.last), wanted, slack))
                ends[journal] = end
                stays = end == one.begin and one.gap is None
                if stays and (journal in start or self._recorded(journal) is not None):
                    del ends[journal]  # a journal without offset gets its start position
        return ends

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """The last known event of each journal."""
        return self._news

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """The batch between two offsets, distributed over tasks.

        Large journals are split; a task reads any number of small ones.
        """
        batch = [
            range_of(journal, start.get(journal), ends)
            for journal, ends in end.items()
            if ends != start.get(journal)
        ]
        total = sum(max(0, span.end.number - span.begin.number) for span in batch)
        most = self._options.partitions or max(2, total // _EVENTS_PER_TASK)
        pieces: list[JournalRange] = []
        for span in batch:
            if span.gap is not None:
                pieces.append(JournalRange(span.journal, span.begin, span.begin, span.gap))
            count = span.end.number - span.begin.number
            tasks = min(most * count // max(total, 1), count // TASK_EVENTS)
            pieces += self._split(span, max(1, tasks))
        return bundled(pieces, most)

    def _split(self, whole: JournalRange, tasks: int) -> list[JournalRange]:
        store, pieces, begin = self._store, [], whole.begin
        count = whole.end.number - whole.begin.number
        for task in range(1, tasks):
            wanted = whole.begin.number + count * task // tasks
            found = store.drive(
                mark_at(store, whole.journal, (begin, whole.end), wanted, count // tasks // 10)
            )
            if found.number > begin.number:
                pieces.append(JournalRange(whole.journal, begin, found))
                begin = found
        if whole.end.where > begin.where:
            pieces.append(JournalRange(whole.journal, begin, whole.end))
        return pieces

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The events of one task as record batches. Raises LisaError as `latestOffset` does."""
        if isinstance(partition, JournalBundle):
            with self._options.server.open() as store:
                yield from self._pieces(store, partition)

    def _pieces(self, store: SyncStore, bundle: JournalBundle) -> Iterator[pa.RecordBatch]:
        schema = arrow_schema(self._schema)
        events = Events(bundle.ranges[0].journal, schema)
        for span in bundle.ranges:
            if span.gap is not None:
                yield gap_batch(span.gap, schema)
                continue
            for piece in add_range(store, span.journal, span.begin, span.end, events):
                if isinstance(piece, JournalGap):
                    self._handle_gap(piece)
                    yield gap_batch(piece, schema)
                else:
                    yield piece
        if len(events):
            yield events.take()

    def _handle_gap(self, gap: JournalGap) -> None:
        if self._options.fail_on_gap:
            raise LisaError(f"{gap.describe()}. {ADVICE}")
        _log.warning("%s", gap.describe())

    def commit(self, end: Offset) -> None:
        """Report this reader's progress to the journal, if option `archive` is set."""
        if self._options.archive is not None and self._options.report_progress:
            store, known = self._store, set(self._known_journals())
            marks = {
                journal: Mark.of(stored)
                for journal, stored in end.items()
                if journal in known or topic_of(journal) == journal  # shards may have been deleted
            }
            store.drive(record_archived(store, self._options.archive, marks))

    def stop(self) -> None:
        """Close the connection."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _known_journals(self) -> list[str]:
        now = time.monotonic()
        if now - self._listed_at >= _LIST_JOURNALS_EVERY_S:
            store = self._store
            self._journals = store.drive(journals(store, self._options.topics))
            self._listed_at = now
        return self._journals

    def _recorded(self, journal: str) -> Mark | None:
        if self._options.archive is None:
            return None
        [mark] = self._store.drive(archived(self._store, [journal], self._options.archive))
        return mark

    def _is_followed(self, journal: str) -> bool:
        """Whether this reader's archive has reported progress for any journal of the same topic."""
        if self._options.archive is None:
            return False
        beside = [other for other in self._known_journals() if topic_of(other) == topic_of(journal)]
        return any(self._store.drive(archived(self._store, beside, self._options.archive)))


@dataclass(frozen=True, slots=True)
class JournalOptions:
    """The parsed options of a stream.

    topics: one or several, separated by commas; default: all topics with a journal, including new
        ones.
    from_earliest: start at the first event (`starting` = earliest) or after the last (latest).
    partitions: maximum number of tasks of a batch; None to derive it from the number of events.
    archive: the name under which this reader reports its progress to the journal.
    report_progress: whether it reports each batch that Spark has committed; the job `archive`
        reports what the archive contains instead.
    """

    server: Server
    topics: tuple[str, ...]
    from_earliest: bool
    max_events: int
    partitions: int | None
    fail_on_gap: bool
    archive: str | None
    report_progress: bool

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Raises ConfigError for an invalid or unknown option."""
        options.refuse_unknown(given, _NAMES, "readStream")
        starting = options.choice(given, "starting", ("earliest", "latest"), "earliest")
        return cls(
            server=Server.of(given.get("url"), given.get("prefix")),
            topics=tuple(map(check_topic, options.listed(given.get("topic", "")))),
            from_earliest=starting == "earliest",
            max_events=options.whole_number(given, "max_events_per_batch") or _MAX_EVENTS,
            partitions=options.whole_number(given, "partitions"),
            fail_on_gap=options.flag(given, "fail_on_gap", default=True),
            archive=_archive_name(given),
            report_progress=options.flag(given, "report_progress", default=True),
        )


def _archive_name(given: Mapping[str, str]) -> str | None:
    name = given.get("archive", "").strip()
    if not name:
        return None
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
        raise ConfigError(
            f"archive {name!r} is not allowed: use 1 to 64 of the characters A-Z a-z 0-9 _ . -"
        )
    return name


@dataclass(frozen=True)
class JournalRange(InputPartition):
    """The events of one journal after `begin` up to `end`; or, if these are equal, a gap."""

    journal: str
    begin: Mark
    end: Mark
    gap: JournalGap | None = None


@dataclass(frozen=True)
class JournalBundle(InputPartition):
    """Ranges of any journals that one task reads one after the other."""

    ranges: tuple[JournalRange, ...]


def bundled(ranges: Sequence[JournalRange], most: int) -> list[JournalBundle]:
    """Distribute ranges over at most `most` tasks of similar size.

    There are fewer tasks if some of them would not be worth starting.
    """
    weights = [JOURNAL_EVENTS + max(0, span.end.number - span.begin.number) for span in ranges]
    count = min(most, len(ranges), max(1, sum(weights) // TASK_EVENTS))
    loads = [(0, number) for number in range(count)]
    bundles: list[list[JournalRange]] = [[] for _ in range(count)]
    by_weight = sorted(zip(weights, ranges, strict=True), key=lambda pair: -pair[0])
    for weight, one in by_weight:
        load, number = heappop(loads)
        bundles[number].append(one)
        heappush(loads, (load + weight, number))
    return [JournalBundle(tuple(bundle)) for bundle in bundles if bundle]


def range_of(journal: str, start: Mapping[str, Any] | None, end: Mapping[str, Any]) -> JournalRange:
    """One journal's part of a batch, derived from its offsets alone."""
    begins = end.get("from") or start
    begin = Mark.of(begins) if begins else Mark.of(end)
    gap = end.get("gap")
    return JournalRange(journal, begin, Mark.of(end), JournalGap(journal, *gap) if gap else None)


def stored_offset(start: Mapping[str, Any] | None, ahead: Unread, end: Mark) -> dict[str, Any]:
    """One journal's part of an offset, in its stored form."""
    stored = end.stored()
    if start is None or Mark.of(start) != ahead.begin:
        stored["from"] = ahead.begin.stored()
    if ahead.gap is not None:
        stored["gap"] = list(ahead.gap[1:])
    return stored
