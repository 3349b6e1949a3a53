"""The consumer that the benchmark measures; its handler only records the time.

Reads LISA_REDIS_URL, BENCH_LEDGER (a directory) and BENCH_TOPICS (separated by commas).
"""

from __future__ import annotations

import atexit
import os
import time
from pathlib import Path

from benchmarks.bench.ledger import RECORD, Writer
from lisa import Consumer, Message

consumer = Consumer(os.environ["LISA_REDIS_URL"])
writer = Writer(Path(os.environ["BENCH_LEDGER"]) / f"{os.getpid()}.ledger")
atexit.register(writer.close)

_note, _pack, _now_ns = writer.note, RECORD.pack, time.time_ns


def handle(message: Message) -> None:
    """Record the due time and the current time."""
    _note(_pack(message.due_ms * 1000, _now_ns() // 1000))


for topic in os.environ["BENCH_TOPICS"].split(","):
    consumer.on(topic)(handle)
