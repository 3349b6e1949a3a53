"""Sharded topics with real producers, managers and consumers."""

import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import pytest

from lisa import Consumer, LisaError, Manager, Producer
from lisa.admin import history, topics
from lisa.admin.fsck import check
from lisa.admin.history import HistorySpan
from lisa.consumer import heartbeat
from lisa.core.model.message import Message
from lisa.core.model.sharding import Topic
from lisa.core.store import group_removal
from lisa.core.transitions.base import text
from lisa.core.transitions.topic import Configure
from lisa.manager.sampler import Sampler
from lisa.manager.sharder import Sharder
from lisa.pipeline.source.events import Mark, number_of
from lisa.pipeline.source.following import find_unread, record_archived
from lisa.producer import Outgoing
from tests.servers import wait_until
from tests.shards import ORDERS, Split, run_steps

HOUR = timedelta(hours=1)
SOON = timedelta(milliseconds=200)
OFTEN = timedelta(milliseconds=100)
MS = timedelta(milliseconds=1)


class Handled:
    """The messages that a consumer has handled."""

    def __init__(self, url: str, **options: Any) -> None:
        self.counts: Counter[str] = Counter()
        self.topics: set[str] = set()
        self.consumer = Consumer(url, **options)
        self.consumer.on("orders", self._handle)
        self._lock = threading.Lock()

    def _handle(self, message: Message) -> None:
        with self._lock:
            self.counts[message.id] += 1
            self.topics.add(message.topic)

    def wait_for(self, count: int) -> None:
        """Wait until so many messages were handled, each of them once."""
        wait_until(lambda: len(self.counts) >= count)
        assert (len(self.counts), set(self.counts.values())) == (count, {1})


def send_now(producer: Producer, count: int) -> list[str]:
    """Send messages that are due soon."""
    report = producer.send_many("orders", range(count), delay=SOON)
    assert report.accepted == count
    return [sent.id for sent in report]


def test_a_pull_takes_from_all_shards_and_returns_its_messages_if_another_fails(
    split: Split,
) -> None:
    split.into(4)
    split.add_group()
    with Producer(split.url) as producer:
        sent = [one.id for one in producer.send_many("orders", range(40))]
    failing = split.keys(split.layout.active(ORDERS)[2])
    split.ask("DEL", failing.options)
    split.ask("SET", failing.options, "a foreign hand's")
    left = split.ask("XLEN", failing.group("lisa").ready)
    consumer, taken, faults = Consumer(split.url, group="lisa"), list[str](), 0
    while faults < 3:
        try:
            found = consumer.pull("orders", batch=7, wait=timedelta(0))
        except LisaError:
            faults += 1
            continue
        assert found, "each pull without messages reports the failing shard"
        for delivery in found:
            assert (delivery.topic, delivery.extend()) == ("orders", True)
            assert [delivery.ack(), delivery.ack()] == ["acked", "repeated"]
            taken.append(delivery.id)
    consumer.stop()
    assert 0 < left < 40
    assert len(set(taken) & set(sent)) == 40 - left, "no message was taken and not returned"


def send_under_load(producer: Producer, is_over: threading.Event) -> list[str]:
    """Send explicit ids twice each, with known ones between them, and cancel others."""
    sent: list[str] = []
    n = 0
    while not is_over.is_set():
        n += 1
        new = [f"{n}-{i}" for i in range(20)]
        batch = [*new, *sent[-200::10]]
        for expected in ("accepted", "duplicate"):
            report = producer.send_many(
                "orders", [Outgoing(1, id=one) for one in batch], delay=10 * (n % 10) * MS
            )
            known = ["duplicate"] * (len(batch) - len(new))
            assert [one.outcome for one in report] == [*[expected] * len(new), *known]
        sent += [*new, producer.send("orders", "made")]
        held = [producer.send("orders", "later", id=f"c{n}-{i}", delay=HOUR) for i in range(5)]
        for one in held:
            found = producer.get("orders", one)
            assert found is not None
            assert (found.state, found.topic) == ("waiting", "orders")
        assert producer.cancel_many("orders", held) == ["cancelled"] * 5
    return sent


@pytest.mark.parametrize(
    ("numbers", "pause_s"),
    [
        ((4, 8, 2, 1), 0.4),
        pytest.param((4, 8, 2, 1, 3, 5, 4, 1, 64, 1), 3.0, marks=pytest.mark.slow),
    ],
)
def test_the_number_changes_under_load(
    split: Split, numbers: tuple[int, ...], pause_s: float
) -> None:
    """Each id is handled once, duplicates are detected, and waiting ids can be cancelled."""
    handled, is_over = Handled(split.url, concurrency=4), threading.Event()
    second = Consumer(split.url, concurrency=4)
    second.on("orders", handled._handle)
    split.drive(split.store.register(["orders"]))
    managers = [
        Manager(split.url, groups={"orders": ["lisa"]}, sweep=timedelta(seconds=1))
        for _ in range(2)
    ]
    with (
        managers[0],
        managers[1],
        handled.consumer,
        second,
        Producer(split.url) as producer,
        ThreadPoolExecutor(1) as pool,
    ):
        sending = pool.submit(send_under_load, producer, is_over)
        try:
            for shards in numbers:
                time.sleep(pause_s)  # of the load
                split.into(shards)
            time.sleep(pause_s)
        finally:
            is_over.set()
        sent = sending.result()
        handled.wait_for(len(sent))
        wait_until(lambda: list(handled.consumer.health()["topics"]) == ["orders/lisa"])  # joined
    assert set(handled.counts) == set(sent)
    assert handled.topics == {"orders"}


def test_a_consumer_that_follows_after_the_former_shards_are_deleted_reads_on(
    split: Split, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(heartbeat, "FOLLOW_S", HOUR.total_seconds())
    handled, count = Handled(split.url, concurrency=2), 20
    manager = Manager(split.url, topics={"orders": {"retention": 0, "shards": 4}}, sweep=OFTEN)
    with manager, Producer(split.url) as producer:
        wait_until(lambda: len(split.layout.current(ORDERS)) == 4)
        with handled.consumer:
            for turn, shards in enumerate((2, 1), 1):
                send_now(producer, count)
                handled.wait_for((2 * turn - 1) * count)
                split.into(shards)
                wait_until(lambda: not left_behind(split))
                send_now(producer, count)
                with monkeypatch.context() as follows:
                    follows.setattr(heartbeat, "FOLLOW_S", 0.1)
                    handled.wait_for(2 * turn * count)
    for untrue in ("lost the layout", "was emptied", "was removed"):
        assert untrue not in caplog.text


def test_the_keys_of_a_number_that_is_left_are_deleted(
    split: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "FOLLOW_S", 0.1)
    handled, count = Handled(split.url, concurrency=2), 20
    sampler, minute = Sampler(split.store), 60_000
    began_ms = split.drive(split.store.server_time_ms()) - 20 * minute

    def sample(after: int) -> None:
        for shard in split.layout.counted(ORDERS):
            sampler.step(shard, began_ms + after * minute)

    def totals() -> tuple[int, int]:
        (counted,) = split.drive(topics.counts(split.store, ["orders"]))
        return counted.total("sent"), counted.total("acked")

    manager = Manager(split.url, topics={"orders": {"retention": 0}}, sweep=OFTEN)
    with manager, handled.consumer, Producer(split.url) as producer:
        for turn, shards in enumerate((4, 1, 4, 2), 1):
            sample(2 * turn - 1)
            late = producer.send("orders", 1, delay=HOUR) if turn == 2 else None
            split.into(shards)
            send_now(producer, count)
            handled.wait_for(turn * count + (turn > 2))
            if late is not None:
                assert split.layout.older, "it holds what is due later"
                assert producer.fire_now("orders", late) == "rescheduled"
            wait_until(lambda: not split.layout.older)
            wait_until(lambda: read_by(handled.consumer) == set(split.layout.active(ORDERS)))
            sample(2 * turn)
            wait_until(lambda: set(split.layout.gone) <= {1})
            wait_until(lambda: not left_behind(split))
            total = turn * count + (turn > 1)
            wait_until(lambda: totals() == (total, total))  # noqa: B023
    steps = split.drive(
        history.history(split.store, "orders", HistorySpan.HOUR, now_ms=began_ms + 20 * minute)
    )
    risen = sum(step.counters.get("sent", 0) for step in steps)
    assert risen == 4 * count + 1
    assert set(handled.counts.values()) == {1}
    assert split.drive(check(split.store, repair=False)).findings == []


def left_behind(split: Split) -> set[str]:
    """Keys, and names in the list of topics, of unused shards."""
    in_use = set(split.layout.counted(ORDERS))
    found, cursor = set[str](split.drive(split.store.shards())), 0
    while True:
        reply, page = split.ask("SCAN", cursor, "MATCH", "lisa:{*", "COUNT", 1000)
        names = [key.decode() for key in page]
        # Records of calls and tombstones expire.
        lasting = [one for one in names if not re.search(r"}:(reply|done):", one)]
        found |= {str(split.store.keys.shard_of(one)) for one in lasting}
        if not (cursor := int(reply)):
            return found - in_use - {"orders"}


class Cut(BaseException):
    """Ends a call as a kill would: it is not caught."""


def cut_after(calls: int, split: Split, patch: pytest.MonkeyPatch) -> None:
    """Let the first `calls` calls to the server through, and raise `Cut` for all others."""
    left = iter(range(calls))

    def call(send: Callable[[Any], Any], commands: Any) -> Any:
        if next(left, None) is None:
            raise Cut
        return send(commands)

    connection = split.store.connection
    patch.setattr(connection, "execute", partial(call, connection.execute))
    patch.setattr(connection, "execute_many", partial(call, connection.execute_many))


def leave_shards(split: Split, topic: str) -> None:
    """A topic with two former shards, each with some counters."""
    split.store.call(Configure(topic, {"layout": "2:1::2"}))
    for shard in (f"{topic}~0of2", f"{topic}~1of2"):
        keys = split.keys(shard)
        split.ask("HSET", keys.options, "accepts", -2)
        split.ask("HSET", keys.stats, "sent", 3, "acked@lisa", 2)
        split.ask("XADD", keys.history, "60000-0", "sent", 3)


def test_deleting_former_shards_may_be_cut_short_between_any_two_calls(
    split_here: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, was_cut = split_here.store, list[bool]()
    while all(was_cut):
        topic = f"orders-{len(was_cut)}"
        leave_shards(split_here, topic)
        with monkeypatch.context() as patch, suppress(Cut):
            cut_after(len(was_cut), split_here, patch)
            was_cut.append(True)
            Sharder(store).step(Topic(topic))
            was_cut[-1] = False
        for _ in range(2):
            Sharder(store).step(Topic(topic))
        assert store.drive(store.stats(topic)) == {"sent": 6, "acked@lisa": 4}
        history = store.ask("XRANGE", split_here.keys(topic).history, "-", "+")
        assert history == [[b"60000-0", [b"sent", b"6"]]]
        assert not {one for one in left_behind(split_here) if one.startswith(f"{topic}~")}
    assert len(was_cut) > 10


def test_a_shard_with_a_journal_is_kept_until_it_is_archived(split_here: Split) -> None:
    split, store = split_here, split_here.store
    split.add_group()
    store.drive(topics.set_options(store, "orders", {"journal": True, "retention": 0}))
    split.into(2)
    shards = split.layout.current(ORDERS)
    with Producer(split.url) as producer:
        sent = [producer.send("orders", 1, delay=HOUR) for _ in range(60)]  # some in each
        assert producer.cancel_many("orders", sent) == ["cancelled"] * 60
        written = {shard: store.drive(store.stats(shard))["journaled"] for shard in shards}
        split.into(1)
        split.step(4)
        assert split.layout.gone == (2,)
        for shard, last in written.items():
            entry = text(store.ask("XREVRANGE", split.keys(shard).events, "+", "-")[0][0])
            store.drive(record_archived(store, "a", {shard: Mark(entry, last)}))
        split.step(2)
        assert left_behind(split) == set()
        for shard, last in written.items():
            assert store.drive(find_unread(store, shard, Mark("5-1", last), None)) is None, "no gap"
        split.into(2)
        sent = [producer.send("orders", 1, delay=HOUR) for _ in range(60)]  # some in each
    for shard in shards:
        first = store.ask("XRANGE", split.keys(shard).events, "-", "+", "COUNT", 1)
        assert number_of(first[0]) == written[shard] + 1


def read_by(consumer: Consumer) -> set[str]:
    """The shards that a consumer reads."""
    runtime = consumer._runtime
    assert runtime is not None
    return {subscription.shard for subscription in runtime.readers.subscriptions()}


SCRIPTS = 13
"""That put a change from 2 to 3 shards through: the layout, options and groups for each of three
shards, three shards to close (the unsplit one, too), three to open."""

CUT_SHORT = [
    pytest.param(
        hears, done, marks=[] if (hears, done) in {(True, 1), (False, 9)} else pytest.mark.full
    )
    for hears in (True, False)
    for done in range(SCRIPTS + 1)
]


@pytest.mark.parametrize(("hears", "done"), CUT_SHORT)
def test_a_manager_finishes_a_change_that_was_cut_short(
    split_here: Split, *, hears: bool, done: int
) -> None:
    split = split_here
    split.add_group()
    split.into(2)
    manager = Manager(split.url)
    if hears:
        manager.start()
    change = topics.set_options(split.store, "orders", {"shards": 3})
    try:
        assert run_steps(change, split, done) == (done == SCRIPTS)
        if not hears:
            manager.start()
        with Producer(split.url) as producer:
            sent = [producer.send("orders", 1, delay=HOUR) for _ in range(9)]
            assert producer.cancel_many("orders", sent) == ["cancelled"] * 9
        if split.layout.shards == 3:
            wait_until(lambda: all(split.accepts(one) == 2 for one in split.layout.current(ORDERS)))
            assert all(split.accepts(one) == -2 for one in split.layout.draining(ORDERS))
    finally:
        manager.stop()


@pytest.mark.parametrize("done", [0, 1, 6, 12, 15])
@pytest.mark.parametrize("how", ["added again", "swept"])
def test_a_removal_that_was_cut_short_among_shards_is_finished(
    split_here: Split, how: str, done: int
) -> None:
    split, store = split_here, split_here.store
    split.into(3)
    for group in ("lisa", "audit"):
        split.add_group(group)
    with Producer(split.url) as producer:
        sent = [producer.send("orders", "old", delay=HOUR) for _ in range(20)]
        for one in sent:
            producer.fire_now("orders", one)
        cut = not run_steps(group_removal.remove(store, ORDERS, "lisa"), split, done)
        assert cut or done > 20
        later = 4_000_000_000_000
        for one in sent:
            producer.send("orders", "new", id=one, at_ms=later, on_duplicate="replace")
        if how == "added again":
            assert split.add_group() == (done > 0)
        else:
            split.sweep()
    kept = how == "added again" or done == 0
    assert split.declared() == {("audit", "lisa") if kept else ("audit",)}
    assert split.copies() == sorted(sent), "none was lost, none is given out early"
    assert split.check().findings == []
