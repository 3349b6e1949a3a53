"""The handlers of a torture run, which record their messages and do what these say.

    lisa-consumer tests.torture.handlers:swift      fast handlers, one at a time
    lisa-consumer tests.torture.handlers:sturdy     all others

A ledger's line is ten integers: message, place, attempt, due (ms), earliest begin and latest end
by Redis's clock (us; 0 while running), verdict, whether the clock was asked, latest begin and
earliest end. A slow handling is also recorded when it begins.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from tests.torture.ledger import Ledger, RedisClock, Span, shift_clock

shift_clock()

from lisa import Consumer, Discard, Retry  # noqa: E402 - the clock is set first
from tests.torture.world import (  # noqa: E402
    ACK_S,
    HANG_TIMEOUT_S,
    RETRY_AFTER_MS,
    Do,
    Verdict,
    place_number,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from lisa import Batch, Message

T = TypeVar("T")

COMMIT_EVERY_S = 0.5
STALL_S = 0.5
TICK_S = 0.1
SLOW_S, SLOW_OF = 0.05, 10
"""On a busy machine, this many requests in a row take this long on average."""

RETRY_AFTER = timedelta(milliseconds=RETRY_AFTER_MS)


class Trouble(Exception):
    """The exception that handlers raise."""


class Handling(NamedTuple):
    """One message being handled."""

    number: int
    do: Do
    place: int
    attempt: int
    due_ms: int
    begin: Span

    @property
    def began(self) -> int:
        """The earliest possible begin; the latest if Redis could not be asked."""
        return self.begin.low if self.begin.was_asked else self.begin.high


class Diary:
    """One process's ledger of handlings and of its stalls."""

    def __init__(self, ledger: Path, clock_port: int, door_port: int) -> None:
        self._ledger = Ledger(ledger)
        self._stalls = Ledger(ledger.with_suffix(".stalls"))
        self._clock = RedisClock(clock_port)
        self._door = RedisClock(door_port)
        self._ledger.commit_forever(COMMIT_EVERY_S)
        for watch in (self._watch, self._watch_way):
            threading.Thread(target=watch, name="watch", daemon=True).start()

    def begin(self, message: Message) -> Handling:
        """Record that a handler got a message."""
        number, do, *_ = message.body
        place = place_number(message.topic, message.group)
        return self.take(number, do, place, message.attempt, message.due_ms)

    def take(self, number: int, do: int, place: int, attempt: int, due_ms: int) -> Handling:
        """The same for a message that was pulled."""
        span = self._clock.at_least(due_ms)
        return Handling(number, Do(do), place, attempt, due_ms, span)

    def note(self, *handlings: Handling, verdict: Verdict) -> None:
        """Note that handlings begin or how they ended, before Lisa learns of it."""
        now = self._clock.now()
        end_from, end = (0, 0) if verdict is Verdict.BEGUN else (now.low, now.high)
        self._ledger.write(
            f"{one.number}\t{one.place}\t{one.attempt}\t{one.due_ms}\t{one.began}\t{end}\t"
            f"{verdict}\t{int(one.begin.was_asked)}\t{one.begin.high}\t{end_from}"
            for one in handlings
        )

    def _watch(self) -> None:
        """Note when the process was not scheduled, or the server did not answer."""
        before = self._clock.ask()
        while True:
            time.sleep(TICK_S)
            now = self._clock.ask()
            if now.low - before.low > (TICK_S + STALL_S) * 1e6:
                self._stalls.write([f"{before.low}\t{now.low}"])
            before = now

    def _watch_way(self) -> None:
        """Note when all answers were slow for some time.

        A heartbeat that makes one request after the other may then be late without a defect.
        """
        while True:
            began, took_s = self._clock.now(), 0.0
            for _ in range(SLOW_OF):
                asked = time.monotonic()
                self._door.ask()
                took_s += time.monotonic() - asked
                time.sleep(TICK_S)
            if took_s > SLOW_OF * SLOW_S:
                self._stalls.write([f"{began.low}\t{self._clock.now().low}"])


def handling(diary: Diary, one: Handling) -> Generator[float, None, bool | None]:
    """Handle a message as its body says: yields pauses, then returns or raises."""
    if one.do is Do.SLOW or one.do is Do.SLOWER or (one.do is Do.HANG and one.attempt == 1):
        diary.note(one, verdict=Verdict.BEGUN)
        yield {Do.SLOW: 0.3, Do.SLOWER: 1.5 * ACK_S}.get(one.do, 3 * HANG_TIMEOUT_S)
    verdict = _verdict(one)
    diary.note(one, verdict=verdict)
    if verdict is Verdict.OK:
        return None
    if one.do is Do.RETRY:
        raise Retry("once more", delay=RETRY_AFTER)
    if one.do is Do.DISCARD:
        raise Discard("told to")
    if one.do is Do.FALSE:
        return False
    raise Trouble(f"attempt {one.attempt}")


def _verdict(one: Handling) -> Verdict:
    fails = {Do.RAISE: 2, Do.RETRY: 1, Do.FALSE: 1, Do.POISON: 1_000}
    if one.do is Do.DISCARD:
        return Verdict.DISCARDED
    return Verdict.FAILED if one.attempt <= fails.get(one.do, 0) else Verdict.OK


diary = Diary(
    Path(os.environ["TORTURE_LEDGER"]),
    int(os.environ["TORTURE_CLOCK_PORT"]),
    int(os.environ["TORTURE_DOOR_PORT"]),
)
swift = Consumer()
sturdy = Consumer(concurrency=16)


@swift.on("bulk")
@swift.on("two")
@sturdy.on("hard")
@sturdy.on("fickle")
@sturdy.on("windows")
@sturdy.on("hang", timeout=timedelta(seconds=HANG_TIMEOUT_S))
def handle(message: Message) -> bool | None:
    """On a thread, or on the reader's thread."""
    steps = handling(diary, diary.begin(message))
    while True:
        try:
            time.sleep(next(steps))
        except StopIteration as end:
            said: bool | None = end.value
            return said


@sturdy.on("async")
async def handle_async(message: Message) -> bool | None:
    """On the event loop."""
    steps = handling(diary, diary.begin(message))
    while True:
        try:
            pause = next(steps)
        except StopIteration as end:
            said: bool | None = end.value
            return said
        await asyncio.sleep(pause)


@sturdy.on("batch", batch=50, within=timedelta(milliseconds=50))
def handle_batch(batch: Batch) -> None:
    """Many in one call; some are set aside as failed."""
    every = [diary.begin(message) for message in batch]
    failed = [_verdict(one) is Verdict.FAILED for one in every]
    diary.note(*_where(every, failed), verdict=Verdict.FAILED)
    diary.note(*_where(every, [not one for one in failed]), verdict=Verdict.OK)
    for message in _where(list(batch), failed):
        batch.fail(message, "told to")


def _where(items: list[T], wanted: list[bool]) -> list[T]:
    return [item for item, is_wanted in zip(items, wanted, strict=True) if is_wanted]
