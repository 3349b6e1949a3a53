"""Nodes that join a running cluster, and nodes that leave it and keep running."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
import redis

from lisa import Manager
from lisa.core.redis import failover
from lisa.core.redis.address import Address
from lisa.core.redis.connection import AsyncConnection, Connection
from lisa.embedded.server import HOST
from tests import topologies
from tests.servers import PATIENCE, wait_until
from tests.topologies import Cluster


@pytest.fixture(scope="module")
def cluster(kind: str) -> Iterator[Cluster]:
    with topologies.cluster(kind, primaries=2, node_timeout=timedelta(seconds=30)) as made:
        yield made


@pytest.fixture
def small(cluster: Cluster) -> Iterator[Cluster]:
    """Two primaries and no keys; nodes that joined leave."""
    for node in cluster.primaries:
        node.ask("FLUSHALL")
    yield cluster
    for node in cluster.primaries[2:]:
        for slot in topologies.slots_of(node):
            topologies.migrate(cluster, slot, node, cluster.primaries[1])
        cluster.forget(node)
        node.server.kill()


@pytest.fixture(params=["sync", "async"])
def calling(request: pytest.FixtureRequest, small: Cluster) -> Iterator[Any]:
    """Blocking calls of either connection, and the owners of slots in its view."""
    loop = asyncio.new_event_loop()
    if request.param == "sync":
        connection = Connection(Address(small.url))
        yield connection
        connection.close()
    else:
        later = AsyncConnection(Address(small.url))

        class Blocking:
            def execute(self, command: Any) -> Any:
                return loop.run_until_complete(later.execute(command))

            def execute_many(self, commands: Any) -> Any:
                return loop.run_until_complete(later.execute_many(commands))

            def execute_chain(self, key: str, commands: Any) -> Any:
                return loop.run_until_complete(later.execute_chain(key, commands))

        yield Blocking()
        loop.run_until_complete(later.close())
    loop.close()


def test_every_kind_of_call_follows_an_ask_to_a_node_without_slots(
    small: Cluster, calling: Any
) -> None:
    """A node that imports its first slot is not in CLUSTER SLOTS yet."""
    key = "{t}:a"
    slot = topologies.slot_of(key)

    def is_set() -> bool:
        """Clients of a process share their view, which may still name a node of another test."""
        with suppress(redis.ConnectionError):
            return bool(calling.execute(("SET", key, "1")))
        return False

    wait_until(is_set)
    source, target = small.owner(key), small.join()
    target.ask("CLUSTER", "SETSLOT", slot, "IMPORTING", topologies.id_of(source))
    source.ask("CLUSTER", "SETSLOT", slot, "MIGRATING", topologies.id_of(target))
    source.ask("MIGRATE", HOST, target.port, "", 0, 5000, "KEYS", key)
    for _ in range(3):
        assert calling.execute(("GET", key)) == b"1"
        assert calling.execute_many([("GET", key), ("STRLEN", key)]) == [b"1", 1]
        assert calling.execute_chain(key, [("GET", key), ("STRLEN", key)]) == [b"1", 1]
        assert calling.execute(("SCAN", 0, "COUNT", 100))
    new = "{t}:b"  # a new key is written to the slot's new node
    assert calling.execute(("SET", new, "2")) == b"OK"
    assert target.ask("CLUSTER", "GETKEYSINSLOT", slot, 10)
    for node in (target, source, *small.nodes):
        node.ask("CLUSTER", "SETSLOT", slot, "NODE", topologies.id_of(target))
    assert calling.execute_many([("GET", key), ("GET", new)]) == [b"1", b"2"]


def test_a_scan_finds_all_while_a_node_joins_and_leaves(small: Cluster) -> None:
    connection = Connection(Address(small.url))
    names = {f"k{i}" for i in range(400)}
    for name in names:
        connection.execute(("SET", name, "1"))
    found: set[str] = set()
    cursor, pages = 0, 0
    while cursor or not pages:
        cursor, keys = connection.execute(("SCAN", cursor, "COUNT", 20))
        cursor = int(cursor)
        found |= {key.decode() for key in keys}
        pages += 1
        if pages == 2:
            node = small.join()
            taken = next(i for i in range(topologies.SLOTS) if not in_use(names, i))
            topologies.migrate(small, taken, small.primaries[0], node)
            connection._redis.topology.refresh()
    assert found == names
    connection.close()


def in_use(names: set[str], slot: int) -> bool:
    return any(topologies.slot_of(name) == slot for name in names)


def test_a_manager_disconnects_its_probe_of_a_node_that_leaves(small: Cluster) -> None:
    node, slot = small.join(), topologies.SLOTS - 1

    def probes() -> int:
        return [client["cmd"] for client in node.admin.client_list()].count("info")

    with Manager(small.url):
        topologies.migrate(small, slot, small.primaries[1], node)
        wait_until(probes)
        topologies.migrate(small, slot, node, small.primaries[1])
        wait_until(lambda: not probes())


def test_a_listener_moves_on_from_a_node_that_leaves(small: Cluster) -> None:
    node = small.join()
    slot = topologies.SLOTS - 1
    topologies.migrate(small, slot, small.primaries[1], node)
    connection = Connection(Address(small.url))
    connection.execute(("PING",))
    watch = failover._watches[connection.address.identity]
    wait_until(lambda: (HOST, node.port) in watch._seen)
    listening = connection.subscribe("news", f"{HOST}:{node.port}")
    topologies.migrate(small, slot, node, small.primaries[1])
    small.forget(node)
    heard: list[bytes] = []

    def listen() -> None:
        nonlocal listening
        ends = time.monotonic() + PATIENCE.total_seconds()
        while not heard and time.monotonic() < ends:
            try:
                said = listening.get(0.2)
            except Exception:  # noqa: BLE001  the connection was shut
                listening.close()
                listening = connection.subscribe("news")
                continue
            heard.extend([said] if said else [])

    thread = threading.Thread(target=listen)
    thread.start()
    wait_until(
        lambda: small.primaries[0].ask("PUBLISH", "news", "x") >= 0 and bool(heard),
    )
    thread.join()
    listening.close()
    connection.close()
