"""How long calls hold the server up: by its own clock, and as another client sees it."""

from __future__ import annotations

import multiprocessing
import re
import time
from collections import defaultdict
from collections.abc import Sequence
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NamedTuple, Self

import redis

from lisa.core.store import SyncStore
from lisa.core.transitions.base import Transition
from lisa.core.transitions.enqueue import Enqueue, OnDuplicate

__all__ = ["BOUND_MS", "COUNTING", "Call", "Observer", "Stopwatch", "quantile", "summary"]

BOUND_MS = 5.0
PING_EVERY_S = 0.001
COUNTING = "(counting)"
COUNT = "local n = 0 for i = 1, tonumber(ARGV[1]) do n = n + i end return n"
"""Takes time and does nothing."""


class Call(NamedTuple):
    """One call: how long it took by the server's clock, and how much of that its thread had a core.

    The difference is what other processes of this machine took. `number` counts before it.
    """

    took_ms: float
    own_ms: float
    number: int


class Stopwatch:
    """Runs transitions, and notes each call by the name of its script."""

    def __init__(self, store: SyncStore, pid: int) -> None:
        self._store = store
        self._schedule = Path(f"/proc/{pid}/schedstat")
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self.counted_ms: list[float] = []

    def run(self, transition: Transition[Any]) -> Any:
        """One transition, timed."""
        before = self._clocks("evalsha")
        reply = self._store.call(transition)
        self._note(label(transition), before, self._clocks("evalsha"))
        return reply

    def count(self, loops: int) -> float:
        """A script that does nothing but count, timed; its milliseconds."""
        before = self._clocks("eval")
        self._store.ask("EVAL", COUNT, 0, loops)
        self._note(COUNTING, before, self._clocks("eval"))
        self.counted_ms.append(self.calls[COUNTING][-1].own_ms)
        return self.counted_ms[-1]

    def forget(self) -> None:
        """All that was noted so far."""
        self.calls.clear()
        self.counted_ms.clear()

    def _note(self, name: str, before: tuple[int, int], after: tuple[int, int]) -> None:
        took_ms, core_ms = (after[0] - before[0]) / 1e3, (after[1] - before[1]) / 1e6
        # The thread ran before and after the call as well, some 0.1 ms, or for a cron of its own.
        own_ms = min(took_ms, core_ms)
        self.calls[name].append(Call(took_ms, own_ms, len(self.counted_ms)))

    def _clocks(self, command: str) -> tuple[int, int]:
        """Microseconds that the command has taken so far, nanoseconds that the thread has run.

        The server waits for us when it is asked: the system's count of the latter is up to date.
        """
        stats = self._store.ask("INFO", "commandstats").decode()
        found = re.search(rf"cmdstat_{command}:calls=\d+,usec=(\d+)", stats)
        return int(found[1]) if found else 0, int(self._schedule.read_text("ascii").split()[0])


def label(transition: Transition[Any]) -> str:
    """Its script; of sends also which, as their costs differ."""
    if not isinstance(transition, Enqueue):
        return transition.script
    if transition.are_ids_new:
        return "enqueue, new ids"
    kind = "replaced" if transition.on_duplicate is OnDuplicate.REPLACE else "own ids"
    return f"enqueue, {kind}"


class Observer:
    """Another client, in a process of its own, that pings a thousand times a second."""

    def __init__(self, url: str) -> None:
        spawning = multiprocessing.get_context("spawn")
        self._stop = spawning.Event()
        self._ours, theirs = spawning.Pipe(duplex=False)
        self._process = spawning.Process(target=_observe, args=(url, self._stop, theirs))
        self.seen_ms: list[float] = []

    def __enter__(self) -> Self:
        self._process.start()
        self._ours.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.seen_ms = self._ours.recv()
        self._process.join()


def _observe(url: str, stop: Event, theirs: Any) -> None:
    seen: list[float] = []
    with redis.Redis.from_url(url) as client:
        client.ping()
        theirs.send(None)
        while not stop.is_set():
            began = time.perf_counter()
            client.ping()
            seen.append((time.perf_counter() - began) * 1e3)
            time.sleep(PING_EVERY_S)
    theirs.send(seen)


def quantile(values: Sequence[float], part: float) -> float:
    """The value that so large a part of them does not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def summary(calls: Sequence[Call], counted_ms: Sequence[float]) -> dict[str, float]:
    """What is told of one script's calls. `counted_ms`: how long counting took, time after time.

    At full speed a call takes less by as much as counting was slower, both before and after it,
    than at its best. (A stall that meets one of the three alone slows no other.)
    """
    own, took = [one.own_ms for one in calls], [one.took_ms for one in calls]
    best = min(counted_ms)
    fast = [one.own_ms * best / min(counted_ms[max(0, one.number - 1) : one.number + 1])
            for one in calls]  # fmt: skip
    over = sum(one >= BOUND_MS for one in own)
    return {
        "calls": len(calls),
        "least_ms": round(min(own), 3),
        "median_ms": round(quantile(own, 0.5), 3),
        "p99_ms": round(quantile(own, 0.99), 3),
        "max_ms": round(max(own), 3),
        "over": over,
        "over_percent": round(100 * over / len(own), 2),
        "took_max_ms": round(max(took), 3),
        "fast_median_ms": round(quantile(fast, 0.5), 3),
        "fast_p99_9_ms": round(quantile(fast, 0.999), 3),
        "fast_max_ms": round(max(fast), 3),
        "fast_over": sum(one >= BOUND_MS for one in fast),
    }
