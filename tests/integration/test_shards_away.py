"""Sharded topics on nodes that are away."""

from __future__ import annotations

import os
import signal
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
from redis.crc import key_slot

from lisa.core.model.errors import ServerUnavailable
from lisa.core.model.keys import Keys
from lisa.core.model.sharding import Shard, Topic
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.store.reshard import spread
from lisa.core.store.store import SyncStore
from lisa.core.transitions.configure import Configure
from lisa.manager.plan import Plan, Schedules
from lisa.manager.registry import Registry
from lisa.manager.sharder import Sharder
from tests import clusters
from tests.servers import connect

if TYPE_CHECKING:
    from collections.abc import Iterator


def named_on(node: int, pattern: str) -> str:
    """Text that, inserted in `pattern`, gives a name in a slot of the node."""
    found = (str(n) for n in range(100) if key_slot((pattern % n).encode()) // 8192 == node)
    return next(found)


@contextmanager
def hanging(url: str) -> Iterator[None]:
    with connect(url) as client:
        pid = int(client.info("server")["process_id"])
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def store_on(nodes: list[str], *, without: int) -> SyncStore:
    """A store with a short timeout, and its list of topics on the other node."""
    address = Address(clusters.address(nodes), socket_timeout_s=0.5)
    prefix = "p" + named_on(1 - without, "p%d:topics")
    return SyncStore(Connection(address), Keys(prefix), timedelta(milliseconds=60))


@pytest.mark.parametrize("hung", [0, pytest.param(1, marks=pytest.mark.full)])
def test_topics_are_found_by_their_keys_though_one_node_hangs(
    two_nodes: list[str], hung: int
) -> None:
    store = store_on(two_nodes, without=hung)
    topics = ["t" + named_on(node, "t%d") for node in (0, 1)]
    for topic in topics:
        store.ask("ZADD", store.keys.topic(topic).waiting, 1, "some-id")
    plan = Plan.of({}, {}, default_group="lisa", schedules=Schedules())
    registry = Registry(store, plan, lambda _: None)
    with hanging(two_nodes[hung]), pytest.raises(ServerUnavailable):
        registry.search()
    assert registry.topics == [topics[1 - hung]]
    registry.search()
    assert registry.topics == sorted(topics)
    assert store.drive(store.topics()) == sorted(topics)
    store.close()


@pytest.mark.parametrize("hung", [0, pytest.param(1, marks=pytest.mark.full)])
def test_split_topics_of_a_healthy_node_are_looked_after_though_another_hangs(
    two_nodes: list[str], hung: int
) -> None:
    store = store_on(two_nodes, without=hung)
    split = {node: "t" + named_on(node, "t%d") for node in (0, 1)}
    plain = "u" + named_on(1 - hung, "u%d")
    for topic in split.values():
        store.call(Configure(topic, {"shards": "2"}))
        store.drive(spread(store, Topic(topic)))
    sharder = Sharder(store)
    names = sorted([*split.values(), plain])
    with hanging(two_nodes[hung]):
        assert sharder.pick(list(map(Shard, names))) == sorted(split.values())
        with pytest.raises(ServerUnavailable):
            sharder.step(Topic(split[hung]))
    assert sharder.pick(list(map(Shard, names))) == sorted(split.values())
    store.close()
