"""Ledgers: files in which handlers record due times and handling times.

Each process writes one file, `<name>.ledger`, of 16-byte records: two little-endian 64-bit
integers, the due time and the handling time in microseconds since the epoch. All figures about
handled messages come from these files.
"""

from __future__ import annotations

import struct
import sys
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from benchmarks.bench.results import Fault

RECORD = struct.Struct("<qq")
FLUSH_S = 0.02
POLL_S = 0.02


class Writer:
    """Writes a ledger with minimal work per message.

    `note(RECORD.pack(due_us, handled_us))` appends to a list; a thread writes the list to the file
    every FLUSH_S. Bytes, unlike tuples, do not trigger garbage collection in the measured process.
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
        """Write the records noted so far."""
        count = len(self._records)
        if count:
            self._file.write(b"".join(self._records[:count]))
            del self._records[:count]

    def close(self) -> None:
        """Write the remaining records and close the file."""
        self._ended.set()
        self._thread.join()
        self.flush()
        self._file.close()


class Ledger:
    """Reads all ledgers of a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._marks: dict[Path, int] = {}

    def mark(self) -> None:
        """Ignore the records written so far."""
        self._marks = {path: size - size % RECORD.size for path, size in self._sizes().items()}

    def count(self) -> int:
        """Number of records since the mark."""
        return sum(
            (size - self._marks.get(path, 0)) // RECORD.size for path, size in self._sizes().items()
        )

    def writers(self) -> int:
        """Number of files with at least one record."""
        return sum(size >= RECORD.size for size in self._sizes().values())

    def wait(self, count: int, timeout_s: float, check: Callable[[], None]) -> None:
        """Wait for `count` records since the mark, calling `check` repeatedly.

        Raises:
            Fault: the records were not written in time.
        """
        deadline = time.monotonic() + timeout_s
        while (found := self.count()) < count:
            if time.monotonic() > deadline:
                raise Fault(f"{found} of {count} messages were handled within {timeout_s:.0f} s")
            check()
            time.sleep(POLL_S)

    def read(self) -> tuple[array[int], array[int]]:
        """Due and handling times since the mark, in microseconds, in arbitrary order."""
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
