"""Concurrent sends: a hundred asyncio tasks, each sending one message at a time."""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta

from lisa import AsyncProducer
from lisa.cli.bench.floor import BODY
from lisa.cli.bench.run import Run
from lisa.cli.bench.server import BenchServer, fresh_server
from lisa.cli.bench.subject import TOPIC, prepared

NAME = "concurrent_send"
TASKS = 100
HOUR = timedelta(hours=1)


def measure(run: Run) -> None:
    """Figures: messages per second with sequential sends and with a hundred tasks."""
    for _ in run.repeats("sending from many tasks"):
        with fresh_server() as server, prepared(server) as producer:
            count = max(TASKS, run.sizes.single)
            began = time.perf_counter()
            for _turn in range(count):
                producer.send(TOPIC, BODY, delay=HOUR)
            single_s = time.perf_counter() - began
            run.results.add(NAME, "lisa", "one at a time", count / single_s, "1/s")
            each = max(1, run.sizes.concurrent // TASKS)
            seconds = asyncio.run(_by_tasks(server, each))
            run.results.add(NAME, "lisa", "rate", each * TASKS / seconds, "1/s")


async def _by_tasks(server: BenchServer, each: int) -> float:
    async with AsyncProducer(server.url) as producer:

        async def one_task(count: int) -> None:
            for _ in range(count):
                await producer.send(TOPIC, BODY, delay=HOUR)

        await asyncio.gather(*(one_task(1) for _ in range(TASKS)))
        began = time.perf_counter()
        await asyncio.gather(*(one_task(each) for _ in range(TASKS)))
        return time.perf_counter() - began
