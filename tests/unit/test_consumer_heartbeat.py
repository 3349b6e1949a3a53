"""The heartbeat's step, where calls hang or fail, without a server."""

from __future__ import annotations

import logging
import time
from collections import deque
from itertools import pairwise
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from lisa.consumer.heartbeat import LONGEST_TICK_S, Heartbeat
from lisa.consumer.inflight import Held
from lisa.consumer.slots import Slots
from lisa.consumer.subscription import Subscription
from lisa.core.model.errors import ServerUnavailable
from lisa.core.model.message import Message
from lisa.core.model.sharding import Shard

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lisa.core.transitions.base import Transition

HANGS_S = 1.2 * LONGEST_TICK_S

made: list[Heartbeat] = []


@pytest.fixture(autouse=True)
def _threads_ended() -> Iterator[None]:
    """End all threads: other tests in this process count threads."""
    yield
    for heartbeat in made:
        heartbeat._pool.close()
    made.clear()


def heartbeat_of(subs: list[Subscription]) -> Heartbeat:
    store = cast("Any", SimpleNamespace(has_nodes=False))
    made.append(Heartbeat(store, lambda: subs, 1, lambda sub: None))
    return made[-1]


class Subscriptions:
    """A heartbeat whose calls for the subscriptions in `hang` fail after a delay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.subs = [
            Subscription(cast("Any", None), Shard(name), "lisa", "me", slots=Slots(1))
            for name in names
        ]
        for sub in self.subs:
            sub.leases.hold("1-1", cast("Any", None))
        self.hang: set[str] = set()
        self.takes_s = 0.0
        self.kept: dict[str, list[float]] = {name: [] for name in names}
        self.told: dict[str, list[float]] = {name: [] for name in names}
        self.heartbeat = heartbeat_of(self.subs)
        monkeypatch.setattr(self.heartbeat, "_renew_leases", lambda sub: self.call(sub, self.kept))
        monkeypatch.setattr(self.heartbeat, "_announce", lambda sub: self.call(sub, self.told))

    def call(self, sub: Subscription, done: dict[str, list[float]]) -> bool:
        if sub.shard in self.hang:
            time.sleep(HANGS_S)
            raise ServerUnavailable("it hangs")
        time.sleep(self.takes_s)
        done[sub.shard].append(time.monotonic())
        return True

    def steps(self, count: int) -> None:
        for _ in range(count):
            assert self.heartbeat.step() <= LONGEST_TICK_S


def test_leases_are_renewed_while_other_subscriptions_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    subs = Subscriptions(monkeypatch, "a", "b", "c", "well")
    subs.hang = {"a", "b", "c"}
    began = time.monotonic()
    subs.steps(6)
    at = [began, *subs.kept["well"], time.monotonic()]
    assert max(later - one for one, later in pairwise(at)) < 2 * HANGS_S
    assert subs.told["well"]


def test_a_subscription_that_hung_is_served_once_its_node_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subs = Subscriptions(monkeypatch, "a", "b", "well")
    subs.hang = {"a", "b"}
    subs.steps(5)
    subs.hang.clear()
    subs.steps(1)
    assert all(subs.kept.values())
    assert all(subs.told.values())


def test_all_are_announced_though_leases_take_longer_than_a_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subs = Subscriptions(monkeypatch, "a", "b")
    subs.takes_s = HANGS_S / 2
    subs.steps(2)
    assert all(subs.told.values())


def test_failed_calls_are_retried_though_leases_take_longer_than_a_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    subs = Subscriptions(monkeypatch, "a", "well")
    subs.hang = {"a"}
    subs.steps(2)
    subs.hang.clear()
    subs.takes_s = HANGS_S
    subs.heartbeat._follow = lambda: time.sleep(HANGS_S)
    subs.steps(3)
    assert all(subs.kept.values())
    assert all(subs.told.values())


def test_an_outage_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    subs = [
        Subscription(cast("Any", None), Shard(name), "lisa", "me", slots=Slots(1))
        for name in ("orders", "mail")
    ]
    for sub in subs:
        sub.membership.group = "lisa"
    away = {"orders", "mail"}

    def beat(sub: Subscription) -> None:
        if sub.shard in away:
            raise ServerUnavailable("away")

    heartbeat = heartbeat_of(subs)
    monkeypatch.setattr(heartbeat._announcer, "_write", beat)
    with caplog.at_level(logging.WARNING, "lisa.consumer"):
        for _ in range(6):
            heartbeat.step()
        assert len(caplog.records) == 1
        away.clear()
        for _ in range(2):
            heartbeat.step()
        away.add("orders")
        heartbeat._announcer._written.clear()
        for _ in range(6):
            heartbeat.step()
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in said] == ["topic orders", "topic orders"]


class Refusing:
    """A store in which this consumer has lost every lease."""

    def __init__(self) -> None:
        self.asked: deque[Transition[Any]] = deque()

    def batch_size(self, topic: str, kind: type[Transition[Any]]) -> int:
        return 100

    def call(self, transition: Transition[Any]) -> list[bool]:
        self.asked.append(transition)
        return [False]


@pytest.mark.parametrize("started", [0.0, 1.0])
def test_a_lost_lease_is_not_renewed_again(started: float) -> None:
    store = Refusing()
    sub = Subscription(cast("Any", store), Shard("orders"), "lisa", "me", slots=Slots(1))
    message = Message(id="a", topic="orders", group="lisa", body=None, due_ms=0)
    sub.leases.held["a-1"] = one = Held("a-1", message, b"", 0, 1.0, 11.0, started)
    for now in (10.0, 10.5, 11.5):
        sub.leases.extend_due(now)
    assert len(store.asked) == 1
    assert sub.start(one, 12.0) is bool(started)
