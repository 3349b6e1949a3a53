"""The handlers of a torture run, which record their messages and do what these say.

lisa-consumer tests.torture.handlers:swift      fast handlers, one at a time
lisa-consumer tests.torture.handlers:sturdy     all others
"""

from __future__ import annotations

import asyncio
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from lisa import Consumer, Discard, Retry
from tests.torture.ledger import Diary, Handling, Orders
from tests.torture.world import ACK_S, HANG_TIMEOUT_S, RETRY_AFTER_MS, Do, Verdict, place_number

if TYPE_CHECKING:
    from collections.abc import Generator

    from lisa import Batch, Message

FAILS = {Do.RAISE: 2, Do.RETRY: 1, Do.FALSE: 1, Do.POISON: 1_000}
"""How many attempts fail."""


class Trouble(Exception):
    """The exception that handlers raise."""


diary = Diary(Orders.read())
swift = Consumer()
sturdy = Consumer(concurrency=16)


def begin(message: Message) -> Handling:
    place = place_number(message.topic, message.group)
    return diary.begin(place, message.body, message.attempt, message.due_ms)


def verdict_on(handling: Handling) -> Verdict:
    if handling.do is Do.DISCARD:
        return Verdict.DISCARDED
    has_failed = handling.attempt <= FAILS.get(handling.do, 0)
    return Verdict.FAILED if has_failed else Verdict.OK


def steps(message: Message) -> Generator[float, None, bool | None]:
    """Handle a message as its body says: yields pauses, then returns or raises."""
    handling = begin(message)
    do, attempt = handling.do, handling.attempt
    if do is Do.SLOW or do is Do.SLOWER or (do is Do.HANG and attempt == 1):
        diary.note(handling, verdict=Verdict.BEGUN)
        yield {Do.SLOW: 0.3, Do.SLOWER: 1.5 * ACK_S}.get(do, 3 * HANG_TIMEOUT_S)
    verdict = verdict_on(handling)
    diary.note(handling, verdict=verdict)
    if verdict is Verdict.OK:
        return None
    if do is Do.RETRY:
        raise Retry("once more", delay=timedelta(milliseconds=RETRY_AFTER_MS))
    if do is Do.DISCARD:
        raise Discard("told to")
    if do is Do.FALSE:
        return False
    raise Trouble(f"attempt {attempt}")


@swift.on("bulk")
@swift.on("two")
@sturdy.on("hard")
@sturdy.on("fickle")
@sturdy.on("windows")
@sturdy.on("hang", timeout=timedelta(seconds=HANG_TIMEOUT_S))
def handle(message: Message) -> bool | None:
    """On a thread, or on the reader's thread."""
    work = steps(message)
    while True:
        try:
            time.sleep(next(work))
        except StopIteration as end:
            said: bool | None = end.value
            return said


@sturdy.on("async")
async def handle_async(message: Message) -> bool | None:
    """On the event loop."""
    work = steps(message)
    while True:
        try:
            pause = next(work)
        except StopIteration as end:
            said: bool | None = end.value
            return said
        await asyncio.sleep(pause)


@sturdy.on("batch", batch=50, within=timedelta(milliseconds=50))
def handle_batch(batch: Batch) -> None:
    """Many in one call; some are set aside as failed."""
    every = [(message, begin(message)) for message in batch]
    for verdict in (Verdict.FAILED, Verdict.OK):
        alike = [handling for _, handling in every if verdict_on(handling) is verdict]
        diary.note(*alike, verdict=verdict)
    for message, handling in every:
        if verdict_on(handling) is Verdict.FAILED:
            batch.fail(message, "told to")
