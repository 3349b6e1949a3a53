"""The records that each process of a torture run keeps outside of Redis, and its clock.

A ledger is an append-only file of tab-separated lines. An attempt is on disk (fsync) before it is
made; its result is written as soon as it is known, in one write that kill -9 cannot undo, and is on
disk with the next commit. `tests.torture.reading` reads all of them.
"""

from __future__ import annotations

import json
import math
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple

from lisa import LisaError  # not from its module, which an earlier build has elsewhere
from tests.torture.world import Do, Verdict, number_of, topic_number

ASK = b"*1\r\n$4\r\nTIME\r\n"
PATIENCE_S = 0.5
ASK_AGAIN_S = 0.2
FORGET_S = 10.0


class Orders(NamedTuple):
    """What a process of the run gets from the stage, in its environment.

    shift_s: how far its clock is off. is_current: no role is of an earlier build, which may know
    neither windows nor keys. waits_ms: how long a message may wait for its window.
    """

    number: int
    kind: str
    ledger: str
    clock_port: int
    door_port: int
    gateway: str
    redis: str
    seed: int
    rate: float
    longest_s: float
    shift_s: int
    has_schedules: bool
    is_current: bool
    waits_ms: float

    @classmethod
    def read(cls) -> Orders:
        return cls(**json.loads(os.environ["TORTURE_ORDERS"]))


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

    def __init__(self, port: int, shift_s: int = 0) -> None:
        self._port = port
        self._shift_s = shift_s
        self._local = threading.local()
        self._lock = threading.Lock()
        self._low, self._high = -math.inf, math.inf
        self._since = self._answered = -math.inf
        self._newest_us = 0
        self._ask_again = 0.0

    def ask(self) -> Span:
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
        now_us = time.monotonic() * 1e6
        if self._low == -math.inf:  # the server was never reached: same machine, same clock
            us = time.time_ns() // 1000 - self._shift_s * 1_000_000
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
        us = int(lines[2]) * 1_000_000 + int(lines[4])
        low, high = us - received * 1e6, us - sent * 1e6
        with self._lock:
            if received - self._since > FORGET_S:  # the clocks of one machine may be set, too
                self._low, self._high, self._since = low, high, received
            self._low, self._high = max(self._low, low), min(self._high, high)
            self._newest_us = max(self._newest_us, us)
            self._answered = max(self._answered, received)


class Book:
    """A sender's ledger: one line for each call before it is made, and one for its result.

        S call low topic first count doing,... due,... ttl key
                                                             a send of `count` new messages
        D call low number due                                the same id sent once more
        P call low topic number of due                       a new message in the place of another
        U call low topic number of due                       the same, with the other's due time
        X call low number                                    a cancel
        R call low number due                                a new due time
        C call high letters                                  what Redis confirmed, letter by letter;
                                                             of a coalesced send, a letter and which
                                                             of the two ids of its key it took
        E call high settled error                            an error, after `settled`
                                                             confirmations; for HTTP with the
                                                             status code

    `low` and `high` are Redis's clock in microseconds: bounds for the begin and the end of the
    call. A due is `+ms` for a delay or epoch milliseconds. A key is the number of one that no other
    sender uses, or 0.
    """

    def __init__(self, orders: Orders) -> None:
        self.clock = RedisClock(orders.clock_port, orders.shift_s)
        self._ledger = Ledger(Path(orders.ledger))
        self._sender = orders.number
        self._calls = count(1)
        self._sent = 0
        self._lines: list[str] = []

    def numbers(self, n: int) -> list[int]:
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
        *,
        ttl: int = 0,
        key: int = 0,
    ) -> int:
        doing, due = _alike(",", [str(int(do)) for do in does]), _alike(",", dues)
        number = topic_number(topic)
        return self.attempt("S", number, numbers[0], len(numbers), doing, due, ttl, key)

    def commit(self) -> None:
        """Return once all notes are on disk; calls may be made now."""
        self._ledger.write(self._lines)
        self._lines.clear()
        self._ledger.commit()

    def confirm(self, call: int, *letters: str) -> None:
        self._ledger.write([f"C\t{call}\t{self.clock.now().high}\t{_alike('', letters)}"])

    def fail(self, call: int, error: Exception) -> None:
        """Note an error: the call may or may not have arrived."""
        if type(error) is LisaError:  # an error of the server without a class of its own
            sys.stderr.write(f"call {call}: {error!r}, caused by {error.__cause__!r}\n")
        settled = getattr(error, "sent", None) or 0
        name = f"{type(error).__name__} {getattr(error, 'status', '') or ''}".rstrip()
        self._ledger.write([f"E\t{call}\t{self.clock.now().high}\t{settled}\t{name}"])


def _alike(separator: str, values: Sequence[str]) -> str:
    """The values, or the only one if all are alike."""
    return values[0] if len(set(values)) == 1 else separator.join(values)


class Pace:
    """Limits a rate, without making up for pauses of more than a second."""

    def __init__(self, rate: float) -> None:
        self._rate, self._credit, self._last = rate, 0.0, time.monotonic()

    def take(self) -> int:
        now = time.monotonic()
        credit = self._credit + (now - self._last) * self._rate
        self._credit, self._last = min(credit, max(1.0, self._rate)), now
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


COMMIT_EVERY_S = 0.5
STALL_S = 0.5
TICK_S = 0.1
SLOW_S, SLOW_OF = 0.05, 10
"""On a busy machine, this many requests in a row take this long on average."""


class Handling(NamedTuple):
    number: int
    do: Do
    place: int
    attempt: int
    due_ms: int
    begin: Span


class Diary:
    """A handler's ledger.

    A line is ten integers: message, place, attempt, due (ms), earliest begin and latest end by
    Redis's clock (us; 0 while running), verdict, whether the clock was asked, latest begin and
    earliest end. A handling is recorded when it begins, and again when it ends. Another file has
    the times at which the process or the server stood still.
    """

    def __init__(self, orders: Orders) -> None:
        path = Path(orders.ledger)
        self._ledger, self._stalls = Ledger(path), Ledger(path.with_suffix(".stalls"))
        self._clock = RedisClock(orders.clock_port, orders.shift_s)
        self._door = RedisClock(orders.door_port, orders.shift_s)
        for work in (self._watch, self._watch_way, self._commit):
            threading.Thread(target=work, name="diary", daemon=True).start()

    def begin(self, place: int, body: list[int], attempt: int, due_ms: int) -> Handling:
        number, do, *_ = body
        return Handling(number, Do(do), place, attempt, due_ms, self._clock.at_least(due_ms))

    def note(self, *handlings: Handling, verdict: Verdict) -> None:
        """Note that handlings begin or how they ended, before Lisa learns of it."""
        now = self._clock.now()
        end_from, end = (0, 0) if verdict is Verdict.BEGUN else (now.low, now.high)
        lines = []
        for number, _, place, attempt, due_ms, (low, high, was_asked) in handlings:
            begin = low if was_asked else high
            times = f"{due_ms}\t{begin}\t{end}\t{verdict}\t{int(was_asked)}\t{high}\t{end_from}"
            lines.append(f"{number}\t{place}\t{attempt}\t{times}")
        self._ledger.write(lines)

    def _commit(self) -> None:
        while True:
            time.sleep(COMMIT_EVERY_S)
            self._ledger.commit()

    def _watch(self) -> None:
        """Note when the process was not scheduled, or the server did not answer."""
        before = self._clock.ask()
        while True:
            time.sleep(TICK_S)
            now = self._clock.ask()
            if now.low - before.low > (TICK_S + STALL_S) * 1e6:
                self._stalls.write([f"{before.low}\t{now.low}"])
            before = now

    def _watch_way(self) -> None:
        """Note when all answers were slow for some time.

        A heartbeat that makes one request after the other may then be late without a defect.
        """
        while True:
            began, took_s = self._clock.now(), 0.0
            for _ in range(SLOW_OF):
                asked = time.monotonic()
                self._door.ask()
                took_s += time.monotonic() - asked
                time.sleep(TICK_S)
            if took_s > SLOW_OF * SLOW_S:
                self._stalls.write([f"{began.low}\t{self._clock.now().low}"])
