"""Cluster and Sentinel: the same message life over other connections."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from lisa.core.daemon.threads import in_thread
from lisa.core.model.errors import ServerUnavailable
from lisa.core.model.keys import Keys
from lisa.core.redis import cluster as cluster_module
from lisa.core.redis.address import Address
from lisa.core.redis.connection import AsyncConnection, Connection
from lisa.core.redis.topology import SLOTS
from lisa.core.store.store import AsyncStore, SyncStore
from lisa.embedded.server import HOST, binary, free_port
from tests import clusters, topologies
from tests.contract.life import EXPECTED, life
from tests.servers import redis_server

PROGRAMS = pytest.mark.parametrize(
    "program",
    ["valkey", pytest.param("redis", marks=pytest.mark.full)],
    indirect=True,
    scope="module",
)
KINDS = pytest.mark.parametrize("kind", ["sync", "async"])


@pytest.fixture(scope="module")
def program(request: pytest.FixtureRequest) -> Path:
    if request.param == "valkey":
        return binary()
    found = redis_server()
    if found is None:
        pytest.skip("redis-server is not on PATH (Debian: apt-get install redis-server)")
    return found


@pytest.fixture
def cluster_url(cluster: list[str]) -> str:
    """An empty cluster; the address names one of its nodes."""
    return clusters.address(cluster)


@pytest.fixture(scope="module")
def cluster(program: Path) -> Iterator[list[str]]:
    """Two nodes with half of the slots each."""
    with clusters.two_nodes(program) as nodes:
        yield nodes


async def lives(kind: str, url: str) -> None:
    """The life of some messages, by a synchronous or asynchronous store."""
    if kind == "sync":
        store = SyncStore(Connection(Address(url)), Keys())
        assert store.drive(life(store)) == EXPECTED
        store.close()
    else:
        other = AsyncStore(AsyncConnection(Address(url)), Keys())
        assert await other.drive(life(other)) == EXPECTED
        await other.close()


@KINDS
@PROGRAMS
async def test_a_whole_life_on_a_cluster(cluster_url: str, kind: str) -> None:
    await lives(kind, cluster_url)


@PROGRAMS
async def test_jobs_of_the_application_do_not_delay_calls_on_a_cluster(
    cluster_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many calls look for their nodes together, while a job occupies the loop's executor."""
    loop, ended, asked = asyncio.get_running_loop(), threading.Event(), list[int]()

    def counted(work: Callable[[int], bool], seen: int) -> asyncio.Future[bool]:
        asked.append(seen)
        return in_thread(work, seen)

    monkeypatch.setattr(cluster_module, "in_thread", counted)
    connection = AsyncConnection(Address(cluster_url))
    connection._opened().topology._owners = [None] * SLOTS
    with ThreadPoolExecutor(1) as executor:
        loop.set_default_executor(executor)
        occupying = loop.run_in_executor(None, ended.wait)
        try:
            async with asyncio.timeout(20):
                calls = [connection.execute(("GET", f"key-{n}")) for n in range(100)]
                assert await asyncio.gather(*calls) == [None] * 100
        finally:
            ended.set()
            await occupying
    assert len(asked) <= 1, "the calls share one look, unless the failover watch was faster"
    await connection.close()


@PROGRAMS
def test_calls_do_not_fail_because_failovers_cannot_be_watched(
    cluster_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the thread limit; the watch begins with the next connection."""
    start, tried = threading.Thread.start, list[str]()

    def starting(thread: threading.Thread) -> None:
        if thread.name == "lisa-failover":
            tried.append(thread.name)
            if len(tried) == 1:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", starting)
    # Its own name, because connections with the same address share a watch.
    connection = Connection(Address(f"{cluster_url}?client_name=unwatched-{uuid4().hex}"))
    assert connection.execute(("GET", "key")) is None
    assert len(tried) == 1
    connection.close()
    assert connection.execute(("GET", "key")) is None
    assert len(tried) == 2
    connection.close()


@PROGRAMS
def test_pipelines_and_commands_without_a_key_on_a_cluster(cluster_url: str) -> None:
    store = SyncStore(Connection(Address(cluster_url)), Keys())
    flow = store.commands([("SET", "{x}:a", "1"), ("GET", "{x}:a"), ("GET", "{y}:a")])
    assert store.drive(flow)[1:] == [b"1", None]
    assert abs(store.drive(store.server_time_us()) / 1e6 - time.time()) < 60
    keys = {f"key{i}".encode() for i in range(300)}
    for key in keys:
        store.ask("SET", key, 1)
    cursor, found, calls = b"0", [], 0
    while calls == 0 or cursor != b"0":
        cursor, page = store.ask("SCAN", cursor, "MATCH", "key*", "COUNT", 50)
        found += page
        calls += 1
    assert set(found) == keys
    assert calls > 2
    assert b"redis_version" in store.ask("INFO")
    store.close()


@KINDS
@pytest.mark.parametrize("url", ["redis+cluster://{}", "redis+sentinel://{}/mymaster"])
async def test_without_an_answer_lisas_error_is_raised(url: str, kind: str) -> None:
    address, patience = Address(url.format(f"{HOST}:{free_port()}")), timedelta(seconds=0.3)
    with pytest.raises(ServerUnavailable, match="does not answer"):  # noqa: PT012  either store
        if kind == "sync":
            SyncStore(Connection(address), Keys(), patience).ask("PING")
        else:
            store = AsyncStore(AsyncConnection(address), Keys(), patience)
            await store.drive(store.command("PING"))


@pytest.fixture
def sentinel_url(program: Path, tmp_path: Path) -> Iterator[str]:
    """One primary and one sentinel."""
    name = "valkey" if program == binary() else "redis"
    with topologies.sentinels(name, tmp_path, replicas=0, count=1) as made:
        yield made.url


@KINDS
@PROGRAMS
async def test_a_whole_life_behind_a_sentinel(sentinel_url: str, kind: str) -> None:
    await lives(kind, sentinel_url)
