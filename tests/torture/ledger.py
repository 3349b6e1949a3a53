"""The record that each process of a torture run keeps outside of Redis, and its clock.

A ledger is an append-only file of tab-separated lines. An attempt is on disk (fsync) before it is
made; its result is written as soon as it is known, in one write that kill -9 cannot undo, and is on
disk with the next commit.
"""

from __future__ import annotations

import datetime as dt
import math
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

ASK = b"*1\r\n$4\r\nTIME\r\n"
PATIENCE_S = 0.5
ASK_AGAIN_S = 0.2
FORGET_S = 10.0
SHIFT = "TORTURE_CLOCK_SHIFT_S"

_time, _time_ns = time.time, time.time_ns
_datetime = dt.datetime


def shift_clock() -> None:
    """Set this process's clock off by the environment's offset, for all Python code.

    To be called before anything else reads a clock, or imports `datetime.datetime`.
    """
    shift_s = int(os.environ.get(SHIFT, "0"))
    if shift_s:
        time.time = lambda: _time() + shift_s
        time.time_ns = lambda: _time_ns() + shift_s * 1_000_000_000
        dt.datetime = _shifted(dt.timedelta(seconds=shift_s))  # type: ignore[misc]


def _shifted(shift: dt.timedelta) -> type[dt.datetime]:
    """A `datetime` whose clock is off. `today` is unchanged: it calls `time`."""

    class Meta(type):
        def __instancecheck__(cls, one: object) -> bool:
            return isinstance(one, _datetime)

    class Shifted(_datetime, metaclass=Meta):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Self:
            return super().now(tz) + shift

        @classmethod
        def utcnow(cls) -> Self:
            return cls.now(dt.UTC).replace(tzinfo=None)

    return Shifted


class Ledger:
    """One process's append-only file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def write(self, lines: Iterable[str]) -> None:
        """Append lines with one write: they remain even if the process is killed."""
        data = "".join(f"{line}\n" for line in lines).encode()
        if data:
            written = os.write(self._file, data)
            assert written == len(data), f"only {written} of {len(data)} bytes fit on the disk"

    def commit(self) -> None:
        """Return once all lines are on disk."""
        os.fdatasync(self._file)

    def commit_forever(self, every_s: float) -> None:
        """Commit repeatedly, on a separate thread."""

        def work() -> None:
            while True:
                time.sleep(every_s)
                self.commit()

        threading.Thread(target=work, name="ledger", daemon=True).start()


class Span(NamedTuple):
    """Lower and upper bounds of an instant by Redis's clock, in microseconds."""

    low: int
    high: int
    was_asked: bool
    """False: the server could not be asked; the bounds follow from its last answers."""


class RedisClock:
    """Redis's clock, asked on a direct connection to the server; threads may share one.

    Each answer bounds the offset between this process's monotonic clock and Redis's: the server
    read its clock after the request was sent and before the answer arrived. While the server is
    down, the last bounds are used.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._local = threading.local()
        self._lock = threading.Lock()
        self._low, self._high = -math.inf, math.inf
        self._since = self._answered = -math.inf
        self._newest_us = 0
        self._ask_again = 0.0

    def ask(self) -> Span:
        """Ask the server now."""
        if time.monotonic() >= self._ask_again:
            try:
                self._ask()
            except (OSError, ValueError, IndexError):
                self._local.socket = None
                self._ask_again = time.monotonic() + ASK_AGAIN_S
            else:
                return self.now(was_asked=True)
        return self.now(was_asked=False)

    def at_least(self, due_ms: int, fresh_s: float = 1.0) -> Span:
        """The current time: asks again unless a recent answer proves that `due_ms` has passed."""
        if self._newest_us < due_ms * 1000 or time.monotonic() - self._answered > fresh_s:
            return self.ask()
        return self.now(was_asked=True)

    def now(self, *, was_asked: bool = False) -> Span:
        """The current time according to previous answers."""
        now_us = time.monotonic() * 1e6
        if self._low == -math.inf:  # the server was never reached: same machine, same clock
            us = _time_ns() // 1000
            return Span(us, us, was_asked=False)
        low = max(int(now_us + self._low), self._newest_us)
        return Span(low, int(now_us + self._high) + 1, was_asked)

    def _ask(self) -> None:
        connection: socket.socket | None = getattr(self._local, "socket", None)
        if connection is None:
            connection = socket.create_connection(("127.0.0.1", self._port), PATIENCE_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._local.socket = connection
        sent = time.monotonic()
        connection.sendall(ASK)
        answer = connection.recv(200)
        while answer.count(b"\r\n") < 5 and answer.startswith(b"*2"):
            answer += connection.recv(200)
        received = time.monotonic()
        lines = answer.split(b"\r\n")
        self._learn(int(lines[2]) * 1_000_000 + int(lines[4]), sent, received)

    def _learn(self, us: int, sent: float, received: float) -> None:
        low, high = us - received * 1e6, us - sent * 1e6
        with self._lock:
            if received - self._since > FORGET_S:  # the clocks of one machine may be set, too
                self._low, self._high, self._since = low, high, received
            self._low, self._high = max(self._low, low), min(self._high, high)
            self._newest_us = max(self._newest_us, us)
            self._answered = max(self._answered, received)
