"""What is measured at work: somebody sends, workers handle, ledgers tell."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import Protocol

from lisa.cli.bench.fault import Fault
from lisa.cli.bench.ledger import Ledger
from lisa.cli.bench.server import Server

__all__ = ["AtWork", "Drained", "drain", "lateness", "now_ms"]

JUST_BEFORE_S = 0.05
PATIENCE_S = 20.0


class AtWork(Protocol):
    """Lisa, the floor or a peer, with its workers running on a server."""

    server: Server
    ledger: Ledger
    slowest: float
    """Messages a second that it surely handles: time-outs are reckoned by it."""

    def send(self, count: int, due_ms: int) -> float:
        """Send messages that are all due at one instant; how many seconds that took."""

    def send_paced(self, count: int, start_ms: int, rate: float) -> float:
        """Send messages that fall due one by one, `rate` a second; how many seconds that took."""

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time of the workers so far, by part."""

    def settled(self) -> bool:
        """Whether nothing is left of what was handled."""

    def check(self) -> None:
        """Raise Fault if a worker has ended."""


def now_ms() -> int:
    """The clock that handlers read, and a server on the same machine."""
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Drained:
    """One drain.

    rate: messages a second, from the due instant to the last one's handling.
    redis_us: the server's processor time a message, from sending until nothing is left.
    cpu_us: the workers' processor time a message, by part, from just before the due instant.
    """

    count: int
    send_s: float
    rate: float
    redis_us: float
    cpu_us: dict[str, float]
    lateness_us: list[int]


def drain(work: AtWork, count: int, head_s: float) -> Drained:
    """Send messages that are due at one instant in `head_s` seconds, and wait for all.

    Raises:
        Fault: messages were sent too late or not all handled in time, or a worker ended.
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
    return Drained(count, send_s, count / seconds, redis_us, cpu_us, _late(due, handled))


def lateness(work: AtWork, count: int, rate: float, head_s: float) -> list[int]:
    """How late messages are that fall due one by one, in microseconds.

    Raises:
        Fault: as `drain`.
    """
    work.ledger.mark()
    start_ms = now_ms() + int(head_s * 1000)
    work.send_paced(count, start_ms, rate)
    _wait_until(start_ms, before_s=0.0)
    seconds = count / rate + count / work.slowest
    work.ledger.wait(count, PATIENCE_S + seconds, work.check)
    return _late(*work.ledger.read())


def wait_settled(work: AtWork) -> None:
    """Wait until nothing is left of what was handled."""
    deadline = time.monotonic() + PATIENCE_S
    while not work.settled():
        if time.monotonic() > deadline:
            raise Fault("what was handled was not settled in time")
        work.check()
        time.sleep(0.01)


def _late(due: array[int], handled: array[int]) -> list[int]:
    return [end - start for start, end in zip(due, handled, strict=True)]


def _wait_until(due_ms: int, before_s: float) -> None:
    left_s = due_ms / 1000 - before_s - time.time()
    if left_s < 0:
        raise Fault(f"sending took {-left_s:.1f} s longer than the head start")
    time.sleep(left_s)
