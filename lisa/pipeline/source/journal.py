"""`spark.readStream.format("lisa")`: follows the journal, exactly once.

Options: `topic` (one, or several with commas; without it all that have a journal, new ones as they
come), `starting` (`earliest`, `latest`), `max_events_per_batch`, `partitions`, `fail_on_gap`,
`archive` (a name under which the journal is told how far this reader has come).

An offset names for each journal the last event that was read, {"orders": {"id": "...", "n": 17}};
each place of a topic that is split has one, "orders~3of8". Where it is needed, it also names what
the batch that ends there begins with: `from`, where that is not the end of the batch before, and
`gap`. So a batch that is repeated after a crash is the same again. A journal that had no share of
the first batch is named, too, with its beginning as both: what came with a later change is not.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from lisa.core.errors import ConfigError, LisaError
from lisa.core.keys import check_topic
from lisa.core.shards import base, bases
from lisa.pipeline.source import options
from lisa.pipeline.source.events import gap_batch
from lisa.pipeline.source.following import (
    Ahead,
    archived,
    earliest,
    is_any_archived,
    journals,
    latest,
    look,
    mark_at,
    record_archived,
    step_over,
)
from lisa.pipeline.source.marks import CURE, START, Gap, Mark, shares
from lisa.pipeline.source.read_columns import arrow_schema, checked
from lisa.pipeline.source.stretches import read_stretch

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from lisa.core.store import SyncStore

__all__ = ["JournalReader", "Stretch"]

Offset = dict[str, dict[str, Any]]

_OPTIONS = options.SERVER | {
    "topic", "starting", "max_events_per_batch", "partitions", "fail_on_gap", "archive",
}  # fmt: skip
_MAX_EVENTS = 500_000
_WORTH_A_TASK = 5_000  # events; a task costs some 10 ms
_LOOK_FOR_PLACES_S = 1.0  # Spark asks for news a hundred times a second
_log = logging.getLogger("lisa.pipeline")


@dataclass(frozen=True)
class Stretch(InputPartition):
    """Events behind `begin` up to `end`, or, if there are none, a gap alone."""

    place: str
    begin: Mark
    end: Mark
    gap: Gap | None = None


class JournalReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the journal of some topics. Raises ConfigError for options that cannot work."""

    def __init__(self, given: Mapping[str, str], schema: StructType) -> None:
        options.refuse_unknown(given, _OPTIONS, "readStream")
        self._server = options.server_of(given)
        self._schema = checked(schema)
        named = [one.strip() for one in given.get("topic", "").split(",")]
        self._named = [check_topic(one) for one in named if one]
        self._starting = options.choice(given, "starting", ("earliest", "latest"), "earliest")
        self._max_events = options.whole_number(given, "max_events_per_batch") or _MAX_EVENTS
        cores = max(2, os.cpu_count() or 2)
        self._tasks = options.whole_number(given, "partitions") or cores
        self._fail_on_gap = options.flag(given, "fail_on_gap", default=True)
        self._archive = _archive_name(given)
        self._fence: dict[str, Mark] | None = None
        self._news: Offset | None = None
        self._places: list[str] = []
        self._places_at = float("-inf")
        self._open: SyncStore | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the connection: workers make their own."""
        return {**self.__dict__, "_open": None}

    @property
    def _store(self) -> SyncStore:
        if self._open is None:
            self._open = options.open_store(*self._server)
        return self._open

    def initialOffset(self) -> Offset:  # noqa: N802  Spark's names
        """Where a new query begins.

        Journals that are not named here begin at their archive's record or their first event, when
        they are first seen.
        """
        if self._starting == "earliest":
            return {}
        store, offset = self._store, {}
        lasts = store.drive(latest(store, self._known_places()))
        for place in sorted({*lasts, *self._named}):
            last = lasts.get(place)
            recorded = self._recorded(place)
            if recorded is None and self._is_followed(place):
                recorded = START
            offset[place] = (recorded or last or START).stored()
        return offset

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """At most `max_events_per_batch`, over all topics."""
        return ReadMaxRows(self._max_events)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Put up a fence behind what there is now; nothing is read beyond."""
        store = self._store
        lasts = store.drive(latest(store, self._known_places()))
        self._fence = {place: last for place, last in lasts.items() if last is not None}

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802
        """The end of the next batch: `start` itself where nothing is new.

        Raises LisaError that names a gap, unless gaps are to be recorded.
        """
        store = self._store
        places = sorted({*self._known_places(), *start})
        lasts = store.drive(latest(store, places))
        self._news = {place: last.stored() for place, last in lasts.items() if last is not None}
        ahead: dict[str, Ahead] = {}
        for place in places:
            found = self._ahead(place, start, lasts[place])
            if found is not None:
                ahead[place] = found
        ends = self._ends(ahead, limit, start)
        offset = dict(start)
        for place, end in ends.items():
            offset[place] = _stored(start.get(place), ahead[place], end)
        return dict(sorted(offset.items()))

    def _ahead(self, place: str, start: Offset, last: Mark | None) -> Ahead | None:
        """What may be read next of one journal, gaps judged and the fence kept."""
        store = self._store
        begin = Mark.of(start[place]) if place in start else self._begin(place, start)
        if begin is None:
            return None
        found = store.drive(look(store, place, begin, last))
        if found is None:
            return None
        if found.gap is not None:
            _judge(found.gap, fail=self._fail_on_gap)
            if found.older:
                store.drive(step_over(store, place, found.begin))
        return found if self._fence is None else self._fenced(found, self._fence.get(place))

    def _begin(self, place: str, start: Offset) -> Mark | None:
        """Where a journal is begun that was not read yet; None where there is nothing.

        One that came to a topic which is followed, by this reader or its archive, begins with its
        first event of all: what was trimmed of it is missing.
        """
        recorded = self._recorded(place)
        if recorded is not None:
            return recorded
        if base(place) in bases(start) or self._is_followed(place):
            return START
        return self._store.drive(earliest(self._store, place))

    def _fenced(self, found: Ahead, fence: Mark | None) -> Ahead | None:
        """The same up to the fence; where that lies behind, only a gap is left to be told."""
        if fence is not None and fence.where >= found.last.where:
            return found
        # After a gap for which the server is to blame, numbers and fence may be of two lives.
        inside = fence is not None and found.begin.where < fence.where
        if inside and fence is not None and found.begin.number < fence.number:
            return found._replace(last=fence)
        return found._replace(last=found.begin) if found.gap is not None else None

    def _ends(self, ahead: Mapping[str, Ahead], limit: ReadLimit, start: Offset) -> dict[str, Mark]:
        """How far the next batch goes: to the end, or as far as its limit allows."""
        ends = {place: one.last for place, one in ahead.items()}
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        counts = {
            place: one.last.number - one.begin.number
            for place, one in ahead.items()
            if one.last.number > one.begin.number
        }
        if most is None or sum(counts.values()) <= most:
            return ends
        store = self._store
        for place, share in shares(counts, most).items():
            one = ahead[place]
            if share < counts[place]:
                wanted, slack = one.begin.number + share, share // 20
                end = store.drive(mark_at(store, place, (one.begin, one.last), wanted, slack))
                ends[place] = end
                stays = end == one.begin and one.gap is None
                if stays and (place in start or self._recorded(place) is not None):
                    del ends[place]  # one that nobody knows yet is named, where it begins
        return ends

    def reportLatestOffset(self) -> Offset | None:  # noqa: N802
        """The last event of each journal, as last heard of."""
        return self._news

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """The batch between two offsets in stretches, more of them for larger journals."""
        batch = [
            _stretch(place, start.get(place), ends)
            for place, ends in end.items()
            if ends != start.get(place)
        ]
        total = sum(max(0, one.end.number - one.begin.number) for one in batch)
        pieces: list[InputPartition] = []
        for one in batch:
            if one.gap is not None:
                pieces.append(Stretch(one.place, one.begin, one.begin, one.gap))
            count = one.end.number - one.begin.number
            tasks = min(self._tasks * count // max(total, 1), count // _WORTH_A_TASK)
            pieces += self._split(one, max(1, tasks))
        return pieces

    def _split(self, whole: Stretch, tasks: int) -> list[Stretch]:
        store, pieces, begin = self._store, [], whole.begin
        count = whole.end.number - whole.begin.number
        for task in range(1, tasks):
            wanted = whole.begin.number + count * task // tasks
            found = store.drive(
                mark_at(store, whole.place, (begin, whole.end), wanted, count // tasks // 10)
            )
            if found.number > begin.number:
                pieces.append(Stretch(whole.place, begin, found))
                begin = found
        if whole.end.where > begin.where:
            pieces.append(Stretch(whole.place, begin, whole.end))
        return pieces

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """One stretch, in record batches. Raises LisaError that names a gap, as `latestOffset`."""
        if not isinstance(partition, Stretch):
            return
        schema = arrow_schema(self._schema)
        if partition.gap is not None:
            yield gap_batch(partition.gap, schema)
            return
        store = options.open_store(*self._server)
        try:
            for piece in read_stretch(
                store, partition.place, partition.begin, partition.end, schema
            ):
                if isinstance(piece, Gap):
                    _judge(piece, fail=self._fail_on_gap)
                    yield gap_batch(piece, schema)
                else:
                    yield piece
        finally:
            store.close()

    def commit(self, end: Offset) -> None:
        """Tell the journal how far this reader has come, if it has a name."""
        if self._archive is not None:
            store = self._store
            marks = {place: Mark.of(stored) for place, stored in end.items()}
            store.drive(record_archived(store, self._archive, marks))

    def stop(self) -> None:
        """Close the connection."""
        if self._open is not None:
            self._open.close()
            self._open = None

    def _known_places(self) -> list[str]:
        now = time.monotonic()
        if now - self._places_at >= _LOOK_FOR_PLACES_S:
            store = self._store
            self._places = store.drive(journals(store, self._named))
            self._places_at = now
        return self._places

    def _recorded(self, place: str) -> Mark | None:
        if self._archive is None:
            return None
        store = self._store
        return store.drive(archived(store, place, self._archive))

    def _is_followed(self, place: str) -> bool:
        """Whether this reader's archive has come to any place of the same topic."""
        if self._archive is None:
            return False
        beside = [one for one in self._known_places() if base(one) == base(place)]
        store = self._store
        return store.drive(is_any_archived(store, beside, self._archive))


def _stretch(place: str, start: Mapping[str, Any] | None, end: Mapping[str, Any]) -> Stretch:
    """What one journal's part of a batch holds, from its offsets alone."""
    begins = end.get("from") or start
    begin = Mark.of(begins) if begins else Mark.of(end)
    told = end.get("gap")
    return Stretch(place, begin, Mark.of(end), Gap(place, *told) if told else None)


def _stored(start: Mapping[str, Any] | None, ahead: Ahead, end: Mark) -> dict[str, Any]:
    """One journal's part of an offset."""
    stored = end.stored()
    if start is None or Mark.of(start) != ahead.begin:
        stored["from"] = ahead.begin.stored()
    if ahead.gap is not None:
        stored["gap"] = list(ahead.gap[1:])
    return stored


def _judge(gap: Gap, *, fail: bool) -> None:
    if fail:
        raise LisaError(f"{gap.told()}. {CURE}")
    _log.warning("%s", gap.told())


def _archive_name(given: Mapping[str, str]) -> str | None:
    name = given.get("archive", "").strip()
    if not name:
        return None
    plain = name.replace("_", "").replace(".", "").replace("-", "")
    if len(name) > 64 or not name.isascii() or not (plain.isalnum() or not plain):
        raise ConfigError(
            f"archive {name!r} is not allowed: use 1 to 64 of the characters A-Z a-z 0-9 _ . -"
        )
    return name
