"""The socket of `lisa pipeline serve`, and the messages between server, commands and keeper.

Every command of the pipeline imports this module before it asks for a server: it must stay small.
"""

from __future__ import annotations

import array
import os
import socket
import stat
import struct
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgspec

import lisa
from lisa.core.model.errors import ConfigError

_LENGTH = struct.Struct("!I")
_MOST_BYTES = 1 << 24
_MOST_FILES = 3
_PIECE = 1 << 16


class CommandRequest(msgspec.Struct, frozen=True, tag=True):
    """A client asks for the execution of a command; its standard streams come along.

    words: the command line after `lisa`. streams: encoding and error handling of stdin, stdout and
    stderr. code: see `code_version`. settings: Spark's settings of the session that the command
    would start. named: the settings that the user named.
    """

    words: list[bytes]
    folder: bytes
    environment: list[tuple[bytes, bytes]]
    umask: int
    streams: list[tuple[str, str]]
    code: str
    locale: str
    master: str
    settings: dict[str, str]
    named: list[str]


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The server can run the command, and waits for `Begin`."""


class CommandRefused(msgspec.Struct, frozen=True, tag=True):
    """The command does not run in the server's session; nothing has been done."""

    reason: str


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The client still waits: run the command."""


class Waiting(msgspec.Struct, frozen=True, tag=True):
    """The command waits for other commands; `running` are running now."""

    running: int


class PassedSignal(msgspec.Struct, frozen=True, tag=True):
    """The client received a signal, which the command gets."""

    number: int


class Stopping(msgspec.Struct, frozen=True, tag=True):
    """The server stops, and cancels the running command."""


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The command ended with an exit code, or by a signal (otherwise 0)."""

    code: int
    signal: int = 0


class SessionReady(msgspec.Struct, frozen=True, tag=True):
    """The keeper's session has started."""

    spark: str


class StartFailure(msgspec.Struct, frozen=True, tag=True):
    """The keeper's session could not start: the class of Lisa's error, and its text."""

    kind: str
    reason: str


class OpenGateway(msgspec.Struct, frozen=True, tag=True):
    """The server asks the keeper for a gateway for a command."""

    number: int
    master: str
    settings: dict[str, str]
    named: list[str]


class GatewayOpened(msgspec.Struct, frozen=True, tag=True):
    """A gateway to the JVM. differing: settings of the command's session; None removes one."""

    number: int
    port: int
    secret: str
    differing: dict[str, str | None]


class GatewayRefused(msgspec.Struct, frozen=True, tag=True):
    """The keeper's session does not suit the command."""

    number: int
    reason: str


class CloseGateway(msgspec.Struct, frozen=True, tag=True):
    """A command has ended: cancel its jobs, and close its gateway."""

    number: int


Message = (
    CommandRequest
    | Accepted
    | CommandRefused
    | Begin
    | Waiting
    | PassedSignal
    | Stopping
    | Ended
    | SessionReady
    | StartFailure
    | OpenGateway
    | GatewayOpened
    | GatewayRefused
    | CloseGateway
)


class MessageChannel:
    """Messages over a stream socket; each is preceded by its length.

    files: the received file descriptors, which the receiver must close.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.files: list[int] = []
        self._received = bytearray()
        self._decoder = msgspec.msgpack.Decoder(Message)

    def send(self, message: Message, files: Sequence[int] = ()) -> None:
        """Send one message. Raises OSError if the other side is gone, or does not read."""
        content = msgspec.msgpack.encode(message)
        data = memoryview(_LENGTH.pack(len(content)) + content)
        sent = socket.send_fds(self.socket, [data], files) if files else 0
        if sent < len(data):  # the receiver may have answered, and gone
            self.socket.sendall(data[sent:])

    def receive(self) -> list[Message]:
        """Receive once; returns the complete messages. Raises EOFError if the other side is gone.

        Raises ValueError if these are no messages.
        """
        try:
            # Python's `socket.recv_fds` would leave the files open in programs that are started.
            data, ancillary, _, _ = self.socket.recvmsg(
                _PIECE, socket.CMSG_SPACE(_MOST_FILES * array.array("i").itemsize), _CLOEXEC
            )
        except ConnectionError:
            raise EOFError from None
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array.array("i")
                found.frombytes(content[: len(content) - len(content) % found.itemsize])
                self.files += found
        if not data:
            raise EOFError
        self._received += data
        return self._complete()

    def _complete(self) -> list[Message]:
        found: list[Message] = []
        while len(self._received) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._received)
            if length > _MOST_BYTES:
                raise ValueError(f"a message of {length} bytes")
            end = _LENGTH.size + length
            if len(self._received) < end:
                break
            try:
                found.append(self._decoder.decode(bytes(self._received[_LENGTH.size : end])))
            except msgspec.MsgspecError as error:
                raise ValueError(f"not a message: {error}") from None
            del self._received[:end]
        return found

    def close(self) -> None:
        """Close the socket and the received files."""
        self.socket.close()
        self.close_files()

    def close_files(self) -> None:
        """Close the received files."""
        while self.files:
            os.close(self.files.pop())


_CLOEXEC = getattr(socket, "MSG_CMSG_CLOEXEC", 0)  # Linux


def socket_folder() -> Path:
    """The directory of the server's socket: $XDG_RUNTIME_DIR/lisa, else one below /tmp."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "lisa") if runtime else Path(tempfile.gettempdir(), f"lisa-{os.getuid()}")


def socket_path() -> Path:
    """The server's socket."""
    return socket_folder() / "pipeline.sock"


def check_private(folder: Path) -> None:
    """Raises ConfigError unless the directory is this user's, and closed to all others."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(f"{folder} must be a directory of this user with the mode 0700")


def private_folder() -> Path:
    """Creates the directory of the socket. Raises OSError; ConfigError if it is not private."""
    folder = socket_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)
    return folder


def is_same_user(connection: socket.socket) -> bool:
    """Whether the other side of a Unix socket runs as this user.

    Outside Linux this is not checked: the directory's mode alone keeps other users out.
    """
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    form = struct.Struct("3i")  # pid, uid, gid
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size)
    return bool(form.unpack(found)[1] == os.getuid())


def code_version() -> str:
    """Identifies Lisa's code and the Python that runs it: server and command must have the same."""
    count, newest, folders = 0, 0, list(lisa.__path__)
    while folders:
        for one in os.scandir(folders.pop()):
            if one.is_dir(follow_symlinks=False):
                if one.name != "__pycache__":
                    folders.append(one.path)
            else:
                count, newest = count + 1, max(newest, one.stat().st_mtime_ns)
    where = " ".join(lisa.__path__)
    return f"{lisa.__version__} {where} {count} {newest} {sys.prefix} {sys.version}"
