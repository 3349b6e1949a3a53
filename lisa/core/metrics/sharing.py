"""Sums metrics over the processes of one role, so that any process can answer for all.

Each process writes its numbers to its own file, once a second and before it answers. Counters in
the sum therefore never decrease between answers of different processes. Counters of processes that
ended are kept; their gauges are dropped.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from lisa.core.daemon.processes import is_running
from lisa.core.metrics.numbers import Numbers, lasting, merge

WRITE_EACH_S = 1.0
GONE_AFTER_S = 10.0
"""Gauges of a process that has not written for this long are dropped."""

_SUFFIX = ".numbers"


class _Record(msgspec.Struct, array_like=True):
    """A process's numbers, and the time of writing by the monotonic clock."""

    at: float
    numbers: Numbers


_writing = threading.Lock()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Record)


class Shared:
    """A directory shared by the processes of a role."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._own = directory / f"{os.getpid()}{_SUFFIX}"
        self._ended = directory / "ended"

    def write(self, numbers: Callable[[], Numbers]) -> Numbers:
        """Replace this process's numbers in the directory with the current ones."""
        with _writing:  # an earlier count must never replace a later one
            found = numbers()
            if found:
                self._replace(self._own, found)
        return found

    def read(self) -> Numbers:
        """The sum over all processes."""
        with self._locked(fcntl.LOCK_SH):
            found = [self._load(path) for path in [*self._paths(), self._ended]]
        since = time.monotonic() - GONE_AFTER_S
        return merge(
            share.numbers if share.at > since else lasting(share.numbers)
            for share in found
            if share
        )

    def tidy(self) -> None:
        """Move the counters of ended processes into one file, to limit the number of files."""
        with self._locked(fcntl.LOCK_EX):
            dead = [path for path in self._paths() if not is_running(int(path.stem))]
            found = [self._load(path) for path in [*dead, self._ended]]
            if dead:
                self._replace(
                    self._ended, merge(lasting(share.numbers) for share in found if share)
                )
            for path in dead:
                path.unlink()

    def _paths(self) -> list[Path]:
        return sorted(self._directory.glob(f"*{_SUFFIX}"))

    def _load(self, path: Path) -> _Record | None:
        try:
            return _decoder.decode(path.read_bytes())
        except FileNotFoundError:
            return None

    def _replace(self, path: Path, numbers: Numbers) -> None:
        new = path.with_suffix(f".{os.getpid()}.new")
        new.write_bytes(_encoder.encode(_Record(time.monotonic(), numbers)))
        new.replace(path)

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        with (self._directory / "lock").open("ab") as file:
            fcntl.flock(file, how)
            yield


def leave_numbers(directory: Path, numbers: Callable[[], Numbers]) -> None:
    """Start a thread that writes this process's numbers as long as it runs."""
    shared = Shared(directory)
    shared.tidy()

    def work() -> None:
        with suppress(FileNotFoundError):  # the parent removed the directory when it ended
            while True:
                shared.write(numbers)
                time.sleep(WRITE_EACH_S)

    threading.Thread(target=work, name="lisa-numbers", daemon=True).start()
