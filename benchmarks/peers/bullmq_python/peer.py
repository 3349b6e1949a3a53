"""BullMQ for Python: the script that fetches jobs promotes due ones from a sorted set."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from bullmq import Queue, Worker
from redis.connection import parse_url

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks.peers.common import Message, Peer, batches, handled, main, ready, redis_url

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH = 500
CONCURRENCY = 25  # jobs wait for Redis; each wake-up costs by this number, 100 was slower


def _connection() -> dict[str, Any]:
    # redis-py 8 gives up a read after 5 s by default, and this edition of BullMQ blocks for up to
    # 10: its workers would sleep through their jobs.
    return {**parse_url(redis_url()), "socket_timeout": None}


def _options(message: Message) -> dict[str, Any]:
    now_ms = time.time_ns() // 1_000_000
    # A delay counts from the job's own timestamp, so the two add up to the instant exactly.
    return {
        "timestamp": now_ms,
        "delay": max(message.due_ms - now_ms, 0),
        "removeOnComplete": True,
    }


async def _send(messages: Sequence[Message]) -> float:
    queue = Queue("bench", {"connection": _connection()})
    started = time.perf_counter()
    for batch in batches(messages, BATCH):
        await queue.addBulk(
            [
                {"name": "handle", "data": message.body, "opts": _options(message)}
                for message in batch
            ]
        )
    seconds = time.perf_counter() - started
    await queue.close()
    return seconds


async def _send_each(messages: Sequence[Message], tasks: int) -> float:
    queue = Queue("bench", {"connection": _connection()})
    waiting = iter(messages)

    async def sender() -> None:
        for message in waiting:
            await queue.add("handle", message.body, _options(message))

    started = time.perf_counter()
    await asyncio.gather(*(sender() for _ in range(tasks)))
    seconds = time.perf_counter() - started
    await queue.close()
    return seconds


def send(messages: Sequence[Message]) -> float:
    """Send batches of 500 with `addBulk`."""
    return float(uvloop.run(_send(messages)))


def send_single(messages: Sequence[Message]) -> float:
    """Send with one call per message, sequentially."""
    return float(uvloop.run(_send_each(messages, 1)))


def send_concurrent(messages: Sequence[Message], tasks: int) -> float:
    """Send from concurrent asyncio tasks."""
    return float(uvloop.run(_send_each(messages, tasks)))


async def _process(job: Any, token: str) -> None:
    del token
    handled(job.data)


async def _work() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    running = Worker(
        "bench",
        _process,
        {
            "connection": _connection(),
            "concurrency": CONCURRENCY,
            "removeOnComplete": {"count": 0},  # nothing is kept of what is done
        },
    )
    # It waits for whole seconds until it knows that this server takes fractions.
    await running.redisConnection.getRedisVersion()
    ready()
    await stop.wait()
    await running.close(force=True)


def worker(number: int) -> None:
    """Run BullMQ's worker in this process."""
    del number
    uvloop.run(_work())


main(
    Peer(
        packages=("bullmq", "redis", "hiredis", "uvloop"),
        processes=2,
        send=send,
        send_single=send_single,
        send_concurrent=send_concurrent,
        worker=worker,
    )
)
