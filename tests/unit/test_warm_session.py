"""The parts of `lisa pipeline serve` that need no Spark: messages, checks, settings."""

from __future__ import annotations

import os
import socket
import struct
from contextlib import closing
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lisa.core.model.errors import ConfigError
from lisa.pipeline.paths import absolute
from lisa.pipeline.session import comparable
from lisa.pipeline.warm.client import is_present
from lisa.pipeline.warm.commands import CommandState, ServedCommands, Surroundings, ended
from lisa.pipeline.warm.keeper import differing_settings
from lisa.pipeline.warm.listener import ClientListener
from lisa.pipeline.warm.protocol import (
    Accepted,
    Begin,
    CommandRequest,
    Ended,
    GatewayOpened,
    MessageChannel,
    check_private,
    is_same_user,
)
from tests.servers import shortest_s

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

REQUEST = CommandRequest(
    words=[b"--json", b"pipeline", b"search", b"\xff"],
    folder=b"/tmp",
    environment=[(b"TZ", b"UTC"), (b"LISA_PREFIX", b"\xff")],
    umask=0o022,
    streams=[("utf-8", "strict")] * 3,
    code="1",
    locale="UTF-8",
    master="local[2]",
    settings={},
    named=[],
)
SURROUNDINGS = Surroundings("1", "UTF-8", 0o022, {b"TZ": b"UTC", b"PATH": b"/bin"})


@pytest.fixture
def channels() -> Iterator[tuple[MessageChannel, MessageChannel]]:
    one, other = (MessageChannel(end) for end in socket.socketpair())
    with closing(one), closing(other):
        yield one, other


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    return tmp_path / "lisa"


class TestChannel:
    """Messages on a socket."""

    def test_a_request_and_its_files_arrive_as_sent(
        self, channels: tuple[MessageChannel, MessageChannel]
    ) -> None:
        one, other = channels
        read, write = os.pipe()
        one.send(REQUEST, (read, write, write))
        one.send(Begin())
        found = other.receive()
        while len(found) < 2:
            found += other.receive()
        assert found == [REQUEST, Begin()]
        os.close(read)
        os.close(write)
        os.write(other.files[1], b"through")
        assert os.read(other.files[0], 10) == b"through"
        assert not any(os.get_inheritable(file) for file in other.files)

    def test_pieces_of_a_message_are_put_together(
        self, channels: tuple[MessageChannel, MessageChannel]
    ) -> None:
        one, other = channels
        content = msgspec.msgpack.encode(Ended(3))
        data = struct.pack("!I", len(content)) + content
        found: list[Any] = []
        for byte in data:
            assert found == []
            one.socket.send(bytes([byte]))
            found = other.receive()
        assert found == [Ended(3)]
        one.socket.send(data + data)
        assert other.receive() == [Ended(3), Ended(3)]

    @pytest.mark.parametrize(
        "data", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1", b"\x00\x00\x00\x01\x80"]
    )
    def test_other_bytes_are_refused(
        self, channels: tuple[MessageChannel, MessageChannel], data: bytes
    ) -> None:
        channels[0].socket.send(data)
        with pytest.raises(ValueError, match="message"):
            channels[1].receive()

    def test_the_end_of_the_other_side_is_an_error(
        self, channels: tuple[MessageChannel, MessageChannel]
    ) -> None:
        one, other = channels
        one.close()
        with pytest.raises(EOFError):
            other.receive()
        with pytest.raises(OSError, match="pipe"):
            other.send(Accepted())

    def test_the_other_sides_user_is_known(
        self, channels: tuple[MessageChannel, MessageChannel]
    ) -> None:
        assert is_same_user(channels[0].socket)


class TestListener:
    """One server for a user."""

    def test_a_second_one_is_refused(self, runtime: Path) -> None:
        first = ClientListener()
        first.open()
        with pytest.raises(ConfigError, match=rf"runs already \(process {os.getpid()}, "):
            ClientListener()
        assert runtime.stat().st_mode & 0o777 == 0o700
        assert first.path.stat().st_mode & 0o777 == 0o600
        first.close(remove=True)
        assert not first.path.exists()
        with closing(socket.socket(socket.AF_UNIX)) as stale:  # that of a server that was killed
            stale.bind(str(first.path))
        second = ClientListener()
        second.open()
        with closing(socket.socket(socket.AF_UNIX)) as client:
            client.connect(str(second.path))
            channel = second.accept()
            assert channel is not None
            channel.close()
        second.close(remove=True)

    def test_a_directory_that_others_can_enter_is_refused(self, runtime: Path) -> None:
        runtime.mkdir()
        runtime.chmod(0o755)
        with pytest.raises(ConfigError, match="0700"):
            ClientListener()
        runtime.chmod(0o700)
        link = runtime.parent / "link"
        link.symlink_to(runtime)
        with pytest.raises(ConfigError, match="0700"):
            check_private(link)

    def test_a_path_that_is_too_long_is_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("x" * 120)))
        listener = ClientListener()
        with pytest.raises(ConfigError, match="cannot be used"):
            listener.open()
        listener.close(remove=True)

    def test_to_ask_without_a_server_takes_no_time(self, runtime: Path) -> None:
        assert not is_present()
        assert shortest_s(is_present, 0.005) < 0.005


class TestSurroundings:
    """What server and command must have in common."""

    def test_the_same_are_accepted(self) -> None:
        SURROUNDINGS.check(REQUEST)

    @pytest.mark.parametrize(
        ("change", "said"),
        [
            ({"code": "2"}, "other code"),
            ({"umask": 0o077}, "umask 0022"),
            ({"locale": "ASCII"}, "encoding UTF-8"),
            ({"environment": []}, "another TZ"),
            (
                {"environment": [(b"TZ", b"UTC"), (b"AWS_SECRET_ACCESS_KEY", b"hidden")]},
                "another AWS_SECRET_ACCESS_KEY",
            ),
        ],
    )
    def test_others_are_refused_without_values(self, change: dict[str, Any], said: str) -> None:
        with pytest.raises(ConfigError, match=said) as refused:
            SURROUNDINGS.check(msgspec.structs.replace(REQUEST, **change))
        assert "hidden" not in str(refused.value)


KEPT = {"spark.sql.x": "1", "spark.driver.memory": "4g", "spark.jars": "/a.jar,/b.jar"}


class TestSettings:
    """Which settings a command's own session can have."""

    def differing(
        self, asked: dict[str, str], named: tuple[str, ...] = ()
    ) -> dict[str, str | None]:
        return differing_settings(KEPT, asked, named, lambda name: name.startswith("spark.sql."))

    def test_those_of_a_session_are_set_or_removed(self) -> None:
        asked = {"spark.sql.x": "2", "spark.sql.y": "3"}
        assert self.differing(asked) == asked
        assert self.differing({}) == {"spark.sql.x": None}
        assert self.differing(KEPT) == {}

    def test_sizes_count_only_if_the_user_names_them(self) -> None:
        asked = KEPT | {"spark.driver.memory": "1g"}
        assert self.differing(asked) == {}
        with pytest.raises(ConfigError, match=r"spark\.driver\.memory"):
            self.differing(asked, ("spark.driver.memory",))

    def test_jars_may_be_some_of_the_servers(self) -> None:
        assert self.differing(KEPT | {"spark.jars": "/b.jar"}) == {}
        with pytest.raises(ConfigError, match=r"spark\.jars"):
            self.differing(KEPT | {"spark.jars": "/b.jar,/c.jar"})

    def test_others_must_be_the_same(self) -> None:
        with pytest.raises(ConfigError, match=r"spark\.hadoop\.fs\.s3a\.secret\.key$"):
            self.differing(KEPT | {"spark.hadoop.fs.s3a.secret.key": "hidden"})

    def test_relative_files_mean_the_users_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        asked = {"spark.jars": "a.jar, /b.jar", "spark.archives": "env.tar.gz#environment"}
        assert comparable(asked) == {
            "spark.jars": f"{tmp_path}/a.jar,/b.jar",
            "spark.archives": f"{tmp_path}/env.tar.gz#environment",
        }


class TestTurns:
    """The order in which commands begin."""

    def test_as_many_at_once_as_allowed_in_order(self) -> None:
        commands, others = ServedCommands(2), []
        for _ in range(4):
            ours, theirs = socket.socketpair()
            others.append(theirs)
            command = commands.add(MessageChannel(ours))
            command.request = REQUEST
            command.gateway = GatewayOpened(command.number, 1, "", {})
            command.state = CommandState.TURN
        first, second, third, fourth = commands
        second.state = CommandState.BEGIN  # its client has not answered yet
        begun = []
        while found := commands.next():
            found[0].pid, found[0].state = 1, CommandState.END
            begun.append(found[0])
        assert begun == [first, third]
        assert first.name == "search"
        commands.remove(first)
        second.state = CommandState.TURN
        found = commands.next()
        assert found is not None
        assert found[0] is second
        for command in commands:
            commands.remove(command)
        for end in others:
            end.close()
        assert fourth not in commands


def test_exit_codes_and_signals_of_a_process() -> None:
    assert ended(3 << 8) == (3, 0)
    assert ended(15) == (0, 15)


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("a/b/") == f"{tmp_path}/a/b/"
    assert [absolute(one) for one in ("/a", "s3a://a/b", "jdbc:x", "file:a", "")] == [
        "/a",
        "s3a://a/b",
        "jdbc:x",
        "file:a",
        "",
    ]
