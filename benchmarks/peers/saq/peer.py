"""SAQ: a sorted set of due jobs, moved to a list by a script once a second."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from saq import Queue, Worker

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks.peers.common import Message, Peer, handled, main, ready, redis_url

if TYPE_CHECKING:
    from collections.abc import Sequence

TASKS = 100


async def handle(context: dict[str, Any], *, body: str) -> None:
    """Handle a job."""
    del context
    handled(body)


async def _send(messages: Sequence[Message], tasks: int) -> float:
    queue = Queue.from_url(redis_url(), name="bench", max_concurrent_ops=tasks)
    await queue.connect()
    waiting = iter(messages)

    async def sender() -> None:
        for message in waiting:
            # ttl=-1: the job goes when it is done, no result is kept.
            await queue.enqueue(
                "handle", body=message.body, scheduled=message.due_ms / 1000, ttl=-1
            )

    started = time.perf_counter()
    await asyncio.gather(*(sender() for _ in range(tasks)))
    seconds = time.perf_counter() - started
    await queue.disconnect()
    return seconds


def send(messages: Sequence[Message]) -> float:
    """Send from 100 concurrent tasks, because SAQ has no bulk call."""
    return float(uvloop.run(_send(messages, TASKS)))


def send_single(messages: Sequence[Message]) -> float:
    """Send with one call per message, sequentially."""
    return float(uvloop.run(_send(messages, 1)))


def send_concurrent(messages: Sequence[Message], tasks: int) -> float:
    """Send from concurrent asyncio tasks."""
    return float(uvloop.run(_send(messages, tasks)))


async def _work() -> None:
    queue = Queue.from_url(redis_url(), name="bench", max_concurrent_ops=100)
    await queue.connect()
    running = Worker(
        queue,
        functions=[handle],
        concurrency=50,  # jobs wait for Redis most of their time: more than the default 10 at once
        startup=_say_ready,
        timers={"schedule": 1},  # whole seconds: the number is a lock's life in Redis as well
    )
    await running.start()
    await queue.disconnect()


async def _say_ready(context: dict[str, Any]) -> None:
    del context
    ready()


def worker(number: int) -> None:
    """Run SAQ's worker in this process."""
    del number
    logging.getLogger("saq").setLevel(logging.ERROR)
    uvloop.run(_work())


main(
    Peer(
        packages=("saq", "redis", "hiredis", "uvloop"),
        processes=2,
        send=send,
        send_single=send_single,
        send_concurrent=send_concurrent,
        worker=worker,
    )
)
