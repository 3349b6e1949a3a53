"""Pulling: deliveries for a custom loop."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest

from lisa import Producer
from lisa.admin import live
from lisa.consumer import AsyncConsumer, Consumer
from lisa.core.delivery.pace import AHEAD_BYTES
from lisa.core.delivery.source import LOOK_AGAIN_S, GroupSource
from lisa.core.metrics import topics as topic_metrics
from lisa.core.model.envelope import decode_envelope
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.transitions.promote import Promote
from tests.consumers import Bench, heard, presences
from tests.servers import shortest_s, wait_until

pytestmark = pytest.mark.usefixtures("orders_declared")

TOPIC = "orders"
WAIT = timedelta(seconds=60)


@pytest.fixture
def consumer(bench: Bench) -> Iterator[Consumer]:
    consumer = Consumer(bench.url)
    yield consumer
    consumer.stop()


def test_deliveries_have_the_message_and_its_settling_methods(
    bench: Bench, consumer: Consumer
) -> None:
    acked = heard(consumer.message_acked)
    sent, retried, discarded, released, deferred = bench.send(TOPIC, [{"order": 1}, 1, 2, 3, 4])
    [delivery] = consumer.pull(TOPIC)
    assert (delivery.id, delivery.topic, delivery.group) == (sent, TOPIC, "lisa")
    assert (delivery.body, delivery.attempt, delivery.headers) == ({"order": 1}, 1, {})
    assert delivery.due_ms == int(delivery.due.timestamp() * 1000)
    assert bench.states(TOPIC, sent) == ["in_flight"]
    assert delivery.ack() == "acked"
    assert delivery.ack() == "repeated"
    assert bench.settled_as(TOPIC, sent) == "acked"
    first, second, third, fourth = consumer.pull(TOPIC, batch=4)
    assert first.retry(delay=timedelta(hours=1), reason="not yet") == "retrying"
    assert second.discard("hopeless") == "dead"
    assert third.release() is True
    assert third.release() is False
    assert third.ack() == "late"  # it takes effect in any state of the message
    assert fourth.defer(delay="1h", reason="busy") == "deferred"
    assert third.defer(delay="1h") == "stale"
    (state,) = bench.inspect(TOPIC, deferred).group_states
    assert (state.state, state.reason, state.failed_attempts) == ("retry", "busy", 0)
    assert bench.states(TOPIC, retried) == ["retry"]
    assert bench.inspect(TOPIC, retried).group_states[0].reason == "not yet"
    assert bench.states(TOPIC, discarded) == ["garbage"]
    assert bench.inspect(TOPIC, discarded).group_states[0].reason == "hopeless"
    assert bench.settled_as(TOPIC, released) == "acked"
    assert [message.id for message in acked] == [sent, sent, released]
    for wrong, said in ((timedelta(seconds=-1), "negative"), (timedelta.max, "beyond the year")):
        with pytest.raises(InvalidMessage, match=said):
            first.retry(delay=wrong)
        with pytest.raises(InvalidMessage, match=said):
            fourth.defer(delay=wrong)


@pytest.mark.parametrize("headers", [{}, {"tenant": "t"}])
def test_deliveries_of_one_send_share_its_token(
    bench: Bench, consumer: Consumer, headers: dict[str, str]
) -> None:
    tokens = []
    for _ in range(2):
        with Producer(bench.url) as producer:
            producer.send(TOPIC, 1, id="a", headers=headers, on_duplicate="replace")
        bench.store.call(Promote(TOPIC))
        [first] = consumer.pull(TOPIC)
        envelope = bench.inspect(TOPIC, "a").envelope
        assert envelope is not None
        assert first.message.token == decode_envelope(envelope).token
        first.release()
        [again] = consumer.pull(TOPIC)
        assert again.message.token == first.message.token
        again.ack()
        tokens.append(again.message.token)
    assert len(set(tokens)) == 2


def test_a_pull_takes_at_most_its_batch_and_waits_for_a_message_a_resume_or_a_group(
    bench: Bench, consumer: Consumer
) -> None:
    bench.send(TOPIC, range(5))
    assert [one.body for one in consumer.pull(TOPIC, batch=3)] == [0, 1, 2]
    assert [one.body for one in consumer.pull(TOPIC, batch=3)] == [3, 4]
    began = time.monotonic()
    assert consumer.pull(TOPIC, batch=3) == []
    assert time.monotonic() - began < WAIT.total_seconds()
    began = time.monotonic()
    assert consumer.pull(TOPIC, wait=timedelta(seconds=0.4)) == []
    assert 0.4 <= time.monotonic() - began < WAIT.total_seconds()
    bench.send(TOPIC, [5])
    bench.configure(TOPIC, paused=True)
    assert consumer.pull(TOPIC) == []
    bench.send("invoices", [6])
    assert consumer.pull("invoices") == []
    assert [one.state for one in presences(bench, "invoices")] == ["waiting"]
    with ThreadPoolExecutor(2) as pool, bench.manager("invoices"):
        resumed = pool.submit(consumer.pull, TOPIC, wait=WAIT)
        grouped = pool.submit(consumer.pull, "invoices", wait=WAIT)
        bench.configure(TOPIC, paused=False)
        bench.declare("invoices", "billing")
        assert [one.body for one in resumed.result()] == [5]
        assert [one.group for one in grouped.result()] == ["billing"]


def test_a_pull_takes_as_many_large_bodies_as_memory_should_hold(
    bench: Bench, consumer: Consumer
) -> None:
    sent = [one for _ in range(40) for one in bench.send(TOPIC, [b"x" * 1_000_000])]
    most = AHEAD_BYTES // 1_000_000 + 1
    seen: list[str] = []
    while len(seen) < 40:
        found = consumer.pull(TOPIC, batch=40)
        assert 1 <= len(found) <= most
        assert {one.attempt for one in found} == {1}
        seen += [one.id for one in found]
        assert bench.pending(TOPIC) == len(found), "the rest is back"
        assert [one.ack() for one in found] == ["acked"] * len(found)
    assert sorted(seen) == sorted(sent)


def test_a_waiting_pull_is_woken_by_the_message(bench: Bench, consumer: Consumer) -> None:
    with ThreadPoolExecutor(1) as pool:

        def wake() -> None:
            pulled = pool.submit(consumer.pull, TOPIC, wait=WAIT)
            wait_until(lambda: b"blocked_clients:0\r" not in bench.ask("INFO", "clients"))
            bench.send(TOPIC, ["wake up"])
            assert [one.body for one in pulled.result()] == ["wake up"]

        assert shortest_s(wake, LOOK_AGAIN_S / 2) < LOOK_AGAIN_S / 2


def test_an_ack_timeout_of_its_own_is_kept_and_extended(bench: Bench, consumer: Consumer) -> None:
    bench.configure(TOPIC, retry_delays="1h")
    [kept, lost] = bench.send(TOPIC, [1, 2])
    [first] = consumer.pull(TOPIC, ack_timeout="1s")
    [second] = consumer.pull(TOPIC, ack_timeout="300ms")
    began = time.monotonic()
    with bench.manager(TOPIC):
        while bench.states(TOPIC, lost) != ["retry"] or time.monotonic() < began + 1.5:
            assert first.extend() is True
        assert bench.states(TOPIC, kept) == ["in_flight"]
        assert second.extend() is False
    assert first.ack() == "acked"


@pytest.mark.parametrize("then", ["pull", "stop"])
def test_messages_of_a_pull_that_is_interrupted_are_kept(
    bench: Bench, consumer: Consumer, monkeypatch: pytest.MonkeyPatch, then: str
) -> None:
    bench.configure(TOPIC, ack_timeout="1h")
    [sent] = bench.send(TOPIC, [1])

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(GroupSource, "open", interrupt)
        with pytest.raises(KeyboardInterrupt):
            consumer.pull(TOPIC)
    assert bench.states(TOPIC, sent) == ["in_flight"]
    if then == "pull":
        assert [(one.id, one.attempt) for one in consumer.pull(TOPIC)] == [(sent, 1)]
    else:
        consumer.stop()
        assert bench.states(TOPIC, sent) == ["ready"]


@pytest.mark.parametrize("limit", ["", pytest.param("?max_connections=5", marks=pytest.mark.full)])
async def test_many_pulls_wait_without_asking_again_and_again(bench: Bench, limit: str) -> None:
    """Each waits on a connection of its own; beyond a limit in the URL, they look now and then."""
    consumer, pulls, waited_s = AsyncConsumer(bench.url + limit), 120, 1

    async def pull() -> int:
        wait = timedelta(seconds=waited_s)
        return len([await one.ack() async for one in consumer.pull(TOPIC, wait=wait)])

    before = bench.calls_of("evalsha")
    assert await asyncio.gather(*(pull() for _ in range(pulls))) == [0] * pulls
    assert bench.calls_of("evalsha") - before <= pulls * (3 + waited_s / LOOK_AGAIN_S)
    await consumer.stop()


def test_mistakes_are_refused_and_the_group_of_a_consumer_that_pulls_cannot_be_changed(
    bench: Bench, consumer: Consumer
) -> None:
    """It would go on pulling for the first group."""
    consumer.group = "billing"
    assert consumer.pull(TOPIC) == []
    with pytest.raises(ConfigError, match="stop it before its group is changed"):
        consumer.group = "lisa"
    assert consumer.group == "billing"
    consumer.stop()
    consumer.group = "lisa"
    bench.send(TOPIC, [1])
    [delivery] = consumer.pull(TOPIC, wait=WAIT)
    assert delivery.group == "lisa"
    undecided = Consumer(bench.url)
    with pytest.raises(ConfigError, match="billing, lisa"):
        undecided.pull(TOPIC)
    undecided.stop()
    for batch in (0, 501, True):
        with pytest.raises(InvalidMessage, match="1 to 500"):
            consumer.pull(TOPIC, batch=batch)
    with pytest.raises(InvalidMessage, match="ack timeout"):
        consumer.pull(TOPIC, ack_timeout=timedelta(milliseconds=1))


def test_percentiles_do_not_exceed_the_highest_lateness(bench: Bench, consumer: Consumer) -> None:
    """Also above five minutes, in all numbers that users see."""
    before = bench.store.drive(live.look(bench.store, [TOPIC]))
    now_ms = bench.store.drive(bench.store.server_time_ms())
    with Producer(bench.url) as producer:
        for minutes in (6, 7, 8, 9):
            producer.send(TOPIC, minutes, at_ms=now_ms - minutes * 60_000)
    *acked, failed = consumer.pull(TOPIC, batch=4, wait=WAIT)
    for delivery in acked:
        delivery.ack()
    failed.retry()
    after = bench.store.drive(live.look(bench.store, [TOPIC]))
    p50, p99 = map(live.activity(before, after)[TOPIC].lateness_ms, (0.5, 0.99))
    highest_ms = after.topics[TOPIC].stats["late_max@lisa"]
    assert 540_000 <= highest_ms < 600_000
    assert p50 is not None
    assert p99 is not None
    assert 300_000 < p50 < p99 <= highest_ms
    numbers = bench.store.drive(topic_metrics.read(bench.store))
    assert numbers["lisa_topic_lateness_max_seconds"][TOPIC, "lisa"] == highest_ms / 1000
