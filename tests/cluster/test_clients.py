"""What the clients of a cluster and of sentinels do, apart from any role."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
import redis

from lisa.core import clients, failover
from lisa.core.address import Address
from lisa.core.clients import telling_its_id
from lisa.core.connection import AsyncConnection, Connection
from lisa.core.flow import Chain, Execute
from lisa.core.keys import Keys
from lisa.core.store import AsyncStore, SyncStore
from lisa.core.stream import read_command
from lisa.core.transitions.declare import Declare
from lisa.embedded.server import HOST, free_port
from tests import topologies
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from lisa.core.flow import Flow
    from tests.topologies import Cluster

IMPATIENT = timedelta(0)


@pytest.fixture(scope="module")
def partial_cluster() -> Iterator[tuple[Cluster, list[str]]]:
    """Three primaries; the one of the last topic given is dead, and nobody replaces it."""
    extra = ("--cluster-require-full-coverage", "no", "--cluster-allow-reads-when-down", "yes")
    with topologies.cluster("valkey", extra=extra, node_timeout=timedelta(seconds=60)) as made:
        topics = [names[0] for names in topologies.topics_on(made, 1)]
        # The first node is whom redis-py asks by default.
        dead = made.primaries[0]
        living = [topic for topic in topics if made.owner(f"{{{topic}}}") is not dead]
        dead.server.kill()
        yield made, living


@pytest.fixture(params=["sync", "async"])
def asking(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    """Makes either store's `drive` for an address, as a blocking call."""
    loop = asyncio.new_event_loop()
    stores: list[Any] = []

    def make(url: str) -> Any:
        if request.param == "sync":
            stores.append(SyncStore(Connection(Address(url)), Keys(), timedelta(seconds=5)))
            return stores[-1], stores[-1].drive
        stores.append(AsyncStore(AsyncConnection(Address(url)), Keys(), timedelta(seconds=5)))
        return stores[-1], lambda flow: loop.run_until_complete(stores[-1].drive(flow))

    yield make
    for store in stores:
        closed = store.close()
        if closed is not None:
            loop.run_until_complete(closed)
    loop.close()


def test_a_dead_node_fails_only_its_own_topics(
    partial_cluster: tuple[Cluster, list[str]], asking: Callable[[str], Any]
) -> None:
    made, living = partial_cluster
    store, drive = asking(made.url)
    began = time.monotonic()
    assert abs(drive(store.server_time_us()) / 1e6 - time.time()) < 60
    assert b"redis_version" in drive(store.command("INFO", "server"))
    for topic in living:
        for node in made.primaries[1:]:
            node.ask("SCRIPT", "FLUSH")
        drive(store.run(Declare(topic, "g")))  # the script is to be loaded where its keys are
        ready = store.keys.topic(topic).group("g").ready
        assert drive(store.command(*read_command(ready, "g", "c", 1, 1))) in (None, [], {})
    assert time.monotonic() - began < 5


def test_of_several_commands_only_those_of_a_dead_node_fail(
    partial_cluster: tuple[Cluster, list[str]],
) -> None:
    made, living = partial_cluster
    names = [names[0] for names in topologies.topics_on(made, 1)]
    connection = Connection(Address(made.url))
    keys = [Keys().topic(name).waiting for name in names]
    replies = connection.execute_many([("ZCARD", key) for key in keys])
    connection.close()
    assert {name for name, reply in zip(names, replies, strict=True) if reply == 0} == set(living)
    assert isinstance(replies[0], redis.ConnectionError)


@pytest.mark.parametrize("road", ["execute", "execute_chain"])
def test_a_slot_that_nobody_served_is_looked_for_again(
    asking: Callable[[str], Any], cluster_of_one: Cluster, road: str
) -> None:
    store, drive = asking(cluster_of_one.url)
    key = store.keys.topic("orders").waiting

    def ask() -> Flow[Any]:
        command = ("ZCARD", key)
        if road == "execute":
            return (yield Execute(command))
        return (yield Chain(key, [command]))

    drive(ask())
    store.connection._redis.nodes_manager.slots_cache.clear()  # as read while a node was gone
    with pytest.raises(redis.exceptions.SlotNotCoveredError):
        drive(ask())
    assert drive(ask()) in (0, [0])


def test_a_node_that_does_not_know_its_own_host_is_the_one_that_was_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slots = [[0, 99, [None, 7001, b"a"]], [100, 16383, [b"", 7002, b"b"], [b"far", 7003, b"c"]]]
    monkeypatch.setattr(redis.Redis, "execute_command", lambda *_: slots)
    ask = clients._asking_nodes(Address("redis+cluster://here:7001"))
    assert ask() == {("here", 7001), ("here", 7002)}


def test_a_trouble_of_the_watch_is_told_once_until_it_passes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said: list[Any] = [
        ValueError("odd"),
        ValueError("odd"),
        KeyError("odd"),
        set(),
        KeyError("odd"),
    ]

    def ask() -> set[failover.Place]:
        one = said.pop(0)
        if isinstance(one, Exception):
            raise one
        return set()

    watch = failover._Watch("key", ask, "the servers")
    for told in (1, 1, 2, 2, 3):
        assert watch._step()
        assert caplog.text.count("it cannot be told who is primary") == told


def test_connections_that_reach_the_servers_in_another_way_are_watched_apart() -> None:
    address = Address("redis+cluster://here:7001", password="one")
    same = telling_its_id(address.blocking_for(60), lambda _: None)
    other = replace(address, password="two")

    def watch(one: Address) -> failover._Watch:
        return failover._watch_of(one, set)

    found = watch(address)
    assert watch(same) is found
    assert watch(other) is not found
    for one in (found, watch(other)):
        one._used = 0.0
        assert not one._step()
    assert watch(address) is not found, "the first is kept no longer"
    failover._forget(watch(address)._key, watch(address))


def test_a_read_that_waits_asks_nobody_where_its_keys_are(
    asking: Callable[[str], Any], cluster_of_one: Cluster
) -> None:
    store, drive = asking(cluster_of_one.url)
    drive(store.run(Declare("orders", "g")))
    ready = store.keys.topic("orders").group("g").ready
    (node,) = cluster_of_one.primaries
    for command in (
        read_command(ready, "g", "c", 1, 0), ("XREAD", "COUNT", 1, "STREAMS", ready, "0"),
    ):  # fmt: skip
        drive(store.command(*command))
    assert "cmdstat_command|getkeys" not in node.info_text("commandstats")


@pytest.fixture(scope="module")
def cluster_of_one() -> Iterator[Cluster]:
    with topologies.cluster("valkey", primaries=1) as made:
        yield made


def test_sentinels_that_are_gone_are_not_waited_for(tmp_path: Path) -> None:
    with topologies.sentinels("valkey", tmp_path, replicas=0, count=1) as watched:
        gone = ",".join(f"{HOST}:{free_port()}" for _ in range(2))
        url = watched.url.replace("sentinel://", f"sentinel://{gone},")
        began = time.monotonic()
        store = SyncStore(Connection(Address(url)), Keys(), IMPATIENT)
        assert store.drive(store.server_time_us())
        store.close()
        assert time.monotonic() - began < 0.8


def test_the_watch_ends_with_the_last_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "IDLE_S", 0.3)

    def watches() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name == "lisa-failover"]

    wait_until(lambda: not watches())  # those of other tests
    with topologies.sentinels("valkey", tmp_path, replicas=0, count=1) as watched:
        store = SyncStore(Connection(Address(watched.url)), Keys())
        store.ask("PING")
        assert len(watches()) == 1
        store.close()
        wait_until(lambda: not watches())
