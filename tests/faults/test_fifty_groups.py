"""Fifty groups on one topic during simultaneous failures.

Consumers are killed, the server is restarted, replies are lost, groups are added and removed.
Every group gets each of its messages, none early; only failures count as failed attempts.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

import pytest

from lisa.admin import groups
from lisa.admin.fsck import check
from lisa.core.model.errors import LisaError
from lisa.core.transitions.inspect import Inspect
from lisa.embedded import EmbeddedServer
from lisa.producer import Outgoing, Producer
from tests.roles import Cast
from tests.servers import wait_until
from tests.torture.proxy import Proxy, Trouble

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.servers import Process, Processes

TOPIC = "orders"
GROUPS = [f"g{n:02}" for n in range(50)]
REMOVED, ADDED = GROUPS[-5:], [f"added-{n}" for n in range(5)]
SHARE = 10
"""Groups of one process. The first two are never killed: in them nothing comes twice."""

STEADY = GROUPS[: 2 * SHARE]
BODIES = ["ok"] * 16 + ["fails", "slow", "poison", "ok"]
RETRIES = ",".join("0" * 40)
POISON_ATTEMPTS = 3
ACK_TIMEOUT_MS = 6_000


class Handling(NamedTuple):
    group: str
    id: str
    attempt: int
    due_ms: int
    begin_ms: int
    body: str


class World:
    """A server behind a proxy, two managers, and one process for every ten groups."""

    def __init__(self, server: EmbeddedServer, processes: Processes, directory: Path) -> None:
        self.server = server
        self.proxy = Proxy(server.port, ("consumer", "manager", "producer"))
        self.cast = Cast(server.url, TOPIC, GROUPS[0])
        for name in GROUPS:
            self.cast.on(TOPIC, name).declare().store.close()
        self.cast.configure(ack_timeout=f"{ACK_TIMEOUT_MS}", retry_delays=RETRIES)
        self.ledger = directory / "handled"
        self._processes = processes
        manager = ("-m", "lisa.cli.manager", "--redis", self.proxy.url("manager"))
        self.managers = [processes.start(*manager) for _ in range(2)]
        shares = [GROUPS[n : n + SHARE] for n in range(0, len(GROUPS), SHARE)]
        self.shares = {tuple(share): self.start(share) for share in shares}
        self.producer = Producer(self.proxy.url("producer"))
        self.sent: dict[str, str] = {}

    def start(self, share: list[str]) -> Process:
        url = self.proxy.url("consumer")
        module = ("-m", "tests.faults.group_handlers")
        return self._processes.start(*module, url, str(self.ledger), *share)

    def kill(self, number: int) -> None:
        """Kill -9 the process of some groups, and replace it."""
        share = list(self.shares)[number]
        self.shares[share].kill()
        self.shares[share] = self.start(list(share))

    def send(self, seconds: float) -> None:
        """Send messages due within 1.5 s for the given time; each is eventually confirmed."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            first = len(self.sent)
            now_ms = time.time_ns() // 1_000_000
            some = {f"m{first + n}": body for n, body in enumerate(BODIES)}
            self._insist([
                Outgoing(body, id=one, at_ms=now_ms + (n * 83) % 1_500,
                         retry=[timedelta(0)] * (POISON_ATTEMPTS - 1) if body == "poison" else None)
                for n, (one, body) in enumerate(some.items())
            ])  # fmt: skip
            self.sent |= some
            time.sleep(0.4)

    def _insist(self, some: list[Outgoing]) -> None:
        for _ in range(20):
            try:
                self.producer.send_many(TOPIC, some)
            except LisaError:
                continue
            return
        raise AssertionError("no send was confirmed")

    def lose_replies(self, seconds: float) -> None:
        self.proxy.make(Trouble.LOSE)
        self.send(seconds)
        self.proxy.make(Trouble.NONE)

    def handled(self) -> list[Handling]:
        lines = [line.split("\t") for line in self.ledger.read_text().splitlines()]
        return [
            Handling(one[0], one[1], int(one[2]), int(one[3]), int(one[4]), one[5]) for one in lines
        ]

    def owes(self) -> int:
        """The number of messages neither acked nor in garbage, over all groups."""
        ask, left = self.cast.store.ask, 0
        for name in self.cast.store.drive(self.cast.store.groups(TOPIC)):
            own = self.cast.keys.group(name)
            left += ask("HLEN", own.entries) + ask("ZCARD", own.retry)
        return left + int(ask("ZCARD", self.cast.keys.waiting))

    def close(self) -> None:
        for one in (*self.shares.values(), *self.managers):
            one.kill()  # an orderly stop of fifty consumers would take too long
        self.producer.close()
        self.cast.store.close()
        self.proxy.close()


@pytest.fixture
def world(processes: Processes, tmp_path: Path) -> Iterator[World]:
    """A world on a server that loses no confirmed write."""
    with EmbeddedServer(appendonly=True, extra=("--appendfsync", "always")) as server:
        made = World(server, processes, tmp_path)
        yield made
        made.close()


@pytest.mark.slow
def test_every_group_gets_every_message(world: World) -> None:
    play(world, 1)


@pytest.mark.slow
def test_every_group_gets_every_message_for_longer(world: World) -> None:
    play(world, 8)


def play(world: World, rounds: int) -> None:
    before: set[str] = set()
    for number in range(rounds):
        world.send(0.8)
        world.shares[tuple(GROUPS[2 * SHARE : 3 * SHARE])].wait_for("handling")
        world.kill(2)
        world.lose_replies(1.0)
        if number == rounds // 2:
            before = set(world.sent)
            change_groups(world)
        world.send(0.5)
        world.server.kill()
        world.kill(3)
        world.server.restart()
        world.send(0.8)
        world.kill(4)
        world.lose_replies(0.5)
    wait_until(lambda: world.owes() == 0)
    judge(world, before, kills=rounds)


def change_groups(world: World) -> None:
    """Remove five groups and add five."""
    store = world.cast.store
    for name in ADDED:
        assert store.drive(groups.add(store, TOPIC, name))
    world.shares[tuple(ADDED)] = world.start(ADDED)
    for name in REMOVED:
        store.drive(groups.remove(store, TOPIC, name))


def judge(world: World, before: set[str], kills: int) -> None:
    by_place: dict[str, dict[str, list[Handling]]] = defaultdict(lambda: defaultdict(list))
    for one in world.handled():
        assert one.begin_ms >= one.due_ms, f"early: {one}"
        by_place[one.group][one.id].append(one)
    for group in [*GROUPS[:-5], *ADDED]:
        owed = set(world.sent) - (before if group in ADDED else set())
        assert owed <= by_place[group].keys(), f"{group} never got {owed - by_place[group].keys()}"
        for message_id, handlings in by_place[group].items():
            judge_attempts(group, message_id, handlings, kills)
    poison = [one for one, body in world.sent.items() if body == "poison"]
    found = world.cast.store.call(Inspect(TOPIC, poison))
    for message_id, seen in zip(poison, found, strict=True):
        there = {one.group: (one.state, one.failed_attempts) for one in seen.group_states}
        due_to = set(GROUPS[:-5]) | (set() if message_id in before else set(ADDED))
        assert {name for name in due_to if there.get(name) != ("garbage", POISON_ATTEMPTS)} == set()
    assert world.cast.store.drive(check(world.cast.store)).findings == []
    assert len(world.cast.store.ask("KEYS", "lisa:{orders}:body:*")) == len(poison)


def judge_attempts(group: str, message_id: str, handlings: list[Handling], kills: int) -> None:
    """Check that each attempt is handled once; only a failure or a kill leads to the next."""
    body, attempts = handlings[0].body, Counter(one.attempt for one in handlings)
    assert set(attempts.values()) == {1}, f"{group}, {message_id}: {handlings}"
    failures = {"fails": 1, "poison": POISON_ATTEMPTS - 1}.get(body, 0)
    most = 1 + failures + (0 if group in STEADY or group in ADDED else kills)
    if body == "poison":
        most = POISON_ATTEMPTS
    if group in STEADY:
        assert sorted(attempts) == list(range(1, most + 1)), f"{group}, {message_id}: {handlings}"
    assert max(attempts) <= most, f"{group}, {message_id}: {handlings}"
