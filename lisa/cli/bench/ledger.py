"""What handlers write down: who was due when, and when it was handled.

One file a process, `<anything>.ledger`, of 16-byte records: two little-endian 64-bit integers, the
due instant and the instant of handling, both in microseconds since the epoch. Lisa's handler, the
floor's and the peers' all write this, and the figures are counted from it alone.
"""

from __future__ import annotations

import struct
import sys
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from lisa.cli.bench.fault import Fault

__all__ = ["FLUSH_S", "Ledger", "Writer"]

RECORD = struct.Struct("<qq")
FLUSH_S = 0.02
POLL_S = 0.02


class Writer:
    """The writing end, made for little work per message.

    `note(RECORD.pack(due_us, handled_us))` is one append; a thread writes every FLUSH_S what has
    come together. Bytes, unlike tuples, do not set off the garbage collector of the process that
    is measured.
    """

    def __init__(self, path: Path) -> None:
        self._records: list[bytes] = []
        self.note = self._records.append
        self._file = path.open("ab", buffering=0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ledger", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(FLUSH_S):
            self.flush()

    def flush(self) -> None:
        """Write what was noted."""
        count = len(self._records)
        if count:
            self._file.write(b"".join(self._records[:count]))
            del self._records[:count]

    def close(self) -> None:
        """Write the rest."""
        self._ended.set()
        self._thread.join()
        self.flush()
        self._file.close()


class Ledger:
    """The reading end: all files of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._marks: dict[Path, int] = {}

    def mark(self) -> None:
        """Forget what was written so far."""
        self._marks = {path: size - size % RECORD.size for path, size in self._sizes().items()}

    def count(self) -> int:
        """How many records came since the mark."""
        return sum(
            (size - self._marks.get(path, 0)) // RECORD.size for path, size in self._sizes().items()
        )

    def writers(self) -> int:
        """How many files hold a record at all."""
        return sum(size >= RECORD.size for size in self._sizes().values())

    def wait(self, count: int, timeout_s: float, check: Callable[[], None]) -> None:
        """Wait for so many records since the mark; `check` is called again and again.

        Raises:
            Fault: they did not come in time.
        """
        deadline = time.monotonic() + timeout_s
        while (found := self.count()) < count:
            if time.monotonic() > deadline:
                raise Fault(f"{found} of {count} messages were handled within {timeout_s:.0f} s")
            check()
            time.sleep(POLL_S)

    def read(self) -> tuple[array[int], array[int]]:
        """Due and handled instants since the mark, in microseconds, in no certain order."""
        all_ = array("q")
        for path, size in self._sizes().items():
            start = self._marks.get(path, 0)
            with path.open("rb") as file:
                file.seek(start)
                all_.frombytes(file.read((size - start) // RECORD.size * RECORD.size))
        if sys.byteorder == "big":
            all_.byteswap()
        return all_[::2], all_[1::2]

    def _sizes(self) -> dict[Path, int]:
        return {path: path.stat().st_size for path in sorted(self.folder.glob("*.ledger"))}
