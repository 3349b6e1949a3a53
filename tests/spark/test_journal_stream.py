"""`spark.readStream.format("lisa")`: reads the journal exactly once, and reports gaps."""

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import redis
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadMaxRows

from lisa.core.model.envelope import encode_envelope
from lisa.pipeline.archive.schemas import EVENT_SCHEMA, GAP_STATE
from lisa.pipeline.source.journal import JournalReader
from tests.spark.journals import Following, Journal, numbers, slow_commands

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def journal(client: redis.Redis) -> Journal:
    return Journal(client)


Follow = Callable[..., Following]


@pytest.fixture
def follow(spark: SparkSession, redis_url: str, tmp_path: Path) -> Follow:
    """Creates streaming queries: follow("checkpoint", topic="a")."""

    def make(checkpoint: str, **options: Any) -> Following:
        return Following(spark, redis_url, tmp_path / checkpoint, **options)

    return make


@pytest.fixture
def following(follow: Follow) -> Following:
    return follow("first")


def test_every_column_of_an_event(journal: Journal, following: Following) -> None:
    envelope = encode_envelope("tokentok", {"order": 42}, {"subtopic": "a"})
    entry = journal.event(
        state="sent",
        group="",
        attempt=0,
        due=1_790_000_000_123,
        expires=1_790_000_060_456,
        policy="0,0,120000~0.2",
        envelope=envelope,
    ).decode()
    journal.event(state="in_flight", actor="consumer@a:b:9", late=-12, due=1_790_000_000_123)
    journal.event(state="retry", attempt=2, reason="ack timeout — ü", place="retry")
    journal.event(state="acked", attempt=3, end=1)
    journal.client.xadd(journal.keys.events, {"foreign": "entry"})
    sent, opened, retried, acked = sorted(following.run(), key=lambda row: row.number)
    milliseconds, sequence = (int(part) for part in entry.split("-"))
    assert sent.asDict() | {"headers": None} == dict.fromkeys(sent.asDict()) | {
        "topic": "orders",
        "id": "m1",
        "state": "sent",
        "attempt": 0,
        "actor": "producer@host:7",
        "at": local(milliseconds),
        "seq": sequence,
        "number": 1,
        "settled": False,
        "due": local(1_790_000_000_123),
        "expires": local(1_790_000_060_456),
        "policy": "0,0,120000~0.2",
        "envelope": bytearray(envelope),
        "kind": "j",
        "body": bytearray(b'{"order":42}'),
    }
    assert sent.headers == {"subtopic": "a"}
    assert (opened.group, opened.late_us, opened.actor) == ("g", -12, "consumer@a:b:9")
    assert (opened.envelope, opened.body, opened.settled) == (None, None, False)
    assert (retried.reason, retried.attempt, retried.place) == ("ack timeout — ü", 2, "retry")
    assert (acked.settled, acked.attempt, acked.due) == (True, 3, None)


def local(milliseconds: int) -> datetime:
    """A timestamp as `collect` returns it: naive, in the machine's time zone."""
    seconds, rest = divmod(milliseconds, 1000)
    at = datetime.fromtimestamp(seconds, UTC).astimezone().replace(tzinfo=None)
    return at.replace(microsecond=rest * 1000)


def test_invalid_options_are_named(redis_url: str, following: Following) -> None:
    wrong = [
        ("topics", "a", "no option 'topics'"),
        ("topic", "a b", "topic 'a b' is not allowed"),
        ("starting", "now", "'now' is not one of earliest, latest"),
        ("max_events_per_batch", "0", "'0' is not a"),
        ("archive", "a b", "archive 'a b' is not allowed"),
        ("url", "redis://127.0.0.1:1/0", "does not answer"),
    ]
    for name, value, named in wrong:
        options = {"url": redis_url, name: value}
        with pytest.raises(Exception, match=named):
            JournalReader(options, EVENT_SCHEMA).latestOffset({}, ReadMaxRows(10))
    for schema, named in (("wrong int", "no column 'wrong'"), ("id int", "'id' as string")):
        following.schema = schema
        with pytest.raises(Exception, match=named):
            following.run()


def test_a_run_continues_after_the_previous_one(journal: Journal, following: Following) -> None:
    journal.write(10)
    assert numbers(following.run()) == list(range(1, 11))
    assert following.run() == []
    journal.write(5)
    following.schema = "id string, number bigint"  # only requested columns are read
    rows = following.run()
    assert numbers(rows) == list(range(11, 16))
    assert rows[0].__fields__ == ["id", "number"]


def test_listed_topics_all_topics_and_new_topics(client: redis.Redis, follow: Follow) -> None:
    first, second, third = (Journal(client, name) for name in ("a", "b", "c"))
    listed, everything = follow("listed", topic="a, c"), follow("all", starting="latest")
    first.write(2)
    second.write(3)
    assert {(row.topic, row.number) for row in listed.run()} == {("a", 1), ("a", 2)}
    assert everything.run() == []  # starts at the latest event
    third.write(4)  # a new journal starts at its first event
    second.write(1)
    found = sorted((row.topic, row.number) for row in everything.run())
    assert found == [("b", 4), ("c", 1), ("c", 2), ("c", 3), ("c", 4)]
    assert sorted((row.topic, row.number) for row in listed.run()) == found[1:]


def test_batches_keep_their_limit_over_all_topics(client: redis.Redis, follow: Follow) -> None:
    large, small = Journal(client, "large"), Journal(client, "small")
    large.write(500)
    time.sleep(0.05)
    large.write(3_500)
    small.write(30)
    following = follow("first", max_events_per_batch=1_000)
    rows = following.run()
    sizes = [len(batch) for batch in following.batches.values()]
    assert max(sizes) <= 1_000
    assert len(sizes) <= 6  # nearly full batches while events are left
    assert sum(row.topic == "small" for row in following.batches[0]) == 30
    assert numbers(row for row in rows if row.topic == "large") == list(range(1, 4_001))


def test_the_number_of_tasks(client: redis.Redis, follow: Follow) -> None:
    """One task per journal would take seconds for a hundred topics."""
    Journal(client).write(20_000)
    following = follow("large", partitions=4)
    assert numbers(following.run()) == list(range(1, 20_001))
    assert following.tasks[0] == 4
    names = [f"topic{number}" for number in range(60)]
    for name in names:
        Journal(client, name).write(3)
    following = follow("small", partitions=2, topic=",".join(names))
    assert numbers(following.run()) == sorted([1, 2, 3] * 60)
    assert following.tasks[0] <= 2


def test_events_written_during_a_run_are_read_by_the_next_one(
    journal: Journal, follow: Follow
) -> None:
    journal.write(1_000)
    following = follow("first", max_events_per_batch=300)
    following.after_batch = lambda: journal.write(5)
    first = following.run()
    following.after_batch = lambda: None
    total = int(journal.client.hget(journal.keys.stats, "journaled") or 0)
    assert 1_000 <= len(first) < total  # the query ended
    assert numbers(first + following.run()) == list(range(1, total + 1))


def test_progress_is_recorded_under_the_archive_name_and_used_as_start(
    journal: Journal, follow: Follow
) -> None:
    journal.write(10)
    following = follow("a", archive="cold.1", max_events_per_batch=4)
    assert numbers(following.run()) == list(range(1, 11))
    # Spark commits a batch to the source when the next one starts.
    following.run()
    journal.write(1)
    following.run()
    told: Any = journal.client.hget(journal.keys.archived, "cold.1")
    entry, number, at = told.decode().split()
    assert int(number) >= 10
    assert abs(int(at) - time.time() * 1000) < 60_000
    assert journal.client.xrange(journal.keys.events, entry, entry)
    anew = follow("b", archive="cold.1")
    assert numbers(anew.run()) == list(range(int(number) + 1, 12))


class TestGaps:
    """Gaps are reported with event numbers, and end the query unless fail_on_gap is false."""

    def test_all_trimmed(self, journal: Journal, following: Following) -> None:
        journal.write(10)
        following.run()
        journal.write(20)
        journal.client.xtrim(journal.keys.events, maxlen=5, approximate=False)
        with pytest.raises(Exception, match="topic 'orders' lacks events 11 to 25: after") as told:
            following.run()
        assert "fail_on_gap=false" in str(told.value)
        journal.client.xtrim(journal.keys.events, maxlen=0, approximate=False)
        with pytest.raises(Exception, match="lacks events 11 to 30"):
            following.run()
        following.change(fail_on_gap="false")
        (gap,) = following.run()
        assert (gap.topic, gap.number, gap.attempt, gap.settled) == ("orders", 11, 0, False)
        assert (gap.state, gap.id, gap.group, gap.envelope) == (GAP_STATE, None, None, None)
        assert "lacks events 11 to 30" in gap.reason
        assert "trimmed" in gap.reason
        assert following.run() == []
        journal.write(3)
        journal.client.xtrim(journal.keys.events, maxlen=2, approximate=False)
        assert numbers(following.run()) == [31, 32, 33]

    def test_an_event_deleted_by_hand(self, journal: Journal, following: Following) -> None:
        entries = [journal.event() for _ in range(10)]
        journal.client.xdel(journal.keys.events, *entries[3:6], entries[8])
        with pytest.raises(Exception, match="lacks events 4 to 6"):
            following.run()
        following.change(fail_on_gap="false")
        rows = following.run()
        assert sorted((row.number, row.state) for row in rows if row.state == "gap") == [
            (4, "gap"),
            (9, "gap"),
        ]
        assert numbers(row for row in rows if row.state != "gap") == [1, 2, 3, 7, 8, 10]

    def test_the_server_came_back_empty(self, journal: Journal, following: Following) -> None:
        journal.write(10)
        following.run()
        journal.client.flushall()
        with pytest.raises(Exception, match="lacks an unknown number of events from 11 on"):
            following.run()
        Journal(journal.client).write(4)
        with pytest.raises(Exception, match="came back empty or older"):
            following.run()
        following.change(fail_on_gap="false")
        rows = following.run()
        assert sorted((row.state, row.number) for row in rows) == [
            ("gap", 11),
            *(("ready", number) for number in range(1, 5)),
        ]
        (gap,) = (row for row in rows if row.state == GAP_STATE)
        assert all(row.at >= gap.at for row in rows)
        journal.write(2)
        assert numbers(following.run()) == [5, 6]
        # Again, without new events.
        journal.client.flushall()
        following.change(topic="orders")
        assert [(row.state, row.number) for row in following.run()] == [("gap", 7)]
        assert following.run() == []
        Journal(journal.client).write(2)
        assert numbers(following.run()) == [1, 2]

    def test_reading_continues_after_failover_to_an_older_replica(
        self, journal: Journal, following: Following
    ) -> None:
        # The stream's ids are ahead of the new server's clock.
        for number in range(1, 11):
            journal.client.xadd(
                journal.keys.events,
                {"n": number, "id": f"m{number}", "state": "sent", "group": "", "attempt": 0},
                id=f"{9_000_000_000_000 + number}-0",
            )
        journal.client.hset(journal.keys.stats, "journaled", 10)
        following.run()
        journal.client.delete(journal.keys.events)
        journal.client.hset(journal.keys.stats, "journaled", 0)
        journal.write(7)
        with pytest.raises(Exception, match="lacks an unknown number of events from 11 on"):
            following.run()
        following.change(fail_on_gap="false")
        assert [(row.state, row.number) for row in following.run()] == [("gap", 11)]
        journal.write(3)
        newest: Any = journal.client.xrevrange(journal.keys.events, count=1)
        assert newest[0][0] > b"9000000000010-0"
        assert numbers(following.run()) == [8, 9, 10]


def test_each_page_is_read_in_bounded_time(journal: Journal, follow: Follow) -> None:
    envelope = encode_envelope("tokentok", b"x" * (1 << 20))
    journal.write(20, state="sent", envelope=envelope)
    journal.write(1_000)
    runs = iter(range(9))

    def read() -> None:
        following = follow(str(next(runs)), partitions=1)
        following.schema = "number bigint, envelope binary"
        rows = following.run()
        assert numbers(rows) == list(range(1, 1_021))
        assert sum(row.envelope == envelope for row in rows) == 20

    assert slow_commands(journal.client, read) == []
