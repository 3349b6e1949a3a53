"""An embedded server whose clock stands still until its owner sets it.

The library libfaketime, preloaded into the server, reads the time from a file. Only wall clocks are
faked: the server's event loop uses the monotonic clock and runs as usual.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from lisa.core.model.clock import ms_datetime
from lisa.core.model.errors import ServerUnavailable
from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.store.store import SyncStore
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import binary

FOUND_ON_DEBIAN = "*/faketime/libfaketime.so.1"
MACHINE = slice(18, 20)
"""The bytes of an ELF file that name the processor."""
MEMORY = Path("/dev/shm")  # noqa: S108  the directory made there has a random name
SET_TIMEOUT_S = 10.0
"""How long to wait until the server shows the time that was set."""

CACHED_US = 999
"""Valkey reads the clock once a millisecond, and adds the time since then."""


def library() -> Path:
    """Path of libfaketime: in the wheel of that name, or where Debian's package installs it.

    Raises:
        ServerUnavailable: there is none for this machine.
    """
    if sys.platform.startswith("linux"):
        spec = importlib.util.find_spec("libfaketime")
        folders = [Path(folder) for folder in (spec and spec.submodule_search_locations) or ()]
        found = [path for folder in folders for path in folder.rglob("libfaketime.so.1")]
        found += sorted(Path("/usr/lib").glob(FOUND_ON_DEBIAN))
        own = _machine(Path(sys.executable))
        for path in found:
            if _machine(path) == own:
                return path
    raise ServerUnavailable(
        "no libfaketime for this machine, which sets the clock of the test's server; it exists for "
        "Linux: pip install 'lisa-delay-queue[test]', or apt-get install libfaketime"
    )


def _machine(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MACHINE.stop)[MACHINE]


class ClockedServer(EmbeddedServer):
    """An embedded server that starts with the machine's time; `set_time` sets it.

    Everything on the server that depends on the time of day follows at once: TIME, the expiry of
    keys, and the idle time of pending entries. `start` raises ServerUnavailable if there is no
    libfaketime for this machine.
    """

    def __init__(self) -> None:
        super().__init__()
        self._store: SyncStore | None = None

    def start(self) -> Self:
        """Start the server. Raises ServerUnavailable."""
        super().start()
        self._store = SyncStore(Connection(Address(self.url)), Keys())
        return self

    def stop(self) -> None:
        """Stop the server and remove its files. A second call does nothing."""
        store, self._store = self._store, None
        if store is not None:
            store.close()
        super().stop()

    def set_time(self, now_us: int) -> None:
        """Set the clock to epoch microseconds; the server shows the new time on return.

        The server adds up to 999 microseconds to it, by its monotonic clock. Raises
        ServerUnavailable.
        """
        self._write(now_us)
        deadline = time.monotonic() + SET_TIMEOUT_S
        while not now_us <= (shown_us := self._shown_us()) < now_us + CACHED_US:
            if time.monotonic() > deadline:
                raise ServerUnavailable(
                    f"the server's clock was set to {now_us} us but shows {shown_us} us: "
                    f"{library()} has no effect on {binary()}"
                )

    def clear(self) -> None:
        """Delete all data."""
        self._asked().ask("FLUSHALL")

    def _make_directory(self) -> Path:
        preloaded = str(library())
        # In memory: on a disk, some file systems write a replaced file at once.
        memory = MEMORY if os.access(MEMORY, os.W_OK) else None
        self._directory = Path(tempfile.mkdtemp(prefix="lisa-server-", dir=memory)).resolve()
        self._env |= {
            "LD_PRELOAD": preloaded,
            "FAKETIME_TIMESTAMP_FILE": str(self._time),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_ONLY_CMDS": binary().name,
            "NO_FAKE_STAT": "1",
            "TZ": "UTC",
        }
        self._write(time.time_ns() // 1_000)
        return self._directory

    @property
    def _time(self) -> Path:
        return self.directory / "time"

    def _write(self, now_us: int) -> None:
        # Half a microsecond more, because the library computes the fraction as a double.
        text = f"{ms_datetime(now_us // 1000):%Y-%m-%d %H:%M:%S}.{now_us % 1_000_000:06d}5\n"
        draft = self._time.with_suffix(".new")
        draft.write_text(text, encoding="ascii")
        os.replace(draft, self._time)  # noqa: PTH105  the server must never read half a file

    def _shown_us(self) -> int:
        store = self._asked()
        return store.drive(store.server_time_us())

    def _asked(self) -> SyncStore:
        if self._store is None:
            raise ServerUnavailable("the embedded server is not running: call start() first")
        return self._store
