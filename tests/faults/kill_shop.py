"""The handlers of the consumers that are killed, as a module for `lisa-consumer`.

What a body says is done: `fine`, `fails` (the first time), `again` (asks for a retry, the first
time), `given-up`, or a number of milliseconds to take. Each call is written down first.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from datetime import timedelta
from pathlib import Path

from lisa.consumer import Consumer
from lisa.core.message import Message
from lisa.core.outcomes import Discard, Retry

TOPIC = "orders"
HANDLED = Path("handled")


def note(message: Message) -> None:
    """Write down what was handed over, and when."""
    line = {"id": message.id, "attempt": message.attempt, "due_ms": message.due_ms,
            "at_ms": time.time_ns() // 1_000_000}  # fmt: skip
    ledger = os.open(HANDLED, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(ledger, json.dumps(line).encode() + b"\n")
    os.close(ledger)


def judge(message: Message) -> float:
    """Do what the body says; how many seconds the handler is to take."""
    note(message)
    if message.attempt == 1 and message.body == "fails":
        raise ValueError("the first attempt fails")
    if message.attempt == 1 and message.body == "again":
        raise Retry("not yet", delay=timedelta(milliseconds=50))
    if message.body == "given-up":
        raise Discard("it is of no use")
    return message.body / 1000 if isinstance(message.body, int) else 0.0


def _consumer(concurrency: int) -> Consumer:
    return Consumer(concurrency=concurrency, poll_timeout=timedelta(seconds=2),
                    grace=timedelta(seconds=5))  # fmt: skip


inline = _consumer(1)
threads = _consumer(3)
looped = _consumer(3)


@inline.on(TOPIC)
@threads.on(TOPIC)
def handle(message: Message) -> None:
    """Blocking."""
    time.sleep(judge(message))


@looped.on(TOPIC)
async def handle_on_a_loop(message: Message) -> None:
    """On an event loop."""
    await asyncio.sleep(judge(message))
