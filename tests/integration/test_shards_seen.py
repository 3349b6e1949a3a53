"""A sharded topic is displayed like a topic without shards."""

from datetime import timedelta

import pytest

from lisa import Consumer, Manager, Producer, message_acked
from lisa.admin import garbage, history, live, messages, roles, topics
from lisa.admin.fsck import check
from lisa.admin.messages import LiveState, Row
from lisa.core.metrics import topics as metrics
from lisa.core.model.message import Message
from lisa.core.store.presence import ConsumerPresence
from lisa.core.transitions.delivery import Pull
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.retry import Fail, Failure
from lisa.producer import Outgoing
from tests.servers import wait_until
from tests.shards import ORDERS, Split

HOUR = timedelta(hours=1)
N = 60


@pytest.fixture
def split(split_here: Split) -> Split:
    """Sixty messages: a third in each of two older layouts and the present one."""
    split_here.add_group()
    with Producer(split_here.url) as producer:
        for third, shards in enumerate((1, 4, 3)):
            if third:
                split_here.into(shards)
            messages = [
                Outgoing(1, id=f"m{n}", delay=HOUR + timedelta(seconds=n))
                for n in range(third, N, 3)
            ]
            producer.send_many("orders", messages)
    return split_here


def listed(split: Split, state: LiveState, limit: int = 7) -> list[Row]:
    """All rows of a state, read page by page."""
    rows, cursor = list[Row](), None
    while True:
        page = split.drive(
            messages.list_messages(split.store, "orders", state, cursor=cursor, limit=limit)
        )
        assert len(page.rows) <= limit
        rows += page.rows
        if page.cursor is None:
            return rows
        cursor = page.cursor


def make_ready(split: Split) -> None:
    with Producer(split.url) as producer:
        for n in range(N):
            assert producer.fire_now("orders", f"m{n}") == "rescheduled"
    for shard in split.layout.active(ORDERS):
        split.store.call(Promote(shard))


def take_all(split: Split, *, to_garbage: bool) -> None:
    for shard in split.layout.active(ORDERS):
        taken = split.store.call(Pull(shard, "lisa", "c1", 100)).entries
        failures = [Failure(entry.id, entry.entry, "no", "discard") for entry in taken]
        if to_garbage and failures:
            split.store.call(Fail(shard, "lisa", failures))


def test_lists_are_merged_page_by_page(split: Split) -> None:
    rows = listed(split, LiveState.WAITING)
    assert [row.id for row in rows] == [f"m{n}" for n in range(N)], "in the order of due times"
    assert {row.topic for row in rows} == {"orders"}
    make_ready(split)
    for state in (LiveState.READY, LiveState.IN_FLIGHT):
        rows = listed(split, state)
        assert sorted(row.id for row in rows) == sorted(f"m{n}" for n in range(N))
        take_all(split, to_garbage=False)
    held = split.drive(roles.held(split.store, "orders", "c1", limit=50))
    assert len(held) == 50


def test_equal_entry_ids_in_two_shards_are_both_listed(split: Split) -> None:
    """Shards number their entries independently: a page may end between equal ids."""
    with Producer(split.url) as producer:
        producer.cancel_many("orders", [f"m{n}" for n in range(N)])
    split.ask("SCRIPT", "FLUSH")
    for shard in split.layout.current(ORDERS):
        keys = split.keys(shard)
        for i in range(3):
            one = f"{shard}-{i}"
            split.ask("SET", keys.body(one), b"x" * 20)
            split.ask("XADD", keys.group("lisa").ready, f"5-{i}", "id", one, "due", 5)
            split.ask("HSET", keys.group("lisa").entries, one, f"5-{i}")
    for limit in (1, 2, 4, 100):
        assert len({row.id for row in listed(split, LiveState.READY, limit)}) == 9


def test_garbage_is_one_heap(split: Split) -> None:
    make_ready(split)
    take_all(split, to_garbage=True)
    store, all_of_it = split.store, garbage.GarbageSelection(topic="orders")
    assert split.drive(garbage.matching(store, all_of_it)) == N
    rows = listed(split, LiveState.GARBAGE)
    assert len({row.id for row in rows}) == N
    ids = [*(row.id for row in rows[:10]), "absent"]
    requeued = split.drive(garbage.requeue(store, "orders", "lisa", ids))
    assert requeued == [*[True] * 10, False]
    assert split.drive(garbage.act(store, all_of_it, garbage.purge)) == N - 10
    assert split.drive(garbage.matching(store, all_of_it)) == 0


def test_counts_are_sums(split: Split) -> None:
    store = split.store
    before = split.drive(live.look(store))
    assert list(before.topics) == ["orders"]
    found = before.topics["orders"]
    assert (found.waiting, found.total("sent")) == (N, N)
    make_ready(split)
    (found,) = split.drive(topics.counts(store, ["orders"]))
    assert (found.waiting, [one.ready for one in found.groups]) == (0, [N])
    now_ms = split.drive(store.server_time_ms())
    (ahead,) = split.drive(history.due(store, "orders", history.Horizon.MINUTES, now_ms=now_ms))
    assert ahead.backlog == N
    span = history.HistorySpan.HOUR
    (first,) = split.drive(history.history(store, "orders", span, now_ms=now_ms))
    assert (first.is_first, first.rise("sent")) == (True, N)
    bands = split.drive(history.bands(store, "orders", now_ms=now_ms))
    assert sum(band.messages for band in bands) == 0
    numbers = split.drive(metrics.read(store))
    assert numbers["lisa_topic_messages"]["orders", "lisa", "ready"] == N
    assert numbers["lisa_topic_sent_total"] == {("orders",): N}
    assert numbers["lisa_topics"] == {(): 1}


def test_fsck_looks_at_every_shard_and_names_the_topic(split: Split) -> None:
    assert split.drive(check(split.store)).topics == ["orders"]
    shard = split.layout.current(ORDERS)[1]
    split.ask("ZADD", split.keys(shard).waiting, 5, "ghost")
    for report in (split.check(), split.drive(check(split.store))):
        (finding,) = report.findings
        assert (finding.topic, finding.id) == ("orders", "ghost")
        assert shard in finding.what
    assert split.check(repair=True).ok
    assert split.check().findings == []


def test_a_consumer_is_shown_once(split: Split) -> None:
    acked = set[str]()

    def hear(topic: str, *, message: Message) -> None:
        acked.update([topic, message.topic])

    def shown() -> list[tuple[str, str, int]]:
        records = [found.record for found in split.drive(roles.consumers(split.store))]
        consumers = [one for one in records if isinstance(one, ConsumerPresence)]
        return [(one.topic, one.group, one.handled) for one in consumers]

    consumer = Consumer(split.url, name="worker")
    consumer.on("orders", lambda _: None)
    message_acked.connect(hear, sender="orders")
    store = split.store
    with Manager(split.url), consumer:
        wait_until(lambda: [topic for topic, _, _ in shown()] == ["orders"])
        make_ready(split)
        wait_until(lambda: split.drive(topics.counts(store, ["orders"]))[0].total("acked") == N)
        wait_until(lambda: shown() == [("orders", "lisa", N)])
        numbers = split.drive(metrics.read(store))
        assert numbers["lisa_topic_consumers_alive"] == {("orders", "lisa"): 1}
        assert consumer.numbers()["lisa_consumer_handled_total"]["orders", "lisa", "ok"] == N
    assert acked == {"orders"}
