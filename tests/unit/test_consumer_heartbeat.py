"""The heartbeat's step, where calls hang or fail, without a server."""

from __future__ import annotations

import logging
import time
from collections import deque
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import pytest

from lisa.consumer.heartbeat import LONGEST_TICK_S, Heartbeat, extend
from lisa.consumer.held import Held
from lisa.consumer.subscription import Subscription
from lisa.core.errors import ServerUnavailable
from lisa.core.message import Message

if TYPE_CHECKING:
    from lisa.core.transitions.base import Transition

HANGS_S = 1.2 * LONGEST_TICK_S


class Places:
    """A heartbeat over some places; calls to those that hang fail late, the others' at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.subs = [Subscription(cast("Any", None), name, "lisa", "me") for name in names]
        self.hang: set[str] = set()
        self.takes_s = 0.0
        self.kept: dict[str, list[float]] = {name: [] for name in names}
        self.told: dict[str, list[float]] = {name: [] for name in names}
        self.heartbeat = Heartbeat(cast("Any", None), lambda: self.subs, 1, lambda sub: None)
        monkeypatch.setattr(self.heartbeat, "_keep", lambda sub: self.call(sub, self.kept))
        monkeypatch.setattr(self.heartbeat, "_tell", lambda sub: self.call(sub, self.told))

    def call(self, sub: Subscription, done: dict[str, list[float]]) -> bool:
        if sub.topic in self.hang:
            time.sleep(HANGS_S)
            raise ServerUnavailable("it hangs")
        time.sleep(self.takes_s)
        done[sub.topic].append(time.monotonic())
        return True

    def steps(self, count: int) -> None:
        for _ in range(count):
            assert self.heartbeat.step() <= LONGEST_TICK_S


def test_leases_are_kept_while_several_other_places_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(monkeypatch, "a", "b", "c", "well")
    places.hang = {"a", "b", "c"}
    began = time.monotonic()
    places.steps(6)
    at = [began, *places.kept["well"], time.monotonic()]
    assert max(later - one for one, later in pairwise(at)) < 2 * HANGS_S
    assert places.told["well"]


def test_what_hung_is_kept_and_told_of_once_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(monkeypatch, "a", "b", "well")
    places.hang = {"a", "b"}
    places.steps(5)
    places.hang.clear()
    places.steps(1)
    assert all(places.kept.values())
    assert all(places.told.values())


def test_all_are_told_of_though_leases_take_longer_than_a_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = Places(monkeypatch, "a", "b")
    places.takes_s = HANGS_S / 2
    places.steps(2)
    assert all(places.told.values())


def test_what_failed_is_tried_again_though_leases_take_longer_than_a_tick(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = Places(monkeypatch, "a", "well")
    places.hang = {"a"}
    places.steps(2)
    places.hang.clear()
    places.takes_s = HANGS_S
    places.heartbeat._follow = lambda: time.sleep(HANGS_S)
    places.steps(3)
    assert all(places.kept.values())
    assert all(places.told.values())


def test_an_outage_is_told_once_of_each_topic(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    subs = [Subscription(cast("Any", None), name, "lisa", "me") for name in ("orders", "mail")]
    for sub in subs:
        sub.group = "lisa"
    away = {"orders", "mail"}

    def beat(sub: Subscription) -> None:
        if sub.topic in away:
            raise ServerUnavailable("away")

    heartbeat = Heartbeat(cast("Any", None), lambda: subs, 1, lambda sub: None)
    monkeypatch.setattr(heartbeat, "beat", beat)
    with caplog.at_level(logging.WARNING, "lisa.consumer"):
        for _ in range(6):
            heartbeat.step()
        assert len(caplog.records) == 2
        away.clear()
        for _ in range(2):
            heartbeat.step()
        away.add("orders")
        heartbeat._beats.clear()
        for _ in range(6):
            heartbeat.step()
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(":")[0] for line in said] == ["topic orders", "topic mail", "topic orders"]


class Refusing:
    """A store for which no lease is this consumer's any more."""

    def __init__(self) -> None:
        self.asked: deque[Transition[Any]] = deque()

    def batch_size(self, topic: str, kind: type[Transition[Any]]) -> int:
        return 100

    def call(self, transition: Transition[Any]) -> list[bool]:
        self.asked.append(transition)
        return [False]


@pytest.mark.parametrize("started", [0.0, 1.0])
def test_a_lease_that_is_lost_is_not_asked_for_again(started: float) -> None:
    store = Refusing()
    sub = Subscription(cast("Any", store), "orders", "lisa", "me")
    message = Message(id="a", topic="orders", group="lisa", body=None, due_ms=0)
    sub.held["a-1"] = one = Held("a-1", message, b"", 0, 1.0, 11.0, started)
    for now in (10.0, 10.5, 11.5):
        extend(sub, now)
    assert len(store.asked) == 1
    assert sub.start(one, 12.0) is bool(started)
