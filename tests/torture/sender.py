"""A producer process: sends, sends again, replaces, cancels and moves messages.

    python -m tests.torture.sender

Its orders are in its environment, its actions in its ledger (`tests.torture.ledger.Book`).
"""

import asyncio
import heapq
import random
import time
from collections.abc import Awaitable, Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

from lisa import AsyncProducer, DuplicateMessage, LisaError, Producer
from lisa.core.transitions.enqueue import Sent
from lisa.producer import Outgoing, SendOutcome
from tests.torture.ledger import Book, Orders, Pace, delay_ms, leaving
from tests.torture.world import (
    COALESCED,
    LANES,
    LIMITED,
    ORDERED,
    POISON_RETRIES,
    RETRY_AFTER_MS,
    RULES,
    SCHEDULES,
    TICKS,
    WINDOWED,
    Do,
    body_of,
    has_time_in_its_window,
    key_of,
    options_of,
    own_id,
    shortly_before_it_closes,
    topic_number,
)

T = TypeVar("T")

BULK_TICK_S, FICKLE_TICK_S = 0.15, 0.1
DEFINES_EVERY_S = 2.0
MOST_SINGLY = 20
LATER_S = 5.0
SKIPPED_TTL_MS = 1_500  # messages with a longer ttl also have a late policy
TRIES_FOR = timedelta(seconds=4)  # for a call; after that it is an error, and the process continues

BULK_TOPICS = {"bulk": 80, "two": 8, "batch": 12, ORDERED: 4, LIMITED: 4}
WAYS = {"alike": 45, "each": 35, "stream": 10, "singly": 10}
TOPICS = {"async": 25, "hard": 20, "hang": 3, "fickle": 52, WINDOWED: 20, COALESCED: 40}
KEYS = 6
"""How many keys of a topic a process uses at a time."""

STORIES = {
    "plain": 20, "again": 15, "reject": 8, "replace": 10, "update": 5,
    "cancel": 22, "move": 12, "fire": 5, "ttl": 3,
}  # fmt: skip
HARD = {
    Do.OK: 600, Do.RAISE: 100, Do.RETRY: 100, Do.FALSE: 50, Do.SLOW: 100, Do.SLOWER: 50,
    Do.DISCARD: 6, Do.POISON: 2, Do.DEFER: 50,
}  # fmt: skip
DOES = {
    "hard": HARD,
    "hang": {Do.OK: 80, Do.HANG: 20},
    "batch": {Do.OK: 99, Do.RAISE: 1},
    WINDOWED: {Do.OK: 80, Do.RAISE: 10, Do.RETRY: 10},
    ORDERED: {
        Do.OK: 84,
        Do.RAISE: 4,
        Do.RETRY: 2,
        Do.FALSE: 2,
        Do.SLOW: 3,
        Do.DISCARD: 1,
        Do.DEFER: 4,
    },
    LIMITED: {Do.OK: 80, Do.RAISE: 4, Do.DEFER: 4, Do.SLOW: 12},
    COALESCED: {Do.OK: 70, Do.RAISE: 5, Do.RETRY: 5, Do.DEFER: 5, Do.SLOW: 15},
}
"""How handlers of these topics treat messages: weights."""

FIRED = 0.3
"""Of the messages with windows; half of these are due while their windows are closed."""


class Sender:
    """What both kinds share: a ledger, and draws."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._book = Book(orders)
        self._chance = random.Random(orders.seed)
        self._told, self._pace = leaving(), Pace(orders.rate)

    def _delay_ms(self) -> int:
        return delay_ms(self._chance, self._orders.longest_s)

    def _drawn(self, weights: Mapping[T, int]) -> T:
        return self._chance.choices(list(weights), list(weights.values()))[0]

    def _topic(self, weights: Mapping[str, int]) -> str:
        """An earlier build has neither windows nor keys."""
        unknown = () if self._orders.is_current else (WINDOWED, *LANES)
        return self._drawn({topic: n for topic, n in weights.items() if topic not in unknown})

    def _do(self, topic: str) -> Do:
        return self._drawn(DOES.get(topic, {Do.OK: 1}))


class Bulk(Sender):
    """Sends many messages per call, in every way that the blocking producer has."""

    def run(self) -> None:
        next_s = 0.0
        with Producer(self._orders.redis, patience=TRIES_FOR) as self._producer:
            while not self._told:
                if n := self._pace.take():
                    self._tick(n)
                if time.monotonic() >= next_s:
                    next_s = time.monotonic() + DEFINES_EVERY_S
                    self._define()
                time.sleep(BULK_TICK_S)
            self._book.commit()

    def _define(self) -> None:
        """Define the schedules as they are, as services do when they start.

        An earlier build has no schedules, and a run that restores defines none.
        """
        schedule: Any = self._orders.has_schedules and getattr(self._producer, "schedule", None)
        with suppress(LisaError):  # during a fault; the schedules exist nevertheless
            for name, options in SCHEDULES.items() if schedule else ():
                schedule(name, topic=TICKS, body=name, **options)

    def _tick(self, n: int) -> None:
        """Send new messages; of single calls, which are slow, only a few.

        alike: one due time for all, ids left to Lisa: the fast way. each: explicit ids, each with
        its own due time, some of them absolute. stream: outcomes before an error are confirmed.
        """
        topic, way = self._topic(BULK_TOPICS), self._drawn(WAYS)
        key = self._chance.randint(1, KEYS) if topic in LANES else 0
        self._book.clock.ask()
        calls = []
        if way == "singly":
            calls = [self._noted(way, topic, key, 1) for _ in range(min(n, MOST_SINGLY))]
            n, way = n - len(calls), "alike"
        if n:
            calls.append(self._noted(way, topic, key, n))
        self._book.commit()
        for call in calls:
            self._send(*call)

    def _noted(
        self, way: str, topic: str, key: int, n: int
    ) -> tuple[int, str, str, list[Outgoing]]:
        numbers, does = self._book.numbers(n), [self._do(topic) for _ in range(n)]
        is_alike = way == "alike"
        delays = [self._delay_ms()] * n if is_alike else [self._delay_ms() for _ in numbers]
        dues, now_ms = [f"+{delay}" for delay in delays], 0
        if way == "each" and self._chance.random() < 0.3:
            now_ms = self._book.clock.now().high // 1000
            dues = [str(now_ms + delay) for delay in delays]
        call = self._book.send(topic, numbers, does, dues, key=key)
        named: Any = {"key": key_of(numbers[0], key)} if key else {}  # an earlier build has no keys
        outgoing = [
            Outgoing(
                body_of(number, do),
                id=None if way in ("alike", "singly") else own_id(number),
                **{"at_ms": now_ms + delay} if now_ms else {"delay": timedelta(milliseconds=delay)},
                **named,
            )
            for number, do, delay in zip(numbers, does, delays, strict=True)
        ]
        return call, way, topic, outgoing

    def _send(self, call: int, way: str, topic: str, outgoing: list[Outgoing]) -> None:
        letters: list[str] = []
        try:
            for outcome in self._outcomes(way, topic, outgoing):
                letters.append(outcome[0])  # noqa: PERF401  keeps those before an error
        except LisaError as error:
            if way == "stream":
                error.sent = len(letters)
            self._book.fail(call, error)
        else:
            self._book.confirm(call, *letters)

    def _outcomes(self, way: str, topic: str, outgoing: list[Outgoing]) -> Iterable[str]:
        bodies = [message.body for message in outgoing]
        options: Any = {"delay": outgoing[0].delay}
        if topic in LANES:
            options["key"] = outgoing[0].key
        if way == "singly":
            self._producer.send(topic, bodies[0], **options)
            return ["accepted"]
        if way == "stream":
            reports: Iterable[SendOutcome] = self._producer.send_stream(topic, iter(outgoing))
        elif way == "alike":
            reports = self._producer.send_many(topic, bodies, **options)
        else:
            reports = self._producer.send_many(topic, outgoing)
        return (report.outcome for report in reports)


class Fickle(Sender):
    """Sends one by one on an event loop and changes its mind, in stories of one or two calls."""

    def __init__(self, orders: Orders) -> None:
        super().__init__(orders)
        self._new_key = count(1)
        self._keys = [next(self._new_key) for _ in range(KEYS)]  # of coalesced sends
        self._later: list[tuple[float, int, str, str]] = []
        self._calls: list[Awaitable[None]] = []

    def _now_ms(self) -> int:
        return self._book.clock.now().low // 1000

    async def run(self) -> None:
        """Due times in windows are chosen by Redis's clock: this process's own may be off."""
        self._producer = AsyncProducer(self._orders.redis, patience=TRIES_FOR)
        if not self._orders.is_current:
            await self._run()
            return
        from lisa.core.model.windows.placing import using_clock

        with using_clock(self._now_ms):
            await self._run()

    async def _run(self) -> None:
        while not self._told or self._later:
            self._book.clock.ask()
            for _ in range(0 if self._told else self._pace.take()):
                self._begin()
            while self._later and self._later[0][0] <= time.monotonic():
                _, number, story, topic = heapq.heappop(self._later)
                self._go_on(story, number, topic)
            calls, self._calls = self._calls, []
            if calls:
                self._book.commit()
                await asyncio.gather(*calls)
            await asyncio.sleep(FICKLE_TICK_S)
        self._book.commit()
        await self._producer.close()

    def _begin(self) -> None:
        """Send a message; a second call comes later, if the story has one."""
        topic = self._topic(TOPICS)
        if topic == COALESCED:
            self._coalesce()
            return
        [number] = self._book.numbers(1)
        story, delay, ttl_ms = "plain", self._delay_ms(), 0
        if topic == WINDOWED:
            if self._chance.random() < 0.5:
                delay = shortly_before_it_closes(number, self._now_ms(), delay)
            if not has_time_in_its_window(number, self._now_ms(), delay, self._orders.waits_ms):
                topic = "async"
            elif self._chance.random() < FIRED:
                story = "fire"
        elif topic == "fickle":
            story = self._drawn(STORIES)
            delay = delay if story == "plain" else self._chance.randint(300, 3_000)
            ttl_ms = self._chance.randint(500, 3_000) if story == "ttl" else 0
        self._send(topic, number, self._do(topic), delay, ttl_ms)
        if story not in ("plain", "ttl"):
            # Around its due time, too: ready or in flight is the harder case.
            soon_s = min(delay / 1000, LATER_S) + 0.1  # or it could not leave in time
            at = time.monotonic() + self._chance.uniform(0.1, soon_s)
            heapq.heappush(self._later, (at, number, story, topic))

    def _send(self, topic: str, number: int, do: Do, delay: int, ttl_ms: int) -> None:
        call = self._book.send(topic, [number], [do], [f"+{delay}"], ttl=ttl_ms)
        options = options_of(number, self._now_ms()) if topic == WINDOWED else {}
        if do is Do.POISON:
            options["retry"] = ",".join([f"{RETRY_AFTER_MS}ms"] * POISON_RETRIES)
        if ttl_ms:
            options["ttl"] = timedelta(milliseconds=ttl_ms)
        if self._orders.is_current and ttl_ms > SKIPPED_TTL_MS:  # an earlier build has neither
            options["late"] = "skip after 1s"
        options |= {"id": own_id(number), "delay": timedelta(milliseconds=delay)}
        self._calls.append(
            self._note(call, self._producer.send(topic, body_of(number, do), **options), "a")
        )

    def _coalesce(self) -> None:
        """Send for a key whose last send has been answered."""
        if not self._keys:
            return
        key = self._keys.pop(self._chance.randrange(len(self._keys)))
        [number], do = self._book.numbers(1), self._do(COALESCED)
        most_ms, options = RULES[key % len(RULES)]
        call = self._book.send(COALESCED, [number], [do], [f"+{most_ms}"], key=key)
        outgoing = Outgoing(body_of(number, do), key=key_of(number, key), **options)
        self._calls.append(self._send_for_key(key, call, outgoing))

    async def _send_for_key(self, key: int, call: int, outgoing: Outgoing) -> None:
        """A key whose send failed is not used again: it may still arrive, after others."""
        try:
            [report] = await self._producer.send_many(COALESCED, [outgoing])
        except LisaError as error:
            self._book.fail(call, error)
            key = next(self._new_key)
        else:
            letter = "f" if report.outcome == Sent.REPLACED_IN_FLIGHT else report.outcome[0]
            self._book.confirm(call, letter + report.id[-1])
        self._keys.append(key)

    def _go_on(self, story: str, number: int, topic: str) -> None:
        name, delay = own_id(number), self._chance.randint(200, 3_000)
        later, due, producer = timedelta(milliseconds=delay), f"+{delay}", self._producer
        options: Any = {"id": name, "delay": later}
        if story == "update" and not self._orders.is_current:
            story = "replace"  # an earlier build has no updates
        if story == "cancel":
            self._call(producer.cancel(topic, name), "X", number)
        elif story == "move":
            self._call(producer.reschedule(topic, name, delay=later), "R", number, due)
        elif story == "fire":
            self._call(producer.fire_now(topic, name), "R", number, "+0")
        elif story in ("replace", "update"):
            [new] = self._book.numbers(1)
            work = self._outcome(topic, Outgoing([new, Do.OK], **options), story)
            kind = "P" if story == "replace" else "U"
            self._call(work, kind, topic_number(topic), new, number, due)
        elif story == "again":
            work = self._outcome(topic, Outgoing([number, Do.OK], **options), "keep")
            self._call(work, "D", number, due)
        else:
            send = producer.send(topic, [number, Do.OK], **options, on_duplicate="reject")
            self._calls.append(self._note(self._book.attempt("D", number, due), send, "a"))

    def _call(self, work: Awaitable[str], kind: str, *fields: object) -> None:
        self._calls.append(self._note(self._book.attempt(kind, *fields), work))

    async def _outcome(self, topic: str, outgoing: Outgoing, mode: str) -> str:
        """The outcome of one message: only a bulk call reports it."""
        [report] = await self._producer.send_many(topic, [outgoing], on_duplicate=mode)
        return report.outcome

    async def _note(self, call: int, work: Awaitable[str], letter: str = "") -> None:
        try:
            said = await work
        except DuplicateMessage:
            self._book.confirm(call, "x")
        except LisaError as error:
            self._book.fail(call, error)
        else:
            # Earlier builds say "replaced" of a message that may be in flight.
            held = said == getattr(Sent, "REPLACED_IN_FLIGHT", "replaced")
            self._book.confirm(call, letter or ("f" if held else said[0]))


def main() -> None:
    orders = Orders.read()
    with suppress(KeyboardInterrupt):
        if orders.kind == "bulk":
            Bulk(orders).run()
        else:
            asyncio.run(Fickle(orders).run())


if __name__ == "__main__":
    main()
