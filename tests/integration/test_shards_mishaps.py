"""A sharded topic with a shard that fails, is late, or is forgotten."""

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
from redis.crc import key_slot

from lisa import Consumer, LisaError, Manager, NotReplicated, Producer, replicas
from lisa.consumer import heartbeat
from lisa.core.model.errors import ServerUnavailable
from lisa.core.model.keys import Keys
from lisa.core.model.sharding import Shard, Topic
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.store import group_removal
from lisa.core.store.reshard import spread
from lisa.core.store.store import SyncStore
from lisa.core.transitions.groups import Undeclare
from lisa.core.transitions.topic import Configure
from lisa.embedded import EmbeddedServer
from lisa.manager.plan import Plan, Schedules
from lisa.manager.registry import Registry
from lisa.manager.sharder import Sharder
from lisa.producer import Outgoing
from tests import clusters
from tests.producers import Either
from tests.servers import connect, shortest_s, wait_until
from tests.shards import ORDERS, Split

HOUR = timedelta(hours=1)
SHORT = timedelta(milliseconds=500)


@pytest.fixture
def split(split_here: Split) -> Split:
    return split_here


@pytest.fixture(params=["sync", "async"])
def producer(request: pytest.FixtureRequest, split_here: Split) -> Iterator[Either]:
    made = Either(request.param, split_here.url)
    yield made
    made.close()


def own(ids: str) -> list[Outgoing]:
    return [Outgoing(1, id=one) for one in ids]


def test_messages_are_not_sent_elsewhere_if_an_older_shard_fails(
    split: Split, producer: Either
) -> None:
    producer.send("orders", 1, id="x", delay=HOUR)
    split.into(4)
    stats = split.keys().stats  # where the duplicate is counted, once it is found
    split.ask("DEL", stats)
    split.ask("SET", stats, "a foreign hand's")
    with pytest.raises(LisaError, match="WRONGTYPE") as caught:
        producer.send_many("orders", own("xyz"), delay=HOUR)
    assert list(caught.value.outcomes) == [None] * 3, "they went to the same shard"
    assert split.copies() == ["x"]
    split.ask("DEL", stats)
    report = producer.send_many("orders", own("xyz"), delay=HOUR)
    assert [one.outcome for one in report] == ["duplicate", "accepted", "accepted"]
    assert split.copies() == ["x", "y", "z"]


def not_replicated(call: Callable[[], object]) -> NotReplicated:
    """The error of a call; one that a busy machine did not answer in time is made again."""
    while True:
        try:
            call()
        except NotReplicated as error:
            return error
        except ServerUnavailable:
            continue
        pytest.fail("the call succeeded without a replica")


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_unreplicated_messages_of_an_older_shard_are_not_sent_elsewhere(
    split: Split, kind: str
) -> None:
    """There is no replica. One patience is enough for all shards."""
    doubting = Either(kind, split.url, durability=replicas(1), patience=SHORT)
    with Producer(split.url) as producer:
        producer.send("orders", 1, id="x", delay=HOUR)
    split.into(4)
    refused = not_replicated(lambda: doubting.send("orders", 1, id="x", delay=HOUR))
    assert list(refused.outcomes) == [None]
    assert split.copies() == ["x"]
    split.into(8)

    def send() -> None:
        messages = own("abcdefghijklmnopqrstuvwxyz")
        not_replicated(lambda: doubting.send_many("orders", messages, delay=HOUR))

    limit_s = 4 * SHORT.total_seconds()
    assert shortest_s(send, limit_s) < limit_s, "not once for each shard"
    doubting.close()


@pytest.mark.parametrize("ended", ["cancelled", "acked"])
def test_a_live_message_in_an_older_shard_is_not_reported_as_settled(
    split: Split, producer: Either, ended: str
) -> None:
    """The present shard has a settled id that is live again in an older shard."""
    producer.send_many("orders", own("abc"), delay=HOUR)
    assert producer.ask("cancel_many", "orders", list("abc")) == ["cancelled"] * 3
    if ended == "acked":
        for one in "abc":
            stone = split.keys().done(one)
            said = split.ask("GET", stone).replace(b"cancelled", b"acked")
            split.ask("SET", stone, said, "KEEPTTL")
    split.into(4)
    report = producer.send_many("orders", own("abc"), delay=HOUR, on_duplicate="replace")
    assert report.replaced == 3
    split.into(2)
    split.into(1)
    found = producer.ask("get", "orders", "a")
    assert (found.state, found.body) == ("waiting", 1)
    assert producer.ask("reschedule", "orders", "b", delay=2 * HOUR) == "rescheduled"
    assert producer.ask("cancel_many", "orders", list("abc")) == ["cancelled"] * 3
    assert split.waiting() == {}
    assert producer.ask("get", "orders", "a").state in (ended, "cancelled")
    assert producer.ask("reschedule", "orders", "b", delay=HOUR) == "done"


@pytest.mark.parametrize("lost", ["the last change", "two changes", "all of it"])
def test_shards_of_a_layout_that_was_lost_are_the_topics_again(
    split: Split, producer: Either, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    split.into(2)
    options = split.keys().options
    before = split.ask("HGET", options, "layout")
    for shards in (8, 4) if lost == "two changes" else (4,):
        split.into(shards)
        producer.send_many("orders", own("xyz"), delay=HOUR)
    if lost == "all of it":
        split.ask("DEL", options)
    else:
        split.ask("HSET", options, "layout", before, "shards", 2)
    before = split.layout.shards
    sharder = Sharder(split.store)
    with caplog.at_level(logging.WARNING, "lisa.manager"):
        assert sharder.pick(split.drive(split.store.shards())) == ["orders"]
        sharder.step(ORDERS)
    counts = {"all of it": "2 and 4", "two changes": "4 and 8"}.get(lost, "4")
    assert f"the server lost the layout with {counts} shards;" in caplog.text
    found = split.layout
    assert (found.shards, set(found.older) >= {1, 4} - {before}) == (before, True)
    assert {split.accepts(one) for one in found.current(ORDERS)} == {found.number}
    assert {split.accepts(one) for one in found.draining(ORDERS)} == {-found.number}
    assert producer.send_many("orders", own("xyz"), delay=HOUR).duplicate == 3
    made = producer.send("orders", 1, delay=HOUR)
    with Producer(split.url) as other:
        assert other.get("orders", made) is not None
        assert other.cancel_many("orders", ["x", "y", "z", made]) == ["cancelled"] * 4
    assert split.waiting() == {}
    caplog.clear()
    sharder.step(ORDERS)
    assert (split.layout, caplog.text) == (found, "")


def test_deleted_shards_that_are_listed_again_are_not_lost(
    split: Split, caplog: pytest.LogCaptureFixture
) -> None:
    """As by a manager that knows them still, once the node of the list answers again."""
    plan = Plan.of((), {}, default_group="lisa", schedules=Schedules())
    registry, sharder = Registry(split.store, plan, lambda _: None), Sharder(split.store)
    split.store.call(Configure("orders", {"retention": "0"}))
    registry.learn(["orders", *(former := split.into(4).current(ORDERS))])
    split.into(1)
    while len(split.layout.counted(ORDERS)) > 1:
        sharder.step(ORDERS)
    sharder.step(ORDERS)
    registry.list_again()
    assert [*map(str, split.drive(split.store.shards()))] == ["orders"]
    split.drive(split.store.register(former))  # in any other way
    for topic in sharder.pick(split.drive(split.store.shards())):
        sharder.step(topic)
    assert (len(split.layout.counted(ORDERS)), caplog.text) == (1, "")


def test_a_number_is_not_forgotten_while_a_removed_group_owes_something(
    split_in_two_groups: Split,
) -> None:
    """Its removal was interrupted after the declaration was deleted."""
    split, store = split_in_two_groups, split_in_two_groups.store
    with Producer(split.url) as producer:
        producer.send("orders", 1)
    store.call(Configure("orders", {"retention": "0"}))
    split.into(2)
    wait_until(lambda: split.ask("HLEN", split.keys().group("audit").entries) == 1)
    store.call(Undeclare("orders", "audit"))
    for group, left in (("lisa", [1]), ("audit", [])):
        split.drive(group_removal.remove(store, ORDERS, group))
        assert store.drive(store.groups("orders")) == ()
        split.step(2)
        assert list(split.layout.older) == left


def test_a_consumer_of_many_shards_stops_soon_although_its_server_hangs(
    own_server: EmbeddedServer,
) -> None:
    """All readers share one deadline."""
    split = Split(own_server.url)
    split.add_group()
    split.into(16)
    consumer = Consumer(f"{split.url}?socket_timeout={SHORT.total_seconds()}", grace=SHORT)
    consumer.on("orders", lambda _: None)
    with consumer:
        wait_until(lambda: consumer.health()["status"] == "ok")
        with hanging(split.url):
            began = time.monotonic()
            consumer.pause()
            consumer.stop()
            took_s = time.monotonic() - began
    assert took_s < 16 * SHORT.total_seconds()


def test_shards_that_no_thread_could_read_at_first_are_read(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused, handled = threading.Thread.start, list[str](), list[str]()

    def starting(thread: threading.Thread) -> None:
        if thread.name.startswith("lisa-reader") and len(refused) < 5:
            refused.append(thread.name)
            raise RuntimeError("can't start new thread")
        start(thread)

    consumer = Consumer(split.url, group="lisa", concurrency=2)
    # With a limit of its own, each shard has a reader, also on a single server.
    consumer.on("orders", lambda message: handled.append(message.id), concurrency=1)
    with Manager(split.url), consumer, Producer(split.url) as producer:
        wait_until(lambda: consumer.health()["status"] == "ok")
        monkeypatch.setattr(threading.Thread, "start", starting)
        monkeypatch.setattr(heartbeat, "FOLLOW_S", 0.1)
        split.into(4)
        sent = [one.id for one in producer.send_many("orders", range(40), delay=SHORT)]
        wait_until(lambda: set(handled) == set(sent))
    assert len(refused) == 5


# Nodes that are away


def named_on(node: int, pattern: str) -> str:
    """Text that, inserted in `pattern`, gives a name in a slot of the node."""
    found = (str(n) for n in range(100) if key_slot((pattern % n).encode()) // 8192 == node)
    return next(found)


@contextmanager
def hanging(url: str) -> Iterator[None]:
    with connect(url) as client:
        pid = int(client.info("server")["process_id"])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("hung", [0, pytest.param(1, marks=pytest.mark.full)])
def test_topics_are_found_and_looked_after_though_one_node_hangs(
    two_nodes: list[str], hung: int
) -> None:
    """Topics are found by their keys."""
    address = Address(clusters.address(two_nodes), socket_timeout_s=0.5)
    prefix = "p" + named_on(1 - hung, "p%d:topics")  # the list of topics is on the other node
    store = SyncStore(Connection(address), Keys(prefix), timedelta(milliseconds=60))
    topics = ["t" + named_on(node, "t%d") for node in (0, 1)]
    for topic in topics:
        store.ask("ZADD", store.keys.topic(topic).waiting, 1, "some-id")
    plan = Plan.of({}, {}, default_group="lisa", schedules=Schedules())
    registry = Registry(store, plan, lambda _: None)
    with hanging(two_nodes[hung]), pytest.raises(ServerUnavailable):
        registry.search()
    assert registry.topics == [topics[1 - hung]]
    registry.search()
    assert registry.topics == sorted(topics)
    assert store.drive(store.topics()) == sorted(topics)
    for topic in topics:
        store.call(Configure(topic, {"shards": "2"}))
        store.drive(spread(store, Topic(topic)))
    names = [Shard(name) for name in sorted([*topics, "u" + named_on(1 - hung, "u%d")])]
    sharder = Sharder(store)
    with hanging(two_nodes[hung]):
        assert sharder.pick(names) == sorted(topics)
        with pytest.raises(ServerUnavailable):
            sharder.step(Topic(topics[hung]))
    assert sharder.pick(names) == sorted(topics)
    store.close()
