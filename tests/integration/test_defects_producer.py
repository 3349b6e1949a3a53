"""Known defects of the original's producer, by their numbers in the review.

Each test would fail on the original's behaviour.
"""

from __future__ import annotations

import inspect
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import time_machine

from lisa.core.model.envelope import encode_envelope, new_token
from lisa.core.redis.flow import Command
from lisa.producer import Outgoing, Producer
from tests.producers import Topic
from tests.rows import Item, enqueue

if TYPE_CHECKING:
    import redis

HOUR = timedelta(hours=1)
HOUR_MS = 3_600_000


def test_l1_every_way_to_say_when_is_heeded(producer: Producer, topic: Topic) -> None:
    """The original's utility dropped `expectAt`, so messages were sent without delay."""
    topic.declare("lisa")
    at = datetime(2040, 1, 1, tzinfo=UTC)
    at_ms = 2_208_988_800_000
    producer.send("orders", 1, id="at", at=at)
    producer.send("orders", 1, id="at_ms", at_ms=at_ms)
    producer.send("orders", 1, id="naive", at=at.replace(tzinfo=None), tz="UTC")
    producer.send_many("orders", [Outgoing(1, id="many")], at=at)
    producer.send_many("orders", [Outgoing(1, id="own", at_ms=at_ms)])
    assert topic.waiting() == dict.fromkeys(("at", "at_ms", "many", "naive", "own"), at_ms)
    producer.send("orders", 1, id="delay", delay=HOUR)
    assert topic.waiting()["delay"] > topic.now_ms()
    assert topic.take("lisa") == []


def test_l1_a_topic_without_configuration_takes_messages(producer: Producer) -> None:
    """The original threw a NullPointerException."""
    message_id = producer.send("never.seen:before-1", 1)
    seen = producer.get("never.seen:before-1", message_id)
    assert seen is not None
    assert seen.state == "waiting"


@pytest.mark.parametrize("due_ms", [0, 9, 999, 1_700_000_000, 999_999_999_999])
def test_l2_small_due_times_are_past(topic: Topic, due_ms: int) -> None:
    """The original compared times as text: 999 counted as later than 1795..."""
    topic.declare("lisa")
    token = new_token()
    topic.store.call(enqueue("orders", token, [Item("a", str(due_ms), encode_envelope(token, 1))]))
    assert [(entry.id, entry.due_ms) for entry in topic.take("lisa")] == [("a", due_ms)]


@pytest.mark.parametrize("due_ms", [10_000_000_000_000, 253_402_300_799_999])
def test_l2_large_due_times_are_ahead(producer: Producer, topic: Topic, due_ms: int) -> None:
    """As text, fourteen digits beginning with 1000... counted as earlier than now."""
    topic.declare("lisa")
    message_id = producer.send("orders", 1, at_ms=due_ms)
    assert topic.waiting() == {message_id: due_ms}
    assert topic.take("lisa") == []
    assert topic.promote() == 0


def test_l16_only_sent_messages_are_in_the_queue(
    producer: Producer, topic: Topic, client: redis.Redis
) -> None:
    """The original put an init message into every queue at each start."""
    topic.declare("lisa")
    ids = {producer.send("orders", 1, delay=HOUR), producer.send("orders", 2, delay=HOUR)}
    assert topic.waiting().keys() == ids
    assert client.xlen(topic.keys.group("lisa").ready) == 0
    ready = producer.send("orders", 3)
    entries: Any = client.xrange(topic.keys.group("lisa").ready)
    assert [fields[b"id"] for _, fields in entries] == [ready.encode()]


@pytest.mark.parametrize("off", [timedelta(days=-1), timedelta(days=1)])
def test_l17_the_producers_clock_decides_nothing(
    producer: Producer, topic: Topic, off: timedelta
) -> None:
    """The original used the clock of the sending machine."""
    topic.declare("lisa")
    now_ms = topic.now_ms()
    with time_machine.travel(datetime.now(UTC) + off, tick=True):
        delayed = producer.send("orders", 1, delay=HOUR)
        ahead = producer.send("orders", 1, at_ms=now_ms + HOUR_MS)
        past = producer.send("orders", 1, at_ms=now_ms - 1)
    later_ms = topic.now_ms()
    waiting = topic.waiting()
    assert waiting.keys() == {delayed, ahead}
    assert now_ms + HOUR_MS <= waiting[delayed] <= later_ms + HOUR_MS + 1
    assert [entry.id for entry in topic.take("lisa")] == [past]


def test_l18_every_key_of_a_call_is_declared_and_in_one_slot(
    producer: Producer, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original's keys had no hash tag, and the body's key was an argument: CROSSSLOT."""
    topic.declare("g1", "g2")
    earlier = set(topic.store.ask("KEYS", "lisa:{orders}:reply:*"))
    calls: list[Command] = []
    execute = producer._store.connection.execute

    def noted(command: Command) -> Any:
        calls.append(command)
        return execute(command)

    monkeypatch.setattr(producer._store.connection, "execute", noted)
    producer.send("orders", 1, id="a", delay=HOUR, ttl=HOUR, retry="1s")
    producer.send_many("orders", [Outgoing(n, id=f"n{n}") for n in range(3)])
    producer.get("orders", "a")
    producer.reschedule("orders", "a", delay=2 * HOUR)
    producer.fire_now("orders", "a")
    producer.send("orders", 1, id="b", delay=HOUR)
    producer.cancel_many("orders", ["a", "b", "n0"])
    declared: set[object] = set()
    scripts = [command for command in calls if command[0] == "EVALSHA"]
    assert len(scripts) >= 7
    for command in scripts:
        count = int(command[2])
        keys, arguments = command[3 : 3 + count], command[3 + count :]
        assert all(str(key).startswith("lisa:{orders}:") for key in keys)
        assert not any(str(argument).startswith("lisa:{orders}") for argument in arguments)
        declared.update(keys)
    found = set(topic.store.ask("KEYS", "lisa:{orders}:*")) - earlier
    written = {key.decode() for key in found}
    assert written <= declared
    assert {key for key in written if ":body:" in key} == {
        "lisa:{orders}:body:n1",
        "lisa:{orders}:body:n2",
    }


def test_l22_missing_features_of_the_original_are_present(producer: Producer, topic: Topic) -> None:
    """Sending returned no id; there was no cancel, query, update, dedupe, ttl or batch."""
    message_id = producer.send("orders", {"n": 1}, delay=HOUR, ttl=HOUR)
    assert topic.waiting().keys() == {message_id}
    seen = producer.get("orders", message_id)
    assert seen is not None
    assert seen.body == {"n": 1}
    assert producer.reschedule("orders", message_id, at_ms=10**13) == "rescheduled"
    assert topic.waiting() == {message_id: 10**13}
    producer.send("orders", {"n": 2}, id=message_id)
    assert topic.waiting() == {message_id: 10**13}
    assert producer.cancel("orders", message_id) == "cancelled"
    assert topic.waiting() == {}
    assert producer.send_many("orders", [1, 2, 3], delay=HOUR).accepted == 3
    assert topic.store.ask("ZCARD", topic.keys.expiry) == 0
    for name in ("delay", "at", "at_ms", "tz", "id", "ttl", "retry", "headers", "on_duplicate"):
        assert name in inspect.signature(producer.send).parameters


def test_l23_a_send_is_one_round_trip_on_a_connection_that_is_given_back(
    producer: Producer, client: redis.Redis
) -> None:
    """The original called SCRIPT EXISTS each time, on a connection that it never closed."""
    producer.send("orders", 0, delay=HOUR)
    client.config_resetstat()
    connections = len(client.client_list())
    for n in range(50):
        producer.send("orders", n, delay=HOUR)
    assert len(client.client_list()) == connections
    stats: Any = client.info("commandstats")
    assert stats["cmdstat_evalsha"]["calls"] == 50
    assert not [name for name in stats if name.startswith(("cmdstat_script", "cmdstat_eval|"))]
    received: Any = client.info("stats")
    assert received["total_connections_received"] == 0
