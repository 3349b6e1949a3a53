"""Generates the two tables of an archive: some days of six topics, including failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as sf

from lisa.pipeline.archive import Archive, ArchiveGap, TopicRecord
from lisa.pipeline.archive.base import selected
from lisa.pipeline.archive.folder import Folder
from lisa.pipeline.archive.reading import HIDDEN, MESSAGES, FoldState, day_of, new_number, save
from lisa.pipeline.archive.schemas import EVENT_SCHEMA, LOG_SCHEMA, MESSAGES_SCHEMA
from lisa.pipeline.archive.table import STATE, place_files, write_files
from lisa.pipeline.archive.writing import FileWriter

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

EVENTS_OF_A_MESSAGE = 4.1
TOPICS = ("orders", "invoices", "reminders", "webhooks", "trial.ends", "carts:abandoned")
_WEIGHTS = (0.42, 0.68, 0.82, 0.92, 0.98, 1.0)
_REASONS = (
    "ack timeout",
    "HTTPStatusError: 503 Service Unavailable for order 48213",
    "ValidationError: field 'amount' of customer 0199f3a2-5b1c-7e21-9d3c-0123456789ab is missing",
    "KeyError: 'sku-7781'",
    "TimeoutError after 30.2 s",
)


@dataclass(frozen=True, slots=True)
class Tables(Archive):
    """Two Parquet directories as an archive."""

    spark: SparkSession
    where: Path

    def log(self) -> DataFrame:
        """All events."""
        return self.spark.read.schema(LOG_SCHEMA).parquet(str(self.where / "message_log"))

    def messages(
        self, topics: Sequence[str] | None = None, ids: Sequence[str] | None = None
    ) -> DataFrame:
        """All messages, or those of some topics and ids."""
        rows = self.spark.read.schema(MESSAGES_SCHEMA).parquet(str(self.where / "messages"))
        return selected(rows, topics, ids)

    def offsets(self) -> dict[str, tuple[str, int]]:
        """No journals."""
        return {}

    def topics(self) -> dict[str, TopicRecord]:
        """No records."""
        return {}

    def gaps(self) -> list[ArchiveGap]:
        """No gaps."""
        return []


def write(spark: SparkSession, where: Path, messages: int, *, end_s: int, hours: int) -> Tables:
    """Write `messages` messages sent within `hours` before `end_s`; some are still live."""
    made = _made(spark, messages, end_s, hours)
    log = _log(made, end_s)
    log.write.partitionBy("day", "topic").parquet(str(where / "message_log"))
    lives = _messages(made, end_s).withColumn("day", sf.to_date("sent_at"))
    lives.write.partitionBy("day", "topic").parquet(str(where / "messages"))
    return Tables(spark, where)


def commit(spark: SparkSession, where: Path, log: DataFrame, messages: DataFrame) -> None:
    """Create an archive in files from its two tables, without computing one from the other."""
    writer = FileWriter(spark, str(where))
    tables, folder = writer.tables, Folder(spark, str(where))
    writer.write(log.select(*EVENT_SCHEMA.names), 0, "benchmark")
    rows = messages.withColumn("day", sf.when(sf.col("settled"), day_of(sf.col("settled_at"))))
    rows = rows.hint("rebalance", sf.col("day"))
    rows = rows.sortWithinPartitions("day", "topic", "settled_at", "id")
    number = new_number()
    root = f"{HIDDEN}/staging/{number}"
    staged = write_files(rows, folder, root, by_day=True)
    files = place_files(folder, staged, root, MESSAGES, number)
    save(folder, FoldState(number, tables.state.number, tables.state.offsets))
    tables.messages.commit(files, {STATE: number}, replace_undated=True)


def _random(salt: int) -> Column:
    """A reproducible pseudo-random number between 0 and 1, exclusive, from the row's id."""
    return (sf.pmod(sf.xxhash64("id", sf.lit(salt)), sf.lit(1_000_003)) + 0.5) / 1_000_003.0


def _normal(salt: int) -> Column:
    """A standard normal variable, by the Box-Muller transform."""
    return sf.sqrt(-2 * sf.log(_random(salt))) * sf.cos(6.283185 * _random(salt + 1))


def _made(spark: SparkSession, messages: int, end_s: int, hours: int) -> DataFrame:
    topic = sf.when(_random(1) < _WEIGHTS[0], TOPICS[0])
    for name, weight in zip(TOPICS[1:], _WEIGHTS[1:], strict=True):
        topic = topic.when(_random(1) < weight, name)
    # Twice as many messages by day as by night.
    when = _random(2) - 0.35 * sf.sin(_random(2) * (6.283185 * hours / 24)) / (
        6.283185 * hours / 24
    )
    slow = sf.when(sf.col("topic") == "webhooks", 9.0).otherwise(1.0)
    return (
        spark.range(messages)
        .withColumn("topic", topic.otherwise(TOPICS[0]))
        .withColumn("sent_ms", ((end_s - (1 - when) * hours * 3600) * 1000).cast("long"))
        .withColumn(
            "due_ms",
            (
                sf.col("sent_ms")
                - 1_800_000 * sf.log(_random(4)) * sf.when(_random(5) < 0.02, 90).otherwise(1)
            ).cast("long"),
        )
        .withColumn(
            "due_ms",
            sf.when(_campaign(end_s), (end_s + (5 + _random(15)) * 3600) * 1000)
            .otherwise(sf.col("due_ms"))
            .cast("long"),
        )
        .withColumn("late_us", (sf.exp(_normal(6) * 0.8 + 7.2) * slow).cast("long"))
        .withColumn("took_us", (sf.exp(_normal(8) * 0.9 + 9.8) * slow).cast("long"))
        .withColumn("luck", _random(10))
        .withColumn(
            "fate",
            sf.when(sf.col("luck") < 0.925, "acked")
            .when(sf.col("luck") < 0.965, "later")
            .when(sf.col("luck") < 0.972, "garbage")
            .when(sf.col("luck") < 0.992, "cancelled")
            .otherwise("expired"),
        )
        .withColumn(
            "why",
            sf.element_at(
                sf.array(*(sf.lit(one) for one in _REASONS)),
                (1 + sf.pow(_random(12), 2) * len(_REASONS)).cast("int"),
            ),
        )
        .withColumn("key", sf.concat(sf.lit("0199f3a2-5b1c-7"), sf.lpad(sf.hex("id"), 12, "0")))
    )


def _campaign(end_s: int) -> Column:
    """Reminders of the last day that fall due together in the future."""
    recent = sf.col("sent_ms") > (end_s - 86_400) * 1000
    return (sf.col("topic") == "reminders") & recent & (_random(14) < 0.5)


def _log(made: DataFrame, end_s: int) -> DataFrame:
    paths = _paths()
    events = sf.when(sf.col("fate") == "acked", sf.array(*paths["acked"]))
    for fate in ("later", "garbage", "cancelled", "expired"):
        events = events.when(sf.col("fate") == fate, sf.array(*paths[fate]))
    rows = made.select("topic", "key", "due_ms", sf.explode(events).alias("e"))
    at = sf.timestamp_millis(sf.floor(sf.col("e.at_us") / 1000))
    filled = {
        "topic": sf.col("topic"),
        "group": sf.col("e.group"),
        "id": sf.col("key"),
        "state": sf.col("e.state"),
        "at": at,
        "attempt": sf.col("e.attempt"),
        "actor": sf.lit("consumer@worker-1:4711"),
        "envelope": sf.col("e.envelope"),
        "due": sf.timestamp_millis("due_ms"),
        "reason": sf.col("e.reason"),
        "late_us": sf.col("e.late_us"),
        "settled": sf.col("e.settled"),
        "seq": sf.lit(0),
        "number": sf.lit(1),
        "host": sf.lit("worker-1"),
        "day": sf.to_date(at),
    }
    return _as(rows.where(sf.col("e.at_us") < end_s * 1_000_000), LOG_SCHEMA, filled)


def _paths() -> dict[str, list[Column]]:
    """Fate of a message -> its events."""
    opened = sf.col("due_ms") * 1000 + sf.col("late_us")
    done = opened + sf.col("took_us")

    group, yes = sf.lit("lisa"), sf.lit(col=True)
    body = sf.concat(sf.lit("jtoken678"), sf.repeat(sf.sha2("key", 256), 2))
    sent = _event("sent", sf.col("sent_ms") * 1000, envelope=body)
    tried = [
        _event("ready", sf.col("due_ms") * 1000, 1, group=group),
        _event("in_flight", opened, 1, group=group, late_us=sf.col("late_us")),
    ]
    failed = _event("retry", done, 1, group=group, reason=sf.col("why"))
    return {
        "acked": [sent, *tried, _event("acked", done, 1, group=group, end=yes)],
        "later": [
            sent,
            *tried,
            failed,
            _event("ready", done + 20_000_000, 2, group=group),
            _event("in_flight", done + 20_000_500, 2, group=group),
            _event("acked", done + 20_000_000 + sf.col("took_us"), 2, group=group, end=yes),
        ],
        "garbage": [
            sent,
            *tried,
            failed,
            _event("garbage", done + 20_000_000, 2, group=group, reason=sf.col("why")),
        ],
        "cancelled": [
            sent,
            _event("cancelled", (sf.col("sent_ms") + sf.col("due_ms")) * 500, end=yes),
        ],
        "expired": [sent, _event("expired", sf.col("due_ms") * 1000 + 60_000_000, end=yes)],
    }


def _event(state: str, at_us: Column, attempt: int = 0, **more: Column) -> Column:
    nothing = sf.lit(None)
    return sf.struct(
        sf.lit(state).alias("state"),
        at_us.alias("at_us"),
        sf.lit(attempt).alias("attempt"),
        more.get("group", nothing).cast("string").alias("group"),
        more.get("reason", nothing).cast("string").alias("reason"),
        more.get("late_us", nothing).cast("long").alias("late_us"),
        more.get("envelope", nothing).cast("binary").alias("envelope"),
        more.get("end", sf.lit(col=False)).alias("settled"),
    )


def _messages(made: DataFrame, end_s: int) -> DataFrame:
    end_us = end_s * 1_000_000
    opened = sf.col("due_ms") * 1000 + sf.col("late_us")
    done = opened + sf.col("took_us")
    last = (
        sf.when(sf.col("fate") == "acked", done)
        .when(sf.col("fate") == "later", done + 20_500_000)
        .when(sf.col("fate") == "cancelled", (sf.col("sent_ms") + sf.col("due_ms")) * 500)
        .otherwise(sf.col("due_ms") * 1000 + 60_000_000)
    ).cast("long")
    over = (last < end_us) & (sf.col("fate") != "garbage")
    end = sf.when(sf.col("fate") == "later", "acked").otherwise(sf.col("fate"))
    state = sf.when(last < end_us, end).when(opened < end_us, "in_flight").otherwise("waiting")
    filled = {
        "topic": sf.col("topic"),
        "id": sf.col("key"),
        "token": sf.lit("token678"),
        "state": state,
        "settled": over,
        "due": sf.timestamp_millis("due_ms"),
        "attempts": sf.lit(0),
        "kind": sf.lit("j"),
        "body": sf.format_string('{"order":%d,"note":"%s"}', "id", sf.sha2("key", 256)),
        "sent_at": sf.timestamp_millis("sent_ms"),
        "updated_at": sf.timestamp_micros(sf.least(last, sf.lit(end_us - 1000))),
        "settled_at": sf.when(over, sf.timestamp_micros(last)),
        "late_us": sf.when(
            (opened < end_us) & sf.col("fate").isin("acked", "later", "garbage"), sf.col("late_us")
        ),
        "groups": sf.array().cast(MESSAGES_SCHEMA["groups"].dataType),
    }
    return _as(made.where(sf.col("sent_ms") * 1000 < end_us), MESSAGES_SCHEMA, filled)


def _as(rows: DataFrame, schema: Any, filled: dict[str, Column]) -> DataFrame:
    """Rows with the columns of a schema; missing columns are null."""
    return rows.select(
        *(filled.get(one.name, sf.lit(None)).cast(one.dataType).alias(one.name) for one in schema)
    )
