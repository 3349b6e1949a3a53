"""A real server whose clock a test sets forward and back while it runs.

A small library (`clock_offset.c`) intercepts the server's system calls for the time: wall clocks
show the machine's time plus an offset, which the library reads from a file. Monotonic clocks are
unchanged, as they are when a machine's clock is set.
"""

import mmap
import shutil
import struct
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Self

from lisa.embedded import EmbeddedServer
from tests.servers import connect, wait_until

SOURCE = Path(__file__).with_name("clock_offset.c")
NS = 1_000_000_000
CLOSE_S = 0.1  # steps are larger than that, and the two clocks are read one after the other


def missing() -> str | None:
    """Why no server's clock can be shifted here; None if it can be."""
    if not sys.platform.startswith("linux"):
        return "a server's clock can be shifted on Linux only"
    if shutil.which("cc") is None:
        return "no C compiler to build what shifts a server's clock (Debian: apt-get install gcc)"
    return None


class ShiftedServer(EmbeddedServer):
    """An embedded server with its own clock, initially the machine's.

    directory: for data, offset and library.
    program: a server other than the embedded Valkey.
    """

    def __init__(self, directory: Path, *, program: Path | None = None) -> None:
        super().__init__(directory=directory / "data", binary=program)
        directory.mkdir(parents=True, exist_ok=True)
        library, offset = directory / "clock_offset.so", directory / "clock-offset"
        subprocess.run(
            ["cc", "-O1", "-fPIC", "-shared", "-o", str(library), str(SOURCE)], check=True
        )
        offset.write_bytes(struct.pack("=q", 0))
        with offset.open("r+b") as file:
            self._offset = mmap.mmap(file.fileno(), 8)
        self._env |= {"LD_PRELOAD": str(library), "CLOCK_OFFSET_FILE": str(offset)}

    @property
    def shift_ns(self) -> int:
        """How far the server's clock is ahead of the machine's."""
        shift: int = struct.unpack("=q", self._offset[:])[0]
        return shift

    def step(self, by: timedelta) -> Self:
        """Set the clock forward, or back if negative; the server shows the new time on return."""
        self._offset[:] = struct.pack("=q", self.shift_ns + round(by.total_seconds() * NS))
        with connect(self.url) as client:

            def shows_it() -> bool:
                seconds, micros = client.time()
                return abs(int(seconds) + int(micros) / 1e6 - self.now()) < CLOSE_S

            wait_until(shows_it)  # a server may cache the time for one iteration of its event loop
        return self

    def now(self) -> float:
        """The server's time, in seconds since 1970."""
        return time.time() + self.shift_ns / NS
