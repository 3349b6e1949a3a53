"""A topic with messages in every state, its journal, and an archive of that journal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf

from lisa import Outgoing, Producer
from lisa.admin.topics import set_options
from lisa.core.model.envelope import fence_of
from lisa.core.model.stream import Entry
from lisa.core.store.store import SyncStore
from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.change import Cancel
from lisa.core.transitions.delivery import Open, Pull
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.lease import Release
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.retry import Fail, Failure
from lisa.core.transitions.upkeep import Expire
from lisa.pipeline.archive import Archive, ArchiveGap, TopicRecord
from lisa.pipeline.archive.base import selected
from lisa.pipeline.archive.fold import fold, host_of
from lisa.pipeline.archive.schemas import EVENT_SCHEMA
from lisa.pipeline.jobs import message_history
from lisa.pipeline.jobs.archive import JournalRecord
from lisa.pipeline.server import Server

ACK_TIMEOUT_MS = 30_000

SMALL = ("--master", "local[2]", "--spark-conf", "spark.sql.shuffle.partitions=1")
"""Options of a job that has few rows."""


@dataclass
class ArchiveSnapshot(Archive):
    """A snapshot of an archive: the journal at one moment, folded."""

    events: DataFrame
    committed: dict[str, tuple[str, int]]
    records: dict[str, TopicRecord]
    named_gaps: list[ArchiveGap] = field(default_factory=list)

    def log(self) -> DataFrame:
        return self.events.withColumn("host", host_of()).withColumn("day", sf.to_date("at"))

    def messages(
        self, topics: Sequence[str] | None = None, ids: Sequence[str] | None = None
    ) -> DataFrame:
        return fold(selected(self.events, topics, ids))

    def offsets(self) -> dict[str, tuple[str, int]]:
        return self.committed

    def topics(self) -> dict[str, TopicRecord]:
        return self.records

    def gaps(self) -> list[ArchiveGap]:
        return self.named_gaps


def frozen(spark: SparkSession, server: Server, topics: Sequence[str], where: str) -> Any:
    """Archive the present journals of topics."""
    ahead, committed = [], {}
    with closing(JournalRecord(server, "frozen")) as record:
        records = record.topics(topics)
    with server.open() as store:
        for topic in topics:
            one = store.drive(message_history.find_remainder(store, topic, None))
            assert one.last is not None
            assert one.last_number is not None
            ahead.append(one)
            committed[topic] = (one.last, one.last_number)
    events = message_history.read_remainders(spark, server, ahead)
    assert events is not None
    events.write.parquet(where)
    return ArchiveSnapshot(spark.read.schema(EVENT_SCHEMA).parquet(where), committed, records)


class World:
    """Creates messages of one topic and changes their states with the roles' transitions."""

    def __init__(self, store: SyncStore, url: str, topic: str, groups: Sequence[str]) -> None:
        self.store = store
        self.topic = topic
        self.groups = groups
        self.producer = Producer(url)
        self._taken: dict[str, Entry] = {}
        self.configure(
            journal=True,
            ack_timeout=timedelta(milliseconds=ACK_TIMEOUT_MS),
            retry_delays="1h,1h,1h",
            max_ready=1_000_000,
            retention=timedelta(minutes=30),  # longer than a test on a busy machine
        )
        for group in groups:
            store.call(Declare(topic, group))
        store.drive(store.groups(topic))

    def close(self) -> None:
        self.producer.close()

    def configure(self, **options: Any) -> None:
        self.store.drive(set_options(self.store, self.topic, options))

    def at(self, shard_name: str) -> World:
        """A World for one shard of the topic."""
        other = copy(self)
        other.topic = shard_name
        self.store.drive(self.store.groups(shard_name))
        return other

    def send(self, ids: Sequence[str], *, delay: timedelta = timedelta(0), **more: Any) -> None:
        bodies = [Outgoing({"order": one}, id=one, **more) for one in ids]
        report = self.producer.send_many(self.topic, bodies, delay=delay)
        assert report.accepted == len(ids)

    def promote(self) -> None:
        while self.store.call(Promote(self.topic, 100)).moved:
            pass

    def take(self, group: str, count: int) -> list[Entry]:
        """Deliver `count` messages to a group."""
        found: list[Entry] = []
        while len(found) < count:
            most = min(100, count - len(found))
            pulled = self.store.call(Pull(self.topic, group, "tester", most))
            assert pulled.entries
            self.store.call(Open(self.topic, group, pulled.entries))
            found += pulled.entries
            self._taken |= {one.id: one for one in pulled.entries}
        return found

    def ack(self, group: str, entries: Sequence[Entry]) -> None:
        for some in pieces(entries):
            seen = self.look([one.id for one in some])
            self.store.call(
                Ack(
                    self.topic,
                    group,
                    [
                        Settlement(one.id, one.entry, fence_of(at.envelope), one.due_ms, 1)
                        for one, at in zip(some, seen, strict=True)
                    ],
                )
            )

    def fail(self, group: str, entries: Sequence[Entry], delay: Any = None) -> None:
        for some in pieces(entries):
            self.store.call(
                Fail(
                    self.topic,
                    group,
                    [Failure(one.id, one.entry, f"no luck with {one.id}", delay) for one in some],
                )
            )

    def release(self, group: str, entries: Sequence[Entry]) -> None:
        """Release delivered messages: they become ready again."""
        for some in pieces(entries):
            self.store.call(Release(self.topic, group, [(one.id, one.entry) for one in some]))

    def cancel(self, ids: Sequence[str]) -> None:
        for some in pieces(ids):
            answers = self.store.call(Cancel(self.topic, some))
            assert {one.value for one in answers} == {"cancelled"}

    def expire(self, ids: Sequence[str]) -> None:
        for some in pieces(ids):
            self.store.call(Expire(self.topic, some))

    def entries(self, ids: Sequence[str]) -> list[Entry]:
        """The delivered entries of messages in flight, by id."""
        return [self._taken[one] for one in ids]

    def look(self, ids: Sequence[str]) -> list[Any]:
        """Inspections with bodies."""
        return [seen for some in pieces(ids) for seen in self.store.call(Inspect(self.topic, some))]


def counted(result: Any) -> dict[str, int]:
    """The counts of an audit or a restore that are not 0."""
    return {name: count for name, count in result.counts.items() if count}


def pieces(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for at in range(0, len(items), 50):
        yield items[at : at + 50]


def wait_past(ms: int) -> None:
    time.sleep(max(0.0, ms / 1000 - time.time()) + 0.01)
