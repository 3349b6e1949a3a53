"""Pushes under faults: gateways that share targets, crash and stop; Redis outages."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lisa import Manager, Producer
from lisa.admin import push as admin
from lisa.admin.push import StoredPushTarget
from lisa.core.delivery.degradation import DEGRADED_AFTER, FIRST_S, LONGEST_S
from lisa.embedded import EmbeddedServer
from lisa.gateway.push.pace import TargetRecord
from lisa.gateway.push.pusher import SETTLE_WITHIN_S, Pusher
from lisa.gateway.request_metrics import Meter
from tests.gateway.push_targets import Received, Reply, Target
from tests.gateways import Gateway, new_topic, state
from tests.servers import connect, open_store, wait_until

CONFIG = """
lisa-delay-queue:
  gateway-server: {push-allow: ["127.0.0.0/8"], push-timeout: 5s, push-concurrency: 2, grace: 2s}
"""


def new_push_topic(redis_url: str, **options: str) -> str:
    topic = new_topic("push")
    with connect(redis_url) as client:
        client.hset(f"lisa:{{{topic}}}:options", mapping={"retry_delays": "50,50,50", **options})
    return topic


@pytest.mark.full
def test_two_gateways_share_a_target(
    redis_url: str, manager: Manager, producer: Producer, target: Target, tmp_path: Path
) -> None:
    topic = new_push_topic(redis_url)
    go = threading.Event()
    target.default = lambda _: Reply(wait=go)
    with (
        Gateway(redis_url, config=CONFIG, directory=tmp_path) as one,
        Gateway(redis_url, config=CONFIG, directory=tmp_path),
    ):
        one.client.put(f"/v1/topics/{topic}/push", json={"url": target.url})
        sent = producer.send_many(topic, list(range(10)))
        wait_until(lambda: target.at_once == 4)  # two of each
        go.set()
        wait_until(lambda: len(target.received) == 10)
        assert sorted(target.ids) == sorted(one.id for one in sent)
        one.client.delete(f"/v1/topics/{topic}/push")


def test_a_gateway_killed_during_a_push_causes_another_push(
    redis_url: str, manager: Manager, producer: Producer, target: Target, tmp_path: Path
) -> None:
    topic = new_push_topic(redis_url, ack_timeout="1000")
    go = threading.Event()
    target.replies.append(Reply(wait=go))
    with Gateway(redis_url, config=CONFIG, directory=tmp_path) as one:
        one.client.put(f"/v1/topics/{topic}/push", json={"url": target.url})
        sent = producer.send(topic, 1)
        wait_until(lambda: target.received)
        one.process.send_signal(signal.SIGKILL)
        one.process.wait()
    go.set()
    with Gateway(redis_url, config=CONFIG, directory=tmp_path) as two:
        wait_until(lambda: state(producer, topic, sent) == "acked")
        attempts = [int(each.headers["lisa-attempt"]) for each in target.received]
        # On a busy machine, more leases may end, also before their pushes.
        assert 1 < len(attempts) == len(set(attempts))
        two.client.delete(f"/v1/topics/{topic}/push")


@pytest.mark.full
def test_a_stopping_gateway_settles_its_pushes(
    redis_url: str, manager: Manager, producer: Producer, target: Target, tmp_path: Path
) -> None:
    topic = new_push_topic(redis_url)
    go = threading.Event()
    target.default = lambda _: Reply(wait=go)
    with Gateway(redis_url, config=CONFIG, directory=tmp_path) as one:
        one.client.put(f"/v1/topics/{topic}/push", json={"url": target.url})
        sent = [producer.send(topic, i) for i in range(5)]
        wait_until(lambda: target.at_once == 2)
        one.process.terminate()
        threading.Timer(0.5, go.set).start()
        assert one.process.wait(20) == 0
    states = [state(producer, topic, each) for each in sent]
    assert sorted(map(str, states)) == ["acked", "acked", "ready", "ready", "ready"]
    assert len(target.received) == 2


def test_pushes_unanswered_after_the_grace_period_are_released(
    redis_url: str, manager: Manager, producer: Producer, target: Target, tmp_path: Path
) -> None:
    topic = new_push_topic(redis_url)
    go = threading.Event()
    target.default = lambda _: Reply(wait=go)
    with Gateway(redis_url, config=CONFIG, directory=tmp_path) as one:
        one.client.put(f"/v1/topics/{topic}/push", json={"url": target.url})
        sent = producer.send(topic, 1)
        wait_until(lambda: target.received)
        assert one.stop() == 0
    go.set()
    found = producer.get(topic, sent)
    assert found is not None
    assert (found.state, found.attempts) == ("ready", 0)


def test_a_push_that_succeeds_in_an_outage_is_settled_afterwards(
    own_server: EmbeddedServer, target: Target, tmp_path: Path
) -> None:
    url, go = own_server.url, threading.Event()
    target.replies.append(Reply(wait=go))
    topic = new_push_topic(url, ack_timeout="60000")
    with (
        Manager(url),
        Producer(url) as producer,
        Gateway(url, config=CONFIG, directory=tmp_path) as one,
    ):
        one.client.put(f"/v1/topics/{topic}/push", json={"url": target.url})
        sent = producer.send(topic, 1)
        wait_until(lambda: target.received)
        own_server.kill()
        go.set()
        wait_until(lambda: target.at_once == 0)
        own_server.restart()
        wait_until(lambda: state(producer, topic, sent) == "acked")
        assert len(target.received) == 1
        other = producer.send(topic, 2)
        wait_until(lambda: state(producer, topic, other) == "acked")


@pytest.mark.full
def test_pushes_outlive_the_patience_of_the_request_that_set_their_target(
    redis_url: str, manager: Manager, producer: Producer, target: Target, tmp_path: Path
) -> None:
    """Otherwise each settlement would occupy one of two places for `SETTLE_WITHIN_S`."""
    topic = new_push_topic(redis_url)
    config = CONFIG.replace("push-timeout", "patience: 500ms, push-timeout")
    with Gateway(redis_url, config=config, directory=tmp_path) as one:
        one.client.put(f"/v1/topics/{topic}/push", json={"url": target.url})
        sent = [producer.send(topic, number, delay="1500ms") for number in range(4)]
        wait_until(
            lambda: all(state(producer, topic, each) == "acked" for each in sent),
            timeout=timedelta(seconds=SETTLE_WITHIN_S / 2),
        )


@pytest.mark.full
def test_a_failing_target_is_tried_with_exponential_back_off(
    redis_url: str, manager: Manager, producer: Producer, target: Target, tmp_path: Path
) -> None:
    topic = new_push_topic(redis_url, retry_delays=",".join(["0"] * 50))
    is_well = threading.Event()

    def reply(_: Received) -> Reply:
        return Reply(200 if is_well.is_set() else 500)

    target.default = reply
    with Gateway(redis_url, config=CONFIG, directory=tmp_path) as one:
        one.client.put(f"/v1/topics/{topic}/push", json={"url": target.url})
        sent = [producer.send(topic, i) for i in range(4)]
        # Targets of earlier tests, which are gone, are degraded as well.
        degraded = f"topic {topic}, group lisa: degraded after 20 failed pushes"
        wait_until(lambda: any(degraded in line for line in one.said))
        before = len(target.received)
        wait_until(lambda: len(target.received) >= before + 4)
        # Pauses of 0.25, 0.5 and 1 s, after hundreds of pushes per second.
        assert target.received[before + 3].at - target.received[before].at >= 0.25
        is_well.set()
        wait_until(lambda: all(state(producer, topic, each) == "acked" for each in sent))
        assert any(topic in line and "succeed again" in line for line in one.said)
        one.client.delete(f"/v1/topics/{topic}/push")


@pytest.mark.parametrize("kind", ["no hash", "no timeout"])
@pytest.mark.full
def test_a_damaged_topic_does_not_hide_other_targets(  # noqa: PLR0917  fixtures
    redis_url: str, manager: Manager, producer: Producer, target: Target, tmp_path: Path, kind: str
) -> None:
    topic, damaged = new_push_topic(redis_url), new_topic("damaged")
    store = open_store(redis_url)
    options = f"lisa:{{{damaged}}}:options"
    with connect(redis_url) as client:
        if kind == "no hash":
            client.set(options, "x")
        else:
            store.drive(admin.set_target(store, damaged, target.url))
            client.hset(options, "ack_timeout", "9" * 30)
        client.zadd("lisa:topics", {damaged: time.time() * 1000})
        try:
            with Gateway(redis_url, config=CONFIG, directory=tmp_path):
                store.drive(admin.set_target(store, topic, target.url))
                sent = producer.send(topic, 1)
                wait_until(lambda: state(producer, topic, sent) == "acked")
        finally:
            client.delete(options)
            client.zrem("lisa:topics", damaged)
            store.close()


# Pacing -------------------------------------------------------------------------------------------


def test_pushes_that_fail_together_cost_one_pause() -> None:
    """A failure of one second during a hundred pushes must not pause them for half a minute."""
    pace = TargetRecord()
    for _ in range(DEGRADED_AFTER + 80):
        pace.failed()
    assert pace.is_degraded
    assert 0 < pace.left_s <= FIRST_S


def test_pauses_grow_with_each_push_that_fails_after_one() -> None:
    pace = TargetRecord()
    for _ in range(DEGRADED_AFTER):
        pace.failed()
    paused = []
    for _ in range(9):
        paused.append(round(pace.left_s, 1))
        pace.resumes = 0.0  # the pause ends
        pace.failed()
    assert paused[:4] == [round(FIRST_S, 1), 0.5, 1.0, 2.0]
    assert paused[-1] == LONGEST_S


def test_a_push_that_began_before_a_wait_does_not_end_it() -> None:
    pace = TargetRecord()
    pace.asked_to_wait(10.0)
    assert not pace.succeeded()
    pace.resumes = 0.0  # the wait ends
    assert pace.most(5) == 1
    assert pace.succeeded()
    assert pace.most(5) == 5


class _Ending(TargetRecord):
    """A pause that ends between two reads of `left_s`."""

    def __init__(self) -> None:
        super().__init__()
        self._left = [1e-9]

    @property
    def left_s(self) -> float:
        return self._left.pop() if self._left else 0.0


async def test_a_wait_may_end_between_two_reads_of_it() -> None:
    hub: Any = SimpleNamespace(
        broker=SimpleNamespace(is_closing=False),
        meter=Meter(),
        settings=SimpleNamespace(gateway_server=SimpleNamespace(push_concurrency=1)),
    )
    target = StoredPushTarget(topic="t", group="g", url="http://hooks.example.com/", secret="")
    poster: Any = None
    pusher = Pusher(hub, poster, target, lambda: None)
    taken = asyncio.Event()

    async def take(most: int) -> list[Any]:
        assert most == 1
        taken.set()
        await asyncio.Event().wait()
        return []

    pusher._pace = _Ending()
    pusher._take = take  # type: ignore[method-assign]
    async with asyncio.timeout(5):
        await taken.wait()
    pusher.stop_pulling()
    await pusher.stop(0)
