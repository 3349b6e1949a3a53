"""Bulk sends: Lisa's `send_many` against MSET + ZADD, 500 per call."""

from __future__ import annotations

import time
from datetime import timedelta

from lisa.cli.bench.floor import BODY, Floor
from lisa.cli.bench.run import Run
from lisa.cli.bench.server import BenchServer, fresh_server
from lisa.cli.bench.subject import TOPIC, prepared

NAME = "bulk_send"


def measure(run: Run) -> None:
    """Figures: rate, and the sender's and the server's CPU time per message."""
    for _ in run.repeats("sending in bulk"):
        with fresh_server() as server:
            _floor(run, server)
        with fresh_server() as server:
            _lisa(run, server)


def _floor(run: Run, server: BenchServer) -> None:
    count = run.sizes.bulk
    floor = Floor(server.client)
    due_ms = time.time_ns() // 1_000_000 + 3_600_000
    messages = {f"{number:022d}": due_ms for number in range(count)}
    floor.send({f"first {number}": due_ms for number in range(500)})
    clocks = _Clocks(server)
    floor.send(messages)
    clocks.add(run, "floor", count)


def _lisa(run: Run, server: BenchServer) -> None:
    count = run.sizes.bulk
    with prepared(server) as producer:
        producer.send_many(TOPIC, [BODY] * 500, delay=timedelta(hours=1))
        clocks = _Clocks(server)
        producer.send_many(TOPIC, [BODY] * count, delay=timedelta(hours=1))
        clocks.add(run, "lisa", count)


class _Clocks:
    def __init__(self, server: BenchServer) -> None:
        self._server = server
        self._redis_us = server.cpu_us()
        self._cpu_s = time.process_time()
        self._began_s = time.perf_counter()

    def add(self, run: Run, subject: str, count: int) -> None:
        wall_s = time.perf_counter() - self._began_s
        cpu_s = time.process_time() - self._cpu_s
        redis_us = self._server.cpu_us() - self._redis_us
        run.results.add(NAME, subject, "rate", count / wall_s, "1/s")
        run.results.add(NAME, subject, "python", cpu_s * 1e6 / count, "us")
        run.results.add(NAME, subject, "redis", redis_us / count, "us")
