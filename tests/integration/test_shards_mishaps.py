"""A topic that is split, where a place fails, is late, or is known to nobody any more."""

from __future__ import annotations

import logging
import time
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from lisa import Consumer, LisaError, Manager, NotReplicated, Producer, replicas
from lisa.admin import groups
from lisa.consumer.leaving import LAST_CALLS_S
from lisa.core import removal
from lisa.core.errors import ServerUnavailable
from lisa.core.shards import Layout
from lisa.core.spread import spread
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.enqueue import Enqueue, Sent
from lisa.core.transitions.place import Place
from lisa.core.transitions.undeclare import Undeclare
from lisa.manager.plan import Plan, Schedules
from lisa.manager.registry import Registry
from lisa.manager.sharder import Sharder
from lisa.producer import Outgoing
from tests.producers import Either
from tests.servers import wait_until
from tests.shards import Split

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lisa.consumer.crew import Crew
    from lisa.consumer.subscription import Subscription
    from lisa.core.flow import Command

HOUR = timedelta(hours=1)
SHORT = timedelta(milliseconds=500)


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    made: str = request.param
    return made


@pytest.fixture
def producer(kind: str, split: Split) -> Iterator[Either]:
    made = Either(kind, split.url)
    yield made
    made.close()


def own(ids: str) -> list[Outgoing]:
    return [Outgoing(1, id=one) for one in ids]


def test_what_an_older_place_could_not_tell_is_sent_nowhere_else(
    split: Split, producer: Either
) -> None:
    producer.send("orders", 1, id="x", delay=HOUR)
    split.into(4)
    stats = split.keys("orders").stats  # where the duplicate is counted, once it is found
    split.store.ask("DEL", stats)
    split.store.ask("SET", stats, "a foreign hand's")
    with pytest.raises(LisaError, match="WRONGTYPE") as caught:
        producer.send_many("orders", own("xyz"), delay=HOUR)
    assert list(caught.value.outcomes) == [None] * 3, "they went to the same place"
    assert split.copies() == ["x"]
    split.store.ask("DEL", stats)
    report = producer.send_many("orders", own("xyz"), delay=HOUR)
    assert [one.outcome for one in report] == ["duplicate", "accepted", "accepted"]
    assert split.copies() == ["x", "y", "z"]


def test_what_no_replica_confirmed_in_an_older_place_is_sent_nowhere_else(
    split: Split, kind: str
) -> None:
    with Producer(split.url) as one:
        one.send("orders", 1, id="x", delay=HOUR)
    split.into(4)
    producer = Either(kind, split.url, durability=replicas(1), patience=SHORT)
    with pytest.raises(NotReplicated) as caught:
        producer.send("orders", 1, id="x", delay=HOUR)
    assert list(caught.value.outcomes) == [None]
    assert split.copies() == ["x"]
    producer.close()


def test_one_patience_is_enough_for_all_places(split_here: Split, kind: str) -> None:
    split_here.into(8)
    producer = Either(kind, split_here.url, durability=replicas(1), patience=SHORT)
    began = time.monotonic()
    with pytest.raises(NotReplicated):
        producer.send_many("orders", own("abcdefghijklmnopqrstuvwxyz"), delay=HOUR)
    assert time.monotonic() - began < 4 * SHORT.total_seconds(), "not once for each place"
    producer.close()


@pytest.mark.parametrize("ended", ["cancelled", "acked"])
def test_what_lives_in_an_older_place_is_no_settled_message(
    split: Split, producer: Either, ended: str
) -> None:
    """The present place remembers an id of before, which then began anew in another."""
    producer.send_many("orders", own("abc"), delay=HOUR)
    assert producer.ask("cancel_many", "orders", list("abc")) == ["cancelled"] * 3
    if ended == "acked":
        for one in "abc":
            stone = split.keys("orders").done(one)
            said = split.store.ask("GET", stone).replace(b"cancelled", b"acked")
            split.store.ask("SET", stone, said, "KEEPTTL")
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


def test_what_an_older_place_cannot_tell_of_a_settled_id_is_not_told(split: Split) -> None:
    with Producer(split.url) as producer:
        producer.send("orders", 1, id="x", delay=HOUR)
        producer.cancel("orders", "x")
        split.into(4)
        producer.send("orders", 1, id="x", delay=HOUR, on_duplicate="replace")
        older = split.layout.place("orders", "x")
        split.into(1)
        split.store.ask("RENAME", split.keys(older).waiting, split.keys(older).root + "away")
        split.store.ask("SET", split.keys(older).waiting, "a foreign hand's")
        with pytest.raises(LisaError, match="WRONGTYPE"):
            producer.cancel("orders", "x")


def test_an_older_place_that_opens_once_more_is_no_older_one(split_here: Split) -> None:
    """Its layout was put through late, between two questions of one who knows a later layout."""
    split, store = split_here, split_here.store
    split.into(4)
    split.into(8)
    for shards in ("4", "16"):  # written, and the places are not told yet
        store.call(Configure("orders", {"shards": shards}))
    latest = split.layout
    late = Layout(3, 4, (8, 1))
    place = late.place("orders", "x")
    with Producer(split.url) as producer:
        execute, asked = producer._store.connection.execute, list[Any]()

        def executed(command: Command) -> Any:
            reply = execute(command)
            if place in command and "known" in command and not asked:
                asked.append(reply)
                put_through(split, late)
                other = Split(split.url).store
                other.learn_layout("orders", late)
                envelope = next(one for one in command if isinstance(one, bytes))
                send = Enqueue("orders", "Q" * 8, ["x"], ["+9000"], [b"Q" * 8 + envelope[8:]])
                assert other.call_by_id(send) == [Sent.ACCEPTED]
                store.drive(spread(store, "orders"))
            return reply

        producer._store.connection.execute = executed  # type: ignore[method-assign]
        producer._store.learn_layout("orders", latest)
        assert producer.send_many("orders", own("x"), delay=HOUR).duplicate == 1
    assert asked
    assert split.copies() == ["x"]


def put_through(split: Split, layout: Layout) -> None:
    for older in layout.draining("orders"):
        split.store.call(Place(older, "close", layout.number))
    for present in layout.current("orders"):
        split.store.call(Place(present, "open", layout.number))


@pytest.mark.parametrize("lost", ["the last change", "two changes", "all of it"])
def test_shards_of_a_layout_that_was_lost_are_the_topics_again(
    split: Split, producer: Either, lost: str, caplog: pytest.LogCaptureFixture
) -> None:
    split.into(2)
    options = split.keys("orders").options
    before = split.store.ask("HGET", options, "layout")
    for shards in (8, 4) if lost == "two changes" else (4,):
        split.into(shards)
        producer.send_many("orders", own("xyz"), delay=HOUR)
    if lost == "all of it":
        split.store.ask("DEL", options)
    else:
        split.store.ask("HSET", options, "layout", before, "shards", 2)
    before = split.layout.shards
    sharder = Sharder(split.store)
    with caplog.at_level(logging.WARNING, "lisa.manager"):
        assert sharder.pick(split.store.drive(split.store.places())) == ["orders"]
        sharder.step("orders")
    counts = {"all of it": "2 and 4", "two changes": "4 and 8"}.get(lost, "4")
    assert f"its server lost what it knew of shards by {counts};" in caplog.text
    found = split.layout
    assert (found.shards, set(found.older) >= {1, 4} - {before}) == (before, True)
    assert {split.accepts(one) for one in found.current("orders")} == {found.number}
    assert {split.accepts(one) for one in found.draining("orders")} == {-found.number}
    assert producer.send_many("orders", own("xyz"), delay=HOUR).duplicate == 3
    made = producer.send("orders", 1, delay=HOUR)
    with Producer(split.url) as other:
        assert other.get("orders", made) is not None
        assert other.cancel_many("orders", ["x", "y", "z", made]) == ["cancelled"] * 4
    assert split.waiting() == {}
    caplog.clear()
    sharder.step("orders")
    assert (split.layout, caplog.text) == (found, "")


def test_a_lost_layout_and_another_of_its_number_are_told_apart(split: Split) -> None:
    split.into(2)
    options = split.keys("orders").options
    before = split.store.ask("HGET", options, "layout")
    with Producer(split.url) as producer:
        split.into(4)
        producer.send("orders", 1, id="x", delay=HOUR)
        split.store.ask("HSET", options, "layout", before, "shards", 2)
        split.into(8)  # number 2, as that one was
        Sharder(split.store).step("orders")
        layout = split.layout
        assert (layout.shards, set(layout.older)) == (8, {1, 2, 4})
        assert producer.send_many("orders", own("x"), delay=HOUR).duplicate == 1
    assert split.copies() == ["x"]


def test_a_manager_and_its_consumers_find_what_a_lost_change_left(split_here: Split) -> None:
    split = split_here
    manager = Manager(split.url, groups={"orders": ["lisa"]}, sweep=timedelta(milliseconds=200))
    with manager, Producer(split.url) as producer:
        wait_until(lambda: split.store.drive(split.store.groups("orders")) == ("lisa",))
        split.into(2)
        split.into(4)
        producer.send("orders", 1, id="x", delay=HOUR)
        split.store.ask("HSET", split.keys("orders").options, "layout", "1:2:1:", "shards", 2)
        wait_until(partial(is_older, split, 4))
        assert producer.cancel("orders", "x") == "cancelled"


def test_a_number_is_not_forgotten_while_a_removed_group_owes_something(
    split_here: Split,
) -> None:
    """Its removal was cut short, so that nobody declares it any more."""
    split, store = split_here, split_here.store
    for group in ("lisa", "audit"):
        store.drive(groups.add(store, "orders", group))
    with Producer(split.url) as producer:
        producer.send("orders", 1)
    store.call(Configure("orders", {"retention": "0"}))
    split.into(2)
    wait_until(lambda: owing(split, "audit") == 1)
    store.call(Undeclare("orders", "audit"))
    store.drive(removal.remove(store, "orders", "lisa"))
    assert store.drive(store.groups("orders")) == ()
    sharder = Sharder(store)
    for _ in range(2):
        sharder.step("orders")
    assert list(split.layout.older) == [1]
    store.drive(removal.remove(store, "orders", "audit"))
    for _ in range(2):
        sharder.step("orders")
    assert list(split.layout.older) == []


def owing(split: Split, group: str) -> int:
    found: int = split.store.ask("HLEN", split.keys("orders").group(group).entries)
    return found


def test_shards_that_are_listed_nowhere_are_found(split: Split) -> None:
    """The list of topics stands on one node, the shards on others."""
    split.into(4)
    split.store.drive(split.store.register(["orders"]))
    with Producer(split.url) as producer:
        for number in range(40):
            producer.send("orders", number, delay=HOUR)
        split.store.ask("DEL", split.store.keys.topics)
    plan = Plan.of({}, {}, default_group="lisa", schedules=Schedules())
    registry = Registry(split.store, plan, lambda _: None)
    registry.search()
    assert registry.topics == split.layout.current("orders")
    assert split.store.drive(split.store.places()) == registry.topics


def test_a_topic_whose_change_fails_keeps_no_other_one(
    split_here: Split, monkeypatch: pytest.MonkeyPatch
) -> None:
    split_here.store.drive(split_here.store.register(["broken"]))
    with Manager(split_here.url) as manager:
        engine = manager._engine
        step, tried = engine._sharder.step, list[str]()

        def stepping(topic: str) -> None:
            tried.append(topic)
            if topic == "broken" and tried.count("broken") < 3:
                raise LisaError("its options are a foreign hand's")
            step(topic)

        monkeypatch.setattr(engine._sharder, "step", stepping)
        split_here.store.call(Configure("orders", {"shards": "2"}))
        for topic in ("broken", "orders"):
            engine._split_anew.put(topic)
        wait_until(lambda: split_here.accepts("orders~0of2") == 1)
        wait_until(lambda: tried.count("broken") == 3)
        wait_until(lambda: engine._jobs.troubles["refresh"].of("broken") is None)
        assert engine._split_anew.empty()


def is_older(split: Split, count: int) -> bool:
    return count in split.layout.older


@pytest.fixture
def reading(split_here: Split) -> Iterator[tuple[Consumer, Crew]]:
    """A consumer that waits for messages in each of eight places."""
    split_here.store.drive(groups.add(split_here.store, "orders", "lisa"))
    split_here.into(8)
    consumer = Consumer(split_here.url, grace=SHORT)
    consumer.on("orders", lambda _: None)
    consumer.start()
    crew = consumer._crew
    assert crew is not None
    wait_until(lambda: [one._intake.is_reading for one in crew._readers.values()] == [True] * 9)
    wait_until(lambda: all(one.is_announced for one in crew._readers))
    yield consumer, crew
    consumer.stop()


def test_a_server_that_hangs_is_asked_once_to_end_the_reads(
    reading: tuple[Consumer, Crew], monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer, crew = reading
    readers, asked = list(crew._readers.values()), list[Any]()

    def hanging(*command: Any) -> Any:
        asked.append(command)
        raise ServerUnavailable("it hangs")

    monkeypatch.setattr(crew._store, "ask", hanging)
    began = time.monotonic()
    consumer.pause()
    assert len(asked) == 1
    consumer.stop()
    assert len(asked) == 2
    assert time.monotonic() - began < 3 * LAST_CALLS_S, "one deadline for all readers"
    monkeypatch.undo()
    wait_until(lambda: not any(one.thread.is_alive() and one.interrupt() for one in readers))


def test_a_place_that_cannot_be_left_keeps_none_of_the_others(
    reading: tuple[Consumer, Crew], monkeypatch: pytest.MonkeyPatch, split_here: Split
) -> None:
    consumer, crew = reading
    leave, tried = crew._heartbeat.leave, list[str]()

    def leaving(sub: Subscription, *, keeps_name: bool = False) -> None:
        tried.append(sub.topic)
        if len(tried) == 1:
            raise ServerUnavailable("its node is away")
        leave(sub, keeps_name=keeps_name)

    monkeypatch.setattr(crew._heartbeat, "leave", leaving)
    consumer.stop()
    assert sorted(tried) == sorted(split_here.layout.places("orders"))
    present = [one for one in split_here.layout.places("orders")
               if split_here.store.ask("HLEN", split_here.keys(one).consumers)]  # fmt: skip
    assert present == tried[:1]
