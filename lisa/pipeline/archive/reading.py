"""Reads an archive in files: two Delta tables, which other programs can read too.

    message_log/   every event, by the day of the event
    messages/      messages, by the day of their end; without a day those that had not ended
    _lisa/         state documents, events of live messages, Spark's checkpoint

The table `messages` is as of the last fold; `messages()` folds the later events and is current
with the log.

A document in `_lisa/state` has what an archive knows besides the rows of its tables. It is written
before each commit, under a new random number. The commit contains this number as an application
transaction, so that table and document change together.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import msgspec
from pyspark.sql import functions as sf
from pyspark.sql.types import DateType, StructField, StructType

from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import ConfigError, LisaError
from lisa.pipeline.archive.base import Archive, ArchiveGap, TopicRecord, selected
from lisa.pipeline.archive.batches import is_new
from lisa.pipeline.archive.fold import fold, host_of
from lisa.pipeline.archive.schemas import EVENT_SCHEMA, LOG_SCHEMA, MESSAGES_SCHEMA
from lisa.pipeline.archive.table import STATE, ArchiveTable
from lisa.pipeline.paths import literal

if TYPE_CHECKING:
    from collections.abc import Collection

    from pyspark.sql import Column, DataFrame, SparkSession

    from lisa.pipeline.archive.folder import Folder

LOG, MESSAGES = "message_log", "messages"

DATED_MESSAGES = StructType([*MESSAGES_SCHEMA.fields, StructField("day", DateType())])
"""The table `messages` as stored: with the day on which the message ended."""


HIDDEN = "_lisa"

RANDOM_BITS = 20

_TRIES = 5


class DeltaTables:
    """The two tables of an archive and their states, as of the last `refresh`."""

    def __init__(self, spark: SparkSession, folder: Folder) -> None:
        self.spark, self.folder = spark, folder
        self.log = ArchiveTable(spark, folder, LOG, LOG_SCHEMA)
        self.messages = ArchiveTable(spark, folder, MESSAGES, DATED_MESSAGES)
        self.refresh()

    def refresh(self) -> None:
        """Read the current versions."""
        self.state, self.fold = load_states(self.folder, self.log, self.messages)

    def unsettled(self) -> DataFrame:
        """Events of messages that were live at the last fold, and later events: EVENT_SCHEMA."""
        found = self.live_events()
        if self.fold.log == self.state.number:
            return found
        since = sf.lit(ms_datetime(self.state.unfolded_from_ms))
        later = self.log.rows().where((sf.col("day") >= day_of(since)) & (sf.col("at") >= since))
        later = later.where(is_new(self.fold.offsets)).select(*EVENT_SCHEMA.names)
        return found.unionByName(later)

    def live_events(self) -> DataFrame:
        """Events of messages that were live at the last fold: EVENT_SCHEMA."""
        if not self.fold.live_events:
            return self.spark.createDataFrame([], EVENT_SCHEMA)
        found = sum(file.size for file in self.folder.files(self.fold.live))
        if found != self.fold.live_bytes > 0:
            raise LisaError(
                f"{self.folder.url(self.fold.live)} has {found:,} bytes; the archive wrote "
                f"{self.fold.live_bytes:,}: restore this directory from a copy of the archive"
            )
        reader = self.spark.read.schema(EVENT_SCHEMA)
        return reader.parquet(literal(self.folder.url(self.fold.live)))


class FileArchive(Archive):
    """A snapshot of an archive in files. Raises ConfigError if the archive does not exist."""

    def __init__(self, tables: DeltaTables) -> None:
        if not tables.state.number:
            raise ConfigError(
                f"there is no archive in {tables.folder.where}; `lisa pipeline archive --to` "
                "creates one"
            )
        self._tables = tables

    def log(self) -> DataFrame:
        """Every committed event: LOG_SCHEMA."""
        return self._tables.log.rows().select(*LOG_SCHEMA.names)

    def messages(
        self, topics: Sequence[str] | None = None, ids: Sequence[str] | None = None
    ) -> DataFrame:
        """One row per message and life, current with the log: MESSAGES_SCHEMA."""
        tables, having = self._tables, {"topic": topics, "id": ids}
        is_folded = tables.fold.log == tables.state.number
        rows = tables.messages.rows(dated=None if is_folded else True, having=having)
        known = selected(rows, topics, ids).select(*MESSAGES_SCHEMA.names)
        if is_folded:
            return known
        return known.unionByName(fold(selected(tables.unsettled(), topics, ids)))

    def offsets(self) -> dict[str, tuple[str, int]]:
        """Journal -> entry id and number of its last committed event."""
        return dict(self._tables.state.offsets)

    def topics(self) -> dict[str, TopicRecord]:
        """Topic -> its options and groups, as needed to restore it."""
        return dict(self._tables.state.topics)

    def gaps(self) -> Sequence[ArchiveGap]:
        """The events that the log lacks."""
        return list(self._tables.state.gaps)


def with_log_columns(events: DataFrame) -> DataFrame:
    """Rows of EVENT_SCHEMA -> rows of LOG_SCHEMA, which has host and day too."""
    return events.withColumns({"host": host_of(), "day": day_of(sf.col("at"))})


def day_of(at: Column) -> Column:
    """The day of a timestamp in UTC, independent of the session's time zone."""
    return sf.date_from_unix_date(sf.floor(sf.unix_millis(at) / 86_400_000).cast("int"))


class LogState(msgspec.Struct, frozen=True):
    """The state of `message_log`.

    number: of the document; 0 in a new archive.
    offsets: journal -> entry id and number of its last event.
    fold: number of the state of `messages` at the time of the commit.
    unfolded_events, unfolded_from_ms: number of events since that fold, and the time of the
        earliest (epoch ms).
    """

    number: int = 0
    offsets: dict[str, tuple[str, int]] = {}
    topics: dict[str, TopicRecord] = {}
    gaps: tuple[ArchiveGap, ...] = ()
    fold: int = 0
    unfolded_events: int = 0
    unfolded_from_ms: int = 0


class FoldState(msgspec.Struct, frozen=True):
    """The state of `messages`.

    log: number of the state of `message_log` that was folded; offsets: its offsets.
    live: directory with the events of messages that had not ended; `live_events` is their number,
        `live_bytes` the size of the files.
    seconds: how long the fold took.
    """

    number: int = 0
    log: int = 0
    offsets: dict[str, tuple[str, int]] = {}
    live: str = ""
    live_events: int = 0
    live_bytes: int = 0
    seconds: float = 0.0


_State = TypeVar("_State", LogState, FoldState)


def new_number() -> int:
    """A new number for a document or a directory; contains the time in ms, see `age_s`."""
    return int(time.time() * 1000) << RANDOM_BITS | secrets.randbits(RANDOM_BITS)


def age_s(number: int) -> float:
    """Seconds since a number was made."""
    return time.time() - (number >> RANDOM_BITS) / 1000


def path(number: int) -> str:
    """The path of a document."""
    return f"{HIDDEN}/state/{number}.json"


def staging(number: int) -> str:
    """The directory of files that no commit names yet."""
    return f"{HIDDEN}/staging/{number}"


def live_folder(number: int) -> str:
    """The directory of the events of live messages, as of a fold."""
    return f"{HIDDEN}/live/{number}"


def save(folder: Folder, state: LogState | FoldState) -> None:
    """Write a document; it counts once a commit names it."""
    folder.write(path(state.number), msgspec.json.encode(state).decode())


def load_states(
    folder: Folder, log: ArchiveTable, messages: ArchiveTable
) -> tuple[LogState, FoldState]:
    """The states of both tables, after refreshing them to versions that belong together."""
    for _ in range(_TRIES):
        messages.refresh()
        fold = _load(folder, messages, FoldState)
        log.refresh()
        found = _load(folder, log, LogState)
        if fold is None or found is None:
            continue  # replaced and deleted meanwhile
        if fold.number == found.fold or fold.log == found.number:
            return found, fold
        # A fold between the two reads. If it stays like this, one table was restored from an older
        # copy: then events of any time may be new to the fold.
        found = msgspec.structs.replace(found, unfolded_from_ms=0)
    if fold is None or found is None:
        raise LisaError(
            f"{folder.url(HIDDEN)}/state lacks the document of the last commit: restore this "
            "directory from a copy of the archive"
        )
    return found, fold


def _load(folder: Folder, table: ArchiveTable, kind: type[_State]) -> _State | None:
    number = table.transaction(STATE)
    if not number:
        return kind()
    text = folder.read(path(number))
    try:
        return None if text is None else msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise LisaError(
            f"{folder.url(path(number))} is damaged ({error}): restore it from a copy of the "
            "archive"
        ) from None


def sweep(folder: Folder, used: Collection[str], keep_s: float) -> None:
    """Delete leftovers: documents, staged files and live events that are not used.

    One that was in use was replaced by the next of its kind; it is kept for `keep_s` from then on.
    """
    for kind in ("state", "staging", "live"):
        found = {}
        for name in folder.names(f"{HIDDEN}/{kind}"):
            number = name.removesuffix(".json").lstrip(".")
            if number.isdigit():
                found[name] = int(number)
        names = sorted(found, key=found.__getitem__)
        for name, following in zip(names, [*names[1:], *names[-1:]], strict=True):
            whole = f"{HIDDEN}/{kind}/{name}"
            if whole not in used and age_s(found[following]) >= keep_s:
                folder.delete(whole)
