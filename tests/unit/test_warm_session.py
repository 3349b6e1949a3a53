"""What protects `lisa pipeline serve`: other bytes, other users, other servers."""

from __future__ import annotations

import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from lisa.core.model.errors import ConfigError
from lisa.pipeline.warm.client import is_present
from lisa.pipeline.warm.listener import ClientListener
from lisa.pipeline.warm.protocol import (
    Accepted,
    Ended,
    MessageChannel,
    check_private,
    is_same_user,
)

Channels = tuple[MessageChannel, MessageChannel]


@pytest.fixture
def channels() -> Iterator[Channels]:
    one, other = (MessageChannel(end) for end in socket.socketpair())
    with closing(one), closing(other):
        yield one, other


def test_messages_arrive_in_pieces_until_the_other_side_ends(channels: Channels) -> None:
    one, other = channels
    assert is_same_user(one.socket)
    content = msgspec.msgpack.encode(Ended(3))
    pieces: list[Any] = []
    for byte in struct.pack("!I", len(content)) + content:
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
