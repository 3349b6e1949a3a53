"""The handlers of a torture run, which record their messages and do what these say.

lisa-consumer tests.torture.handlers:swift      fast handlers, one at a time
lisa-consumer tests.torture.handlers:sturdy     all others
"""

import asyncio
import time
from datetime import timedelta

import lisa
from lisa import Batch, Consumer, Discard, Message, Retry
from tests.torture.ledger import Diary, Handling, Orders
from tests.torture.world import (
    ACK_S,
    DEFER_UNTIL,
    HANG_TIMEOUT_S,
    RETRY_AFTER_MS,
    Do,
    Verdict,
    place_number,
)

FAILS = {Do.RAISE: 2, Do.RETRY: 1, Do.FALSE: 1, Do.POISON: 1_000}
"""How many attempts fail."""

Defer = getattr(lisa, "Defer", None)
"""Roles of an earlier build have none, and handle such messages."""

PAUSES_S = {Do.SLOW: 0.3, Do.SLOWER: 1.5 * ACK_S, Do.HANG: 3 * HANG_TIMEOUT_S}


class Trouble(Exception):
    """The exception that handlers raise."""


diary = Diary(Orders.read())
swift = Consumer()
sturdy = Consumer(concurrency=16)


def begin(*messages: Message) -> list[Handling]:
    """Note that the handlers of messages begin, before anything else."""
    handlings = [
        diary.begin(place_number(one.topic, one.group), one.body, one.attempt, one.due_ms)
        for one in messages
    ]
    diary.note(*handlings, verdict=Verdict.BEGUN)
    return handlings


def verdict_on(handling: Handling) -> Verdict:
    if handling.do is Do.DISCARD:
        return Verdict.DISCARDED
    if Defer and handling.do is Do.DEFER and handling.due_ms % DEFER_UNTIL:
        return Verdict.DEFERRED
    has_failed = handling.attempt <= FAILS.get(handling.do, 0)
    return Verdict.FAILED if has_failed else Verdict.OK


def pause_s(handling: Handling) -> float:
    """How long the handler takes."""
    do = handling.do
    is_hung_once = do is Do.HANG and handling.attempt > 1
    return 0.0 if is_hung_once else PAUSES_S.get(do, 0.0)


def end(handling: Handling) -> bool | None:
    """Note how the handling ends, and return or raise that."""
    do, verdict = handling.do, verdict_on(handling)
    diary.note(handling, verdict=verdict)
    if verdict is Verdict.OK:
        return None
    if do is Do.RETRY:
        raise Retry("once more", delay=timedelta(milliseconds=RETRY_AFTER_MS))
    if verdict is Verdict.DEFERRED and Defer:
        raise Defer("not now", delay=timedelta(milliseconds=RETRY_AFTER_MS))
    if do is Do.DISCARD:
        raise Discard("told to")
    if do is Do.FALSE:
        return False
    raise Trouble(f"attempt {handling.attempt}")


@swift.on("bulk")
@swift.on("two")
@sturdy.on("hard")
@sturdy.on("fickle")
@sturdy.on("windows")
@sturdy.on("ordered")
@sturdy.on("limited")
@sturdy.on("coalesced")
@sturdy.on("hang", timeout=timedelta(seconds=HANG_TIMEOUT_S))
def handle(message: Message) -> bool | None:
    """On a thread, or on the reader's thread."""
    (handling,) = begin(message)
    time.sleep(pause_s(handling))
    return end(handling)


@sturdy.on("async")
async def handle_async(message: Message) -> bool | None:
    """On the event loop."""
    (handling,) = begin(message)
    await asyncio.sleep(pause_s(handling))
    return end(handling)


@sturdy.on("batch", batch=50, within=timedelta(milliseconds=50))
def handle_batch(batch: Batch) -> None:
    """Many in one call; some are set aside as failed."""
    every = list(zip(batch, begin(*batch), strict=True))
    for verdict in (Verdict.FAILED, Verdict.OK):
        alike = [handling for _, handling in every if verdict_on(handling) is verdict]
        diary.note(*alike, verdict=verdict)
    for message, handling in every:
        if verdict_on(handling) is Verdict.FAILED:
            batch.fail(message, "told to")
