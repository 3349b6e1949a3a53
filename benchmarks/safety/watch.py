"""Measures how long calls block the server, by its own clock and from another client."""

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

from lisa.core.store.store import SyncStore
from lisa.core.transitions.base import Transition
from lisa.core.transitions.enqueue import Enqueue, OnDuplicate

BOUND_MS = 5.0
PING_EVERY_S = 0.001
COUNTING = "(counting)"
COUNT = "local n = 0 for i = 1, tonumber(ARGV[1]) do n = n + i end return n"
"""A script that only takes time."""


class Call(NamedTuple):
    """One call: its wall time and its CPU time; `number` is the number of countings before it.

    The difference between the times is the share of other processes.
    """

    took_ms: float
    own_ms: float
    number: int


class Stopwatch:
    """Runs transitions and records each call by script name."""

    def __init__(self, store: SyncStore, pid: int) -> None:
        self._store = store
        self._schedule = Path(f"/proc/{pid}/schedstat")
        self.calls: dict[str, list[Call]] = defaultdict(list)
        self.counted_ms: list[float] = []

    def run(self, transition: Transition[Any], about: str = "") -> Any:
        """Run and time a transition; `about` is a suffix for its name."""
        before = self._clocks("evalsha")
        reply = self._store.call(transition)
        self._note(label(transition) + about, before, self._clocks("evalsha"))
        return reply

    def count(self, loops: int) -> float:
        """Run and time a script that only counts; returns its milliseconds."""
        before = self._clocks("eval")
        self._store.ask("EVAL", COUNT, 0, loops)
        self._note(COUNTING, before, self._clocks("eval"))
        self.counted_ms.append(self.calls[COUNTING][-1].own_ms)
        return self.counted_ms[-1]

    def forget(self) -> None:
        """Discard all recorded calls."""
        self.calls.clear()
        self.counted_ms.clear()

    def _note(self, name: str, before: tuple[int, int], after: tuple[int, int]) -> None:
        took_ms, core_ms = (after[0] - before[0]) / 1e3, (after[1] - before[1]) / 1e6
        # The thread also ran for about 0.1 ms before and after the call, or for background work.
        own_ms = min(took_ms, core_ms)
        self.calls[name].append(Call(took_ms, own_ms, len(self.counted_ms)))

    def _clocks(self, command: str) -> tuple[int, int]:
        """Total time of the command in microseconds, and of the thread in nanoseconds.

        The server is idle during this call, so the thread's time is up to date.
        """
        stats = self._store.ask("INFO", "commandstats").decode()
        found = re.search(rf"cmdstat_{command}:calls=\d+,usec=(\d+)", stats)
        return int(found[1]) if found else 0, int(self._schedule.read_text("ascii").split()[0])


def label(transition: Transition[Any]) -> str:
    """The script's name; sends are distinguished by kind, because their costs differ."""
    if not isinstance(transition, Enqueue):
        return transition.script
    if transition.are_ids_new:
        return "enqueue, new ids"
    kind = "replaced" if transition.on_duplicate is OnDuplicate.REPLACE else "own ids"
    return f"enqueue, {kind}"


class Observer:
    """Another client, in its own process, that pings a thousand times per second."""

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
    """The quantile `part` (0 to 1) of some values."""
    return sorted(values)[min(len(values) - 1, int(len(values) * part))]


def summary(calls: Sequence[Call], counted_ms: Sequence[float]) -> dict[str, float]:
    """Summarize one script's calls; `counted_ms` are the times of all countings.

    The times at full speed are corrected by the slowdown of counting: the smaller of those before
    and after the call, relative to the best counting.
    """
    own, took = [one.own_ms for one in calls], [one.took_ms for one in calls]
    best = min(counted_ms)
    fast = [
        one.own_ms * best / min(counted_ms[max(0, one.number - 1) : one.number + 1])
        for one in calls
    ]
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
