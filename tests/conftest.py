"""Fixtures: servers, clients and processes. Each ends with the test or session that asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import fakeredis
import pytest
from xdist.scheduler import LoadScopeScheduling

from lisa.core.signals import Signals, everywhere
from lisa.embedded import EmbeddedServer
from tests.mutants.summary import print_table
from tests.servers import Processes, connect, flush, redis_server

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import redis
    import xdist.remote


SPARK = ("tests/spark/", "tests/docs/test_pages.py::test_programs_run[docs/how-to/pipeline.md]")
"""Tests that start JVMs."""


class FilesAndSpark(LoadScopeScheduling):
    """What may run beside each other: files, and all of Spark's tests as one.

    Half of the suite's time is Spark's, and a second session would not make it less.
    """

    def _split_scope(self, nodeid: str) -> str:
        return "spark" if nodeid.startswith(SPARK) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(
    config: pytest.Config, log: xdist.remote.Producer
) -> LoadScopeScheduling:
    return FilesAndSpark(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # Here and not with the mutants: workers run those, and the session that prints loads this file.
    print_table(terminalreporter)


@pytest.fixture(autouse=True)
def no_receiver_is_left() -> Iterator[None]:
    """Module-wide receivers end with their test, not when the garbage collector comes by."""
    yield
    for name in Signals.__slots__:
        signal = getattr(everywhere, name)
        if signal.receivers:
            signal._clear_state()


@pytest.fixture(scope="session")
def valkey_server() -> Iterator[EmbeddedServer]:
    """The embedded Valkey, one for the session; do not kill it (see `own_server`)."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture(scope="session")
def debian_server() -> Iterator[EmbeddedServer]:
    """The redis-server on PATH, one for the session."""
    binary = redis_server()
    if binary is None:
        pytest.skip("redis-server is not on PATH (Debian: apt-get install redis-server)")
    with EmbeddedServer(binary=binary) as server:
        yield server


@pytest.fixture(params=["valkey", "redis"])
def server(request: pytest.FixtureRequest) -> str:
    """URL of an empty server; the test runs once on each kind."""
    name = {"valkey": "valkey_server", "redis": "debian_server"}[request.param]
    running: EmbeddedServer = request.getfixturevalue(name)
    return flush(running.url)


@pytest.fixture
def redis_url(valkey_server: EmbeddedServer) -> str:
    """URL of an empty embedded Valkey."""
    return flush(valkey_server.url)


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """A plain client on `redis_url`; bytes in its answers."""
    with connect(redis_url) as client:
        yield client


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """A server for one test, append-only, to be killed and restarted.

    It writes before it answers: with fsync each second, an answer may overtake a delayed write.
    """
    with EmbeddedServer(appendonly=True, extra=("--appendfsync", "always")) as server:
        yield server


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    """Starts Python programs in `tmp_path`, and ends them."""
    started = Processes(tmp_path)
    try:
        yield started
    finally:
        started.end()


@pytest.fixture
def fake_client() -> Iterator[fakeredis.FakeRedis]:
    """An empty fakeredis of its own: for scripts, not for what blocks on a stream."""
    with fakeredis.FakeRedis(server_type="redis", version=(7,), legacy_responses=False) as client:
        yield client
