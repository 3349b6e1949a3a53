"""The consumer of the benchmark of coalescing sends; its handler records what it gets, and when.

Reads LISA_REDIS_URL and BENCH_LEDGER (a directory).
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from lisa import Consumer, Message

consumer = Consumer()
_ledger = (Path(os.environ["BENCH_LEDGER"]) / f"{os.getpid()}.handled").open("a", buffering=1)


@consumer.on("bench")
@consumer.on("plain")
def handle(message: Message) -> None:
    """Record key or topic, number of the send, due time in ms, and the current time in us."""
    now_us = time.time_ns() // 1000
    _ledger.write(f"{message.key or message.topic} {message.body['n']} {message.due_ms} {now_us}\n")
