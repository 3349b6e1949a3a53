"""Clients of a cluster and of sentinels, without any role."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
import redis
import uvloop
from redis.sentinel import MasterNotFoundError

from lisa.core.model.keys import Keys
from lisa.core.model.stream import read_all_command
from lisa.core.redis import failover
from lisa.core.redis.address import Address
from lisa.core.redis.cluster import AsyncCluster
from lisa.core.redis.connection import AsyncConnection, Connection, reporting_client_id
from lisa.core.redis.failover import AsyncSentinels, Sentinels
from lisa.core.redis.flow import Chain, Execute, Flow, Step
from lisa.core.redis.topology import SLOTS, NodeAddress, Topology, topology_of
from lisa.core.store.store import AsyncStore
from lisa.core.transitions.groups import Declare
from lisa.embedded.server import HOST, free_port
from tests import topologies
from tests.integration.test_connection import cut_while_connecting
from tests.servers import PATIENCE, open_store, shortest_s, wait_until
from tests.topologies import Cluster

IMPATIENT = timedelta(0)
HANGS_S = 10.0


@pytest.fixture(scope="module")
def partial_cluster() -> Iterator[Cluster]:
    """Three primaries. The first one, which redis-py asks by default, is dead and not replaced."""
    extra = ("--cluster-require-full-coverage", "no", "--cluster-allow-reads-when-down", "yes")
    with topologies.cluster("valkey", extra=extra, node_timeout=timedelta(seconds=60)) as made:
        made.primaries[0].server.kill()
        yield made


@pytest.fixture(params=["sync", "async"])
def asking(request: pytest.FixtureRequest) -> Iterator[Callable[[str], Any]]:
    """Makes either store for an address, and its `drive` as a blocking call."""
    with asyncio.Runner() as runner, ExitStack() as stack:

        def make(url: str) -> Any:
            if request.param == "sync":
                blocking = stack.enter_context(closing(open_store(url, PATIENCE)))
                return blocking, blocking.drive
            store = AsyncStore(AsyncConnection(Address(url)), Keys(), PATIENCE)
            stack.callback(lambda: runner.run(store.close()))
            return store, lambda flow: runner.run(store.drive(flow))

        yield make


def test_a_dead_node_fails_only_its_own_topics(
    partial_cluster: Cluster, asking: Callable[[str], Any]
) -> None:
    store, drive = asking(partial_cluster.url)
    lost, *living = [names[0] for names in topologies.topics_on(partial_cluster, 1)]
    began = time.monotonic()
    assert abs(drive(store.server_time_us()) / 1e6 - time.time()) < 60
    assert b"redis_version" in drive(store.command("INFO", "server"))
    for topic in living:
        for node in partial_cluster.primaries[1:]:
            node.ask("SCRIPT", "FLUSH")
        drive(store.run(Declare(topic, "g")))  # the script must be loaded on the node of its keys
        ready = store.keys.topic(topic).group("g").ready
        assert drive(store.command(*read_all_command([ready], "g", "c", 1, 1))) in (None, [], {})
    assert time.monotonic() - began < PATIENCE.total_seconds() / 2
    with closing(Connection(Address(partial_cluster.url))) as connection:
        commands = [("ZCARD", store.keys.topic(name).waiting) for name in (lost, *living)]
        failed, *replies = connection.execute_many(commands)
    assert isinstance(failed, redis.ConnectionError)
    assert replies == [0, 0]


def test_the_owner_of_an_unserved_slot_is_looked_up_again(
    asking: Callable[[str], Any], cluster_of_one: Cluster
) -> None:
    store, drive = asking(cluster_of_one.url)
    key = store.keys.topic("orders").waiting

    def ask(step: Step) -> Flow[Any]:
        return (yield step)

    drive(store.server_time_us())
    for step, answer in ((Execute(("ZCARD", key)), 0), (Chain(key, [("ZCARD", key)]), [0])):
        store.connection._opened().topology._owners = [
            None
        ] * SLOTS  # as read while a node was away
        assert drive(ask(step)) == answer


Said = tuple[bytes | Exception, list[Any]]
"""What a node answers to CLUSTER INFO and CLUSTER SLOTS."""


class Told:
    """A topology with configured replies by node; records the nodes queried."""

    def __init__(self, said: dict[int, Said | Exception], seeds: list[int]) -> None:
        self.said = said
        self.asked: list[int] = []
        self.topology = Topology([("here", port) for port in seeds], self.connect)

    def connect(self, address: NodeAddress) -> Any:
        """A pool of one node, for one round trip with CLUSTER INFO and CLUSTER SLOTS."""

        def execute_many(_: object) -> Said:
            self.asked.append(address[1])
            said = self.said.get(address[1], redis.ConnectionError("refused"))
            if isinstance(said, Exception):
                raise said
            return said

        return MagicMock(execute_many=execute_many)

    @property
    def owners(self) -> list[int]:
        """The ports of the owners of the first and the last slot."""
        owners = (self.topology.owner(0), self.topology.owner(SLOTS - 1))
        return [address[1] if address else 0 for address in owners]

    def refresh_together(self) -> list[BaseException | None]:
        """Five threads refresh for the same reason; their errors."""
        seen = self.topology.rounds
        with ThreadPoolExecutor(5) as pool:
            calls = [pool.submit(self.topology.refresh, seen) for _ in range(5)]
        return [call.exception() for call in calls]


def info(epoch: int, state: str = "ok") -> bytes:
    return f"cluster_state:{state}\r\ncluster_current_epoch:{epoch}\r\n".encode()


def slots(*ports: int) -> list[Any]:
    """Equal shares of the slots; a node's id is its port."""
    count = len(ports)
    return [
        [SLOTS * i // count, SLOTS * (i + 1) // count - 1, [b"here", port, b"%d" % port]]
        for i, port in enumerate(ports)
    ]


def test_a_node_without_a_known_host_has_the_address_queried() -> None:
    rows = [[0, 99, [None, 1, b"a"]], [100, 16383, [b"", 2, b"b"], [b"far", 3, b"c"]]]
    told = Told({1: (info(1), rows)}, [1])
    assert told.topology.refresh()
    assert told.topology.primaries == [("here", 1), ("here", 2)]
    assert told.topology.members[-1] == ("far", 3)


@pytest.mark.parametrize("may_ask", [True, False], ids=["state", "no-right-to-state"])
def test_a_removed_seed_that_keeps_running_is_ignored(*, may_ask: bool) -> None:
    refused = redis.exceptions.NoPermissionError("no CLUSTER INFO")
    told = Told({1: (info(3) if may_ask else refused, slots(1, 2))}, [1])
    assert told.topology.refresh()
    assert told.owners == [1, 2]
    told.said = {
        1: (info(3, "fail") if may_ask else refused, []),  # forgotten and reset
        2: (info(4) if may_ask else refused, slots(2, 3)),
        3: (info(4) if may_ask else refused, slots(2, 3)),
    }
    for _ in range(3):
        assert told.topology.refresh()
        assert told.owners == [2, 3]
    told.asked.clear()
    for _ in range(5):
        assert told.topology.refresh()
    assert 1 not in told.asked


def test_the_majority_and_the_latest_epoch_count() -> None:
    now = (info(4), slots(2, 3))
    told = Told({1: (info(4), slots(1, 3)), 2: now, 3: now}, [1, 2, 3])
    assert told.topology.refresh()
    assert told.owners == [2, 3], "a removed node is outvoted"
    told.said = dict.fromkeys((2, 3), (info(3), slots(3, 2)))
    assert told.topology.refresh()
    assert told.owners == [3, 2], "the only node that knew the later epoch is gone"


def test_a_node_that_knows_no_better_changes_nothing() -> None:
    now = (info(4), slots(2, 3))
    in_a_minority, earlier = (info(3, "fail"), slots(1, 2)), (info(3), slots(1, 2))
    told = Told({2: now, 3: now}, [2, 3])
    assert told.topology.refresh()
    for said in (in_a_minority, earlier):
        told.said = {2: said, 3: redis.TimeoutError("hangs")}
        for _ in range(3):
            assert not told.topology.refresh()
            assert told.owners == [2, 3]
    # Without contradiction, another cluster at the same address would replace it.
    for said in (in_a_minority, earlier, (info(9), slots(8, 9))):
        told.said = {2: said, 3: now}
        told.topology.refresh()
        assert told.owners == [2, 3]


def test_a_cluster_that_is_down_is_called_all_the_same() -> None:
    told = Told({1: (info(1, "fail"), slots(1))}, [1])
    assert told.topology.refresh()
    assert told.owners == [1, 1]
    with pytest.raises(redis.ConnectionError, match="no node of the cluster answers"):
        Told({1: (info(1), [])}, [1]).topology.refresh()  # it has no slots


def test_concurrent_callers_share_one_answer_or_error() -> None:
    told = Told({1: (info(1), slots(1))}, [1])
    assert told.refresh_together() == [None] * 5
    assert told.asked == [1]
    told = Told({1: redis.AuthenticationError("WRONGPASS")}, [1])
    assert [type(error) for error in told.refresh_together()] == [redis.AuthenticationError] * 5
    assert told.asked == [1]


def test_tasks_share_one_answer_even_if_no_thread_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told({1: (info(1), slots(1))}, [1])
    cluster = AsyncCluster(told.topology, lambda _: None)

    async def exchange(node: NodeAddress, *_: Any) -> list[Any]:
        return [node[1]]

    monkeypatch.setattr(cluster, "exchange", exchange)

    async def ask_together() -> list[Any]:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        return await asyncio.gather(*(cluster.execute(("GET", f"k{i}")) for i in range(9)))

    assert asyncio.run(ask_together()) == [1] * 9
    assert told.asked == [1]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_can_refresh_during_its_parent_s_refresh() -> None:
    told = Told({1: (info(1), slots(1))}, [1])
    address = Address("redis+cluster://here:1")
    topology = topology_of(address, lambda: told.topology)
    with topology._asking:
        child = os.fork()
        if not child:
            signal.alarm(10)
            os._exit(0 if topology.refresh() and told.owners == [1, 1] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_an_error_of_the_watch_is_logged_once_until_it_passes(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "IDLE_S", 60.0)
    odd = [ValueError("odd"), ValueError("odd"), KeyError("odd"), set(), KeyError("odd")]
    watch = failover._Watch("key", MagicMock(side_effect=odd), "the servers")
    for told in (1, 1, 2, 2, 3):
        assert watch._step()
        assert caplog.text.count("cannot determine the primary") == told


def test_connections_with_different_settings_are_watched_separately() -> None:
    address = Address("redis+cluster://here:7001", password="one")
    same = reporting_client_id(address.blocking_for(60), lambda _: None)
    first = failover._watch_of(address, set)
    other = failover._watch_of(replace(address, password="two"), set)
    assert failover._watch_of(same, set) is first
    assert other is not first
    for watch in (first, other):
        watch._used = 0.0
        assert not watch._step()
    again = failover._watch_of(address, set)
    assert again is not first, "the first is kept no longer"
    failover._forget(again._key, again)


def test_a_blocking_read_does_not_ask_for_the_topology(
    asking: Callable[[str], Any], cluster_of_one: Cluster
) -> None:
    store, drive = asking(cluster_of_one.url)
    drive(store.run(Declare("orders", "g")))
    ready = store.keys.topic("orders").group("g").ready
    (node,) = cluster_of_one.primaries
    drive(store.command(*read_all_command([ready], "g", "c", 1, 0)))
    drive(store.command("XREAD", "COUNT", 1, "STREAMS", ready, "0"))
    assert "cmdstat_command|getkeys" not in node.info_text("commandstats")


@pytest.fixture(scope="module")
def cluster_of_one() -> Iterator[Cluster]:
    with topologies.cluster("valkey", primaries=1) as made:
        yield made


@pytest.fixture(scope="module")
def sentinel_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("sentinel")
    with topologies.sentinels("valkey", directory, replicas=0, count=1) as made:
        yield made.url


def test_sentinels_that_are_gone_are_not_waited_for(sentinel_url: str) -> None:
    gone = ",".join(f"{HOST}:{free_port()}" for _ in range(2))
    url = sentinel_url.replace("sentinel://", f"sentinel://{gone},")

    def ask() -> None:
        with closing(open_store(url, IMPATIENT)) as store:
            assert store.drive(store.server_time_us())

    assert shortest_s(ask, 0.8) < 0.8


@pytest.mark.parametrize("kind", ["cluster", "sentinel"])
def test_an_asyncio_connection_that_is_cut_while_it_is_set_up_is_a_lost_one(
    cluster_of_one: Cluster, sentinel_url: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    url = sentinel_url if kind == "sentinel" else cluster_of_one.url

    async def call() -> None:
        connection = AsyncConnection(Address(url))
        with monkeypatch.context() as patched:
            assert cut_while_connecting(patched) == []
            for ask in (
                partial(connection.execute, ("GET", "k")),
                partial(connection.execute_chain, "k", [("GET", "k"), ("GET", "k")]),
            ):
                with pytest.raises(redis.ConnectionError):
                    await ask()
        assert await connection.execute(("GET", "k")) is None
        await connection.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(call())


def state(port: int, epoch: int, **more: object) -> dict[str, Any]:
    up = {"is_master": True, "is_sdown": False, "is_odown": False, "num-other-sentinels": 2}
    return {"mymaster": {"ip": "here", "port": port, "config-epoch": epoch, **up, **more}}


@pytest.fixture(params=["sync", "async"])
def discover(request: pytest.FixtureRequest) -> Iterator[Callable[[list[Any]], Any]]:
    """Finds the primary from the sentinels' replies in order; None is a blocked sentinel."""
    loop = asyncio.new_event_loop()
    ended = threading.Event()
    is_async = request.param == "async"
    sentinels: Any = (AsyncSentinels if is_async else Sentinels)([])

    def sentinel(said: Any) -> MagicMock:
        def answer() -> Any:
            if said is None:
                ended.wait(HANGS_S)
            if isinstance(said, Exception):
                raise said
            return said

        async def answer_on_a_loop() -> Any:
            return answer() if said is not None else await asyncio.sleep(HANGS_S)

        return MagicMock(sentinel_masters=answer_on_a_loop if is_async else answer)

    def ask(said: list[Any]) -> Any:
        sentinels.sentinels = [sentinel(one) for one in said]
        found = sentinels.discover_master("mymaster")
        return loop.run_until_complete(found) if is_async else found

    yield ask
    ended.set()
    loop.close()


def test_of_sentinels_the_latest_configuration_counts(discover: Callable[[list[Any]], Any]) -> None:
    gone = redis.ConnectionError("refused")
    assert discover([state(1, 4), state(2, 5), state(2, 5)]) == ("here", 2)
    assert discover([gone, state(2, 5), state(1, 4)]) == ("here", 2)
    began = time.monotonic()
    assert discover([None, state(2, 5), state(2, 5)]) == ("here", 2)
    assert time.monotonic() - began < HANGS_S / 2, "a sentinel that hangs is not waited for"
    with pytest.raises(MasterNotFoundError, match="no Sentinel knows a service"):
        discover([{}, {}])
    with pytest.raises(MasterNotFoundError, match="refused"):  # only the stale sentinel replies
        discover([state(1, 4), gone, gone])
    with pytest.raises(MasterNotFoundError, match="no usable primary"):  # the others say it is down
        discover([state(1, 4), state(2, 5, is_odown=True), gone])
    assert discover([state(2, 5, is_sdown=True), state(2, 5), gone]) == ("here", 2)
    assert discover([state(3, 0), state(3, 0), gone]) == ("here", 3), "set up anew"


def test_the_watch_ends_with_the_last_connection(
    sentinel_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(failover, "IDLE_S", 0.3)

    def watches() -> list[threading.Thread]:
        return [one for one in threading.enumerate() if one.name == "lisa-failover"]

    wait_until(lambda: not watches())  # those used by other tests
    with closing(open_store(sentinel_url)) as store:
        store.ask("PING")
        assert len(watches()) == 1
    wait_until(lambda: not watches())
