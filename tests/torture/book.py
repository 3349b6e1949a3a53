"""A sender's ledger, and what it is told to do.

It holds one line for each call before it is made, and one for what came of it; the module
`tests.torture.reading` reads them:

    S call low topic first count doing,... due,... ttl   a send of `count` new messages
    D call low number due                                the same id sent once more
    P call low number of due                             a new message in the place of another
    X call low number                                    a cancel
    R call low number due                                a new due time
    C call high letters                                  what Redis confirmed, letter by letter
    E call high settled error                            an error, after so many were confirmed;
                                                         by HTTP with the status that was answered

`low` and `high` are Redis's clock, microseconds: not later than the call began, not earlier than it
ended. A due is `+ms` for a delay or epoch milliseconds.
"""

from __future__ import annotations

import os
import random
import signal
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.torture.ledger import Ledger, RedisClock
from tests.torture.world import Do, number_of, topic_number

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Book", "Orders", "Pace", "delay_ms", "leaving"]


class Orders(NamedTuple):
    """What a process of the run is told by its environment."""

    number: int
    seed: int
    rate: float
    redis: str
    clock_port: int
    ledger: Path
    longest_s: float

    @classmethod
    def read(cls) -> Orders:
        env = os.environ
        return cls(
            int(env["TORTURE_PROCESS"]), int(env["TORTURE_SEED"]), float(env["TORTURE_RATE"]),
            env["TORTURE_REDIS"], int(env["TORTURE_CLOCK_PORT"]), Path(env["TORTURE_LEDGER"]),
            float(env["TORTURE_LONGEST_S"]),
        )  # fmt: skip


class Book:
    """A sender's ledger: calls and messages, each with a number of its own."""

    def __init__(self, orders: Orders) -> None:
        self.clock = RedisClock(orders.clock_port)
        self._ledger = Ledger(orders.ledger)
        self._sender = orders.number
        self._calls = count(1)
        self._sent = 0
        self._lines: list[str] = []

    def numbers(self, n: int) -> list[int]:
        """Numbers for new messages."""
        first, self._sent = self._sent, self._sent + n
        return [number_of(self._sender, first + k) for k in range(n)]

    def attempt(self, kind: str, *fields: object) -> int:
        """Note a call that is about to be made; its number. To be followed by `commit`."""
        call = next(self._calls)
        low = self.clock.now().low
        self._lines.append("\t".join(map(str, (kind, call, low, *fields))))
        return call

    def send(
        self, topic: str, numbers: Sequence[int], does: Sequence[Do], dues: Sequence[str],
        ttl_ms: int = 0,
    ) -> int:  # fmt: skip
        """Note a send of new messages."""
        return self.attempt(
            "S", topic_number(topic), numbers[0], len(numbers), _alike([int(do) for do in does]),
            _alike(dues), ttl_ms,
        )  # fmt: skip

    def commit(self) -> None:
        """Return once everything noted is on disk; calls may be made now."""
        self._ledger.write(self._lines)
        self._lines.clear()
        self._ledger.commit()

    def confirm(self, call: int, letters: str) -> None:
        """Note what Redis confirmed."""
        self._ledger.write([f"C\t{call}\t{self.clock.now().high}\t{letters}"])

    def fail(self, call: int, error: Exception) -> None:
        """Note an error: the call may have arrived, or not."""
        settled = getattr(error, "sent", None) or 0
        name = f"{type(error).__name__} {getattr(error, 'status', '') or ''}".rstrip()
        self._ledger.write([f"E\t{call}\t{self.clock.now().high}\t{settled}\t{name}"])


def _alike(values: Sequence[object]) -> str:
    if all(value == values[0] for value in values):
        return str(values[0])
    return ",".join(map(str, values))


class Pace:
    """So many a second, without making up for long pauses."""

    def __init__(self, rate: float, most: int) -> None:
        self._rate = rate
        self._most = most
        self._credit = 0.0
        self._last = time.monotonic()

    def take(self) -> int:
        """How many it is time for."""
        now = time.monotonic()
        self._credit = min(self._credit + (now - self._last) * self._rate, self._most)
        self._last = now
        n = int(self._credit)
        self._credit -= n
        return n


def leaving() -> list[bool]:
    """A list that is not empty once the process was told to end."""
    told: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    return told


def delay_ms(chance: random.Random, longest_s: float) -> int:
    """Some are due at once, most soon, a few late."""
    draw = chance.random()
    if draw < 0.1:
        return 0
    return int(chance.uniform(50, 5_000 if draw < 0.9 else longest_s * 1000))
