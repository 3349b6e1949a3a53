"""streaQ: a sorted set of task ids, moved to a stream by a script every half a second."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import coredis
import uvloop
from streaq import Worker

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks.peers.common import Message, Peer, batches, handled, main, ready, redis_url

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

BATCH = 500


async def handle(body: str) -> None:
    """The task."""
    handled(body)


@asynccontextmanager
async def _lifespan() -> AsyncGenerator[None]:
    ready()
    yield


coredis.Config.optimized = True  # its Redis client's documentation: no checks at run time


def _worker(**options: Any) -> tuple[Worker, Any]:
    streaq = Worker(redis_url=redis_url(), queue_name="bench", **options)
    # ttl=0: no result is kept. silent: no line of log for each task.
    return streaq, streaq.task(name="handle", ttl=0, silent=True)(handle)


async def _send(messages: Sequence[Message]) -> float:
    streaq, task = _worker()
    async with streaq:
        started = time.perf_counter()
        for batch in batches(messages, BATCH):
            await streaq.enqueue_many(
                [task.enqueue(message.body).start(schedule=message.due) for message in batch]
            )
        return time.perf_counter() - started


async def _send_each(messages: Sequence[Message], tasks: int) -> float:
    streaq, task = _worker()
    waiting = iter(messages)

    async def sender() -> None:
        for message in waiting:
            await task.enqueue(message.body).start(schedule=message.due)

    async with streaq:
        started = time.perf_counter()
        await asyncio.gather(*(sender() for _ in range(tasks)))
        return time.perf_counter() - started


def send(messages: Sequence[Message]) -> float:
    """By 500 with `enqueue_many`, one pipeline each."""
    return float(uvloop.run(_send(messages)))


def send_single(messages: Sequence[Message]) -> float:
    """Send with one call per message, sequentially."""
    return float(uvloop.run(_send_each(messages, 1)))


def send_concurrent(messages: Sequence[Message], tasks: int) -> float:
    """Send from concurrent asyncio tasks."""
    return float(uvloop.run(_send_each(messages, tasks)))


def worker(number: int) -> None:
    """Run streaQ's worker in this process."""
    del number
    logging.getLogger("streaq").setLevel(logging.ERROR)
    streaq, _ = _worker(
        concurrency=64,  # tasks wait for Redis most of their time: more than the default 16 at once
        prefetch=256,
        lifespan=_lifespan,
        anyio_kwargs={"use_uvloop": True},  # its documentation's advice for speed
    )
    streaq.run_sync()


main(
    Peer(
        packages=("streaq", "coredis", "uvloop"),
        processes=2,
        send=send,
        send_single=send_single,
        send_concurrent=send_concurrent,
        worker=worker,
    )
)
