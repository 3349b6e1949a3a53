"""A producer process: sends, sends again, replaces, cancels and moves messages.

    python -m tests.torture.sender

Its orders are in its environment (`book.Orders`), its actions in its ledger (`book.Book`).
"""

from __future__ import annotations

import asyncio
import heapq
import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from tests.torture.ledger import shift_clock

shift_clock()

from lisa import AsyncProducer, DuplicateMessage, LisaError, Producer  # noqa: E402 - clock first
from lisa.producer import Outgoing  # noqa: E402
from tests.torture.book import Book, Orders, Pace, delay_ms, leaving  # noqa: E402
from tests.torture.world import (  # noqa: E402  # noqa: E402
    POISON_RETRIES,
    RETRY_AFTER_MS,
    SCHEDULES,
    TICKS,
    WINDOWED,
    Do,
    body_of,
    options_of,
    own_id,
    shortly_before_it_closes,
    topic_number,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterator, Mapping, Sequence

T = TypeVar("T")

BULK_TICK_S = 0.15
FIRED = 0.3
"""Of the messages with windows; half of these are due while their windows are closed."""
DEFINES_EVERY_S = 2.0
FICKLE_TICK_S = 0.1
MOST_SINGLY = 20
SKIPPED_TTL_MS = 1_500  # messages with a longer ttl also have a late policy
TRIES_FOR = timedelta(seconds=4)  # for a call; after that it is an error, and the process continues


Way = Callable[[str, list[int], list[Do]], None]


class Bulk:
    """Sends many messages per call, in every way that the blocking producer has."""

    def __init__(self, orders: Orders) -> None:
        self._book = Book(orders)
        self._chance = random.Random(orders.seed)
        self._longest_s = orders.longest_s
        self._producer = Producer(orders.redis, patience=TRIES_FOR)
        # An earlier build has no schedules, and a run that restores defines none.
        has_schedules = bool(os.environ.get("TORTURE_SCHEDULES"))
        self._schedule: Any = has_schedules and getattr(self._producer, "schedule", None)
        self._ways = [(self._alike, 45), (self._each, 35), (self._stream, 10), (self._singly, 10)]

    def _delay_ms(self) -> int:
        return delay_ms(self._chance, self._longest_s)

    def run(self, rate: float) -> None:
        told, pace, next_s = leaving(), Pace(rate, max(1, int(rate))), 0.0
        while not told:
            n = pace.take()
            if n:
                self._tick(n)
            if self._schedule and time.monotonic() >= next_s:
                next_s = time.monotonic() + DEFINES_EVERY_S
                self._define()
            time.sleep(BULK_TICK_S)
        self._book.commit()
        self._producer.close()

    def _define(self) -> None:
        """Define the schedules as they are, as services do when they start."""
        with suppress(LisaError):  # during a fault; the schedules exist nevertheless
            for name, options in SCHEDULES.items():
                self._schedule(name, topic=TICKS, body=name, **options)

    def _tick(self, n: int) -> None:
        (topic,) = self._chance.choices(("bulk", "two", "batch"), (80, 8, 12))
        ways, weights = zip(*self._ways, strict=True)
        (way,) = self._chance.choices(ways, weights)
        singly = min(n, MOST_SINGLY) if way == self._singly else 0
        if singly:
            self._by(way, topic, singly)
        if n > singly:
            self._by(self._alike if singly else way, topic, n - singly)

    def _by(self, way: Way, topic: str, n: int) -> None:
        does = [Do.OK] * n
        if topic == "batch":
            does = self._chance.choices((Do.OK, Do.RAISE), (99, 1), k=n)
        self._book.clock.ask()
        way(topic, self._book.numbers(n), does)

    def _alike(self, topic: str, numbers: list[int], does: list[Do]) -> None:
        """One due time for all, ids left to Lisa: the fast way."""
        delay = self._delay_ms()
        call = self._book.send(topic, numbers, does, [f"+{delay}"])
        self._book.commit()
        bodies = [body_of(number, do) for number, do in zip(numbers, does, strict=True)]
        self._many(call, topic, bodies, delay=timedelta(milliseconds=delay))

    def _each(self, topic: str, numbers: list[int], does: list[Do]) -> None:
        """Explicit ids, each with its own due time."""
        dues = [f"+{self._delay_ms()}" for _ in numbers]
        if self._chance.random() < 0.3:
            now_ms = self._book.clock.now().high // 1000
            dues = [str(now_ms + int(due)) for due in dues]
        call = self._book.send(topic, numbers, does, dues)
        self._book.commit()
        self._many(call, topic, list(_outgoing(numbers, does, dues)))

    def _many(self, call: int, topic: str, bodies: Sequence[object], **options: Any) -> None:
        try:
            report = self._producer.send_many(topic, bodies, **options)
        except LisaError as error:
            self._book.fail(call, error)
        else:
            self._book.confirm(call, _alike_letters([one.outcome[0] for one in report]))

    def _stream(self, topic: str, numbers: list[int], does: list[Do]) -> None:
        """A stream of sends; outcomes before an error are confirmed."""
        dues = [f"+{self._delay_ms()}" for _ in numbers]
        call = self._book.send(topic, numbers, does, dues)
        self._book.commit()
        letters: list[str] = []
        try:
            for outcome in self._producer.send_stream(topic, _outgoing(numbers, does, dues)):
                letters.append(outcome.outcome[0])  # noqa: PERF401  keeps those before an error
        except LisaError as error:
            error.sent = len(letters)
            self._book.fail(call, error)
        else:
            self._book.confirm(call, _alike_letters(letters))

    def _singly(self, topic: str, numbers: list[int], does: list[Do]) -> None:
        """One call each, committed together."""
        calls = []
        for number, do in zip(numbers, does, strict=True):
            delay = self._delay_ms()
            calls.append((self._book.send(topic, [number], [do], [f"+{delay}"]), number, do, delay))
        self._book.commit()
        for call, number, do, delay in calls:
            try:
                self._producer.send(topic, body_of(number, do), delay=timedelta(milliseconds=delay))
            except LisaError as error:
                self._book.fail(call, error)
            else:
                self._book.confirm(call, "a")


def _outgoing(
    numbers: Sequence[int], does: Sequence[Do], dues: Sequence[str]
) -> Iterator[Outgoing]:
    for number, do, due in zip(numbers, does, dues, strict=True):
        body = body_of(number, do)
        if due.startswith("+"):
            yield Outgoing(body, id=own_id(number), delay=timedelta(milliseconds=int(due)))
        else:
            yield Outgoing(body, id=own_id(number), at_ms=int(due))


def _alike_letters(letters: Sequence[str]) -> str:
    return letters[0] if len(set(letters)) == 1 else "".join(letters)


class Fickle:
    """Sends one by one on an event loop and changes its mind, in stories of one or two calls."""

    TOPICS: ClassVar = {"async": 25, "hard": 20, "hang": 3, "fickle": 52}
    STORIES: ClassVar = {
        "plain": 20,
        "again": 15,
        "reject": 8,
        "replace": 15,
        "cancel": 22,
        "move": 12,
        "fire": 5,
        "ttl": 3,
    }
    HARD: ClassVar = {
        Do.OK: 600,
        Do.RAISE: 100,
        Do.RETRY: 100,
        Do.FALSE: 50,
        Do.SLOW: 100,
        Do.SLOWER: 50,
        Do.DISCARD: 6,
        Do.POISON: 2,
    }

    AGAIN: ClassVar = {Do.OK: 80, Do.RAISE: 10, Do.RETRY: 10}

    def __init__(self, orders: Orders) -> None:
        self._book = Book(orders)
        self._chance = random.Random(orders.seed)
        self._longest_s = orders.longest_s
        self._producer = AsyncProducer(orders.redis, patience=TRIES_FOR)
        self._has_windows = bool(os.environ.get("TORTURE_WINDOWS"))
        self._topics = {**self.TOPICS, WINDOWED: 20 * self._has_windows}
        self._later: list[tuple[float, int, str, int, str]] = []
        self._calls: list[Awaitable[None]] = []

    def _delay_ms(self) -> int:
        return delay_ms(self._chance, self._longest_s)

    def _now_ms(self) -> int:
        return self._book.clock.now().low // 1000

    async def run(self, rate: float) -> None:
        """Due times in windows are chosen by Redis's clock: this process's own may be off."""
        if not self._has_windows:
            await self._run(rate)
            return
        from lisa.core.model.windows.placing import using_clock

        with using_clock(self._now_ms):
            await self._run(rate)

    async def _run(self, rate: float) -> None:
        told, pace = leaving(), Pace(rate, max(1, int(rate)))
        while not told or self._later:
            self._book.clock.ask()
            for _ in range(0 if told else pace.take()):
                self._begin()
            while self._later and self._later[0][0] <= time.monotonic():
                _, _, story, number, topic = heapq.heappop(self._later)
                self._go_on(story, number, topic)
            calls, self._calls = self._calls, []
            if calls:
                self._book.commit()
                await asyncio.gather(*calls)
            await asyncio.sleep(FICKLE_TICK_S)
        self._book.commit()
        await self._producer.close()

    def _begin(self) -> None:
        topic = self._drawn(self._topics)
        [number] = self._book.numbers(1)
        if topic == "fickle":
            self._begin_story(self._drawn(self.STORIES), number)
            return
        do = Do.HANG if topic == "hang" and self._chance.random() < 0.2 else Do.OK
        if topic == "hard":
            do = self._drawn(self.HARD)
        elif topic == WINDOWED:
            do = self._drawn(self.AGAIN)
        retry = ",".join([f"{RETRY_AFTER_MS}ms"] * POISON_RETRIES) if do is Do.POISON else None
        delay = self._delay_ms()
        if topic == WINDOWED and self._chance.random() < 0.5:
            delay = shortly_before_it_closes(number, self._now_ms(), delay)
        self._send(topic, number, do, delay, retry=retry)
        if topic == WINDOWED and self._chance.random() < FIRED:
            self._go_on_later("fire", number, topic, delay)

    def _drawn(self, weights: Mapping[T, int]) -> T:
        [one] = self._chance.choices(list(weights), list(weights.values()))
        return one

    def _begin_story(self, story: str, number: int) -> None:
        delay = self._delay_ms() if story == "plain" else self._chance.randint(300, 3_000)
        ttl_ms = self._chance.randint(500, 3_000) if story == "ttl" else 0
        self._send("fickle", number, Do.OK, delay, ttl_ms=ttl_ms)
        if story not in ("plain", "ttl"):
            self._go_on_later(story, number, "fickle", delay)

    def _go_on_later(self, story: str, number: int, topic: str, delay: int) -> None:
        """Around its due time, too: ready or in flight is the harder case."""
        at = time.monotonic() + self._chance.uniform(0.1, delay / 1000 + 0.1)
        heapq.heappush(self._later, (at, number, story, number, topic))

    def _send(
        self,
        topic: str,
        number: int,
        do: Do,
        delay: int,
        *,
        ttl_ms: int = 0,
        retry: str | None = None,
    ) -> None:
        call = self._book.send(topic, [number], [do], [f"+{delay}"], ttl_ms)
        ttl = timedelta(milliseconds=ttl_ms) if ttl_ms else None
        options = options_of(number, self._now_ms()) if topic == WINDOWED else {}
        if self._has_windows and ttl_ms > SKIPPED_TTL_MS:  # an earlier build has neither
            options["late"] = "skip after 1s"
        send = self._producer.send(
            topic,
            body_of(number, do),
            id=own_id(number),
            delay=timedelta(milliseconds=delay),
            ttl=ttl,
            retry=retry,
            **options,
        )
        self._calls.append(self._note(call, send, "a"))

    def _go_on(self, story: str, number: int, topic: str) -> None:
        message_id, delay = own_id(number), self._chance.randint(200, 3_000)
        later = timedelta(milliseconds=delay)
        if story == "cancel":
            call = self._book.attempt("X", number)
            self._calls.append(self._note(call, self._producer.cancel(topic, message_id)))
        elif story == "move":
            call = self._book.attempt("R", number, f"+{delay}")
            moved = self._producer.reschedule(topic, message_id, delay=later)
            self._calls.append(self._note(call, moved))
        elif story == "fire":
            call = self._book.attempt("R", number, "+0")
            self._calls.append(self._note(call, self._producer.fire_now(topic, message_id)))
        elif story == "replace":
            [new] = self._book.numbers(1)
            call = self._book.attempt("P", topic_number(topic), new, number, f"+{delay}")
            outgoing = Outgoing([new, Do.OK], id=message_id, delay=later)
            self._calls.append(self._note(call, self._outcome(topic, outgoing, "replace")))
        elif story == "again":
            call = self._book.attempt("D", number, f"+{delay}")
            outgoing = Outgoing([number, Do.OK], id=message_id, delay=later)
            self._calls.append(self._note(call, self._outcome(topic, outgoing, "keep")))
        else:
            call = self._book.attempt("D", number, f"+{delay}")
            send = self._producer.send(
                topic, [number, Do.OK], id=message_id, delay=later, on_duplicate="reject"
            )
            self._calls.append(self._note(call, send, "a"))

    async def _outcome(self, topic: str, outgoing: Outgoing, mode: str) -> str:
        """The outcome of one message: only a bulk call reports it."""
        [one] = await self._producer.send_many(topic, [outgoing], on_duplicate=mode)
        return one.outcome

    async def _note(self, call: int, work: Awaitable[str], letter: str = "") -> None:
        try:
            said = await work
        except DuplicateMessage:
            self._book.confirm(call, "x")
        except LisaError as error:
            self._book.fail(call, error)
        else:
            self._book.confirm(call, letter or said[0])


def main() -> None:
    orders = Orders.read()
    with suppress(KeyboardInterrupt):
        if os.environ["TORTURE_KIND"] == "bulk":
            Bulk(orders).run(orders.rate)
        else:
            asyncio.run(Fickle(orders).run(orders.rate))


if __name__ == "__main__":
    main()
