"""Loads what falls due within a horizon from a table, so that later messages cost no memory.

A loader is a repeated job. Nothing is marked in the table: each run reads the rows that are due
from shortly before the last successful run until the horizon's end, and ids keep rows from being
sent twice. Redis remembers each loader's last successful run.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Self

import msgspec
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    BooleanType,
    DateType,
    NullType,
    NumericType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from lisa.core.model.clock import (
    COMPACT,
    EPOCH,
    FIRST_COMPACT_MS,
    LAST_COMPACT_MS,
    MAX_DUE_MS,
    OLDEST_DUE_MS,
    duration_ms,
    utc_text,
)
from lisa.core.model.errors import ConfigError
from lisa.core.model.sharding import KEY_END
from lisa.core.store.presence import LoaderRecord
from lisa.core.store.store import grouped, portions
from lisa.core.transitions.change import Cancel, Reschedule
from lisa.pipeline.source import register
from lisa.pipeline.source.columns import CORRUPT

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from lisa.core.store.store import SyncStore
    from lisa.pipeline.source.sending import WriteOptions

OVERLAP = timedelta(minutes=30)
"""Rows that were due within this time before the last run are read again: they may be new."""

MARGIN = timedelta(hours=1)
"""How much longer than the horizon ids are remembered.

A message may end as soon as it is loaded, by a cancel. Its row is read again until it has been due
for `OVERLAP` and the time between two runs.
"""

DAY_MS = 86_400_000
"""No wall time is further from UTC."""

MOST_BROADCAST = 1_000_000
"""Up to this many live messages are copied to each executor, which avoids sorting the table."""

CHANGES_PER_CALL = 50

MOST_NAMED = 10
"""Messages that a warning names."""

NOT_HANDLED = "waiting,parked,ready,retry"
"""States in which a message can be cancelled."""

_ZERO = r"[-+]?(0+[.,]?0*|[.,]0+)(e[-+]?\d+)?"
_NO_DAY = r"0000-00-00([ t]00:00:00([.]0+)?)?"
_NOT_CANCELLED = (
    rf"(?iU)^\s*(|{_ZERO}|{_NO_DAY}|f|false|n|no|off|null|\(null\)|\\n|none|nan|nat|#?n/a|na|<na>"
    r"|\[\s*\]|\{\s*\})\s*$"
)

_log = logging.getLogger("lisa.pipeline")


@dataclass(frozen=True, slots=True)
class Loader:
    """One run of a loader: it loads rows due after `after_ms`, until `record.until_ms`.

    record: what to remember once the run has succeeded.
    """

    record: LoaderRecord
    after_ms: int

    @classmethod
    def begin(
        cls, store: SyncStore, name: str, topic: str, due_within: timedelta, since: datetime | None
    ) -> Self:
        """Choose the rows by the server's clock and the record of the last run.

        Records a first run at once: if it fails, the next one begins at the same time. since: start
        of the first run; by default now. Raises ConfigError for another topic.
        """
        now_ms, horizon_ms = store.drive(store.server_time_ms()), duration_ms(due_within)
        found = store.ask("HGET", store.keys.loaders, name)
        if found is None:
            start_ms = now_ms if since is None else duration_ms(since - EPOCH)
            _log.warning("first run of %r: rows due before %s are left out", name, _utc(start_ms))
            times = {"floor_ms": start_ms, "until_ms": start_ms}
            first = LoaderRecord(
                name=name, topic=topic, seen_ms=now_ms, horizon_ms=horizon_ms, **times
            )
            store.ask("HSETNX", store.keys.loaders, name, msgspec.json.encode(first))
            found = store.ask("HGET", store.keys.loaders, name)
        last = msgspec.json.decode(found, type=LoaderRecord)
        if last.topic != topic:
            raise ConfigError(
                f"loader {name!r} loads {last.topic or 'several topics'}: give another job name, "
                f"or forget this one: lisa loaders --forget {name}"
            )
        # Ids of handled messages are remembered for longer than this.
        known_ms = now_ms - min(horizon_ms, last.horizon_ms)
        seen_ms = min(last.seen_ms, now_ms) - duration_ms(OVERLAP)
        after_ms = min(last.until_ms, max(last.floor_ms, seen_ms, known_ms))
        if after_ms > max(last.floor_ms, seen_ms):
            _log.warning(
                "%r last ran at %s: rows written since then and due before %s were not loaded; "
                "send them with another job",
                *(name, _utc(last.seen_ms), _utc(after_ms)),
            )
        record = msgspec.structs.replace(
            last, seen_ms=now_ms, horizon_ms=horizon_ms, until_ms=now_ms + horizon_ms
        )
        return cls(record, after_ms)

    @property
    def due_in(self) -> tuple[int, int]:
        """The times after which, and until which the rows are due."""
        return self.after_ms, self.record.until_ms

    def limited(self, options: WriteOptions) -> WriteOptions:
        """Options of a write that sends these rows, and remembers ids for long enough."""
        least = timedelta(milliseconds=self.record.horizon_ms) + MARGIN
        dedupe_for = max(options.dedupe_for or least, least)
        return replace(options, due_in=self.due_in, dedupe_for=dedupe_for)

    def narrowed(self, df: DataFrame) -> DataFrame:
        """The rows that may be due within these times, as far as Spark can tell without effort.

        Rows with a time that no message can have, and rows that could not be read, remain, to be
        refused.
        """
        first, last = self.due_in
        if "due" not in df.columns:
            wall = df["at_local"].cast("string")
            days = (sf.lit(_utc(ms)[:10]) for ms in (first - DAY_MS, last + DAY_MS))
            day = wall.substr(1, 10)
            is_odd = ~wall.rlike(r"^\d{4}-\d\d-\d\d") | (day < _utc(OLDEST_DUE_MS)[:10])
            return df.where(wall.isNull() | day.between(*days) | is_odd | ~_is_readable(df))
        due: Column = df["due"]
        low, high, oldest, latest = map(sf.lit, (first, last, OLDEST_DUE_MS, MAX_DUE_MS))
        is_compact = due.between(FIRST_COMPACT_MS, LAST_COMPACT_MS)
        if isinstance(df.schema["due"].dataType, TimestampType):
            low, high, oldest, latest = map(sf.timestamp_millis, (low, high, oldest, latest))
            is_compact = sf.lit(False)  # noqa: FBT003
        is_odd = due.isNull() | (due < oldest) | (due > latest) | is_compact
        return df.where(is_odd | ((due > low) & (due <= high)) | ~_is_readable(df))

    def end(self, store: SyncStore) -> None:
        """Remember this run, which has succeeded."""
        record = msgspec.json.encode(self.record)
        store.ask("HSET", store.keys.loaders, self.record.name, record)


def check(
    columns: Collection[str],
    due_within: timedelta | None,
    since: datetime | None,
    *,
    job: str | None,
    on_duplicate: str,
    sync: bool,
) -> None:
    """Raises ConfigError if rows cannot be loaded by their due times, or not repeatedly."""
    if due_within is None:
        if since is not None or sync:
            raise ConfigError("since (--since) and sync (--sync) need due_within (--due-within)")
        return
    names, loader = set(columns), "due_within (--due-within)"
    problems = {
        "since (--since) needs a time zone": since is not None and since.tzinfo is None,
        f"{loader} must be more than 0": due_within <= timedelta(0),
        f"{loader} needs a job name (--job): the loader's, always the same one": job is None,
        f"{loader} needs a column 'due' or 'at_local' (--due or --at-local)": names.isdisjoint(
            {"due", "at_local"}
        ),
        f"{loader} reads rows repeatedly: on_duplicate (--on-duplicate) must be keep": on_duplicate
        != "keep",
        "sync (--sync) needs columns 'id' and 'due' (--id and --due), and neither 'at_local' nor "
        "'window'": sync
        and not ({"id", "due"} <= names and names.isdisjoint({"at_local", "window"})),
    }
    for problem, is_given in problems.items():
        if is_given:
            raise ConfigError(problem)


def due_ms(df: DataFrame) -> Column:
    """The due times of rows as they are sent: in milliseconds, rounded up."""
    due: Column = df["due"]
    if isinstance(df.schema["due"].dataType, TimestampType):
        micros = sf.unix_micros(due)
        due = (micros + sf.pmod(-micros, sf.lit(1000))) / 1000
    return due.cast("bigint")


def reconcile(df: DataFrame, options: WriteOptions, cancelled: str | None) -> dict[str, int]:
    """Cancel and reschedule live messages whose rows have changed; returns the counts.

    A message whose id is that of rows that differ stays as it is; a warning names it.
    """
    counts = Counter[str]()
    unclear: list[str] = []
    with options.server.open() as store:
        rows = _changed(df, options, cancelled).toLocalIterator()
        for part in portions(rows, CHANGES_PER_CALL, lambda _: 0):
            unclear += (row.id.replace(KEY_END, " ") for row in part if row.differ)
            clear = (((row.topic, row.gone), row) for row in part if not row.differ)
            for (name, is_gone), found in grouped(clear).items():
                # A message moves only if it still waits until the second time.
                items = [(row.id, f"{row.due_ms}@{row.was_ms}") for row in found]
                cancel = Cancel(name, [row.id for row in found])
                call: Any = cancel if is_gone else Reschedule(name, items)
                counts.update(map(str, store.call_by_id(call)))
    if unclear:
        _log.warning(
            "sync: %d messages did not follow the table, which has several rows with their ids: %s",
            *(len(unclear), ", ".join(sorted(unclear)[:MOST_NAMED])),
        )
    return {name: counts[name] for name in ("rescheduled", "cancelled")}


def _changed(df: DataFrame, options: WriteOptions, cancelled: str | None) -> DataFrame:
    """The live messages that differ from their rows: topic, id, due_ms, was_ms, gone and differ.

    Rows are joined with the messages, so that other messages are never touched. differ: whether the
    rows with this id do.
    """
    own_id = whole_id = df["id"].cast("string")
    if "key" in df.columns:
        keyed_id = sf.concat(df["key"].cast("string"), sf.lit(KEY_END), own_id)
        whole_id = sf.coalesce(keyed_id, own_id)
    gone = sf.lit(False) if cancelled is None else is_cancelled(df, cancelled)  # noqa: FBT003
    topic = sf.lit(options.topic) if options.topic else df["topic"]
    named = {"topic": topic, "id": whole_id, "due_ms": due_ms(df), "gone": gone}
    rows = df.where(_is_readable(df)).select(*(col.alias(name) for name, col in named.items()))
    register(df.sparkSession)
    given = {**options.server.as_options(), "state": NOT_HANDLED, "topic": options.topic or ""}
    reader = df.sparkSession.read.format("lisa").options(**given)
    live = reader.schema("topic string, id string, state string, due timestamp").load()
    was_ms = sf.when(sf.col("state") == "waiting", sf.unix_millis("due")).alias("was_ms")
    live = live.select("topic", "id", was_ms).distinct()  # a message has a row for each group
    if live.count() < MOST_BROADCAST:
        live = sf.broadcast(live)
    first, last = (bound(sf.struct("due_ms", "gone")) for bound in (sf.min, sf.max))
    differ = (~first.eqNullSafe(last)).alias("differ")
    by_message = rows.join(live, ["topic", "id"]).groupBy("topic", "id", "was_ms")
    found = by_message.agg(differ, first.alias("row"))
    moved = f"due_ms != was_ms AND due_ms BETWEEN {OLDEST_DUE_MS} AND {MAX_DUE_MS}"
    moved += f" AND NOT string(due_ms) RLIKE '^{COMPACT}$'"
    columns = ("topic", "id", "was_ms", "differ", "row.*")
    return found.select(*columns).where(f"differ OR gone OR {moved}")


def is_cancelled(df: DataFrame, name: str) -> Column:
    """Whether a column cancels a row: by a value that is not null, nor zero, false or NaN.

    Of text, also not one of _NOT_CANCELLED. A row that could not be read is not cancelled. Raises
    ConfigError for a missing column, and for a type that has none of these values.
    """
    if name not in df.columns:
        raise ConfigError(
            f"cancelled (--cancelled): no column {name!r}; the columns are {', '.join(df.columns)}"
        )
    column, kind = df[f"`{name}`"], df.schema[name].dataType
    if isinstance(kind, StringType):
        found = ~column.rlike(_NOT_CANCELLED)
    elif isinstance(kind, (BooleanType, NumericType)):
        number = column.cast("double")
        found = (number != 0) & ~sf.isnan(number)
    elif isinstance(kind, (DateType, TimestampType, TimestampNTZType, NullType)):
        found = column.isNotNull()
    else:
        raise ConfigError(
            f"cancelled (--cancelled): column {name!r} has type {kind.simpleString()}; it must be "
            "Boolean, a number, text, a date or a timestamp"
        )
    return sf.coalesce(found, sf.lit(False)) & _is_readable(df)  # noqa: FBT003


def _is_readable(df: DataFrame) -> Column:
    """Whether a row could be read. Otherwise, its values may be those of other columns."""
    return df[CORRUPT].isNull() if CORRUPT in df.columns else sf.lit(True)  # noqa: FBT003


def _utc(ms: int) -> str:
    return utc_text(EPOCH + timedelta(milliseconds=ms))
