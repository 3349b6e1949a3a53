"""Calls whose replies are lost are repeated, and still return their results: a case for each role.

A proxy forwards each call of a script but loses its reply: once, so that the call is repeated
within its patience; or more often, so that the caller must handle the error. That a repeated call
of any script changes nothing is proved in tests/contract/test_every_script.py.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, TypeVar

import pytest

from lisa import Manager
from lisa.admin.limits import set_limits
from lisa.consumer import Consumer
from lisa.consumer.pull import Delivery, Puller
from lisa.consumer.settler import SignalSender
from lisa.core.model.errors import ServerUnavailable
from lisa.core.model.keys import keyed_id
from lisa.core.model.lanes import KeyLimits
from lisa.core.model.message import Message
from lisa.core.model.signals import Signals, everywhere
from lisa.core.transitions.delivery import Pull
from lisa.core.transitions.promote import Promote
from lisa.embedded import EmbeddedServer
from lisa.producer import Outgoing, Producer
from tests.consumers import Bench
from tests.gateways import Gateway
from tests.producers import Either
from tests.scripts import all_versions, versions
from tests.servers import open_store, wait_until
from tests.torture.proxy import Proxy

T = TypeVar("T")

TOPIC = "orders"
HOUR = timedelta(hours=1)
OFTEN = 12
"""More often than a call is repeated within its patience."""


@pytest.fixture
def bench(redis_url: str) -> Bench:
    bench = Bench(redis_url)
    for script in all_versions():  # else the lost reply may be that the script is missing
        bench.ask("SCRIPT", "LOAD", script.source)
    bench.declare(TOPIC, ack_timeout=timedelta(seconds=1), retry_delays="", journal="1")
    return bench


@pytest.fixture
def proxy(valkey_server: EmbeddedServer) -> Iterator[Proxy]:
    proxy = Proxy(valkey_server.port, ("role",))
    yield proxy
    proxy.close()


def lose(proxy: Proxy, *names: str, times: int = 1) -> None:
    """Lose the replies to calls of these scripts."""
    proxy.lose_replies_to(
        *(one.sha.encode() for name in names for one in versions(name)), times=times
    )


def listen(signals: Signals, *names: str) -> list[tuple[str, str]]:
    """The received signals as (name, id)."""
    heard: list[tuple[str, str]] = []
    for name in names:

        def hear(_topic: str, *, message: Message, name: str = name) -> None:
            heard.append((name, message.id))

        getattr(signals, name).connect(hear, weak=False)
    return heard


def events(bench: Bench, state: str) -> list[str]:
    """The ids that entered a state according to the journal, sorted."""
    found = bench.ask("XRANGE", bench.store.keys.topic(TOPIC).events, "-", "+")
    told = [dict(zip(flat[::2], flat[1::2], strict=True)) for _, flat in found]
    return sorted(one[b"id"].decode() for one in told if one[b"state"].decode() == state)


def test_a_consumer_reports_each_failure_once(
    bench: Bench, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    bench.configure(TOPIC, retry_delays="0", ack_timeout=timedelta(minutes=1))
    lose(proxy, "retry", times=OFTEN)
    heard = listen(everywhere, "retrying", "dead")

    def handle(_message: Message) -> None:
        raise ValueError("no")

    consumer = Consumer(proxy.url("role"))
    consumer.on(TOPIC, handle)
    ids = bench.send(TOPIC, range(3))
    with caplog.at_level(logging.ERROR, "lisa.consumer"), consumer, bench.manager(TOPIC):
        wait_until(lambda: len(heard) >= 6)
    assert sorted(heard) == sorted((name, one) for name in ("retrying", "dead") for one in ids)
    deaths = [one.getMessage() for one in caplog.records if "moved to garbage" in one.message]
    assert all(sum(one in said for said in deaths) == 1 for one in ids), deaths
    assert events(bench, "garbage") == sorted(ids)
    assert bench.stat(TOPIC, "stale") == 0
    assert proxy.lost >= OFTEN


def test_a_manager_reports_each_death_and_each_expiry(
    bench: Bench, proxy: Proxy, caplog: pytest.LogCaptureFixture
) -> None:
    heard = listen(everywhere, "dead", "expired")
    lose(proxy, "reclaim", "expire", times=OFTEN)
    bench.configure(TOPIC, ack_timeout=timedelta(milliseconds=300))
    dying = bench.send(TOPIC, range(3))
    ending = bench.send(TOPIC, range(3), delay_ms=100, ttl_ms=200)
    group = bench.store.keys.topic(TOPIC).group("lisa")
    bench.ask("XREADGROUP", "GROUP", "lisa", "c", "COUNT", 3, "STREAMS", group.ready, ">")
    bench.ask("HSET", bench.store.keys.topic(TOPIC).options, "paused", "1")
    over_ms = bench.store.drive(bench.store.server_time_ms()) + 300  # leases and ttls
    wait_until(lambda: bench.store.drive(bench.store.server_time_ms()) > over_ms)
    bench.ask("HDEL", bench.store.keys.topic(TOPIC).options, "paused")
    with caplog.at_level(logging.WARNING), Manager(proxy.url("role"), topics=[TOPIC]):
        wait_until(lambda: len(heard) >= 6)
    told = {*(("dead", one) for one in dying), *(("expired", one) for one in ending)}
    assert set(heard) == told
    said = [one.getMessage() for one in caplog.records if "moved to garbage" in one.message]
    assert all(any(one in line for line in said) for one in dying), said
    assert events(bench, "garbage") == sorted(dying)
    assert events(bench, "expired") == sorted(ending)
    assert proxy.lost >= 2 * OFTEN


ANSWERS: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "retry": (lambda delivery: delivery.retry(delay=timedelta(hours=1)), "retrying"),
    "discard": (lambda delivery: delivery.discard("no"), "dead"),
    "defer": (lambda delivery: delivery.defer(delay="1h"), "deferred"),
    "extend": (lambda delivery: delivery.extend(), True),
    "ack": (lambda delivery: delivery.ack(), "repeated"),
    "release": (lambda delivery: delivery.release(), True),  # the last: it is ready again
}


def test_a_delivery_has_the_same_outcome_as_without_the_loss(bench: Bench, proxy: Proxy) -> None:
    bench.configure(TOPIC, retry_delays="5s")
    heard = listen(everywhere, "retrying", "dead", "acked")
    with Consumer(proxy.url("role")) as consumer:
        for name, (act, answer) in ANSWERS.items():
            lose(proxy, "pull", "retry", "defer", "release", "extend", "ack")
            lost = proxy.lost
            [sent] = bench.send(TOPIC, ["x"])
            [delivery] = consumer.pull(TOPIC, wait=timedelta(seconds=5))
            assert (delivery.id, delivery.attempt) == (sent, 1)
            assert act(delivery) == answer, name
            wanted = {"retry": "retrying", "discard": "dead", "ack": "acked"}.get(name)
            assert heard == ([(wanted, sent)] if wanted else []), name
            assert proxy.lost >= lost + 2
            heard.clear()


@pytest.fixture
def pull(proxy: Proxy) -> Iterator[Callable[[int], list[Delivery]]]:
    """Pulls a number of messages, with little patience."""
    with closing(open_store(proxy.url("role"), timedelta(milliseconds=100))) as store:
        sender = SignalSender(Signals(), lambda _: None)
        make = partial(Delivery, store, sender, "c")
        puller = Puller(store, store.connection, "lisa", "c", sender, new_delivery=make)
        yield lambda batch: store.drive(puller.pull(TOPIC, batch, timedelta(0), None))
        for flow in puller.leave(store):
            store.drive(flow)


def test_a_repeated_delivery_call_returns_the_first_result(
    bench: Bench, proxy: Proxy, pull: Callable[[int], list[Delivery]]
) -> None:
    bench.configure(TOPIC, retry_delays="5s")

    def insisting(call: Callable[[], Any]) -> Any:
        for _ in range(9):  # one more than replies are lost
            try:
                return call()
            except ServerUnavailable:
                continue
        raise AssertionError("no call was answered")

    for name in ("retry", "discard", "defer", "release"):
        act, answer = ANSWERS[name]
        lose(proxy, "pull", "retry", "defer", "release", times=8)
        [sent] = bench.send(TOPIC, ["x"])
        [delivery] = insisting(partial(pull, 1))
        assert (delivery.id, delivery.attempt) == (sent, 1)
        assert insisting(partial(act, delivery)) == answer


def test_a_smaller_pull_after_a_lost_reply_releases_the_surplus(
    bench: Bench, proxy: Proxy, pull: Callable[[int], list[Delivery]]
) -> None:
    bench.configure(TOPIC, ack_timeout="1h")
    sent = bench.send(TOPIC, range(10))
    assert pull(1)[0].release()
    lose(proxy, "pull", times=1_000)
    with pytest.raises(ServerUnavailable):
        pull(10)
    lose(proxy, times=0)
    first, others = pull(3), pull(10)
    assert len(first) == 3
    assert sorted(one.id for one in [*first, *others]) == sorted(sent)
    assert {one.attempt for one in [*first, *others]} == {1}


def test_the_gateway_responds_as_without_the_loss(bench: Bench, proxy: Proxy) -> None:
    lose(proxy, "pull", "retry", "release", "extend", "requeue", "purge")
    sent = bench.send(TOPIC, range(3))
    with Gateway(proxy.url("role")) as gateway:
        path = f"/v1/topics/{TOPIC}"

        def post(what: str, **body: object) -> dict[str, Any]:
            answer = gateway.client.post(f"{path}/{what}", json=body)
            assert answer.status_code == 200, answer.text
            found: dict[str, Any] = answer.json()
            return found

        def receipts() -> list[tuple[str, str]]:
            found = post("pull", max=3, wait_ms=2_000)["deliveries"]
            assert sorted(one["id"] for one in found) == sorted(sent)
            assert {one["attempt"] for one in found} == {1}
            return [(one["id"], one["receipt"]) for one in found]

        for one, receipt in receipts():
            assert post(f"messages/{one}/extend", receipt=receipt)
            assert post(f"messages/{one}/release", receipt=receipt)
        for one, receipt in receipts():
            assert post(f"messages/{one}/retry", receipt=receipt, discard=True)["outcome"] == "dead"
        assert post("garbage:requeue", ids=sent[:1])["done"] == 1
        assert post("garbage:purge", ids=sent[1:])["done"] == 2
        assert proxy.lost >= 9
    assert events(bench, "garbage") == sorted(sent)
    assert events(bench, "requeued") == sent[:1]
    assert events(bench, "purged") == sorted(sent[1:])


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_producer_gets_the_same_reply_as_without_the_loss(
    bench: Bench, proxy: Proxy, kind: str
) -> None:
    either = Either(kind, proxy.url("role"))
    lose(proxy, "enqueue", "cancel", "reschedule", "inspect")
    either.send(TOPIC, 1, id="a", delay=HOUR)
    ids = [f"m{n}" for n in range(300)]
    report = either.send_many(TOPIC, [Outgoing(1, id=one) for one in ids], delay=HOUR)
    assert {one.outcome for one in report} == {"accepted"}
    streamed = either.stream(TOPIC, [Outgoing(n, id=f"s{n}") for n in range(3)], 3)
    assert {one.outcome for one in streamed} == {"accepted"}
    assert either.send(TOPIC, 2, id="a", delay=HOUR, on_duplicate="replace") == "a"
    assert either.ask("cancel_many", TOPIC, ["m0", "m1", "none"])[:2] == ["cancelled"] * 2
    assert either.ask("cancel", TOPIC, "m2") == "cancelled"
    assert either.ask("reschedule", TOPIC, "a", delay=2 * HOUR) == "rescheduled"
    assert either.ask("fire_now", TOPIC, "m3") == "rescheduled"
    assert either.ask("get", TOPIC, "a").body == 2
    either.close()
    assert proxy.lost >= 8
    assert events(bench, "sent") == sorted(["a", *ids, "s0", "s1", "s2"])
    assert events(bench, "cancelled") == ["m0", "m1", "m2"]
    assert events(bench, "replaced") == ["a"]


def test_a_lost_read_costs_no_attempt(bench: Bench, proxy: Proxy) -> None:
    """Without retries, a counted attempt would lose the message."""
    bench.configure(TOPIC, ack_timeout=timedelta(minutes=5))
    ids = bench.send(TOPIC, range(20))
    proxy.lose_replies_to(b"XREADGROUP", times=1)
    handled: dict[str, int] = {}
    consumer = Consumer(proxy.url("role"))

    @consumer.on(TOPIC)
    def handle(message: Message) -> None:
        handled[message.id] = message.attempt

    with consumer:
        wait_until(lambda: len(handled) == len(ids))
    assert proxy.lost >= 1
    assert handled == dict.fromkeys(ids, 1)
    assert bench.stat(TOPIC, "garbage") == 0


def despite_a_loss(proxy: Proxy, script: str, call: Callable[[], T]) -> T:
    """The result of a call that loses the first reply of a script, in each of its versions."""
    lost = proxy.lost
    lose(proxy, script)
    result = call()
    assert proxy.lost > lost
    return result


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_coalescing_sends_have_the_same_outcome_as_without_the_loss(
    bench: Bench, proxy: Proxy, kind: str
) -> None:
    bench.configure(TOPIC, ack_timeout=HOUR)
    either = Either(kind, proxy.url("role"))
    rules: dict[str, tuple[dict[str, Any], str]] = {
        "debounced": ({"debounce": HOUR, "max_wait": 2 * HOUR}, "replaced"),
        "throttled": ({"throttle": HOUR}, "updated"),
        "latest": ({"latest": True, "delay": HOUR}, "updated"),
    }
    for key, (options, outcome) in rules.items():

        def send(body: int, key: str = key, options: dict[str, Any] = options) -> tuple[str, str]:
            call = partial(either.send_one, TOPIC, body, key=key, **options)
            return tuple(despite_a_loss(proxy, "coalesce", call))

        first, second = keyed_id(key, "~1"), keyed_id(key, "~2")
        assert send(1) == (first, "accepted")
        assert send(2) == (first, outcome)
        lose(proxy, times=0)
        assert either.fire_key(TOPIC, key) == [(first, "rescheduled")]
        bench.store.call(Promote(TOPIC))
        [entry] = bench.store.call(Pull(TOPIC, "lisa", "c", 10)).entries
        assert entry.id == first
        assert send(3) == (second, "accepted")
        assert sorted(one.body for one in either.list_key(TOPIC, key)) == [2, 3]
    either.close()
    firsts, seconds = ([keyed_id(key, own) for key in rules] for own in ("~1", "~2"))
    assert events(bench, "sent") == sorted(firsts + seconds)
    assert events(bench, "replaced") == sorted(firsts)


def test_all_messages_of_a_key_change_once_despite_the_loss(bench: Bench, proxy: Proxy) -> None:
    with Producer(proxy.url("role")) as producer:
        at = datetime(2100, 1, 1, tzinfo=UTC)
        ids = [producer.send(TOPIC, 1, key="k", at=at) for _ in range(3)]
        shift = partial(producer.reschedule_key, TOPIC, "k", shift="1h")
        assert sorted(despite_a_loss(proxy, "reschedule", shift)) == [
            (one, "rescheduled") for one in sorted(ids)
        ]
        assert {one.due for one in producer.list_key(TOPIC, "k")} == {at + HOUR}
        cancel = partial(producer.cancel_key, TOPIC, "k")
        assert sorted(despite_a_loss(proxy, "cancel", cancel)) == [
            (one, "cancelled") for one in sorted(ids)
        ]
        assert producer.list_key(TOPIC, "k") == []
    assert events(bench, "cancelled") == sorted(ids)


def test_limits_of_a_key_change_once_despite_the_loss(bench: Bench, proxy: Proxy) -> None:
    with closing(open_store(proxy.url("role"))) as store:

        def change(concurrency: int) -> bool:
            flow = set_limits(store, TOPIC, "k", KeyLimits(concurrency=concurrency))
            return store.drive(flow)

        assert despite_a_loss(proxy, "limit", partial(change, 1))
        assert not despite_a_loss(proxy, "limit", partial(change, 1))
        assert despite_a_loss(proxy, "limit", partial(change, 2))
    options = bench.store.keys.topic(TOPIC).options
    assert bench.ask("HGET", options, "lanes_changed") == b"2"


def test_a_lane_gives_each_slot_once_despite_the_loss(bench: Bench, proxy: Proxy) -> None:
    """Of a promotion, and of acks, deferrals and retries."""
    bench.configure(TOPIC, key_concurrency=2, ack_timeout=HOUR, retry_delays="1h")
    own = bench.store.keys.topic(TOPIC).group("lisa")
    with (
        closing(open_store(proxy.url("role"))) as store,
        Consumer(proxy.url("role")) as consumer,
    ):
        with Producer(bench.url) as producer:
            producer.send_many(TOPIC, range(8), key="k")
        despite_a_loss(proxy, "promote", partial(store.call, Promote(TOPIC)))
        for name, script in (("ack", "ack"), ("defer", "defer"), ("retry", "retry")):
            [delivery, *_] = consumer.pull(TOPIC, wait=timedelta(seconds=5))
            act, answer = ANSWERS[name]
            assert despite_a_loss(proxy, script, partial(act, delivery)) == answer
            store.call(Promote(TOPIC))
            assert bench.ask("HLEN", own.entries) == 2
