"""Measurements with running workers: send messages, and read the ledgers of the handlers."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import Protocol

from lisa.cli.bench.fault import Fault
from lisa.cli.bench.ledger import Ledger
from lisa.cli.bench.server import BenchServer

JUST_BEFORE_S = 0.05
PATIENCE_S = 20.0


class AtWork(Protocol):
    """Lisa, the floor or a peer, with running workers."""

    server: BenchServer
    ledger: Ledger
    slowest: float
    """Lower bound of the messages handled per second, for time-outs."""

    def send(self, count: int, due_ms: int) -> float:
        """Send messages that are due at one instant; returns the seconds taken."""

    def send_paced(self, count: int, start_ms: int, rate: float) -> float:
        """Send messages that fall due at `rate` per second; returns the seconds taken."""

    def cpu_seconds(self) -> dict[str, float]:
        """CPU time of the workers so far, by part."""

    def settled(self) -> bool:
        """Whether all handled messages are removed."""

    def check(self) -> None:
        """Raise Fault if a worker has ended."""


def now_ms() -> int:
    """The current time in ms, by the clock that handlers and the server share."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Drained:
    """The result of a drain.

    rate: messages per second, from the due time until the last message is handled.
    redis_us: the server's CPU time per message, from sending until all messages are removed.
    cpu_us: the workers' CPU time per message, by part, from just before the due time.
    """

    send_s: float
    rate: float
    redis_us: float
    cpu_us: dict[str, float]
    lateness_us: list[int]


def drain(work: AtWork, count: int, head_s: float) -> Drained:
    """Send messages that are due in `head_s` seconds, and wait until all are handled.

    Raises:
        Fault: sending took too long, not all messages were handled in time, or a worker ended.
    """
    work.ledger.mark()
    before_us = work.server.cpu_us()
    due_ms = now_ms() + int(head_s * 1000)
    send_s = work.send(count, due_ms)
    _wait_until(due_ms, before_s=JUST_BEFORE_S)
    cpu = work.cpu_seconds()
    work.ledger.wait(count, PATIENCE_S + count / work.slowest, work.check)
    wait_settled(work)
    cpu_us = {part: (s - cpu[part]) * 1e6 / count for part, s in work.cpu_seconds().items()}
    redis_us = (work.server.cpu_us() - before_us) / count
    due, handled = work.ledger.read()
    seconds = max(max(handled) / 1e6 - due_ms / 1000, 1e-6)
    return Drained(send_s, count / seconds, redis_us, cpu_us, _late(due, handled))


@dataclass(frozen=True, slots=True)
class Paced:
    """The result of a constant rate.

    redis_us, cpu_us: CPU time per message of the server and of the workers by part, from the first
        due time until all messages are removed: without sending.
    """

    redis_us: float
    cpu_us: dict[str, float]
    lateness_us: list[int]


def paced(work: AtWork, count: int, rate: float, head_s: float) -> Paced:
    """Send messages that fall due at `rate` per second, and wait until all are handled.

    Raises:
        Fault: as for `drain`.
    """
    work.ledger.mark()
    start_ms = now_ms() + int(head_s * 1000)
    work.send_paced(count, start_ms, rate)
    _wait_until(start_ms, before_s=0.0)
    before_us, cpu = work.server.cpu_us(), work.cpu_seconds()
    seconds = count / rate + count / work.slowest
    work.ledger.wait(count, PATIENCE_S + seconds, work.check)
    wait_settled(work)
    cpu_us = {part: (s - cpu[part]) * 1e6 / count for part, s in work.cpu_seconds().items()}
    redis_us = (work.server.cpu_us() - before_us) / count
    return Paced(redis_us, cpu_us, _late(*work.ledger.read()))


def wait_settled(work: AtWork) -> None:
    """Wait until all handled messages are removed."""
    deadline = time.monotonic() + PATIENCE_S
    while not work.settled():
        if time.monotonic() > deadline:
            raise Fault("the handled messages were not removed in time")
        work.check()
        time.sleep(0.01)


def _late(due: array[int], handled: array[int]) -> list[int]:
    return [end - start for start, end in zip(due, handled, strict=True)]


def _wait_until(due_ms: int, before_s: float) -> None:
    left_s = due_ms / 1000 - before_s - time.time()
    if left_s < 0:
        raise Fault(f"sending took {-left_s:.1f} s longer than the head start")
    time.sleep(left_s)
