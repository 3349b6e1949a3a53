"""Loads what falls due within a horizon from a table, so that later messages cost no memory.

A loader is a repeated job. Nothing is marked in the table: each run reads the rows that are due
from shortly before the last successful run until the horizon's end, and ids keep rows from being
sent twice. Redis remembers each loader's last successful run.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Self

import msgspec
from pyspark.sql import functions as sf
from pyspark.sql.types import StringType, TimestampType

from lisa.core.model.clock import EPOCH, MAX_DUE_MS, OLDEST_DUE_MS, duration_ms, utc_text
from lisa.core.model.errors import ConfigError
from lisa.core.model.sharding import KEY_END
from lisa.core.store.presence import LoaderRecord
from lisa.core.store.store import chunks, grouped
from lisa.core.transitions.change import Cancel, Cancelled, Reschedule, Rescheduled
from lisa.pipeline.source import register

if TYPE_CHECKING:
    import pyarrow as pa
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

ZONES = timedelta(hours=15)
"""No zone is further from UTC."""

MOST_BROADCAST = 1_000_000
"""Waiting messages of which each executor gets a copy, so that Spark need not sort the table."""

_NOT_CANCELLED = ("", "0", "f", "false", "n", "no")

_log = logging.getLogger("lisa.pipeline")


@dataclass(frozen=True, slots=True)
class Loader:
    """One run of a loader: it loads rows due after `after_ms` and until `until_ms`.

    record: what to remember once the run has succeeded.
    """

    record: LoaderRecord
    after_ms: int
    until_ms: int

    @classmethod
    def begin(
        cls, store: SyncStore, name: str, topic: str, due_within: timedelta, since: datetime | None
    ) -> Self:
        """Choose the rows by the server's clock and the record of the last run.

        since: start of the first run; by default now. Raises ConfigError for another topic.
        """
        now_ms, horizon_ms = store.drive(store.server_time_ms()), duration_ms(due_within)
        found = store.ask("HGET", store.keys.loaders, name)
        if found is None:
            after_ms = now_ms if since is None else duration_ms(since - EPOCH)
            _log.warning(
                "first run of loader %r: rows due before %s are left out%s",
                name,
                _utc(after_ms),
                "" if since else "; --since in a first run names an earlier time",
            )
            record = LoaderRecord(
                name=name, topic=topic, seen_ms=now_ms, horizon_ms=horizon_ms, floor_ms=after_ms
            )
            return cls(record, after_ms, now_ms + horizon_ms)
        last = msgspec.json.decode(found, type=LoaderRecord)
        if last.topic != topic:
            raise ConfigError(
                f"loader {name!r} loads {last.topic or 'several topics'}: give another job name, "
                f"or forget this one: lisa loaders --forget {name}"
            )
        # Ids of handled messages are remembered for longer than this.
        known_ms = now_ms - min(horizon_ms, last.horizon_ms)
        seen_ms = min(last.seen_ms, now_ms) - duration_ms(OVERLAP)
        after_ms = min(last.seen_ms + last.horizon_ms, max(last.floor_ms, seen_ms, known_ms))
        if seen_ms < known_ms:
            _log.warning(
                "loader %r last ran at %s: rows written since then and due before %s were not "
                "loaded; send them with another job",
                name,
                _utc(last.seen_ms),
                _utc(after_ms),
            )
        record = msgspec.structs.replace(last, seen_ms=now_ms, horizon_ms=horizon_ms)
        return cls(record, after_ms, now_ms + horizon_ms)

    def limited(self, options: WriteOptions) -> WriteOptions:
        """Options of a write that sends these rows, and remembers ids for long enough."""
        least = timedelta(milliseconds=self.record.horizon_ms) + MARGIN
        return replace(
            options,
            due_in=(self.after_ms, self.until_ms),
            dedupe_for=max(options.dedupe_for or least, least),
        )

    def about(self) -> dict[str, int]:
        """The times, for a report."""
        return {"due_after_ms": self.after_ms, "due_until_ms": self.until_ms}

    def end(self, store: SyncStore) -> None:
        """Remember this run, which has succeeded."""
        record = msgspec.json.encode(self.record)
        store.ask("HSET", store.keys.loaders, self.record.name, record)

    def narrowed(self, df: DataFrame) -> DataFrame:
        """The rows that may be due within these times, as far as Spark can tell without effort.

        Rows with a time that no message can have remain, to be refused.
        """
        first, last = self.after_ms, self.until_ms
        if "due" in df.columns:
            due = df["due"]
            if isinstance(df.schema["due"].dataType, TimestampType):
                low, high = (sf.timestamp_millis(sf.lit(ms)) for ms in (first, last))
                return df.where(due.isNull() | ((due > low) & (due <= high)))
            odd = (due < OLDEST_DUE_MS) | (due > MAX_DUE_MS)
            return df.where(due.isNull() | odd | ((due > first) & (due <= last)))
        due, is_text = df["at_local"], isinstance(df.schema["at_local"].dataType, StringType)
        bounds = (_moment(first) - ZONES, _moment(last) + ZONES)
        if is_text:
            day, (low, high) = sf.substring(due, 1, 10), (sf.lit(f"{one:%F}") for one in bounds)
            odd = ~due.rlike(r"^\d{4}-\d\d-\d\d")
            return df.where(due.isNull() | odd | day.between(low, high))
        low, high = (sf.lit(f"{one:%F %T}").cast("timestamp_ntz") for one in bounds)
        return df.where(due.isNull() | due.between(low, high))


def check(
    df: DataFrame,
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
            raise ConfigError("since and sync are for loaders: they need due_within")
        return
    if since is not None and since.tzinfo is None:
        raise ConfigError(f"since={since.isoformat()} has no time zone")
    if due_within <= timedelta(0):
        raise ConfigError("due_within must be more than 0")
    if job is None:
        raise ConfigError("due_within needs a job name: the loader's, always the same one")
    if "due" not in df.columns and "at_local" not in df.columns:
        raise ConfigError(
            "due_within needs a column 'due' or 'at_local': other rows are due whenever they are "
            "sent"
        )
    if sync and ("id" not in df.columns or not {"at_local", "window"}.isdisjoint(df.columns)):
        raise ConfigError(
            "sync needs columns 'id' and 'due', and neither 'at_local' nor 'window': it compares "
            "the due times of rows and messages"
        )
    if on_duplicate != "keep":
        raise ConfigError(
            f"due_within loads rows again and again: on_duplicate must be keep, not {on_duplicate}"
        )


def due_ms(df: DataFrame) -> Column:
    """The due times of rows as they are sent: in milliseconds, rounded up."""
    due = df["due"]
    if isinstance(df.schema["due"].dataType, TimestampType):
        micros = sf.unix_micros(due)
        due = (micros + sf.pmod(-micros, sf.lit(1000))) / 1000
    return due.cast("bigint")


def reconcile(df: DataFrame, options: WriteOptions, cancelled: str | None) -> dict[str, int]:
    """Cancel and reschedule the waiting messages whose rows have changed; returns the counts.

    Rows are joined with the messages that wait, so that other messages are never touched.
    """
    whole_id = df["id"].cast("string")
    if "key" in df.columns:
        keyed_id = sf.concat(df["key"].cast("string"), sf.lit(KEY_END), whole_id)
        whole_id = sf.coalesce(keyed_id, whole_id)
    gone = sf.lit(False) if cancelled is None else is_cancelled(df, cancelled)  # noqa: FBT003
    topic = sf.lit(options.topic) if options.topic else df["topic"]
    rows = df.select(
        topic.alias("topic"), whole_id.alias("id"), due_ms(df).alias("due_ms"), gone.alias("gone")
    )
    register(df.sparkSession)
    reader = df.sparkSession.read.format("lisa").options(**options.server.as_options())
    reader = reader.option("state", "waiting").option("topic", options.topic or "")
    waiting = reader.schema("topic string, id string, due timestamp").load()
    if waiting.count() < MOST_BROADCAST:
        waiting = sf.broadcast(waiting)
    was_ms = sf.unix_millis("due").alias("was_ms")
    moved = (sf.col("due_ms") != sf.col("was_ms")) & sf.col("due_ms").between(
        OLDEST_DUE_MS, MAX_DUE_MS
    )
    changed = rows.join(waiting.select("topic", "id", was_ms), ["topic", "id"])
    changed = changed.where(sf.col("gone") | moved)
    done = changed.mapInArrow(partial(_change, options), "rescheduled long, cancelled long")
    sums = done.agg(*(sf.sum(name).alias(name) for name in ("rescheduled", "cancelled"))).first()
    return {} if sums is None else {name: count or 0 for name, count in sums.asDict().items()}


def _change(options: WriteOptions, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """One of Spark's tasks: change messages, unless they have been handed out meanwhile."""
    import pyarrow as pa

    with options.server.open() as store:
        for batch in batches:
            rows = batch.to_pylist()
            counts = [0, 0]
            for topic, part in grouped((row["topic"], row) for row in rows).items():
                store.drive(store.groups(topic))
                gone = [row["id"] for row in part if row["gone"]]
                # Only a message that still waits until the second time is moved.
                items = [
                    (row["id"], f"{row['due_ms']}@{row['was_ms']}")
                    for row in part
                    if not row["gone"]
                ]
                for some in chunks(items, store.batch_size(topic, Reschedule)):
                    outcomes = store.call_by_id(Reschedule(topic, some))
                    counts[0] += outcomes.count(Rescheduled.RESCHEDULED)
                for ids in chunks(gone, store.batch_size(topic, Cancel)):
                    counts[1] += store.call_by_id(Cancel(topic, ids)).count(Cancelled.CANCELLED)
            yield pa.RecordBatch.from_pydict({"rescheduled": counts[:1], "cancelled": counts[1:]})


def is_cancelled(df: DataFrame, name: str) -> Column:
    """Whether a column cancels a row: it is not null, nor empty, 0, no or false.

    Raises ConfigError if there is no such column.
    """
    if name not in df.columns:
        raise ConfigError(f"cancelled: no column {name!r}; the columns are {', '.join(df.columns)}")
    text = sf.lower(sf.trim(df[f"`{name}`"].cast("string")))
    return sf.coalesce(~text.isin(*_NOT_CANCELLED), sf.lit(False))  # noqa: FBT003


def _moment(ms: int) -> datetime:
    return EPOCH + timedelta(milliseconds=ms)


def _utc(ms: int) -> str:
    return utc_text(_moment(ms))
