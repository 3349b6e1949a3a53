"""Topics that are split, as producers, managers and consumers live with them."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import pytest

from lisa import Consumer, LisaError, Manager, Producer, message_acked
from lisa.admin import groups, topics
from lisa.admin.fsck import check
from lisa.consumer.joining import ask_for_group, join
from lisa.core import removal, scripts
from lisa.core.errors import ConfigError
from lisa.core.flow import Execute, Pause
from lisa.core.spread import spread
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.undeclare import Undeclare
from lisa.manager.announcer import Announcer
from lisa.manager.expirer import Expirer
from lisa.manager.sharder import Sharder
from lisa.manager.sweeper import Sweeper
from lisa.producer import Outgoing
from tests.servers import wait_until
from tests.shards import Split

if TYPE_CHECKING:
    from collections.abc import Callable
    from collections.abc import Set as AbstractSet

    from lisa.core.flow import Command, Flow
    from lisa.core.message import Message

HOUR = timedelta(hours=1)
SOON = timedelta(milliseconds=200)
OFTEN = timedelta(milliseconds=100)


class Handled:
    """What a consumer's handler saw."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.topics: set[str] = set()
        self.most_at_once = 0
        self._running = 0
        self._lock = threading.Lock()

    def __call__(self, message: Message) -> None:
        with self._lock:
            self._running += 1
            self.most_at_once = max(self.most_at_once, self._running)
            self.counts[message.id] += 1
            self.topics.add(message.topic)
        time.sleep(0.001)
        with self._lock:
            self._running -= 1


def test_a_consumer_takes_all_shards_as_one_topic(split: Split) -> None:
    handled, acked = Handled(), set[str]()

    def hear(topic: str, *, message: Message) -> None:
        assert topic == message.topic
        acked.add(topic)

    message_acked.connect(hear, sender="orders")
    consumer = Consumer(split.url, concurrency=3)
    consumer.on("orders", handled)
    with Manager(split.url, topics={"orders": {"shards": 4}}), consumer, Producer(split.url) as one:
        wait_until(lambda: len(split.layout.current("orders")) == 4)
        sent = [out.id for out in one.send_many("orders", range(300), delay=SOON)]
        wait_until(lambda: len(handled.counts) == 300)
        assert set(handled.counts) == set(sent)
        assert set(handled.counts.values()) == {1}
        assert handled.topics == acked == {"orders"}
        assert handled.most_at_once <= 3
        assert list(consumer.health()["topics"]) == ["orders/lisa"]
        wait_until(lambda: state_of(one, sent[0]) == "acked")


def state_of(producer: Producer, message_id: str) -> str | None:
    found = producer.get("orders", message_id)
    return None if found is None else found.state


def test_a_pull_takes_from_all_shards(split: Split) -> None:
    split.into(4)
    with Manager(split.url, groups={"orders": ["lisa"]}), Producer(split.url) as producer:
        sent = [one.id for one in producer.send_many("orders", range(40), delay=SOON)]
        consumer, taken = Consumer(split.url, group="lisa"), list[str]()
        deadline = time.monotonic() + 20
        while len(taken) < 40 and time.monotonic() < deadline:
            for delivery in consumer.pull("orders", batch=7, wait=timedelta(seconds=5)):
                assert delivery.topic == "orders"
                assert delivery.extend()
                assert delivery.ack() == "acked"
                assert delivery.ack() == "repeated"
                taken.append(delivery.id)
        assert sorted(taken) == sorted(sent)
        consumer.stop()


def test_a_pull_gives_what_it_took_though_another_shard_fails(split: Split) -> None:
    split.into(4)
    split.store.drive(groups.add(split.store, "orders", "lisa"))
    with Producer(split.url) as producer:
        sent = [one.id for one in producer.send_many("orders", range(40))]
    failing = split.keys(split.layout.places("orders")[2])
    split.store.ask("DEL", failing.options)
    split.store.ask("SET", failing.options, "a foreign hand's")
    left = split.store.ask("XLEN", failing.group("lisa").ready)
    consumer, taken, faults = Consumer(split.url, group="lisa"), list[str](), 0
    while faults < 3:
        try:
            found = consumer.pull("orders", batch=7, wait=timedelta(0))
        except LisaError:
            faults += 1
        else:
            assert found, "nobody told of the trouble"
            taken += [one.id for one in found if one.ack() == "acked"]
    consumer.stop()
    assert 0 < left < 40
    assert len(set(taken) & set(sent)) == 40 - left, "some were taken, and given to nobody"


class Load:
    """Sends with ids of its own, twice each, and cancels some, for as long as the block runs."""

    def __init__(self, url: str) -> None:
        self.accepted: list[str] = []
        self.cancelled: set[str] = set()
        self.faults: list[object] = []
        self._url = url
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(work,))
            for work in (self._send, self._cancel, self._make_ids)
        ]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _work(self, work: Callable[[Producer, int], None]) -> None:
        try:
            with Producer(self._url) as producer:
                n = 0
                while not self._ended.is_set():
                    work(producer, n)
                    n += 1
        except Exception as error:  # noqa: BLE001  the test shows it
            self.faults.append(error)

    def _send(self, producer: Producer, n: int) -> None:
        """A batch of new ids; then, shuffled among others, ids that are known."""
        new = [f"{n}-{i}" for i in range(20)]
        delay = timedelta(milliseconds=50 * (n % 10))
        for expected in ("accepted", "duplicate"):
            batch = [*new, *self.accepted[-200::10]]
            report = producer.send_many(
                "orders", [Outgoing(1, id=one) for one in batch], delay=delay
            )
            outcomes = [one.outcome for one in report]
            known = len(batch) - len(new)
            if outcomes != [expected] * len(new) + ["duplicate"] * known:
                self.faults.append((n, expected, outcomes))
        self.accepted += new

    def _cancel(self, producer: Producer, n: int) -> None:
        """What waits for an hour is found, wherever it went meanwhile."""
        held = [producer.send("orders", "later", id=f"c{n}-{i}", delay=HOUR) for i in range(5)]
        time.sleep(0.05)
        for one in held:
            found = producer.get("orders", one)
            if found is None or found.state != "waiting" or found.topic != "orders":
                self.faults.append((one, found))
        answers = producer.cancel_many("orders", held)
        if answers != ["cancelled"] * 5:
            self.faults.append((held, answers))
        self.cancelled.update(held)

    def _make_ids(self, producer: Producer, _n: int) -> None:
        self.accepted.append(producer.send("orders", "made"))


def change(split: Split, numbers: tuple[int, ...], pause_s: float) -> None:
    for shards in numbers:
        time.sleep(pause_s)
        split.into(shards)
    time.sleep(pause_s)


def check_under_load(split: Split, numbers: tuple[int, ...], pause_s: float) -> None:
    """Each accepted id is handled once, duplicates stay duplicates, cancel finds what waits."""
    handled = Handled()
    consumers = [Consumer(split.url, concurrency=4) for _ in range(2)]
    for consumer in consumers:
        consumer.on("orders", handled)
    managers = [
        Manager(split.url, groups={"orders": ["lisa"]}, sweep=timedelta(seconds=1))
        for _ in range(2)
    ]
    split.store.drive(split.store.register(["orders"]))
    with managers[0], managers[1], consumers[0], consumers[1]:
        with Load(split.url) as load:
            change(split, numbers, pause_s)
        assert not load.faults, load.faults[:5]
        wait_until(lambda: len(handled.counts) >= len(load.accepted))
    assert set(handled.counts) == set(load.accepted)
    assert max(handled.counts.values()) == 1, "nobody was slow, and nobody died"
    assert not load.cancelled & set(handled.counts)
    assert len(load.accepted) > 20 * len(numbers)


def test_a_round_over_split_topics_does_not_read_all_topics_for_each(
    split_here: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, read = split_here.store, list[int]()
    for topic in ("a", "b", "c"):
        store.drive(topics.set_options(store, topic, {"shards": 2}))
    listed, places = store.drive(store.places()), store.places

    def reading() -> Flow[list[str]]:
        read.append(1)
        return places()

    monkeypatch.setattr(store, "places", reading)
    sharder = Sharder(store)
    for _ in range(2):
        picked = sharder.pick(listed)
        assert picked == ["a", "b", "c"]
        for topic in picked:
            sharder.step(topic)
    assert len(read) <= 2


def test_the_number_changes_under_load(split: Split) -> None:
    check_under_load(split, (4, 8, 2, 1), 0.7)


@pytest.mark.slow
def test_the_number_changes_under_load_for_longer(split: Split) -> None:
    check_under_load(split, (4, 8, 2, 1, 3, 5, 4, 1, 64, 1), 3.0)


def test_a_number_that_is_left_is_forgotten_when_it_is_empty(split_here: Split) -> None:
    split, handled = split_here, Handled()
    consumer = Consumer(split.url, concurrency=2)
    consumer.on("orders", handled)
    manager = Manager(split.url, topics={"orders": {"retention": 0}}, sweep=OFTEN)
    with manager, consumer, Producer(split.url) as producer:
        for number, shards in enumerate((2, 3, 1), 1):
            before = split.layout.places("orders")
            late = {producer.send("orders", 1, delay=HOUR) for _ in range(8)}
            split.into(shards)
            assert split.layout.number == number
            assert set(before) <= set(split.layout.places("orders"))
            new = {producer.send("orders", 1, delay=SOON) for _ in range(8)}
            wait_until(partial(new.issubset, handled.counts))
            assert split.layout.older, "it holds what is due later"
            for one in late:
                assert producer.fire_now("orders", one) == "rescheduled"
            wait_until(partial(late.issubset, handled.counts))
            wait_until(lambda: not split.layout.older)
            # A consumer lets go of them within a second or two.
            wait_until(partial(reads_only, consumer, set(split.layout.places("orders"))))
    assert set(handled.counts.values()) == {1}


def reads_only(consumer: Consumer, places: AbstractSet[str]) -> bool:
    crew = consumer._crew
    assert crew is not None
    return {sub.topic for sub in crew._readers} == places


ALWAYS = {(True, 1), (True, 11), (False, 1), (False, 7), (False, 9)}
SCRIPTS = 13
"""That put a change from 2 to 3 shards through: the layout, options and groups for each of three
places, three places to close (the unsplit one, too), three to open."""

CUT_SHORT = [
    pytest.param(hears, done, marks=[] if (hears, done) in ALWAYS else [pytest.mark.slow])
    for hears in (True, False) for done in range(SCRIPTS + 1)
]  # fmt: skip


@pytest.mark.parametrize(("hears", "done"), CUT_SHORT)
def test_a_manager_finishes_a_change_that_was_cut_short(
    split_here: Split, *, hears: bool, done: int
) -> None:
    split = split_here
    split.store.drive(groups.add(split.store, "orders", "lisa"))
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
            wait_until(
                lambda: all(split.accepts(one) == 2 for one in split.layout.current("orders"))
            )
            assert all(split.accepts(one) == -2 for one in split.layout.draining("orders"))
    finally:
        manager.stop()


@pytest.mark.parametrize("done", range(0, 16, 3))
@pytest.mark.parametrize("how", ["added again", "swept"])
def test_a_removal_that_was_cut_short_among_shards_is_finished(
    split_here: Split, how: str, done: int
) -> None:
    split, store = split_here, split_here.store
    split.into(3)
    for group in ("lisa", "audit"):
        store.drive(groups.add(store, "orders", group))
    with Producer(split.url) as producer:
        sent = [producer.send("orders", "old", delay=HOUR) for _ in range(20)]
        for one in sent:
            producer.fire_now("orders", one)
        cut = not run_steps(removal.remove(store, "orders", "lisa"), split, done)
        assert cut or done > 20
        later = 4_000_000_000_000
        for one in sent:
            producer.send("orders", "new", id=one, at_ms=later, on_duplicate="replace")
        if how == "added again":
            assert store.drive(groups.add(store, "orders", "lisa")) == (done > 0)
        else:
            sweeper = Sweeper(store, Expirer(store, Announcer(store)), lambda _: True)
            for place in split.layout.counted("orders"):
                if store.ask("HEXISTS", split.keys(place).options, "removing:lisa"):
                    store.call(Configure(place, {"removing:lisa": "1"}))
            for place in split.layout.counted("orders"):
                sweeper.step(place)
    declared = {store.drive(store.groups(one)) for one in split.layout.counted("orders")}
    kept = how == "added again" or done == 0
    assert declared == {("audit", "lisa") if kept else ("audit",)}
    assert split.copies() == sorted(sent), "none was lost, none is given out early"
    assert store.drive(check(store, ["orders"])).findings == []


def test_a_removal_among_shards_ends_where_the_group_is_declared_anew(split_here: Split) -> None:
    split, store = split_here, split_here.store
    for group in ("lisa", "audit"):
        store.drive(groups.add(store, "orders", group))
    split.into(2)
    first, second = split.layout.current("orders")
    removing = Halting(removal.remove(store, "orders", "lisa"), split)
    looks_at_second = ("HEXISTS", split.keys(second).groups, "lisa")
    assert not removing.run_until(lambda command: command == looks_at_second)
    assert Split(split.url).store.drive(join(store, first, "lisa")) == "lisa"
    assert removing.run_until(lambda _: False)
    store.drive(spread(store, "orders"))
    places = split.layout.counted("orders")
    assert {store.drive(store.groups(one)) for one in places} == {("audit", "lisa")}


def test_what_is_told_of_a_group_that_is_being_removed_is_taken_back(split_here: Split) -> None:
    split, store = split_here, split_here.store
    for group in ("lisa", "audit"):
        store.drive(groups.add(store, "orders", group))
    split.into(2)
    places = split.layout.counted("orders")
    spreading = Halting(spread(store, "orders"), split)
    looks_at_shards = ("HGETALL", split.keys(split.layout.current("orders")[0]).options)
    assert not spreading.run_until(lambda command: command == looks_at_shards)
    assert store.drive(removal.remove(store, "orders", "lisa")) == 0
    assert spreading.run_until(lambda _: False)
    assert {store.drive(store.groups(one)) for one in places} == {("audit",)}
    assert not any(store.ask("EXISTS", *split.keys(one).group("lisa")) for one in places)


class Halting:
    """A flow that is driven in parts, so that it can be left half-way, or others come between."""

    def __init__(self, flow: Flow[Any], split: Split) -> None:
        self._flow = flow
        self._connection = split.store.connection
        self._step: Any = next(flow)

    def run_until(self, halts: Callable[[Command], bool]) -> bool:
        """Up to the first command that halts it, which is not sent; whether it came to its end."""
        with suppress(StopIteration):
            while True:
                if isinstance(self._step, Pause):
                    self._step = self._flow.send(None)
                    continue
                many = not isinstance(self._step, Execute)
                replies = []
                for command in self._step.commands if many else [self._step.command]:
                    if halts(command):
                        return False
                    replies += self._connection.execute_many([command])
                if not many and isinstance(replies[0], Exception):
                    self._step = self._flow.throw(replies[0])
                else:
                    self._step = self._flow.send(replies if many else replies[0])
        return True


def run_steps(flow: Flow[Any], split: Split, count: int) -> bool:
    """Send so many of a flow's script calls to the server, then leave it; whether it was done."""
    sent = 0

    def halts(command: Command) -> bool:
        nonlocal sent
        sent += command[0] == "EVALSHA"
        return sent > count

    for name in scripts.names():  # or a call might be one more
        split.store.ask("SCRIPT", "LOAD", scripts.load(name).source)
    return Halting(flow, split).run_until(halts)


def test_a_shard_that_was_not_told_of_a_group_yet_is_not_joined_for_another(
    split_here: Split,
) -> None:
    split, store = split_here, split_here.store
    store.drive(groups.add(store, "orders", "billing"))
    split.into(2)
    new = split.layout.current("orders")[0]
    store.call(Undeclare(new, "billing", drop=True))
    assert store.drive(join(store, new, "")) is None
    store.call(Declare("orders", "stock"))
    store.call(Declare(new, "billing"))
    with pytest.raises(ConfigError, match="several groups"):
        store.drive(join(store, new, ""))


def test_who_waits_at_a_shard_is_answered_with_the_topic_s_group(split_here: Split) -> None:
    split, store = split_here, split_here.store
    store.drive(groups.add(store, "orders", "billing"))
    split.into(2)
    new = split.layout.current("orders")[0]
    store.call(Undeclare(new, "billing", drop=True))
    with Manager(split.url):
        store.drive(ask_for_group(store, new, "c1"))
        wait_until(lambda: store.drive(store.groups(new)) == ("billing",))
    assert store.drive(store.groups("orders")) == ("billing",)
