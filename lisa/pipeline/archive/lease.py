"""A lease that lets only one process write to an archive's directory at a time."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from lisa.core.daemon.processes import is_running
from lisa.core.model.clock import human
from lisa.core.model.errors import ConfigError

if TYPE_CHECKING:
    from lisa.pipeline.archive.folder import Folder

PATH = "_lisa/lease.json"
BEAT_S = 10.0
STALE_S = 60.0
"""A lease that was not renewed for this long is expired."""


class Lease:
    """A lease held from `take` to `release`, renewed by a background thread.

    A killed holder is detected by its process id on the same host, otherwise after STALE_S without
    a renewal. A holder that was only suspended notices the loss in `check`, before it commits.
    """

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.token = token_hex(8)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lisa-lease", daemon=True)

    def take(self) -> None:
        """Take the lease. Raises ConfigError if another process holds it."""
        for _ in range(3):
            if self._folder.write_new(PATH, self._text()):
                self._thread.start()
                return
            holder = self._read()
            if holder is not None and _is_alive(holder):
                raise ConfigError(
                    f"another process writes to {self._folder.where}: process {holder['pid']} on "
                    f"{holder['host']}, whose lease was renewed "
                    f"{human(int(1000 * max(0.0, time.time() - holder['seen'])))} ago; stop that "
                    "process, or use another directory"
                )
            self._folder.delete(PATH)
        raise ConfigError(f"another process has taken the lease {self._folder.url(PATH)}")

    def check(self) -> None:
        """Raises ConfigError if another process has taken the lease."""
        for _ in range(20):
            holder = self._read()
            if holder is not None:
                break
            time.sleep(0.05)  # on HDFS a renewal deletes the file before it renames the new one
        if holder is None or holder["token"] != self.token:
            raise ConfigError(
                "this process did not renew its lease in time: another process writes to "
                f"{self._folder.where} now"
            )

    def release(self) -> None:
        """Stop renewing the lease and delete it."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()
        holder = self._read()
        if holder is not None and holder["token"] == self.token:
            self._folder.delete(PATH)

    def _text(self) -> str:
        return json.dumps(
            {
                "token": self.token,
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "seen": time.time(),
            }
        )

    def _read(self) -> dict[str, Any] | None:
        text = self._folder.read(PATH)
        try:
            found: dict[str, Any] | None = json.loads(text) if text else None
        except ValueError:  # the holder was killed while writing its first lease
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
    return is_running(int(holder["pid"]))
