"""The cost of promoting a message with a small and a large backlog."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from benchmarks.bench.floor import BODY
from benchmarks.bench.measures import Run
from benchmarks.bench.results import Results
from benchmarks.bench.server import BenchServer, debian_binary, fresh_server
from benchmarks.bench.work import TOPIC, now_ms, prepared, store_on
from benchmarks.comparison.sizes import FurtherSizes
from lisa import Producer
from lisa.admin.topics import set_options
from lisa.core.store.store import SyncStore
from lisa.core.transitions.promote import Promote

NAME = "backlog"
ROUNDS = 3
AHEAD_MS = 200
ON_DEBIAN = "lisa on redis-server"
NO_LIMIT = "1000000000"
BATCH = 500


def figure(waiting: int, what: str = "redis") -> str:
    """The name of a figure, `redis` or `wall`, for a number of waiting messages."""
    return f"{what} with {waiting:,} waiting"


def amounts(results: Results) -> list[int]:
    """The measured backlogs in ascending order."""
    names = [one.key.name for one in results.figures() if one.key[:2] == (NAME, "lisa")]
    found = (name.removesuffix(" waiting").rpartition(" ")[2] for name in names)
    return sorted({int(amount.replace(",", "")) for amount in found})


def measure(run: Run, sizes: FurtherSizes) -> None:
    """Figures: server CPU time and wall time per promoted message, in microseconds.

    Each backlog has its own server; they are measured in turns. Runs on the embedded server and on
    `redis-server` if it is on PATH, because their allocators differ.
    """
    _on(run, sizes, "lisa", None)
    binary = None if run.sizes.mode == "quick" else debian_binary()
    if binary is not None:
        _on(run, sizes, ON_DEBIAN, binary)


def _on(run: Run, sizes: FurtherSizes, subject: str, binary: Path | None) -> None:
    with ExitStack() as stack:
        backlogs = []
        for waiting in sizes.waiting:
            run.say(f"filling a backlog of {waiting:,}")
            backlogs.append(stack.enter_context(_backlog(waiting, binary)))
        for _ in run.repeats("promoting before a backlog"):
            for _turn in range(ROUNDS):
                for backlog in backlogs:
                    _round(run, subject, backlog, sizes.promoted)


class _Backlog(NamedTuple):
    waiting: int
    server: BenchServer
    producer: Producer
    store: SyncStore


@contextmanager
def _backlog(waiting: int, binary: Path | None) -> Iterator[_Backlog]:
    with (
        fresh_server(binary) as server,
        prepared(server) as producer,
        closing(store_on(server)) as store,
    ):
        store.drive(set_options(store, TOPIC, {"max_ready": NO_LIMIT}))
        # Spread due times as in real backlogs: equal scores would sort by id alone.
        for number, start in enumerate(range(0, waiting, BATCH)):
            some = [BODY] * min(BATCH, waiting - start)
            producer.send_many(TOPIC, some, delay=timedelta(days=1, seconds=number))
        yield _Backlog(waiting, server, producer, store)


def _round(run: Run, subject: str, backlog: _Backlog, count: int) -> None:
    waiting, server, producer, store = backlog
    due_ms = now_ms() + AHEAD_MS + count // 50
    producer.send_many(TOPIC, [BODY] * count, at_ms=due_ms)
    time.sleep(max(0.0, due_ms / 1000 - time.time()) + 0.002)
    cpu_us, began, moved = server.cpu_us(), time.perf_counter(), 0
    while step := store.call(Promote(TOPIC)).moved:
        moved += step
    wall_us = (time.perf_counter() - began) * 1e6
    redis_us = server.cpu_us() - cpu_us
    run.results.add(NAME, subject, figure(waiting), redis_us / moved, "us")
    run.results.add(NAME, subject, figure(waiting, "wall"), wall_us / moved, "us")
