"""Only one process writes to an archive's directory at a time."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from lisa.core.clock import human
from lisa.core.errors import ConfigError

if TYPE_CHECKING:
    from lisa.pipeline.archive.folder import Folder

__all__ = ["Lease"]

PATH = "_lisa/lease.json"
BEAT_S = 10.0
STALE_S = 60.0
"""A holder on another machine that was not heard of for so long is gone."""


class Lease:
    """Held from `take` to `release`, renewed by a thread of its own.

    A holder that was killed on this machine is known by its process, one on another by its
    silence. A holder that was only asleep finds, before it commits, that it holds it no more.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.token = token_hex(8)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lisa-lease", daemon=True)

    def take(self) -> None:
        """Raises ConfigError that names the holder, if there is one."""
        for _ in range(3):
            if self._folder.write_new(PATH, self._text()):
                self._thread.start()
                return
            holder = self._read()
            if holder is not None and _is_alive(holder):
                raise ConfigError(
                    f"another process writes to {self._folder.where}: process {holder['pid']} on "
                    f"{holder['host']}, last heard of "
                    f"{human(int(1000 * max(0.0, time.time() - holder['seen'])))} ago; end it, or "
                    "give this archive another directory"
                )
            self._folder.delete(PATH)
        raise ConfigError(f"{self._folder.url(PATH)} cannot be taken: somebody else is quicker")

    def check(self) -> None:
        """Raises ConfigError if somebody else has taken it meanwhile."""
        for _ in range(20):
            holder = self._read()
            if holder is not None:
                break
            time.sleep(0.05)  # HDFS does not replace a file: the beat is between two
        if holder is None or holder["token"] != self.token:
            raise ConfigError(
                "this process was silent for too long: another one writes to "
                f"{self._folder.where} now"
            )

    def release(self) -> None:
        """Let another one in."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        holder = self._read()
        if holder is not None and holder["token"] == self.token:
            self._folder.delete(PATH)

    def _text(self) -> str:
        return json.dumps({
            "token": self.token, "pid": os.getpid(), "host": socket.gethostname(),
            "seen": time.time(),
        })  # fmt: skip

    def _read(self) -> dict[str, Any] | None:
        text = self._folder.read(PATH)
        try:
            found: dict[str, Any] | None = json.loads(text) if text else None
        except ValueError:  # killed while it wrote its first lease
            return None
        return found

    def _beat(self) -> None:
        while not self._done.wait(BEAT_S):
            holder = self._read()
            if holder is None or holder["token"] != self.token:
                return
            self._folder.write(PATH, self._text())


def _is_alive(holder: dict[str, Any]) -> bool:
    if time.time() - holder["seen"] > STALE_S:
        return False
    if holder["host"] != socket.gethostname():
        return True
    if holder["pid"] == os.getpid():
        return True
    try:
        os.kill(holder["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
