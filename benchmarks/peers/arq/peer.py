"""arq: polls a sorted set of job ids and claims each job with a transaction."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from arq import create_pool, func
from arq.connections import ArqRedis, RedisSettings
from arq.worker import Worker

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks.peers.common import Message, Peer, handled, main, ready, redis_url

if TYPE_CHECKING:
    from collections.abc import Sequence

TASKS = 100


async def handle(context: dict[str, Any], body: str) -> None:
    """Handle a job."""
    del context
    handled(body)


async def _send(messages: Sequence[Message], tasks: int) -> float:
    pool = await create_pool(RedisSettings.from_dsn(redis_url()))
    waiting = iter(messages)

    async def sender() -> None:
        for message in waiting:
            await pool.enqueue_job("handle", message.body, _defer_until=message.due)

    started = time.perf_counter()
    await asyncio.gather(*(sender() for _ in range(tasks)))
    seconds = time.perf_counter() - started
    await pool.aclose()
    return seconds


def send(messages: Sequence[Message]) -> float:
    """Send from 100 concurrent tasks, because arq has no bulk call."""
    return float(uvloop.run(_send(messages, TASKS)))


def send_single(messages: Sequence[Message]) -> float:
    """Send with one call per message, sequentially."""
    return float(uvloop.run(_send(messages, 1)))


def send_concurrent(messages: Sequence[Message], tasks: int) -> float:
    """Send from concurrent asyncio tasks."""
    return float(uvloop.run(_send(messages, tasks)))


async def _say_ready(context: dict[str, ArqRedis]) -> None:
    del context
    ready()


def worker(number: int) -> None:
    """Run arq's worker in this process; two workers compete for jobs and are slower."""
    del number
    uvloop.install()
    asyncio.set_event_loop(asyncio.new_event_loop())
    Worker(
        [func(handle, name="handle", keep_result=0)],  # no result is kept
        redis_settings=RedisSettings.from_dsn(redis_url()),
        on_startup=_say_ready,
        poll_delay=0.005,  # half a second by default: lateness follows it
        max_jobs=100,  # jobs wait for Redis most of their time: more than the default 10 at once
        queue_read_limit=500,
        log_results=False,
    ).run()


main(
    Peer(
        packages=("arq", "redis", "hiredis", "uvloop"),
        processes=1,
        send=send,
        send_single=send_single,
        send_concurrent=send_concurrent,
        worker=worker,
    )
)
