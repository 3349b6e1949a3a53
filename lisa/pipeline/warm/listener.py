"""The server's socket: one for each user, never two servers."""

from __future__ import annotations

import fcntl
import os
import socket
from typing import BinaryIO

from lisa.core.model.errors import ConfigError
from lisa.pipeline.warm.protocol import MessageChannel, is_same_user, private_folder, socket_path


class ClientListener:
    """The server's socket. Only one process of a user has it, ensured by a lock on a file.

    Raises ConfigError if another server runs, or if the directory is not private.
    """

    def __init__(self) -> None:
        path = socket_path()
        private_folder()
        self._lock: BinaryIO = path.with_suffix(".lock").open("ab+")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.seek(0)
            pid = self._lock.read().decode().strip()
            self._lock.close()
            raise ConfigError(
                f"`lisa pipeline serve` runs already (process {pid}, {path})"
            ) from None
        self._lock.truncate(0)
        self._lock.write(str(os.getpid()).encode())
        self._lock.flush()
        self.path = path
        self.is_open = False
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.setblocking(False)  # noqa: FBT003  Python's

    def open(self) -> None:
        """Accept connections; replaces the socket of a server that was killed."""
        self.path.unlink(missing_ok=True)
        before = os.umask(0o177)
        try:
            self.socket.bind(str(self.path))
        except OSError as error:  # a path of more than 107 bytes
            raise ConfigError(f"{self.path} cannot be used: {error}") from None
        finally:
            os.umask(before)
        self.socket.listen(64)
        self.is_open = True

    def accept(self) -> MessageChannel | None:
        """The next client's channel; None if it is gone, or another user's."""
        try:
            connection, _ = self.socket.accept()
        except OSError:
            return None
        if not is_same_user(connection):
            connection.close()
            return None
        connection.setblocking(False)  # noqa: FBT003  Python's
        return MessageChannel(connection)

    def close(self, *, remove: bool) -> None:
        """Stop accepting. remove: by the server itself, not by a process that it forked."""
        if remove and self.is_open:
            self.path.unlink(missing_ok=True)
        self.is_open = False
        self.socket.close()
        self._lock.close()
