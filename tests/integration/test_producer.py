"""Both producers on real servers: one suite, because both run the same flows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from lisa.core.model.clock import OLDEST_DUE_MS, ms_datetime
from lisa.core.model.envelope import fence_of
from lisa.core.model.errors import DuplicateMessage, InvalidMessage, TopicFull
from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.open import Open
from lisa.core.transitions.purge import Purge
from lisa.core.transitions.retry import Fail, Failure
from lisa.producer import AsyncProducer, Outgoing, Producer, Sent
from tests.producers import Either, Topic, noting

if TYPE_CHECKING:
    from pathlib import Path

    import redis

HOUR = timedelta(hours=1)
HOUR_MS = 3_600_000


@pytest.fixture(params=["sync", "async"])
def producer(request: pytest.FixtureRequest, server: str) -> Iterator[Either]:
    either = Either(request.param, server, zone="Asia/Shanghai")
    yield either
    either.close()


@pytest.fixture
def topic(server: str) -> Iterator[Topic]:
    played = Topic(server)
    yield played
    played.close()


def test_send_gives_an_id_and_the_message_waits(producer: Either, topic: Topic) -> None:
    before = topic.now_ms()
    message_id = producer.send("orders", {"order": 42}, delay=HOUR, headers={"trace": "1"})
    after = topic.now_ms()
    assert before + HOUR_MS <= topic.waiting()[message_id] <= after + HOUR_MS + 1
    seen = producer.ask("get", "orders", message_id)
    assert (seen.id, seen.topic, seen.state, seen.body) == (
        message_id,
        "orders",
        "waiting",
        {"order": 42},
    )
    assert (seen.headers, seen.attempts, seen.groups) == ({"trace": "1"}, 0, {})
    assert seen.due_ms == topic.waiting()[message_id]
    assert seen.due == ms_datetime(seen.due_ms)


def test_due_times_are_exact_and_never_early(producer: Either, topic: Topic) -> None:
    noon = datetime(2040, 1, 1, 12, tzinfo=UTC)
    noon_ms = 2_209_032_000_000
    producer.send("orders", 1, id="aware", at=noon)
    producer.send("orders", 1, id="fraction", at=noon + timedelta(microseconds=1))
    producer.send("orders", 1, id="naive", at=noon.replace(tzinfo=None))
    producer.send("orders", 1, id="tz", at=noon.replace(tzinfo=None), tz="UTC")
    producer.send("orders", 1, id="ms", at_ms=noon_ms)
    producer.send("orders", 1, id="past", at_ms=OLDEST_DUE_MS)
    assert topic.waiting() == {
        "aware": noon_ms,
        "fraction": noon_ms + 1,
        "naive": noon_ms - 8 * HOUR_MS,
        "tz": noon_ms,
        "ms": noon_ms,
        "past": OLDEST_DUE_MS,
    }


def test_due_messages_go_straight_to_the_groups(producer: Either, topic: Topic) -> None:
    topic.declare("g1", "g2")
    ids = [producer.send("orders", n) for n in range(3)]
    ids.append(producer.send("orders", 3, at_ms=OLDEST_DUE_MS))
    for group in ("g1", "g2"):
        assert [entry.id for entry in topic.take(group)] == ids


def test_ttl_and_retry_travel_with_the_message(producer: Either, topic: Topic, server: str) -> None:
    producer.send("orders", 1, id="a", at_ms=10**13, ttl=timedelta(seconds=5), retry="0,2m")
    producer.send_many("orders", [Outgoing(1, id="b", retry=[]), 2], retry="1s")
    assert topic.store.ask("ZRANGE", topic.keys.expiry, 0, -1, "WITHSCORES") == [
        b"a",
        b"10000000005000",
    ]
    assert topic.store.ask("HGET", topic.keys.policy, "a") == b"0,120000"
    assert topic.store.ask("HGET", topic.keys.policy, "b") == b""
    assert topic.store.ask("HLEN", topic.keys.policy) == 3


def test_duplicates(producer: Either, topic: Topic) -> None:
    assert producer.send("orders", "first", id="a", at_ms=10**13) == "a"
    assert producer.send("orders", "second", id="a", at_ms=10**13 + 1) == "a"
    assert producer.ask("get", "orders", "a").body == "first"
    with pytest.raises(DuplicateMessage, match="'a'"):
        producer.send("orders", "third", id="a", on_duplicate="reject")
    assert producer.send("orders", "fourth", id="a", at_ms=10**13 + 2, on_duplicate="replace")
    seen = producer.ask("get", "orders", "a")
    assert (seen.body, seen.due_ms) == ("fourth", 10**13 + 2)
    assert len(topic.waiting()) == 1


def test_send_one_reports_the_outcome(producer: Either, topic: Topic) -> None:
    def send(body: str, mode: str = "keep") -> str:
        sent = producer.ask("send_one", "orders", body, id="a", delay=HOUR, on_duplicate=mode)
        assert sent.id == "a"
        return str(sent.outcome)

    assert [send("first"), send("second")] == ["accepted", "duplicate"]
    assert producer.ask("get", "orders", "a").body == "first"
    assert send("third", "reject") == "rejected"
    assert send("fourth", "replace") == "replaced"
    assert producer.ask("get", "orders", "a").body == "fourth"
    assert topic.waiting().keys() == {"a"}
    assert producer.ask("send_one", "orders", 1).outcome is Sent.ACCEPTED
    with pytest.raises(InvalidMessage, match="send_many"):
        producer.ask("send_one", "orders", Outgoing(1))


def test_send_many_reports_each_outcome(producer: Either, topic: Topic) -> None:
    producer.send("orders", "old", id="known", delay=HOUR)
    bodies = [Outgoing("x", id="known"), "y", Outgoing("z", id="z", delay=2 * HOUR)]
    report = producer.send_many("orders", bodies, delay=HOUR)
    assert (report.accepted, report.duplicate, len(report)) == (2, 1, 3)
    assert [outcome for _, outcome in report] == [Sent.DUPLICATE, Sent.ACCEPTED, Sent.ACCEPTED]
    assert [one.id for one in report][::2] == ["known", "z"]
    assert topic.waiting().keys() == {one.id for one in report}
    rejected = producer.send_many("orders", bodies[::2], on_duplicate="reject")
    assert rejected.rejected == 2
    replaced = producer.send_many("orders", bodies[::2], on_duplicate="replace")
    assert replaced.replaced == 2


def test_send_many_takes_any_number_and_keeps_the_order(producer: Either, topic: Topic) -> None:
    assert len(producer.send_many("orders", [])) == 0
    report = producer.send_many("orders", ({"n": n} for n in range(1_234)), at_ms=10**13)
    assert report.accepted == len(report) == 1_234
    ids = [one.id for one in report]
    assert list(topic.waiting()) == ids == sorted(ids)
    assert producer.ask("get", "orders", ids[1_233]).body == {"n": 1_233}


def test_calls_shrink_with_the_number_of_groups(producer: Either, topic: Topic) -> None:
    groups = [f"g{n}" for n in range(5)]
    topic.declare(*groups)
    report = producer.send_many("orders", range(321))
    assert report.accepted == 321
    assert producer.producer._store.batch_size("orders") == 100
    for group in groups:
        assert [entry.id for entry in topic.take(group, 400)] == [one.id for one in report]


def test_send_stream_draws_lazily(producer: Either, topic: Topic) -> None:
    drawn: list[int] = []
    outcomes = producer.stream("orders", noting(drawn, 5_000), take=501)
    assert [one.outcome for one in outcomes] == [Sent.ACCEPTED] * 501
    assert len(drawn) <= 1_500
    assert len(topic.waiting()) == len(drawn)


async def test_send_stream_draws_from_an_asynchronous_source(server: str) -> None:
    async def source() -> AsyncIterator[int]:
        for n in range(700):
            yield n

    async with AsyncProducer(server) as producer:
        outcomes = [one async for one in producer.send_stream("orders", source(), delay=HOUR)]
        assert [one.outcome for one in outcomes] == [Sent.ACCEPTED] * 700
        last = await producer.get("orders", outcomes[-1].id)
        assert last is not None
        assert last.body == 699


def test_bad_message_among_many_sends_nothing_of_its_call(producer: Either, topic: Topic) -> None:
    bodies: list[Any] = [*range(600), object(), *range(5)]
    with pytest.raises(InvalidMessage, match="JSON") as caught:
        producer.send_many("orders", bodies, delay=HOUR)
    assert caught.value.sent == len(topic.waiting()) == 500


def test_full_topic(producer: Either, topic: Topic) -> None:
    topic.store.call(Configure("orders", {"capacity": "700"}))
    with pytest.raises(TopicFull, match="700") as caught:
        producer.send_many("orders", range(1_000), delay=HOUR)
    assert caught.value.sent == len(topic.waiting()) == 500
    producer.send_many("orders", range(200), delay=HOUR)
    with pytest.raises(TopicFull) as caught:
        producer.send("orders", 1)
    assert caught.value.sent == 0


def test_oversize_body(producer: Either, topic: Topic) -> None:
    topic.store.call(Configure("orders", {"max_body_bytes": "100"}))
    producer.send("orders", "x" * 100, headers={"k": "v" * 200}, id="fits")
    with pytest.raises(InvalidMessage, match=r"101 bytes.*max_body_bytes"):
        producer.send("orders", "x" * 101)
    with pytest.raises(InvalidMessage, match="'b'"):
        producer.send_many("orders", [Outgoing("x", id="a"), Outgoing("x" * 101, id="b")])
    assert topic.waiting().keys() == {"fits"}


def test_large_bodies_travel_in_several_calls(producer: Either, topic: Topic) -> None:
    bodies = [b"x" * 400_000] * 7
    report = producer.send_many("orders", bodies, delay=HOUR)
    assert report.accepted == 7
    assert producer.ask("get", "orders", next(iter(report)).id).body == bodies[0]


def test_cancel(producer: Either, topic: Topic) -> None:
    topic.declare("lisa")
    waiting = producer.send("orders", 1, delay=HOUR)
    taken = producer.send("orders", 2)
    topic.take("lisa")
    ready = producer.send("orders", 3)
    asked = [waiting, taken, ready, "nobody"]
    truths = ["cancelled", "in_flight", "cancelled", "unknown"]
    assert [producer.ask("cancel", "orders", one) for one in asked] == truths
    assert producer.ask("cancel_many", "orders", iter(asked)) == truths
    assert producer.ask("get", "orders", waiting).state == "cancelled"
    assert producer.ask("cancel_many", "orders", []) == []


def test_cancel_many_takes_any_number(producer: Either, topic: Topic) -> None:
    ids = [one.id for one in producer.send_many("orders", range(1_100), delay=HOUR)]
    assert set(producer.ask("cancel_many", "orders", ids)) == {"cancelled"}
    assert topic.waiting() == {}


def test_reschedule_and_fire_now(producer: Either, topic: Topic) -> None:
    topic.declare("lisa")
    message_id = producer.send("orders", 1, delay=HOUR)
    assert producer.ask("reschedule", "orders", message_id, at_ms=10**13) == "rescheduled"
    assert topic.waiting() == {message_id: 10**13}
    later = producer.ask("reschedule", "orders", message_id, delay=2 * HOUR)
    assert later == "rescheduled"
    assert topic.waiting()[message_id] > topic.now_ms() + HOUR_MS
    assert producer.ask("fire_now", "orders", message_id) == "rescheduled"
    assert topic.promote() == 1
    assert [entry.id for entry in topic.take("lisa")] == [message_id]
    assert producer.ask("fire_now", "orders", message_id) == "in_flight"
    assert producer.ask("fire_now", "orders", "nobody") == "unknown"
    producer.send("orders", 2, id="gone", delay=HOUR)
    producer.ask("cancel", "orders", "gone")
    assert producer.ask("reschedule", "orders", "gone", delay=HOUR) == "done"


def test_get_in_every_state(producer: Either, topic: Topic) -> None:
    def seen(message_id: str) -> Any:
        return producer.ask("get", "orders", message_id)

    topic.declare("lisa")
    assert seen("nobody") is None
    producer.send("orders", {"n": 1}, id="a", retry="1h")
    assert (seen("a").state, seen("a").attempts, seen("a").body) == ("ready", 0, {"n": 1})
    (entry,) = topic.take("lisa")
    held = seen("a")
    assert (held.state, held.attempts, held.consumer) == ("in_flight", 1, "c1")
    assert timedelta(0) <= held.idle < timedelta(seconds=20)
    assert held.due_ms == entry.due_ms
    topic.store.call(Fail("orders", "lisa", [Failure("a", entry.entry, "no luck")]))
    failed = seen("a")
    assert (failed.state, failed.attempts, failed.reason) == ("retry", 1, "no luck")
    assert failed.due_ms > topic.now_ms()
    producer.ask("fire_now", "orders", "a")
    topic.promote()
    (entry,) = topic.take("lisa")
    topic.store.call(Fail("orders", "lisa", [Failure("a", entry.entry, "no hope")]))
    dead = seen("a")
    assert (dead.state, dead.attempts, dead.reason) == ("garbage", 2, "no hope")
    topic.store.call(Purge("orders", "lisa", ["a"]))
    purged = seen("a")
    assert (purged.state, purged.attempts, purged.body) == ("purged", 2, None)


def test_get_after_ack(producer: Either, topic: Topic) -> None:
    topic.declare("lisa")
    message_id = producer.send("orders", 1)
    (entry,) = topic.take("lisa")
    opened = topic.store.call(Open("orders", "lisa", [entry]))
    guard = fence_of(opened.envelopes[0] or b"")
    done = Settlement(message_id, entry.entry, guard, entry.due_ms, entry.attempt)
    topic.store.call(Ack("orders", "lisa", [done]))
    acked = producer.ask("get", "orders", message_id)
    assert (acked.state, acked.attempts, acked.due_ms, acked.groups) == (
        "acked",
        1,
        entry.due_ms,
        {},
    )


def test_get_with_several_groups_shows_the_most_advanced(producer: Either, topic: Topic) -> None:
    topic.declare("g1", "g2", "g3")
    message_id = producer.send("orders", 1)
    (first,) = topic.take("g1")
    topic.store.call(Fail("orders", "g1", [Failure(message_id, first.entry, "later")]))
    topic.take("g3")
    seen = producer.ask("get", "orders", message_id)
    assert (seen.state, seen.consumer) == ("in_flight", "c1")
    states = {group: (one.state, one.attempts, one.reason) for group, one in seen.groups.items()}
    assert states == {
        "g1": ("retry", 1, "later"),
        "g2": ("ready", 0, None),
        "g3": ("in_flight", 1, None),
    }


def test_get_of_a_body_that_a_foreign_hand_wrote(producer: Either, topic: Topic) -> None:
    message_id = producer.send("orders", 1, delay=HOUR)
    topic.store.ask("SET", topic.keys.body(message_id), "9 from the future")
    seen = producer.ask("get", "orders", message_id)
    assert (seen.state, seen.body) == ("waiting", None)
    assert "version" in seen.reason


def test_the_topic_is_registered_while_sending(
    producer: Either, topic: Topic, monkeypatch: pytest.MonkeyPatch
) -> None:
    def registered_at() -> bytes | None:
        at: bytes | None = topic.store.ask("ZSCORE", topic.store.keys.topics, "orders")
        return at

    producer.send("orders", 1, delay=HOUR)
    assert registered_at() is not None
    topic.store.ask("DEL", topic.store.keys.topics)
    producer.send("orders", 1, delay=HOUR)
    assert registered_at() is None  # not at each send
    monkeypatch.setattr("lisa.producer.sending.REGISTER_EVERY_S", 0.0)
    producer.send("orders", 1, delay=HOUR)
    assert registered_at() is not None


def test_a_topic_is_known_before_its_first_message_is_there(producer: Either, topic: Topic) -> None:
    """Otherwise a sender that dies in between leaves a message that no manager finds."""
    topic.store.ask("HSET", topic.keys.options, "max_body_bytes", "1")
    with pytest.raises(InvalidMessage, match="at most 1"):
        producer.send("orders", "too long", delay=HOUR)
    assert topic.store.ask("ZSCORE", topic.store.keys.topics, "orders") is not None


def test_lookups_and_cancellations_register_no_topic(producer: Either, topic: Topic) -> None:
    producer.ask("get", "orders", "a")
    producer.ask("cancel", "orders", "a")
    assert topic.store.ask("EXISTS", topic.store.keys.topics) == 0


async def test_many_tasks_share_a_producer(server: str) -> None:
    either_ids: set[str] = set()
    async with AsyncProducer(server) as producer:
        sends = (producer.send("orders", n, delay=HOUR) for n in range(100))
        either_ids.update(await asyncio.gather(*sends))
    assert len(either_ids) == 100


def test_threads_share_a_producer(redis_url: str, client: redis.Redis) -> None:
    ids: list[str] = []
    start = threading.Barrier(8)

    def work(producer: Producer) -> None:
        start.wait(10)
        for n in range(25):
            ids.append(producer.send("orders", n, delay=HOUR))
            ids.extend(one.id for one in producer.send_many("orders", range(10), delay=HOUR))

    with Producer(redis_url) as producer:
        threads = [threading.Thread(target=work, args=(producer,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(set(ids)) == len(ids) == 8 * 25 * 11
    assert client.zcard("lisa:{orders}:waiting") == len(ids)


def test_a_closed_producer_opens_again(producer: Either) -> None:
    producer.send("orders", 1, delay=HOUR)
    producer.ask("close")
    assert producer.send("orders", 1, delay=HOUR)


def test_prefixes_keep_systems_apart(server: str, client: redis.Redis) -> None:
    with Producer(server, prefix="one") as one, Producer(server, prefix="two") as two:
        message_id = one.send("orders", 1, delay=HOUR)
        assert two.get("orders", message_id) is None
        assert one.get("orders", message_id) is not None


def test_from_config(redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "producer.yml"
    file.write_text(
        f"lisa-delay-queue:\n  redis: {{url: '{redis_url}'}}\n  zone: '+08:00'\n  prefix: shop\n"
        "  patience: 2s\n"
    )
    naive = datetime(2040, 1, 1, 12)  # noqa: DTZ001  the zone is the file's
    with Producer.from_config(file) as producer:
        assert producer._patience == timedelta(seconds=2)
        message_id = producer.send("orders", 1, at=naive)
        seen = producer.get("orders", message_id)
        assert seen is not None
        assert seen.due == datetime(2040, 1, 1, 4, tzinfo=UTC)
    monkeypatch.setenv("LISA_CONFIG", str(file))
    with Producer.from_config(zone="UTC") as producer:
        assert producer.get("orders", message_id) == seen
        other = producer.get("orders", producer.send("orders", 1, at=naive))
        assert other is not None
        assert other.due == naive.replace(tzinfo=UTC)
