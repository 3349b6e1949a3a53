"""RQ: a scheduler process polls a sorted set of scheduled jobs every second."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from redis import Redis
from rq import Queue, SimpleWorker

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks.peers.common import Message, Peer, batches, main, ready, redis_url

if TYPE_CHECKING:
    from collections.abc import Sequence

BATCH = 500
HANDLER = "benchmarks.peers.common.handled"  # by name: a function of this script has no module


def send(messages: Sequence[Message]) -> float:
    """Send batches of 500 in one pipeline, which `enqueue_at` accepts."""
    queue, connection = _queue()
    started = time.perf_counter()
    for batch in batches(messages, BATCH):
        with connection.pipeline() as pipeline:
            for message in batch:
                # result_ttl=0: the job goes when it is done, no result is kept.
                queue.enqueue_at(
                    message.due, HANDLER, args=(message.body,), result_ttl=0, pipeline=pipeline
                )
            pipeline.execute()
    return time.perf_counter() - started


def send_single(messages: Sequence[Message]) -> float:
    """Send with one call per message, sequentially."""
    queue, _ = _queue()
    started = time.perf_counter()
    for message in messages:
        queue.enqueue_at(message.due, HANDLER, args=(message.body,), result_ttl=0)
    return time.perf_counter() - started


def worker(number: int) -> None:
    """Run a SimpleWorker, which does not fork for each job, as recommended for speed.

    The scheduler polls once a second; its lock and its clock use whole seconds.
    """
    connection = Redis.from_url(redis_url())
    simple = _Worker(["bench"], connection=connection, name=f"bench{number}")
    simple.log_job_description = False
    simple.work(with_scheduler=number == 0, logging_level="ERROR")


class _Worker(SimpleWorker):  # type: ignore[misc]
    """RQ's worker, which also reports when it is ready."""

    def register_birth(self) -> None:
        super().register_birth()
        ready()


def _queue() -> tuple[Queue, Redis]:
    connection = Redis.from_url(redis_url())
    connection.ping()
    return Queue("bench", connection=connection), connection


if __name__ == "__main__":
    main(
        Peer(
            packages=("rq", "redis", "hiredis"),
            processes=2,
            send=send,
            send_single=send_single,
            worker=worker,
        )
    )
