"""Celery on Redis: workers fetch tasks with an `eta` early and keep them in memory."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from celery import Celery
from celery.signals import worker_ready

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks.peers.common import Message, Peer, handled, main, ready, redis_url

if TYPE_CHECKING:
    from collections.abc import Sequence

app = Celery("bench", set_as_current=True)
app.conf.update(
    task_ignore_result=True,  # the optimizing guide: do not keep what nobody reads
    worker_prefetch_multiplier=0,  # no bound: tasks are many and short (the guide's limits)
    worker_disable_rate_limits=True,  # the guide: no token bucket where no rate limit is set
    worker_enable_remote_control=False,  # no second channel to poll beside the queue
    worker_hijack_root_logger=False,
)
task = app.task(name="handle")(handled)


def send(messages: Sequence[Message]) -> float:
    """Send with one call per message; kombu's Redis transport has no pipeline."""
    app.conf.broker_url = redis_url()
    with app.producer_or_acquire() as producer:
        producer.connection.ensure_connection()
        started = time.perf_counter()
        for message in messages:
            task.apply_async((message.body,), eta=message.due, producer=producer)
        return time.perf_counter() - started


def worker(number: int) -> None:
    """Run a worker with one thread; more threads do not speed up a no-op task.

    The default and solo pools start ten due tasks and then wait for up to a second without other
    events; the thread pool has its own timer.
    """
    app.conf.broker_url = redis_url()
    worker_ready.connect(lambda **_: ready(), weak=False)
    options = [
        "--pool=threads",
        "--concurrency=1",
        "--loglevel=ERROR",
        f"--hostname=bench{number}@localhost",
    ]
    # Workers need not know of each other here (the guide to workers names these for that).
    app.worker_main(["worker", *options, "--without-gossip", "--without-mingle"])


main(
    Peer(
        packages=("celery", "kombu", "redis", "hiredis"),
        processes=2,
        send=send,
        send_single=send,
        worker=worker,
    )
)
