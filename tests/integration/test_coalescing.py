"""debounce, throttle and latest, on real servers: one message stands for several sends of a key."""

import asyncio
import json
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import redis
from click.testing import CliRunner

from lisa import AsyncProducer, InvalidMessage, Outgoing, Producer, TopicFull
from lisa.cli.main import main
from lisa.core.model.envelope import decode_content
from lisa.core.model.keys import keyed_id
from lisa.core.transitions.change import Cancel
from lisa.core.transitions.topic import Configure
from lisa.producer import SendOutcome
from tests.consumers import Bench
from tests.integration.test_producer_gathering import script_calls
from tests.producers import Either, Topic
from tests.servers import Processes, connect, wait_until
from tests.shards import Split

ONE, TWO = keyed_id("k", "~1"), keyed_id("k", "~2")
HOUR_MS = 3_600_000


@pytest.fixture(params=["sync", "async"])
def either(request: pytest.FixtureRequest, redis_url: str) -> Iterator[Either]:
    made = Either(request.param, redis_url)
    yield made
    made.close()


def test_a_debounce_restarts_with_each_send(either: Either, topic: Topic) -> None:
    said = [either.send_one("orders", body, key="k", debounce="1h") for body in "abc"]
    assert said == [(ONE, "accepted"), (ONE, "replaced"), (ONE, "replaced")]
    ((sent, due),) = topic.waiting().items()
    assert (sent, either.get("orders", ONE).body) == (ONE, "c")
    assert 0 <= topic.now_ms() + HOUR_MS - due < 60_000
    either.send("orders", "d", key="k", debounce=timedelta(hours=2), max_wait="2h")
    assert topic.waiting()[ONE] > due


def test_a_throttled_key_has_one_message_per_interval(either: Either, topic: Topic) -> None:
    topic.declare("lisa")
    assert either.send("orders", "a", key="k", throttle="1h") == ONE
    assert topic.promote() == 1
    (entry,) = topic.take("lisa")
    said = [either.send_one("orders", body, key="k", throttle="1h") for body in "bc"]
    assert said == [(TWO, "accepted"), (TWO, "updated")]
    assert HOUR_MS - 60_000 < topic.waiting()[TWO] - entry.due_ms <= HOUR_MS + 1
    assert either.get("orders", TWO).body == "c"


def test_the_latest_message_keeps_its_due_time(either: Either, topic: Topic) -> None:
    said = [either.send_one("orders", b, key="k", latest=True, delay=f"{b}h") for b in "123"]
    assert said == [(ONE, "accepted"), (ONE, "updated"), (ONE, "updated")]
    assert topic.waiting()[ONE] < topic.now_ms() + 2 * HOUR_MS
    assert either.get("orders", ONE).body == "3"
    assert either.send("orders", "x", key="k", id="own", delay="1h") == keyed_id("k", "own")


def test_many_keys_in_few_calls(either: Either, topic: Topic, client: redis.Redis) -> None:
    either.send("orders", "x", key="first", latest=True)
    script_calls(client)
    bodies = [Outgoing(n, key=f"k{n % 100}") for n in range(1_000)]
    report = either.send_many("orders", bodies, debounce="1h", headers={"a": "b"}, ttl="1h")
    assert script_calls(client) == 1_000 // 125
    assert (report.accepted, report.replaced, len(report)) == (100, 900, 1_000)
    assert [sent.id for sent in report][:2] == [keyed_id("k0", "~1"), keyed_id("k1", "~1")]
    assert either.get("orders", keyed_id("k7", "~1")).body == 907
    mixed = [Outgoing(1, key="k1", throttle="1h"), 2, Outgoing(3, key="k3", latest=True)]
    report = either.send_many("orders", mixed, delay="1h")
    assert [str(sent.outcome) for sent in report] == ["updated", "accepted", "updated"]
    assert len(topic.waiting()) == 102
    assert either.get("orders", keyed_id("k3", "~1")).body == 3


async def test_concurrent_sends_share_calls(redis_url: str, client: redis.Redis) -> None:
    async with AsyncProducer(redis_url) as producer:
        await producer.send("orders", "x", key="first", debounce="1h")
        await producer.send("orders", "x", delay="1h")
        script_calls(client)
        sends = [
            producer.send_one("orders", n, key=f"k{n % 10}", debounce="1h") for n in range(100)
        ]
        others = [producer.send("orders", n, delay="1h") for n in range(100)]
        said, _ = await asyncio.gather(asyncio.gather(*sends), asyncio.gather(*others))
        assert script_calls(client) == 2
        assert [sent.outcome for sent in said] == ["accepted"] * 10 + ["replaced"] * 90
        found = await producer.get("orders", keyed_id("k3", "~1"))
        assert found is not None
        assert found.body == 93


async def test_a_refused_send_affects_no_other(redis_url: str, topic: Topic) -> None:
    topic.store.call(Configure("orders", {"max_body_bytes": "100", "capacity": "3"}))
    async with AsyncProducer(redis_url) as producer:
        bodies = {"a": "x", "b": "x" * 101, "c": "x", "d": "x"}
        said = await asyncio.gather(
            *[producer.send_one("orders", b, key=k, latest=True) for k, b in bodies.items()],
            return_exceptions=True,
        )
        assert [type(one) for one in said] == [
            SendOutcome,
            InvalidMessage,
            SendOutcome,
            SendOutcome,
        ]
        with pytest.raises(TopicFull):
            await producer.send("orders", "x", key="e", throttle="1s")
        assert (await producer.send_one("orders", "y", key="a", latest=True)).outcome == "updated"


def test_options_that_contradict_are_refused(either: Either, topic: Topic) -> None:
    with pytest.raises(InvalidMessage, match="need a key"):
        either.send("orders", "x", debounce="1s")
    with pytest.raises(InvalidMessage, match="leave out id"):
        either.send("orders", "x", key="k", id="a", latest=True)
    with pytest.raises(InvalidMessage, match="'~2' is that of messages with debounce"):
        either.send("orders", "x", key="k", id="~2")
    assert topic.waiting() == {}


def test_the_command_line(redis_url: str, topic: Topic) -> None:
    def lisa(*arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(main, ["send", "orders", *arguments, "--redis", redis_url])
        assert done.exit_code == code, done.output
        return done.output

    lisa("a", "--key", "k", "--debounce", "1h", "--max-wait", "2h")
    found = json.loads(lisa("b", "--key", "k", "--latest", "--json"))
    assert (found["id"], found["outcome"]) == (ONE, "updated")
    lisa("c", "--key", "t", "--throttle", "10s", "--ttl", "1h")
    assert sorted(topic.waiting()) == [ONE, keyed_id("t", "~1")]
    assert "need a key" in lisa("c", "--throttle", "10s", code=2)
    assert "leave out on_duplicate" in lisa(
        "c", "--key", "k", "--latest", "--on-duplicate", "keep", code=2
    )


def test_a_wall_time_is_followed_under_both_ids(either: Either, topic: Topic) -> None:
    either.send(
        "orders", "x", key="k", latest=True, at_local="2040-01-01T12:00", tz="Europe/Vienna"
    )
    due = topic.waiting()[ONE]
    listed = topic.store.ask("ZRANGE", topic.keys.local, 0, -1, "WITHSCORES")
    assert [(listed[i].decode(), int(listed[i + 1])) for i in (0, 2)] == [(ONE, due), (TWO, due)]


def test_a_key_stays_in_its_shard_until_its_messages_have_ended(split_here: Split) -> None:
    split_here.add_group()
    with Producer(split_here.url) as producer:
        producer.send("orders", "a", key="k", debounce="1h")
        split_here.into(4)
        split_here.drive(split_here.store.layout(Topic(split_here.url).name))  # type: ignore[arg-type]
        said = producer.send_one("orders", "b", key="k", debounce="1h")
        assert said == (ONE, "replaced")
        assert split_here.waiting() == {"orders": {ONE}}
        split_here.store.call(Cancel("orders", [ONE]))
        assert producer.send_one("orders", "c", key="k", debounce="1h") == (ONE, "accepted")
        ((shard, ids),) = split_here.waiting().items()
        assert (shard.partition("~")[2][1:], ids) == ("of4", {ONE})


SHOP = """
import json, os, time
import redis
from lisa import Consumer
client = redis.Redis.from_url(os.environ["LISA_REDIS_URL"])
consumer = Consumer(concurrency=8)
def now_us():
    seconds, micros = client.time()
    return 1_000_000 * seconds + micros
@consumer.on("orders")
def handle(message):
    begun = now_us()
    time.sleep(0.05)
    client.rpush("log", json.dumps([message.id, message.body, begun, now_us()]))
"""
SENDER = """
import os, random, sys, time
from lisa import Outgoing, Producer
name, chosen = sys.argv[1], random.Random(sys.argv[1])
with Producer() as producer:
    for n in range(150):
        keys = chosen.sample(range(50), 5)
        bodies = [Outgoing([name, n], key=f"k{key}") for key in keys]
        producer.send_many("orders", bodies, debounce="60ms", max_wait="200ms")
        time.sleep(chosen.choice([0, 0.002, 0.02, 0.05]))
"""
QUIET_MS, MOST_MS, KEYS, SENDERS = 60, 200, 50, 3


class Life(NamedTuple):
    """One burst in the journal: the due times and the bodies of its sends, with their instants."""

    sends: list[tuple[int, int, Any]]
    taken: list[int]


def lives(client: redis.Redis) -> dict[str, list[Life]]:
    """The bursts of each id, in order."""
    found: dict[str, list[Life]] = {}
    events: Any = client.xrange("lisa:{orders}:events")
    for entry, fields in events:
        message_id, state = fields[b"id"].decode(), fields[b"state"]
        if state == b"sent":
            found.setdefault(message_id, []).append(Life([], []))
        life = found[message_id][-1]
        if state in (b"sent", b"replaced"):
            assert not life.taken, "a burst that had begun was changed"
            body, _ = decode_content(fields[b"envelope"])
            life.sends.append((int(entry.split(b"-")[0]), int(fields[b"due"]), body))
        if state == b"in_flight":
            life.taken.append(len(life.sends))
    return found


def check_dues(life: Life) -> None:
    """Due once there was no send for the quiet time, but no later than allowed.

    One that is late keeps its place.
    """
    most_ms = life.sends[0][0] + MOST_MS
    for at_ms, due_ms, _ in life.sends:
        wanted_ms = min(at_ms + QUIET_MS, most_ms)
        assert due_ms in (wanted_ms, wanted_ms + 1) or due_ms <= wanted_ms <= at_ms


def test_each_burst_is_handled_once_with_its_last_body(
    bench: Bench, processes: Processes, tmp_path: Path
) -> None:
    """With real processes: senders that share keys, two consumers, a manager."""
    bench.declare("orders", journal=True)
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "sender.py").write_text(SENDER)
    env = {"LISA_REDIS_URL": bench.url}
    processes.start("-m", "lisa.cli.manager", env=env)
    processes.start("-m", "lisa.cli.consumer", "--processes", "2", "shop", env=env)
    senders = [processes.start("sender.py", f"{n}", env=env) for n in range(SENDERS)]
    assert [sender.wait() for sender in senders] == [0] * SENDERS
    client = connect(bench.url)

    def is_idle() -> bool:
        stats = bench.stats("orders")
        return stats.get("acked@lisa") == sum(map(len, lives(client).values()))

    wait_until(is_idle)
    log = [json.loads(line) for line in client.lrange("log", 0, -1)]
    bursts = lives(client)
    assert {message_id.partition("\x1f")[0] for message_id in bursts} == {
        f"k{n}" for n in range(KEYS)
    }
    for message_id, found in bursts.items():
        assert all(life.taken == [len(life.sends)] for life in found)
        last_bodies = [life.sends[-1][2] for life in found]
        assert [body for sent, body, _, _ in log if sent == message_id] == last_bodies
        for life in found:
            check_dues(life)
    assert sum(len(life.sends) for found in bursts.values() for life in found) == 5 * 150 * SENDERS
    check_alone(log)
    client.close()


def check_alone(log: list[tuple[str, Any, int, int]]) -> None:
    """No two messages of a key were handled at once."""
    ends: dict[str, int] = {}
    for message_id, _, begun, ended in sorted(log, key=lambda line: line[2]):
        key = message_id.partition("\x1f")[0]
        assert begun >= ends.get(key, 0)
        ends[key] = ended
