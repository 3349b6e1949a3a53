"""taskiq with taskiq-redis: schedules in lists by the minute, read whole by a scheduler."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from taskiq import TaskiqEvents, TaskiqScheduler
from taskiq.api import run_receiver_task, run_scheduler_task
from taskiq_redis import ListRedisScheduleSource, RedisStreamBroker

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks.peers.common import Message, Peer, handled, main, ready, redis_url

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

TASKS = 100
SECOND = timedelta(seconds=1)


async def handle(body: str) -> None:
    """The task."""
    handled(body)


def _broker() -> tuple[RedisStreamBroker, Any]:
    # The stream broker, which the documentation puts first; no result backend: nothing is kept.
    broker = RedisStreamBroker(redis_url(), queue_name="bench", xread_count=500)
    return broker, broker.register_task(handle, task_name="handle")


def _source() -> ListRedisScheduleSource:
    # Schedules are read by this many at a time; its default of 50 means ten times the round trips.
    return ListRedisScheduleSource(redis_url(), buffer_size=500)


async def _send(messages: Sequence[Message], tasks: int) -> float:
    broker, task = _broker()
    source = _source()
    await source.startup()
    waiting = iter(messages)

    async def sender() -> None:
        for message in waiting:
            await task.schedule_by_time(source, message.due, message.body)

    started = time.perf_counter()
    await asyncio.gather(*(sender() for _ in range(tasks)))
    seconds = time.perf_counter() - started
    await source.shutdown()
    await broker.shutdown()
    return seconds


def send(messages: Sequence[Message]) -> float:
    """Send from 100 concurrent tasks, because the schedule source has no bulk call."""
    return float(uvloop.run(_send(messages, TASKS)))


def send_single(messages: Sequence[Message]) -> float:
    """Send with one call per message, sequentially."""
    return float(uvloop.run(_send(messages, 1)))


def send_concurrent(messages: Sequence[Message], tasks: int) -> float:
    """Send from concurrent asyncio tasks."""
    return float(uvloop.run(_send(messages, tasks)))


async def _receive() -> None:
    broker, _ = _broker()
    broker.add_event_handler(TaskiqEvents.WORKER_STARTUP, lambda _: ready())
    await _until_term(run_receiver_task(broker, run_startup=True, max_async_tasks=100))
    await broker.shutdown()


async def _schedule() -> None:
    broker, _ = _broker()
    scheduler = TaskiqScheduler(broker, [_source()])
    ready()
    # A second is the shortest: the loop cuts its next instant to whole seconds.
    await _until_term(
        run_scheduler_task(scheduler, run_startup=True, interval=SECOND, loop_interval=SECOND)
    )
    await scheduler.shutdown()


async def _until_term(running: Coroutine[Any, Any, None]) -> None:
    task = asyncio.ensure_future(running)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await asyncio.wait([task])


def worker(number: int) -> None:
    """Run the scheduler (the documentation allows only one) or a worker."""
    logging.getLogger("taskiq").setLevel(logging.ERROR)
    uvloop.run(_schedule() if number == 1 else _receive())


main(
    Peer(
        packages=("taskiq", "taskiq-redis", "redis", "hiredis", "uvloop"),
        processes=2,
        send=send,
        send_single=send_single,
        send_concurrent=send_concurrent,
        worker=worker,
    )
)
