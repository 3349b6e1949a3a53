"""A sharded topic: messages are found, and accepted once, through all changes."""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import redis

from lisa import DuplicateMessage, LisaError, TopicFull
from lisa.admin import limits, topics
from lisa.core.model.envelope import encode_envelope
from lisa.core.model.errors import Misplaced, ServerUnavailable
from lisa.core.model.lanes import KeyLimits, Rate
from lisa.core.model.options import TopicOptions
from lisa.core.model.sharding import Layout, Topic, name, topic_of
from lisa.core.redis.flow import Command
from lisa.core.store.limits import read as read_limits
from lisa.core.store.reshard import spread
from lisa.core.transitions.enqueue import Enqueue
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.topic import Configure, LimitKeys, SetLayout
from lisa.manager.sharder import Sharder
from lisa.producer import Outgoing, Producer
from tests.producers import Either
from tests.proxies import LossyProxy
from tests.servers import open_store, wait_until
from tests.shards import ORDERS, Split

HOUR = timedelta(hours=1)
IDS = [f"order-{n}" for n in range(40)]


def own(ids: Iterable[str], body: object = 1) -> list[Outgoing]:
    """Messages with ids of their own."""
    return [Outgoing(body, id=one) for one in ids]


@pytest.fixture(params=["sync", "async"])
def producer(request: pytest.FixtureRequest, split: Split) -> Iterator[Either]:
    made = Either(request.param, split.url)
    yield made
    made.close()


def test_the_layouts_field_determines_the_shard_of_an_id() -> None:
    layout = Layout.read(b"3:4:1,2:8")
    assert layout == Layout(3, 4, (1, 2), (8,))
    assert layout.current(Topic("t")) == ["t~0of4", "t~1of4", "t~2of4", "t~3of4"]
    assert layout.draining(Topic("t")) == ["t", "t~0of2", "t~1of2"]
    assert {layout.shard_for(Topic("t"), one) for one in IDS} == set(layout.current(Topic("t")))
    assert {topic_of(shard) for shard in layout.counted(Topic("t"))} == {"t"}
    assert Layout.read(b"nonsense") == Layout.read(None) == Layout()


def test_messages_are_spread_over_shards_and_found_by_id(split: Split, producer: Either) -> None:
    producer.send("orders", 1, id="early", delay=HOUR)
    split.into(4)
    report = producer.send_many("orders", own(IDS), delay=HOUR)
    assert [one.id for one in report] == IDS
    assert report.accepted == len(IDS)
    assert set(split.waiting()) == {"orders", *(name(ORDERS, n, 4) for n in range(4))}
    assert split.copies() == sorted([*IDS, "early"])
    for one in ("early", IDS[5]):
        assert producer.ask("get", "orders", one).state == "waiting"
        assert producer.ask("fire_now", "orders", one) == "rescheduled"
        assert producer.ask("cancel", "orders", one) == "cancelled"
        assert producer.ask("cancel", "orders", one) == "cancelled"
    assert producer.ask("get", "orders", IDS[0]).topic == "orders"
    assert producer.ask("reschedule", "orders", IDS[1], delay=2 * HOUR) == "rescheduled"
    assert producer.ask("cancel", "orders", IDS[2]) == "cancelled"
    assert producer.ask("cancel_many", "orders", IDS[:4]) == ["cancelled"] * 4
    assert producer.ask("cancel", "orders", "absent") == "unknown"
    assert producer.ask("get", "orders", "absent") is None
    made = [producer.send("orders", n, delay=HOUR) for n in range(12)]
    assert set(made) <= set(split.copies())


def test_a_known_id_is_known_through_each_change(split: Split, producer: Either) -> None:
    """Ids are accepted by each layout in turn, and sent again to all later ones."""
    known: list[str] = []
    for shards in (1, 4, 8, 2, 4, 1):
        if shards > 1 or known:
            split.into(shards)
        new = [f"{shards}-{len(known)}-{n}" for n in range(6)]
        report = producer.send_many("orders", own([*known, *new]), delay=HOUR)
        assert [one.outcome for one in report] == ["duplicate"] * len(known) + ["accepted"] * 6
        known += new
        with pytest.raises(DuplicateMessage):
            producer.send("orders", 1, id=known[0], delay=HOUR, on_duplicate="reject")
    assert split.copies() == sorted(known)
    assert producer.ask("cancel_many", "orders", known) == ["cancelled"] * len(known)
    assert split.waiting() == {}
    again = producer.send_many("orders", own(known), delay=HOUR)
    assert again.duplicate == len(known), "tombstones count wherever they lie"


def test_replacing_keeps_an_id_in_one_shard(split: Split, producer: Either) -> None:
    split.into(2)
    producer.send("orders", "old", id="live", delay=HOUR)
    producer.send("orders", "old", id="ended", delay=HOUR)
    producer.ask("cancel", "orders", "ended")
    split.into(4)
    for body in ("new", "newest"):
        messages = own(("live", "ended"), body)
        report = producer.send_many("orders", messages, delay=2 * HOUR, on_duplicate="replace")
        assert [one.outcome for one in report] == ["replaced", "replaced"]
        assert split.copies() == ["ended", "live"]
        assert producer.ask("get", "orders", "live").body == body
        assert producer.ask("get", "orders", "ended").body == body
    assert producer.send("orders", "late", id="ended", delay=HOUR) == "ended"
    assert producer.ask("get", "orders", "ended").body == "newest"


def test_a_shard_opens_only_when_all_older_ones_are_closed(split: Split) -> None:
    with Producer(split.url, patience=timedelta(milliseconds=200)) as producer:
        producer.send("orders", 1, id="one", delay=HOUR)
        split.store.call(Configure("orders", {"shards": "4"}))
        assert producer.send("orders", 2, id="two", delay=HOUR) == "two"
        assert split.waiting() == {"orders": {"one", "two"}}
        split.store.call(SetLayout("orders", "close", 1))
        with pytest.raises(Misplaced, match="no manager"):
            producer.send("orders", 3, id="three", delay=HOUR)
        with pytest.raises(Misplaced):
            producer.cancel("orders", "three")
        split.drive(spread(split.store, ORDERS))
        assert producer.send("orders", 1, id="one", delay=HOUR) == "one"
        assert split.copies() == ["one", "two"]
        # A late call changes nothing.
        assert split.store.call(SetLayout("orders", "open", 1)) == -1
        assert split.accepts("orders") == -1


def test_a_lost_reply_adds_nothing_though_the_number_changes(split_here: Split) -> None:
    """The call arrives under one layout and is repeated under the next."""
    split_here.into(2)
    with (
        LossyProxy(split_here.url) as proxy,
        Producer(proxy.url) as producer,
        ThreadPoolExecutor(1) as pool,
    ):
        producer.send("orders", 0, delay=HOUR)
        for n, shards in enumerate((4, 8, 1, 3), 1):
            proxy.lose(1)
            sending = pool.submit(producer.send, "orders", n, delay=HOUR)
            wait_until(lambda: proxy.lost == n)  # noqa: B023
            split_here.into(shards)  # within the pause before the call is repeated
            sending.result()
            assert len(split_here.copies()) == n + 1


def test_options_and_groups_are_in_every_shard(split: Split) -> None:
    store = split.store

    def shards() -> list[tuple[TopicOptions, tuple[str, ...]]]:
        return [
            (split.drive(store.options(shard)), split.drive(store.groups(shard)))
            for shard in split.layout.current(ORDERS)
        ]

    split.drive(topics.set_options(store, "orders", {"capacity": 10, "ack_timeout": "3s"}))
    split.add_group("billing")
    split.into(4)
    split.add_group("stock")
    split.drive(topics.pause(store, "orders"))
    for options, declared in shards():
        assert (options.capacity, options.max_ready, options.paused) == (3, 2500, True)
        assert options.ack_timeout == timedelta(seconds=3)
        assert declared == ("billing", "stock")
    of_lanes = {"rate": "10/s", "concurrency": 10, "key_rate": "1/s", "concurrency@stock": 5}
    split.drive(topics.set_options(store, "orders", of_lanes))
    for shard in split.layout.current(ORDERS):
        options = split.drive(store.options(shard, "stock"))
        assert (options.rate, options.key_rate) == (Rate(10, timedelta(seconds=4)), Rate(1))
        assert options.concurrency == 2
        assert split.drive(store.options(shard)).concurrency == 3
    split.drive(topics.unset_options(store, "orders", ["concurrency"], "stock"))
    for shard in split.layout.current(ORDERS):
        assert split.drive(store.group_options(shard)) == {}
    split.drive(topics.unset_options(store, "orders", ["ack_timeout"]))
    split.drive(topics.resume(store, "orders"))
    for options, _ in shards():
        assert (options.ack_timeout, options.paused) == (timedelta(seconds=10), False)


def test_limits_of_keys_are_in_every_shard(split: Split) -> None:
    store = split.store

    def put_limits(key: str, group: str | None = None, **given: object) -> bool:
        changed = limits.set_limits(store, "orders", key, KeyLimits.parse(**given), group)
        return bool(split.drive(changed))

    def copies() -> list[dict[str, str]]:
        return [split.drive(read_limits(store, one)) for one in split.layout.active(ORDERS)]

    split.add_group("billing")
    assert put_limits("a", weight=2)
    split.into(4)
    assert put_limits("b", "billing", rate="2/s", concurrency=4)
    wanted = {"a": "weight=2", "billing\x1fb": "rate=2,1000,1;concurrency=4"}
    assert copies() == [wanted] * len(copies())
    assert not put_limits("a", weight=2)
    assert put_limits("a")
    del wanted["a"]
    assert copies() == [wanted] * len(copies())
    # An interrupted copy is repeated, and one that lacks several pages is completed.
    shard = split.keys("orders~1of4")
    split.ask("HSET", shard.options, "limits", "1+")
    many = {f"k{n}": "weight=1" for n in range(450)}
    split.ask("HSET", shard.limits, *(part for item in many.items() for part in item))
    split.drive(spread(store, ORDERS))
    assert copies() == [wanted] * len(copies())
    split.drive(store.run(LimitKeys("orders", "set", many)))
    split.into(1)
    split.into(8)
    assert copies() == [wanted | many] * len(copies())


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_one_shard_s_refusal_leaves_the_others_messages_sent(split_here: Split, kind: str) -> None:
    """The report of a partly refused call lists the sent messages, so none is sent twice."""
    split_here.drive(topics.set_options(split_here.store, "orders", {"capacity": 8}))
    split_here.into(4)
    producer = Either(kind, split_here.url, patience=timedelta(milliseconds=600))

    def kept(error: type[LisaError]) -> list[str]:
        with pytest.raises(error) as caught:
            producer.send_many("orders", own(IDS), delay=HOUR)
        return [one for one, sent in zip(IDS, caught.value.outcomes, strict=True) if sent]

    assert split_here.copies() == sorted(kept(TopicFull))
    assert producer.ask("cancel_many", "orders", IDS)
    split_here.drive(topics.unset_options(split_here.store, "orders", ["capacity"]))
    moved = split_here.keys("orders~1of4").options
    split_here.ask("HSET", moved, "accepts", split_here.layout.number + 3)
    assert 0 < len(kept(Misplaced)) < 40
    producer.close()


@pytest.mark.parametrize("trouble", [Misplaced, ServerUnavailable])
def test_one_shard_s_refusal_says_nothing_about_another(
    split_here: Split, trouble: type[LisaError]
) -> None:
    """The other one moves, or its reply is lost."""
    split, large = split_here, "x" * 5000
    split.into(2)
    split.store.call(Configure("orders", {"max_body_bytes": "1000"}))
    split.drive(spread(split.store, ORDERS))
    layout = split.layout
    first, second = layout.current(ORDERS)
    ids = [str(n) for n in range(12)]
    bodies = [large if layout.shard_for(ORDERS, one) == first else "" for one in ids]
    assert set(bodies) == {large, ""}
    envelopes = [encode_envelope("T" * 8, body) for body in bodies]
    send = Enqueue("orders", ids, ["+60000"], envelopes, are_ids_new=True)
    store = open_store(split.url, timedelta(milliseconds=600))
    store.drive(store.layout(ORDERS))
    execute_many = store.connection.execute_many

    def losing(commands: Sequence[Command]) -> list[Any]:
        lost = redis.ConnectionError("its reply is lost")
        return [
            lost if command[0] == "EVALSHA" and second in command else reply
            for command, reply in zip(commands, execute_many(commands), strict=True)
        ]

    def losing_one(command: Command) -> Any:
        (reply,) = losing([command])
        if isinstance(reply, Exception):
            raise reply
        return reply

    if trouble is Misplaced:
        split.ask("HSET", split.keys(second).options, "accepts", layout.number + 3)
    else:
        store.connection.execute_many = losing  # type: ignore[method-assign]
        store.connection.execute = losing_one  # type: ignore[method-assign]
    with pytest.raises(trouble):
        store.call_by_id(send)


def test_a_name_that_no_number_of_shards_has_changes_nothing(split_here: Split) -> None:
    split_here.into(2)
    names = ["orders~5of4", "orders~0of1", "orders~00of2", "orders~1of99"]
    split_here.drive(split_here.store.register(names))
    before, sharder = split_here.layout, Sharder(split_here.store)
    for topic in sharder.pick(split_here.drive(split_here.store.shards())):
        sharder.step(topic)
    assert split_here.layout == before


def test_while_the_number_changes_a_key_has_a_lane_in_each_of_its_shards(split_here: Split) -> None:
    """New messages of a key do not wait for those that are left in its earlier shard."""
    split_here.add_group()
    split_here.drive(topics.set_options(split_here.store, "orders", {"order": "continue"}))
    with Producer(split_here.url) as producer:
        producer.send_many("orders", ["a", "b"], key="k")
        split_here.into(4)
        producer.send_many("orders", ["c", "d"], key="k")
    held = {}
    for shard in split_here.layout.counted(ORDERS):
        split_here.store.call(Promote(shard))
        held[shard] = split_here.ask("HLEN", split_here.keys(shard).group("lisa").entries)
    assert sorted(held.values()) == [0, 0, 0, 1, 1]
