"""Fixtures: servers, clients and processes. Each ends with the requesting test or session."""

import atexit
import gc
import logging
import os
import signal
import socket
import tempfile
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import redis
import xdist.remote
from xdist.scheduler import LoadScopeScheduling

from lisa.core.daemon.process_signals import STOPPING
from lisa.core.model.signals import Signals, everywhere
from lisa.core.redis import failover
from lisa.embedded import EmbeddedServer
from lisa.embedded import server as embedded
from tests.servers import ROOT, Processes, connect, flush, opened, redis_server

SPARK = {
    "tests/spark/test_archive_jdbc.py": "spark: databases",
    "tests/spark/test_a": "spark: archives",
    "tests/spark/test_r": "spark: reports and restores",
    "tests/spark/": "spark: others",
    "tests/docs/test_pages.py::test_programs_run[docs/how-to/pipeline-keep.md]": "spark: others",
    "tests/docs/test_pages.py::test_programs_run[docs/how-to/pipeline-load.md]": "spark: others",
    "tests/docs/test_pages.py::test_programs_run[docs/how-to/pipeline-look.md]": "spark: others",
}
"""Prefixes of the ids of tests that start JVMs, and the share of them that one worker runs."""

LONGEST_FIRST = (
    "tests/spark/test_archive_jdbc.py",
    "tests/spark/test_a",
    "tests/faults/test_kill_points.py",
    "tests/mutants/",
    "tests/model/",
    "tests/spark/test_r",
    "tests/cluster/",
    *SPARK,
    "tests/browser/",
    "tests/integration/test_wheel.py",
    "tests/integration/test_s",
    "tests/gateway/",
)
"""Prefixes of the ids of tests that workers begin with.

Two Spark shares occupy two cores; the other workers begin with tests that mostly wait. The last
share must not remain for a single worker.
"""

PORT_RANGES = 24
LONGEST_TMPDIR = 30
"""Paths of Unix sockets are limited to 107 characters; pytest's directories add about 70."""

IGNORED_BY_BACKGROUND_JOBS = {
    # Child processes would ignore these signals, too; they do not inherit handlers. The handler of
    # SIGHUP does nothing, so that this process outlives its terminal, as `nohup` asks for.
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: lambda *_: None,
}
for number, handler in IGNORED_BY_BACKGROUND_JOBS.items():
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Tests and their child processes see the same environment on every machine.
for name in list(os.environ):
    if name.startswith("LC_") or name.lower().endswith("_proxy"):
        del os.environ[name]
os.environ |= {"LANG": "C.UTF-8", "TZ": "UTC"}
failover.IDLE_S = 0.0  # the watch of a cluster that is gone must not connect during later tests
time.tzset()
os.umask(0o022)
if len(tempfile.gettempdir()) > LONGEST_TMPDIR:
    os.environ["TMPDIR"] = "/tmp"
    tempfile.tempdir = None  # to be read again

# For every JVM that tests start: it is too short-lived for its second compiler, and for a check of
# all bytecode that it loads, to pay off.
os.environ["SPARK_SUBMIT_OPTS"] = (
    "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC "
    "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
)
os.environ["SPARK_CONF_DIR"] = str(ROOT / "tests" / "spark" / "conf")


def reserve_ports() -> tuple[range, socket.socket]:
    """A range of ports for this worker alone, and the socket that holds its first port.

    A port that a process has picked but not bound yet looks free to others: to other workers, and
    to another run of the tests on the same machine. Processes that tests start pick from all
    ports, but try again.
    """
    size = len(embedded.PORTS) // PORT_RANGES
    for number in range(PORT_RANGES):
        ports = embedded.PORTS[number * size : (number + 1) * size]
        owner = socket.socket()
        try:
            owner.bind((embedded.HOST, ports[0]))
        except OSError:
            owner.close()
        else:
            return ports, owner
    raise RuntimeError(f"{PORT_RANGES} workers run already")


embedded.PORTS, port_owner = reserve_ports()
atexit.register(port_owner.close)


class FilesAndSpark(LoadScopeScheduling):
    """Tests of one file share a worker; Spark tests are split into shares with one session each.

    Those of `make test` are few: a session takes longer to start than most of them take.
    """

    def _split_scope(self, nodeid: str) -> str:
        share = spark_share(nodeid)
        if share and "not full" in self.config.option.markexpr:
            return "spark"
        return share or nodeid.partition("::")[0]


def spark_share(nodeid: str) -> str:
    """The share of a test that starts JVMs; empty for other tests."""
    return next((share for start, share in SPARK.items() if nodeid.startswith(start)), "")


def rank(nodeid: str) -> int:
    """The position of a test among `LONGEST_FIRST`."""
    starts = [number for number, start in enumerate(LONGEST_FIRST) if nodeid.startswith(start)]
    return starts[0] if starts else len(LONGEST_FIRST)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--embedded-only", action="store_true", help="leave out cases on redis-server and fakeredis"
    )


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests twice as fast: the modules and tests stay, so none of it is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Start with the longest scopes: at the end each would run alone."""
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: rank(item.nodeid))
    if config.getoption("embedded_only"):
        left_out = [item for item in items if is_on_another_server(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not is_on_another_server(item)]


def is_on_another_server(item: pytest.Item) -> bool:
    """Whether a test's case is for redis-server or fakeredis."""
    params = (
        item.callspec.params
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
        else {}
    )
    return any(params.get(fixture) in ("redis", "fake") for fixture in ("server", "bench"))


def pytest_xdist_make_scheduler(
    config: pytest.Config, log: xdist.remote.Producer
) -> LoadScopeScheduling:
    return FilesAndSpark(config, log)


@pytest.fixture(autouse=True)
def process_is_as_before() -> Iterator[None]:
    """Close the test's stores, and undo its changes of receivers, signals and logging.

    Module-wide receivers end with their test, not at the next garbage collection. Commands of roles
    set signals and logging for a process of their own.
    """
    handlers = {one: signal.getsignal(one) for one in (signal.SIGHUP, *STOPPING)}
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    level, logs = logging.root.level, logging.root.handlers[:]
    opened.pop_all()  # by wider fixtures, which close them
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    logging.root.setLevel(level)
    logging.root.handlers[:] = logs
    for name in Signals.__slots__:
        ours = getattr(everywhere, name)
        if ours.receivers:
            ours._clear_state()
    opened.close()


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
    """A plain client on `redis_url`; its replies are bytes."""
    with connect(redis_url) as client:
        yield client


@pytest.fixture
def own_server() -> Iterator[EmbeddedServer]:
    """A server for one test, append-only, to be killed and restarted.

    It writes before it replies: with fsync every second, a reply may precede a delayed write.
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
