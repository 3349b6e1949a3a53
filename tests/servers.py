"""Shared helpers for real servers and processes."""

import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import redis

from lisa.core.model.errors import ServerUnavailable
from lisa.core.model.keys import Keys
from lisa.core.model.options import PRODUCER_RETRY_TIME
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.store.store import SyncStore
from lisa.embedded import EmbeddedServer
from lisa.testing.clocked_server import library

ROOT = Path(__file__).parent.parent
PATIENCE = timedelta(seconds=60)
"""For steps that take milliseconds, or a second to start a process, on an idle machine."""

JVM_PATIENCE = timedelta(seconds=300)
"""The same for programs that start a JVM, which takes five seconds on an idle machine."""
POLL_SECONDS = 0.005


def redis_server() -> Path | None:
    """Debian's server, if it is installed."""
    found = shutil.which("redis-server")
    return Path(found) if found else None


def no_clock() -> str | None:
    """Why the test kit cannot set a server's clock here; None if it can."""
    try:
        library()
    except ServerUnavailable as error:
        return str(error)
    return None


def connect(url: str) -> redis.Redis:
    """A plain client with bytes for replies, with the settings that Lisa uses."""
    return redis.Redis.from_url(url, legacy_responses=False)


opened = ExitStack()
"""Closes the stores of a test and of its fixtures when the test ends."""


def open_store(url: str, patience: timedelta = PRODUCER_RETRY_TIME) -> SyncStore:
    """A store on a server, closed when the test ends."""
    store = SyncStore(Connection(Address(url)), Keys(), patience)
    opened.callback(store.close)
    return store


def flush(url: str) -> str:
    """Empty the server; returns its URL."""
    with connect(url) as client:
        client.flushall()
    return url


@contextmanager
def failing_disk(server: EmbeddedServer) -> Iterator[None]:
    """Have the server refuse writes, because it cannot save a snapshot."""
    (server.directory / "dump.rdb").mkdir()
    with connect(server.url) as client:
        client.config_set("save", "3600 1000000")
        client.bgsave(schedule=True)
        wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
        yield
        client.config_set("stop-writes-on-bgsave-error", "no")


def wait_until(condition: Callable[[], object], *, timeout: timedelta = PATIENCE) -> None:
    """Return as soon as the condition holds; raise AssertionError after the timeout."""
    deadline = time.monotonic() + timeout.total_seconds()
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout.total_seconds()} s: {condition}"
        time.sleep(POLL_SECONDS)


def least(measure: Callable[[], float], limit: float, rounds: int = 10) -> float:
    """The least of several measurements, repeated until one is below the limit.

    On a busy machine any round may have waited for a core; what is slow is slow in every round.
    """
    found = math.inf
    for _ in range(rounds):
        found = min(found, measure())
        if found < limit:
            break
    return found


def shortest_s(work: Callable[[], object], limit_s: float) -> float:
    """The duration of some work, as `least` measures it."""

    def measure() -> float:
        began = time.monotonic()
        work()
        return time.monotonic() - began

    return least(measure, limit_s)


def runs(pid: int) -> bool:
    """Whether a process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with suppress(FileNotFoundError, ProcessLookupError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
        return stat.rpartition(")")[2].split()[0] != "Z"
    return not Path("/proc/self").exists()


class Process:
    """A Python program under test, in its own session; both its outputs are collected."""

    def __init__(
        self, arguments: tuple[str, ...], environment: Mapping[str, str], cwd: Path
    ) -> None:
        self._changed = threading.Condition()
        self._text = ""
        self._closed = False
        self._popen = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            bufsize=1,
            env=environment,
            cwd=cwd,
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def output(self) -> str:
        """All output so far."""
        with self._changed:
            return self._text

    @property
    def alive(self) -> bool:
        return self._popen.poll() is None

    def wait_for(self, text: str, *, times: int = 1, timeout: timedelta = PATIENCE) -> str:
        """Wait until the process has written the text that often; returns all its output."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._text.count(text) >= times or self._closed, timeout.total_seconds()
            )
            assert self._text.count(text) >= times, f"no {text!r} in: {self._text}"
            return self._text

    def signal(self, number: signal.Signals) -> None:
        self._popen.send_signal(number)

    def wait(self, *, timeout: timedelta = PATIENCE) -> int:
        """Wait until the process ends on its own; returns its exit code."""
        code = self._popen.wait(timeout.total_seconds())
        self._reader.join(timeout.total_seconds())
        return code

    def stop(self, *, timeout: timedelta = PATIENCE) -> int:
        """Send SIGTERM and wait; returns the exit code."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout=timeout)

    def kill(self) -> None:
        """Send SIGKILL and wait."""
        self.signal(signal.SIGKILL)
        self.wait()

    def end(self) -> None:
        """End the process and its children in any case."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, PermissionError):  # the latter: macOS, on zombies
                os.killpg(self.pid, number)
            with suppress(subprocess.TimeoutExpired):
                self._popen.wait(3)
        self._reader.join(3)
        if not self._reader.is_alive() and self._popen.stdout is not None:
            self._popen.stdout.close()

    def _read(self) -> None:
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            with self._changed:
                self._text += line
                self._changed.notify_all()
        with self._changed:
            self._closed = True
            self._changed.notify_all()


class Processes:
    """Starts Python programs, and ends them all."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._started: list[Process] = []

    def start(
        self, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> Process:
        """Run `python ARGUMENTS`, such as ("-m", "lisa.cli.manager", "--redis", url).

        The caller's LISA_* environment is not passed on; `env` is added to the rest. The working
        directory is the test's own, so that handler modules written there can be imported.
        """
        clean = {name: value for name, value in os.environ.items() if not name.startswith("LISA_")}
        path = os.pathsep.join([str(ROOT), *filter(None, [clean.get("PYTHONPATH")])])
        clean |= {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(env or {})}
        process = Process(arguments, clean, cwd or self._directory)
        self._started.append(process)
        return process

    def end(self) -> None:
        for process in reversed(self._started):
            process.end()
