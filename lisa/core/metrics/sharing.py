"""The numbers of several processes of one role, summed: whoever is asked answers for all.

Each process leaves its numbers in a file of its own, once a second and before it answers. So what
one process tells is never less than what another told earlier, as far as counters go. Counters of
processes that ended stay; their gauges go.
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

from lisa.core.metrics.numbers import Numbers, lasting, merge

__all__ = ["WRITE_EACH_S", "Shared", "leave_numbers"]

WRITE_EACH_S = 1.0
GONE_AFTER_S = 10.0
"""A process that did not write for so long has no gauges any more."""

_SUFFIX = ".numbers"


class _Left(msgspec.Struct, array_like=True):
    """What a process left: when, by the machine's monotonic clock, and its numbers."""

    at: float
    numbers: Numbers


_writing = threading.Lock()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Left)


class Shared:
    """One directory that the processes of a family share."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._own = directory / f"{os.getpid()}{_SUFFIX}"
        self._ended = directory / "ended"

    def write(self, numbers: Callable[[], Numbers]) -> Numbers:
        """Leave this process's numbers as they are now, in place of what it left before."""
        with _writing:  # what was counted earlier never takes the place of what was later
            found = numbers()
            if found:
                self._replace(self._own, found)
        return found

    def read(self) -> Numbers:
        """The sum of what all have left."""
        with self._locked(fcntl.LOCK_SH):
            found = [self._load(path) for path in [*self._left(), self._ended]]
        since = time.monotonic() - GONE_AFTER_S
        return merge(
            one.numbers if one.at > since else lasting(one.numbers) for one in found if one
        )

    def tidy(self) -> None:
        """Put the counters of processes that ended into one file, so that files stay few."""
        with self._locked(fcntl.LOCK_EX):
            dead = [path for path in self._left() if not _lives(int(path.name[: -len(_SUFFIX)]))]
            found = [self._load(path) for path in [*dead, self._ended]]
            if dead:
                self._replace(self._ended, merge(lasting(one.numbers) for one in found if one))
            for path in dead:
                path.unlink()

    def _left(self) -> list[Path]:
        return sorted(self._directory.glob(f"*{_SUFFIX}"))

    def _load(self, path: Path) -> _Left | None:
        try:
            return _decoder.decode(path.read_bytes())
        except FileNotFoundError:
            return None

    def _replace(self, path: Path, numbers: Numbers) -> None:
        new = path.with_suffix(f".{os.getpid()}.new")
        new.write_bytes(_encoder.encode(_Left(time.monotonic(), numbers)))
        new.replace(path)

    @contextmanager
    def _locked(self, how: int) -> Iterator[None]:
        with (self._directory / "lock").open("ab") as file:
            fcntl.flock(file, how)
            yield


def leave_numbers(directory: Path, numbers: Callable[[], Numbers]) -> None:
    """Write this process's numbers, as long as it lives and has any, on a thread of its own."""
    shared = Shared(directory)
    shared.tidy()

    def work() -> None:
        with suppress(FileNotFoundError):  # the parent is gone, and its directory with it
            while True:
                shared.write(numbers)
                time.sleep(WRITE_EACH_S)

    threading.Thread(target=work, name="lisa-numbers", daemon=True).start()


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
