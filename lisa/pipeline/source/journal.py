"""`spark.readStream.format("lisa")`: reads the journal, exactly once.

See `journal_options` for the options and `journal_offsets` for the offsets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from lisa.core.model.errors import LisaError
from lisa.core.model.sharding import topic_of, topics_of
from lisa.pipeline.source.events import Events, gap_batch
from lisa.pipeline.source.following import (
    Unread,
    archived,
    earliest,
    find_unread,
    journals,
    latest,
    mark_at,
    raise_last_id,
    record_archived,
)
from lisa.pipeline.source.journal_offsets import (
    TASK_EVENTS,
    JournalBundle,
    JournalRange,
    Offset,
    bundled,
    range_of,
    stored_offset,
)
from lisa.pipeline.source.journal_options import JournalOptions
from lisa.pipeline.source.journal_range import add_range
from lisa.pipeline.source.marks import ADVICE, START, JournalGap, Mark, shares
from lisa.pipeline.source.read_columns import arrow_schema, checked

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from lisa.core.store.store import SyncStore

_EVENTS_PER_TASK = 25_000  # without option `partitions`
_LIST_JOURNALS_EVERY_S = 1.0  # Spark calls latestOffset a hundred times per second
_log = logging.getLogger("lisa.pipeline")


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
        total = sum(max(0, one.end.number - one.begin.number) for one in batch)
        most = self._options.partitions or max(2, total // _EVENTS_PER_TASK)
        pieces: list[JournalRange] = []
        for one in batch:
            if one.gap is not None:
                pieces.append(JournalRange(one.journal, one.begin, one.begin, one.gap))
            count = one.end.number - one.begin.number
            tasks = min(most * count // max(total, 1), count // TASK_EVENTS)
            pieces += self._split(one, max(1, tasks))
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
        for one in bundle.ranges:
            if one.gap is not None:
                yield gap_batch(one.gap, schema)
                continue
            for piece in add_range(store, one.journal, one.begin, one.end, events):
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
        beside = [one for one in self._known_journals() if topic_of(one) == topic_of(journal)]
        return any(self._store.drive(archived(self._store, beside, self._options.archive)))
