"""A sender's ledger, and its orders.

It holds one line for each call before it is made, and one for its result; the module
`tests.torture.reading` reads them:

    S call low topic first count doing,... due,... ttl   a send of `count` new messages
    D call low number due                                the same id sent once more
    P call low number of due                             a new message in the place of another
    X call low number                                    a cancel
    R call low number due                                a new due time
    C call high letters                                  what Redis confirmed, letter by letter
    E call high settled error                            an error, after `settled` confirmations;
                                                         for HTTP with the status code

`low` and `high` are Redis's clock in microseconds: bounds for the begin and the end of the call. A
due is `+ms` for a delay or epoch milliseconds.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from lisa import LisaError  # not from its module, which an earlier build has elsewhere
from tests.torture.ledger import Ledger, RedisClock
from tests.torture.world import Do, number_of, topic_number

if TYPE_CHECKING:
    from collections.abc import Sequence


class Orders(NamedTuple):
    """What a process of the run gets from its environment."""

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
            int(env["TORTURE_PROCESS"]),
            int(env["TORTURE_SEED"]),
            float(env["TORTURE_RATE"]),
            env["TORTURE_REDIS"],
            int(env["TORTURE_CLOCK_PORT"]),
            Path(env["TORTURE_LEDGER"]),
            float(env["TORTURE_LONGEST_S"]),
        )


class Book:
    """A sender's ledger: calls and messages, each with its own number."""

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
        """Note a call about to be made; returns its number. To be followed by `commit`."""
        call = next(self._calls)
        low = self.clock.now().low
        self._lines.append("\t".join(map(str, (kind, call, low, *fields))))
        return call

    def send(
        self,
        topic: str,
        numbers: Sequence[int],
        does: Sequence[Do],
        dues: Sequence[str],
        ttl_ms: int = 0,
    ) -> int:
        """Note a send of new messages."""
        return self.attempt(
            "S",
            topic_number(topic),
            numbers[0],
            len(numbers),
            _alike([int(do) for do in does]),
            _alike(dues),
            ttl_ms,
        )

    def commit(self) -> None:
        """Return once all notes are on disk; calls may be made now."""
        self._ledger.write(self._lines)
        self._lines.clear()
        self._ledger.commit()

    def confirm(self, call: int, letters: str) -> None:
        """Note what Redis confirmed."""
        self._ledger.write([f"C\t{call}\t{self.clock.now().high}\t{letters}"])

    def fail(self, call: int, error: Exception) -> None:
        """Note an error: the call may or may not have arrived."""
        if type(error) is LisaError:  # an error of the server without a class of its own
            sys.stderr.write(f"call {call}: {error!r}, caused by {error.__cause__!r}\n")
        settled = getattr(error, "sent", None) or 0
        name = f"{type(error).__name__} {getattr(error, 'status', '') or ''}".rstrip()
        self._ledger.write([f"E\t{call}\t{self.clock.now().high}\t{settled}\t{name}"])


def _alike(values: Sequence[object]) -> str:
    if all(value == values[0] for value in values):
        return str(values[0])
    return ",".join(map(str, values))


class Pace:
    """Limits a rate, without making up for long pauses."""

    def __init__(self, rate: float, most: int) -> None:
        self._rate = rate
        self._most = most
        self._credit = 0.0
        self._last = time.monotonic()

    def take(self) -> int:
        """How many are due now."""
        now = time.monotonic()
        self._credit = min(self._credit + (now - self._last) * self._rate, self._most)
        self._last = now
        n = int(self._credit)
        self._credit -= n
        return n


def leaving() -> list[bool]:
    """A list that is not empty once SIGTERM has arrived."""
    told: list[bool] = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    return told


def delay_ms(chance: random.Random, longest_s: float) -> int:
    """Some messages are due immediately, most soon, a few late."""
    draw = chance.random()
    if draw < 0.1:
        return 0
    return int(chance.uniform(50, 5_000 if draw < 0.9 else longest_s * 1000))
