"""huey on Redis: a scheduler moves due tasks from a sorted set to a list every second."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from huey import RedisHuey

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks.peers.common import Message, Peer, handled, main, ready, redis_url

if TYPE_CHECKING:
    from collections.abc import Sequence


def send(messages: Sequence[Message]) -> float:
    """Send with one call per message, because huey has no bulk call.

    `add_schedule` adds the task to the schedule directly; `schedule` would send it through the
    queue to a worker first.
    """
    huey = _huey()
    task = huey.task(name="handle")(handled)
    huey.storage.conn.ping()
    started = time.perf_counter()
    for message in messages:
        huey.add_schedule(task.s(message.body, eta=message.due))
    return time.perf_counter() - started


def worker(number: int) -> None:
    """Run a huey consumer with one thread; two consumers use both cores.

    Each has a scheduler; a script gives each due task to only one of them.
    """
    del number
    logging.getLogger("huey").setLevel(logging.ERROR)
    huey = _huey()
    huey.task(name="handle")(handled)
    huey.on_startup()(ready)
    huey.create_consumer(
        workers=1,
        worker_type="thread",
        graceful_signal="TERM",
        check_worker_health=False,
        scheduler_interval=1,  # the shortest: huey rounds less up to a second
        periodic=False,
    ).run()


def _huey() -> RedisHuey:
    return RedisHuey("bench", url=redis_url(), results=False, utc=True)


main(
    Peer(
        packages=("huey", "redis", "hiredis"),
        processes=2,
        send=send,
        send_single=send,
        worker=worker,
    )
)
