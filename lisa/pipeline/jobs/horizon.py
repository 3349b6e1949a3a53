"""Loads what falls due within a horizon from a table, so that later messages cost no memory.

A loader is a repeated job. Nothing is marked in the table: each run reads the rows that are due
from shortly before the last successful run until the horizon's end, and ids keep rows from being
sent twice. Redis remembers each loader's last successful run.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Self

import msgspec
from pyspark.sql import functions as sf
from pyspark.sql.types import StringType, TimestampType

from lisa.core.model.clock import EPOCH, MAX_DUE_MS, OLDEST_DUE_MS, duration_ms, utc_text
from lisa.core.model.errors import ConfigError
from lisa.core.store.presence import LoaderRecord

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

ZONES = timedelta(hours=15)
"""No zone is further from UTC."""

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
) -> None:
    """Raises ConfigError if rows cannot be loaded by their due times, or not repeatedly."""
    if due_within is None:
        if since is not None:
            raise ConfigError("since is for loaders: it needs due_within")
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
    if on_duplicate != "keep":
        raise ConfigError(
            f"due_within loads rows again and again: on_duplicate must be keep, not {on_duplicate}"
        )


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
