"""Pushes under faults: gateways that share targets, crash and stop; Redis outages."""

import asyncio
import resource
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest

from lisa import Manager, Producer
from lisa.admin import push as admin
from lisa.admin.push import StoredPushTarget
from lisa.core.delivery.pace import DEGRADED_AFTER, FIRST_S, LONGEST_S
from lisa.embedded import EmbeddedServer
from lisa.gateway.pulls import PullPresence
from lisa.gateway.push.pusher import SETTLE_WITHIN_S, Pusher, TargetRecord
from lisa.gateway.shares import Meter
from tests.gateway.push_targets import PushTopic, Received, Reply, Target
from tests.gateways import Gateway, new_topic, stored
from tests.servers import connect, open_store, wait_until

CONFIG = """
lisa-delay-queue:
  gateway-server: {push-allow: ["127.0.0.0/8"], push-timeout: 5s, push-concurrency: 2, grace: 2s}
"""

Start = Callable[[], Gateway]


@pytest.fixture
def topic(redis_url: str, manager: Manager, producer: Producer) -> Iterator[PushTopic]:
    """Its push targets are removed after the test."""
    found = PushTopic(redis_url, producer, retry_delays="50,50,50")
    yield found
    with connect(redis_url) as client:
        client.delete(f"lisa:{{{found.name}}}:options")


@pytest.fixture
def start(redis_url: str, target: Target) -> Iterator[Start]:
    """Starts a gateway that ends with the test."""
    with ExitStack() as stack:
        yield lambda: stack.enter_context(Gateway(redis_url, config=CONFIG))


@pytest.fixture
def go(target: Target) -> threading.Event:
    """The target's responses wait for this event."""
    event = threading.Event()
    target.default = Reply(wait=event)
    return event


def test_a_fault_of_the_gateway_costs_no_attempt(
    topic: PushTopic, target: Target, start: Start
) -> None:
    """Here it cannot open a connection, for lack of file descriptors."""
    gateway = start()
    topic.push_to(gateway.client, target.url)
    pid = gateway.process.pid
    wait_until(lambda: any("pushing to" in line for line in gateway.said))
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
    sent = [topic.send() for _ in range(8)]
    wait_until(lambda: any("cannot push to" in line for line in gateway.said))
    time.sleep(1)
    assert target.received == []
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    topic.wait_for("acked", *sent)
    assert {request.headers["lisa-attempt"] for request in target.received} == {"1"}
    assert len([line for line in gateway.said if "cannot push to" in line]) == 1


@pytest.mark.full
def test_two_gateways_share_a_target(
    topic: PushTopic, target: Target, go: threading.Event, start: Start
) -> None:
    first, _ = start(), start()
    topic.push_to(first.client, target.url)
    sent = [topic.send() for _ in range(10)]
    wait_until(lambda: target.at_once == 4)  # two of each
    go.set()
    wait_until(lambda: len(target.received) == 10)
    assert sorted(target.ids) == sorted(sent)


def test_a_gateway_killed_during_a_push_causes_another_push(
    topic: PushTopic, target: Target, go: threading.Event, start: Start
) -> None:
    topic.set(ack_timeout="1000")
    killed = start()
    topic.push_to(killed.client, target.url)
    sent = topic.send()
    wait_until(lambda: target.received)
    killed.process.kill()
    killed.process.wait()
    go.set()
    start()
    topic.wait_for("acked", sent)
    attempts = [int(request.headers["lisa-attempt"]) for request in target.received]
    # On a busy machine, more leases may end, also before their pushes.
    assert 1 < len(attempts) == len(set(attempts))


@pytest.mark.full
def test_a_stopping_gateway_settles_its_pushes(
    topic: PushTopic, target: Target, go: threading.Event, start: Start
) -> None:
    gateway = start()
    topic.push_to(gateway.client, target.url)
    sent = [topic.send() for _ in range(5)]
    wait_until(lambda: target.at_once == 2)
    gateway.process.terminate()
    threading.Timer(0.5, go.set).start()
    assert gateway.process.wait(20) == 0
    states = [str(topic.state(message_id)) for message_id in sent]
    assert sorted(states) == ["acked", "acked", "ready", "ready", "ready"]
    assert len(target.received) == 2


def test_pushes_unanswered_after_the_grace_period_are_released(
    topic: PushTopic, target: Target, go: threading.Event, start: Start, producer: Producer
) -> None:
    gateway = start()
    topic.push_to(gateway.client, target.url)
    sent = topic.send()
    wait_until(lambda: target.received)
    assert gateway.stop() == 0
    go.set()
    found = stored(producer, topic.name, sent)
    assert (found.state, found.attempts) == ("ready", 0)


def test_a_push_that_succeeds_in_an_outage_is_settled_afterwards(
    own_server: EmbeddedServer, target: Target, go: threading.Event
) -> None:
    url = own_server.url
    with (
        Manager(url),
        Producer(url) as producer,
        Gateway(url, config=CONFIG) as gateway,
    ):
        topic = PushTopic(url, producer, ack_timeout="60000")
        topic.push_to(gateway.client, target.url)
        sent = topic.send()
        wait_until(lambda: target.received)
        own_server.kill()
        go.set()
        wait_until(lambda: target.at_once == 0)
        own_server.restart()
        topic.wait_for("acked", sent)
        assert len(target.received) == 1
        topic.wait_for("acked", topic.send())


@pytest.mark.full
def test_pushes_outlive_the_patience_of_the_request_that_set_their_target(
    topic: PushTopic, target: Target, redis_url: str
) -> None:
    """Otherwise each settlement would occupy one of two places for `SETTLE_WITHIN_S`."""
    config = CONFIG.replace("push-timeout", "patience: 500ms, push-timeout")
    with Gateway(redis_url, config=config) as gateway:
        topic.push_to(gateway.client, target.url)
        sent = [topic.send(delay="1500ms") for _ in range(4)]
        wait_until(
            lambda: all(topic.state(message_id) == "acked" for message_id in sent),
            timeout=timedelta(seconds=SETTLE_WITHIN_S / 2),
        )


@pytest.mark.full
def test_a_failing_target_is_tried_with_exponential_back_off(
    topic: PushTopic, target: Target, start: Start
) -> None:
    topic.set(retry_delays=",".join(["0"] * 50))
    is_well = threading.Event()

    def reply(_: Received) -> Reply:
        return Reply(200 if is_well.is_set() else 500)

    target.default = reply
    gateway = start()
    topic.push_to(gateway.client, target.url)
    sent = [topic.send() for _ in range(4)]
    # Targets of earlier tests, which are gone, are degraded as well.
    degraded = f"topic {topic.name}, group lisa: degraded after 20 failed pushes"
    wait_until(lambda: any(degraded in line for line in gateway.said))
    before = len(target.received)
    wait_until(lambda: len(target.received) >= before + 4)
    # Pauses of 0.25, 0.5 and 1 s, after hundreds of pushes per second.
    assert target.received[before + 3].at - target.received[before].at >= 0.25
    is_well.set()
    topic.wait_for("acked", *sent)
    wait_until(lambda: any("succeed again" in line and topic.name in line for line in gateway.said))


@pytest.mark.full
def test_damaged_topics_do_not_hide_other_targets(
    topic: PushTopic, target: Target, start: Start, redis_url: str
) -> None:
    names = [new_topic("damaged") for _ in range(2)]
    no_hash, no_timeout = (f"lisa:{{{name}}}:options" for name in names)
    store = open_store(redis_url)
    with connect(redis_url) as client:
        try:
            client.set(no_hash, "x")
            store.drive(admin.set_target(store, names[1], target.url))
            client.hset(no_timeout, "ack_timeout", "9" * 30)
            client.zadd("lisa:topics", dict.fromkeys(names, time.time() * 1000))
            start()
            store.drive(admin.set_target(store, topic.name, target.url))
            topic.wait_for("acked", topic.send())
        finally:
            client.delete(no_hash, no_timeout)
            client.zrem("lisa:topics", *names)
            store.close()


# Pacing -------------------------------------------------------------------------------------------


def test_pauses_grow_with_each_push_that_fails_after_one() -> None:
    """Pushes that fail together cost one pause: a failure of one second during a hundred pushes
    must not pause them for half a minute."""
    pace = TargetRecord()
    for _ in range(DEGRADED_AFTER + 80):
        pace.failed("500")
    assert pace.is_degraded
    assert 0 < pace.left_s <= FIRST_S
    paused = []
    for _ in range(9):
        paused.append(round(pace.left_s, 1))
        pace.resumes = 0.0  # the pause ends
        pace.failed("500")
    assert paused[:4] == [round(FIRST_S, 1), 0.5, 1.0, 2.0]
    assert paused[-1] == LONGEST_S


def test_a_push_that_began_before_a_wait_does_not_end_it() -> None:
    pace = TargetRecord()
    pace.asked_to_wait(10.0, "503")
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
    store: Any = None
    presence = PullPresence(store, "gateway", lambda *_: False)
    context: Any = SimpleNamespace(
        broker=SimpleNamespace(is_closing=False, presence=presence),
        meter=Meter(),
        settings=SimpleNamespace(gateway_server=SimpleNamespace(push_concurrency=1)),
    )
    target = StoredPushTarget(topic="t", group="g", url="http://hooks.example.com/", secret="")
    poster: Any = None
    pusher = Pusher(context, poster, target, lambda: None)
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
