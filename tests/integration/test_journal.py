"""The journal of real roles: the events of each role, and trimming by the manager."""

import os
import socket
import threading
from contextlib import suppress
from datetime import timedelta

import pytest

from lisa import Consumer, Manager, Message, Producer
from lisa.admin.journal import journal
from lisa.core.model.envelope import encode_envelope
from lisa.core.model.keys import Keys
from lisa.core.model.sharding import Shard
from lisa.core.store.store import SyncStore
from lisa.core.transitions.enqueue import Enqueue
from lisa.manager import engine
from lisa.manager.pruner import Pruner
from tests.servers import connect, wait_until

KEYS = Keys().topic("orders")


def events(url: str) -> list[dict[str, str]]:
    with connect(url) as client:
        found = client.xrange(KEYS.events)
    return [
        {k.decode(): v.decode("utf-8", "replace") for k, v in fields.items()} for _, fields in found
    ]


@pytest.fixture
def server(redis_url: str) -> str:
    return redis_url


def test_a_story_names_the_actors(redis_url: str) -> None:
    options = {"journal": True, "retry_delays": "0", "group": "lisa"}
    handled = threading.Event()
    consumer = Consumer(redis_url)

    @consumer.on("orders")
    def fail_once(message: Message) -> None:
        if message.attempt == 1:
            raise ValueError("not yet")
        handled.set()

    with (
        connect(redis_url) as client,
        Manager(redis_url, topics={"orders": options}),
        Producer(redis_url) as producer,
    ):
        wait_until(lambda: client.hget(KEYS.options, "journal") == b"1")
        wait_until(lambda: client.hexists(KEYS.groups, "lisa"))
        with consumer:
            message_id = producer.send("orders", {"order": 42}, delay=timedelta(milliseconds=50))
            assert handled.wait(60)
            wait_until(lambda: any(event["state"] == "acked" for event in events(redis_url)))
    story = [event for event in events(redis_url) if event["id"] == message_id]
    told = [(e["state"], e["attempt"], e["actor"].partition("@")[0]) for e in story]
    assert told == [
        ("sent", "0", "producer"),
        ("ready", "1", "manager"),
        ("in_flight", "1", "consumer"),
        ("retry", "1", "consumer"),
        ("ready", "2", "manager"),
        ("in_flight", "2", "consumer"),
        ("acked", "2", "consumer"),
    ]
    assert [int(event["n"]) for event in story] == list(range(1, 8))
    assert "not yet" in story[3]["reason"]
    assert int(story[2]["late"]) >= 0
    assert story[-1]["end"] == "1"


def test_a_forked_process_is_named_by_its_own_id(redis_url: str) -> None:
    producer = Producer(redis_url)
    with connect(redis_url) as client:
        client.hset(KEYS.options, "journal", "1")
    if (child := os.fork()) == 0:
        with suppress(BaseException):
            producer.send("orders", {}, delay="1h")
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    [sent] = events(redis_url)
    assert sent["actor"] == f"producer@{socket.gethostname()}:{child}"


def test_the_manager_keeps_a_journal_within_its_bound(
    store: SyncStore,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine, "PRUNE", timedelta(milliseconds=100))
    with connect(redis_url) as client:
        client.hset(KEYS.options, mapping={"journal": "1", "journal_max": "1000"})
        for start in range(0, 5_000, 500):
            ids, data = [f"m{start + i}" for i in range(500)], [encode_envelope("A" * 8, "")] * 500
            store.call(Enqueue("orders", ids, ["4000000000000"], data))
        assert Pruner(store).pick([Shard("orders"), Shard("other")]) == ["orders"]
        with Manager(redis_url):
            wait_until(lambda: client.xlen(KEYS.events) <= 1100)
            wait_until(lambda: "unarchived events" in caplog.text)
        assert client.xlen(KEYS.events) >= 1000
        lost = int(client.hget(KEYS.stats, "journal_lost") or 0)
        assert lost == 5_000 - client.xlen(KEYS.events)
    assert f"{lost} unarchived events" in caplog.text


def test_a_topic_whose_journal_waits_for_its_archive_stays_listed(
    redis_url: str, store: SyncStore
) -> None:
    """A record that no archive wrote is passed over."""
    with connect(redis_url) as client, Manager(redis_url, sweep=timedelta(milliseconds=100)):
        client.hset(KEYS.archived, mapping={"bad": "1-1 x y", "nightly": "1-1 3 1234"})
        for topic in ("orders", "empty"):
            client.zadd(Keys().topics, {topic: 1})
        client.xadd(KEYS.events, {"n": "1"})
        wait_until(lambda: client.zscore(Keys().topics, "empty") is None)
        assert client.zscore(Keys().topics, "orders") is not None
    found = store.drive(journal(store, "orders"))
    assert [(one.name, one.number) for one in found.archives] == [("nightly", 3)]
