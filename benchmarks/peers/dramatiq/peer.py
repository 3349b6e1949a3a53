"""Dramatiq on Redis: workers fetch delayed messages early and enqueue them again when due."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import dramatiq
from dramatiq.brokers.redis import RedisBroker

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks.peers.common import Message, Peer, handled, main, ready, redis_url

if TYPE_CHECKING:
    from collections.abc import Sequence


def send(messages: Sequence[Message]) -> float:
    """Send with one call per message, because the broker has no bulk call."""
    actor = _actor(_broker())
    started = time.perf_counter()
    for message in messages:
        delay_ms = message.due_ms - time.time_ns() // 1_000_000
        actor.send_with_options(args=(message.body,), delay=max(delay_ms, 0))
    return time.perf_counter() - started


def worker(number: int) -> None:
    """Run Dramatiq's worker in this process."""
    del number
    broker = _broker()
    _actor(broker)
    # Idle consumers poll after 10 ms instead of a second, which determines lateness.
    running = dramatiq.Worker(broker, worker_threads=THREADS, worker_timeout=10)
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    running.start()
    ready()
    stop.wait()
    running.stop()


THREADS = 8


def _broker() -> RedisBroker:
    broker = RedisBroker(url=redis_url())
    broker.client.ping()
    dramatiq.set_broker(broker)
    return broker


def _actor(broker: RedisBroker) -> dramatiq.Actor:
    return dramatiq.actor(handled, broker=broker, queue_name="bench")


main(
    Peer(
        packages=("dramatiq", "redis", "hiredis"),
        processes=2,
        send=send,
        send_single=send,
        worker=worker,
    )
)
