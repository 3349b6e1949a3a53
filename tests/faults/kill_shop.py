"""The handlers of killed consumers, as a module for `lisa-consumer`.

The body selects the outcome: `fine`, `given-up`, or a duration in milliseconds, and, the first time
only, `fails`, `again` (requests a retry), `deferred` or `limited`. `until-stopped` (the first time)
waits until its consumer is stopped, or a file with the message's id appears. Each call is recorded
first.
"""

import asyncio
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from lisa.consumer import Consumer
from lisa.consumer.inflight import Held
from lisa.core.delivery import opening
from lisa.core.model.envelope import has_window
from lisa.core.model.message import Message
from lisa.core.model.outcomes import Defer, Discard, Limited, Retry
from lisa.core.transitions.delivery import Limits

TOPIC = "orders"
HANDLED = Path("handled")
STEP_S = 0.02


def note(message: Message) -> None:
    line = {"id": message.id, "due_ms": message.due_ms, "at_ms": time.time_ns() // 1_000_000}
    ledger = os.open(HANDLED, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.write(ledger, json.dumps(line).encode() + b"\n")
    os.close(ledger)


def close_windows_early() -> None:
    """Let the window of each message that has one close before its handler starts, once."""
    closed: set[bytes] = set()
    real = opening.limits_of

    def limits_of(head: bytes, topic_window: str, now_ms: int, unknown: Any) -> Limits | None:
        token = head[1:9]
        if not has_window(head) or token in closed:
            return real(head, topic_window, now_ms, unknown)
        closed.add(token)
        return Limits(now_ms + 60_000, now_ms + 100)

    def close_at(self: Held, limits: Limits, at_us: int, at: float) -> None:
        if limits.opens_ms < limits.closes_ms:  # those above
            self.limits, self.closes = Limits(0, limits.opens_ms), at

    opening.limits_of = limits_of
    Held.close_at = close_at  # type: ignore[method-assign]


def judge(message: Message) -> float:
    """Apply the body's outcome; the seconds that the handler should take."""
    note(message)
    if message.attempt == 1 and message.body == "fails":
        raise ValueError("the first attempt fails")
    if message.attempt == 1 and message.body == "again":
        raise Retry("not yet", delay=timedelta(milliseconds=50))
    ends = {"deferred": Defer("not yet", delay="50ms"), "limited": Limited(retry_after="50ms")}
    if message.body in ends and not (mark := Path(f"deferred-{message.id}")).exists():
        mark.touch()
        raise ends[message.body]
    if message.body == "given-up":
        raise Discard("it is of no use")
    return message.body / 1000 if isinstance(message.body, int) else 0.0


def has_to_wait(consumer: Consumer, message: Message) -> bool:
    """True until the consumer is stopped and has released messages without a handler."""
    if message.body != "until-stopped" or message.attempt > 1 or Path(message.id).exists():
        return False
    topic = next(iter(consumer.health()["topics"].values()), None)
    is_stopped = topic is None or topic["state"] == "stopping"
    return not is_stopped or (topic is not None and topic["held"] > HELD_AT_MOST[consumer])


TIMES: Any = {"poll_timeout": timedelta(seconds=2), "grace": timedelta(seconds=5)}
inline, looped = Consumer(concurrency=1, **TIMES), Consumer(concurrency=3, **TIMES)
HELD_AT_MOST = {inline: sys.maxsize, looped: 3}
"""By consumer, when it has released the rest; the first does so in the thread of its handlers."""


@inline.on(TOPIC)
def handle(message: Message) -> None:
    time.sleep(judge(message))
    while has_to_wait(inline, message):
        time.sleep(STEP_S)


@looped.on(TOPIC)
async def handle_on_a_loop(message: Message) -> None:
    await asyncio.sleep(judge(message))
    while has_to_wait(looped, message):  # noqa: ASYNC110  no event tells
        await asyncio.sleep(STEP_S)
