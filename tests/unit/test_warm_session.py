"""The parts of `lisa pipeline serve` that need no Spark: messages, checks, settings."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from lisa.core.model.errors import ConfigError
from lisa.pipeline.paths import absolute
from lisa.pipeline.session import comparable
from lisa.pipeline.warm.client import is_present
from lisa.pipeline.warm.commands import Surroundings
from lisa.pipeline.warm.keeper import differing_settings
from lisa.pipeline.warm.listener import ClientListener
from lisa.pipeline.warm.protocol import (
    Accepted,
    Begin,
    CommandRequest,
    Ended,
    MessageChannel,
    check_private,
    is_same_user,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

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
Channels = tuple[MessageChannel, MessageChannel]


@pytest.fixture
def channels() -> Iterator[Channels]:
    one, other = (MessageChannel(end) for end in socket.socketpair())
    with closing(one), closing(other):
        yield one, other


def test_messages_and_files_arrive_as_sent(channels: Channels) -> None:
    one, other = channels
    assert is_same_user(one.socket)
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
    content = msgspec.msgpack.encode(Ended(3))
    data = struct.pack("!I", len(content)) + content
    pieces: list[Any] = []
    for byte in data:
        assert pieces == []
        one.socket.send(bytes([byte]))
        pieces = other.receive()
    assert pieces == [Ended(3)]
    one.close()
    with pytest.raises(EOFError):
        other.receive()
    with pytest.raises(OSError, match="pipe"):
        other.send(Accepted())


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x01\xc1", b"\x00\x00\x00\x01\x80"]
)
def test_other_bytes_are_refused(channels: Channels, data: bytes) -> None:
    channels[0].socket.send(data)
    with pytest.raises(ValueError, match="message"):
        channels[1].receive()


def test_one_server_for_a_user(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # sockets have short paths
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        assert not is_present()
        first = ClientListener()
        first.open()
        with pytest.raises(ConfigError, match=rf"runs already \(process {os.getpid()}, "):
            ClientListener()
        assert first.path.parent.stat().st_mode & 0o777 == 0o700
        assert first.path.stat().st_mode & 0o777 == 0o600
        first.close(remove=True)
        assert not first.path.exists()
        with closing(socket.socket(socket.AF_UNIX)) as stale:  # that of a server that was killed
            stale.bind(str(first.path))
        second = ClientListener()
        second.open()
        second.close(remove=True)
        first.path.parent.chmod(0o755)  # others can enter it
        with pytest.raises(ConfigError, match="0700"):
            ClientListener()
        first.path.parent.chmod(0o700)
        link = Path(short) / "link"
        link.symlink_to(first.path.parent)
        with pytest.raises(ConfigError, match="0700"):
            check_private(link)
        monkeypatch.setenv("XDG_RUNTIME_DIR", f"{short}/{'x' * 120}")
        listener = ClientListener()
        with pytest.raises(ConfigError, match="cannot be used"):
            listener.open()
        listener.close(remove=True)


def test_server_and_command_have_their_surroundings_in_common() -> None:
    surroundings = Surroundings("1", "UTF-8", 0o022, {b"TZ": b"UTC", b"PATH": b"/bin"})
    surroundings.check(REQUEST)
    secret = [(b"TZ", b"UTC"), (b"AWS_SECRET_ACCESS_KEY", b"hidden")]
    changes: list[tuple[dict[str, Any], str]] = [
        ({"code": "2"}, "other code"),
        ({"umask": 0o077}, "umask 0022"),
        ({"locale": "ASCII"}, "encoding UTF-8"),
        ({"environment": []}, "another TZ"),
        ({"environment": secret}, "another AWS_SECRET_ACCESS_KEY"),
    ]
    for change, said in changes:
        with pytest.raises(ConfigError, match=said) as refused:
            surroundings.check(msgspec.structs.replace(REQUEST, **change))
        assert "hidden" not in str(refused.value)


def test_settings_that_a_commands_own_session_can_have() -> None:
    kept = {"spark.sql.x": "1", "spark.driver.memory": "4g", "spark.jars": "/a.jar,/b.jar"}

    def differing(asked: dict[str, str], *named: str) -> dict[str, str | None]:
        return differing_settings(kept, asked, named, lambda name: name.startswith("spark.sql."))

    asked = {"spark.sql.x": "2", "spark.sql.y": "3"}
    assert differing(asked) == asked
    assert differing({}) == {"spark.sql.x": None}
    assert differing(kept) == differing(kept | {"spark.jars": "/b.jar"}) == {}
    other_size = kept | {"spark.driver.memory": "1g"}
    assert differing(other_size) == {}
    for other, name in (
        (other_size, "spark.driver.memory"),  # counts only if the user names it
        (kept | {"spark.jars": "/b.jar,/c.jar"}, "spark.jars"),
        (kept | {"spark.hadoop.fs.s3a.secret.key": "hidden"}, "spark.hadoop.fs.s3a.secret.key"),
    ):
        with pytest.raises(ConfigError, match=name) as refused:
            differing(other, "spark.driver.memory")
        assert "hidden" not in str(refused.value)


def test_relative_files_mean_the_users_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = {"spark.jars": "a.jar, /b.jar", "spark.archives": "env.tar.gz#environment"}
    assert comparable(asked) == {
        "spark.jars": f"{tmp_path}/a.jar,/b.jar",
        "spark.archives": f"{tmp_path}/env.tar.gz#environment",
    }
    assert absolute("a/b/") == f"{tmp_path}/a/b/"
    for kept in ("/a", "s3a://a/b", "jdbc:x", "file:a", ""):
        assert absolute(kept) == kept
