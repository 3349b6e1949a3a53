"""Nodes that join a running cluster, and nodes that leave it and keep running."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
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
from tests.servers import wait_until
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
    if request.param == "sync":
        with closing(Connection(Address(small.url))) as connection:
            yield connection
        return
    later = AsyncConnection(Address(small.url))
    with asyncio.Runner() as runner:

        class Blocking:
            def __getattr__(self, name: str) -> Callable[..., Any]:
                return lambda *args: runner.run(getattr(later, name)(*args))

        yield Blocking()
        runner.run(later.close())


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
            in_use = set(map(topologies.slot_of, names))
            taken = next(slot for slot in range(topologies.SLOTS) if slot not in in_use)
            topologies.migrate(small, taken, small.primaries[0], node)
            connection._opened().topology.refresh()
    assert found == names
    connection.close()


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

    def hears() -> bool:
        nonlocal listening
        small.primaries[0].ask("PUBLISH", "news", "x")
        try:
            return bool(listening.get(0.2))
        except Exception:  # noqa: BLE001  the connection was shut
            listening.close()
            listening = connection.subscribe("news")
            return False

    wait_until(hears)
    listening.close()
    connection.close()
