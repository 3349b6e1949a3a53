"""Cluster and Sentinel: the same life on other roads to the server."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
import redis

from lisa.core.address import Address
from lisa.core.connection import AsyncConnection, Connection
from lisa.core.keys import Keys
from lisa.core.store import AsyncStore, SyncStore
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import HOST, binary, free_port
from tests.contract.life import EXPECTED, life
from tests.servers import connect, redis_server, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROGRAMS = pytest.mark.parametrize("program", ["valkey", "redis"], indirect=True)


@pytest.fixture
def program(request: pytest.FixtureRequest) -> Path:
    if request.param == "valkey":
        return binary()
    found = redis_server()
    if found is None:
        pytest.skip("redis-server is not on PATH (Debian: apt-get install redis-server)")
    return found


@pytest.fixture
def cluster_url(program: Path) -> Iterator[str]:
    """One node that has all slots."""
    with EmbeddedServer(binary=program, extra=("--cluster-enabled", "yes")) as node:
        with connect(node.url) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            wait_until(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO"))
        yield f"redis+cluster://{HOST}:{node.port}"


@PROGRAMS
def test_a_whole_life_on_a_cluster(cluster_url: str) -> None:
    store = SyncStore(Connection(Address(cluster_url)), Keys())
    assert store.drive(life(store)) == EXPECTED
    store.close()


@PROGRAMS
async def test_a_whole_life_on_a_cluster_with_asyncio(cluster_url: str) -> None:
    store = AsyncStore(AsyncConnection(Address(cluster_url)), Keys())
    assert await store.drive(life(store)) == EXPECTED
    await store.close()


@PROGRAMS
def test_a_pipeline_on_a_cluster(cluster_url: str) -> None:
    store = SyncStore(Connection(Address(cluster_url)), Keys())
    flow = store.commands([("SET", "{x}:a", "1"), ("GET", "{x}:a"), ("GET", "{y}:a")])
    assert store.drive(flow)[1:] == [b"1", None]
    store.close()


@pytest.fixture
def sentinel_url(program: Path, tmp_path: Path) -> Iterator[str]:
    """One primary, and one sentinel that watches it."""
    port = free_port()
    with EmbeddedServer(binary=program) as primary:
        settings = tmp_path / "sentinel.conf"
        settings.write_text(
            f"port {port}\nbind {HOST}\ndir {tmp_path}\n"
            f"sentinel monitor mymaster {HOST} {primary.port} 1\n",
            encoding="utf-8",
        )
        sentinel = subprocess.Popen(
            [str(program), str(settings), "--sentinel"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            wait_until(lambda: _watches(port) or sentinel.poll() is not None)
            assert sentinel.poll() is None, "the sentinel did not start"
            yield f"redis+sentinel://{HOST}:{port}/mymaster/0"
        finally:
            sentinel.terminate()
            sentinel.wait(20)


def _watches(port: int) -> bool:
    with connect(f"redis://{HOST}:{port}") as client:
        try:
            return b"status=ok" in client.execute_command("INFO", "sentinel")
        except redis.ConnectionError:
            return False


@PROGRAMS
def test_a_whole_life_behind_a_sentinel(sentinel_url: str) -> None:
    store = SyncStore(Connection(Address(sentinel_url)), Keys())
    assert store.drive(life(store)) == EXPECTED
    store.close()


@PROGRAMS
async def test_a_whole_life_behind_a_sentinel_with_asyncio(sentinel_url: str) -> None:
    store = AsyncStore(AsyncConnection(Address(sentinel_url)), Keys())
    assert await store.drive(life(store)) == EXPECTED
    await store.close()
