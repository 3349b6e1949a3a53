"""Shared by the producer's tests: one interface for both producers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from lisa.core.model.stream import Entry
from lisa.core.redis.address import Address
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.pull import Pull
from lisa.producer import AsyncProducer, Producer, SendOutcome, SendReport
from tests.servers import open_store


class Either:
    """A `Producer`, or an `AsyncProducer` with its own event loop, with the same calls."""

    def __init__(self, kind: str, server: str | Address, **options: Any) -> None:
        self._loop = asyncio.new_event_loop() if kind == "async" else None
        made = AsyncProducer if self._loop else Producer
        self.producer: Any = made(server, **options)

    def _run(self, name: str, *args: Any, **options: Any) -> Any:
        result = getattr(self.producer, name)(*args, **options)
        return self._loop.run_until_complete(result) if self._loop else result

    def send(self, topic: str, body: object, **options: Any) -> str:
        message_id: str = self._run("send", topic, body, **options)
        return message_id

    def send_many(self, topic: str, bodies: Iterable[object], **options: Any) -> SendReport:
        report: SendReport = self._run("send_many", topic, bodies, **options)
        return report

    def stream(self, topic: str, bodies: Iterable[object], take: int) -> list[SendOutcome]:
        """The first `take` outcomes of a `send_stream`."""
        outcomes = self.producer.send_stream(topic, bodies)
        if self._loop is None:
            return [outcome for outcome, _ in zip(outcomes, range(take), strict=False)]

        async def collect() -> list[SendOutcome]:
            got: list[SendOutcome] = []
            async for outcome in outcomes:
                got.append(outcome)
                if len(got) == take:
                    break
            await outcomes.aclose()
            return got

        return self._loop.run_until_complete(collect())

    def ask(self, name: str, *args: Any, **options: Any) -> Any:
        """Call any other method."""
        return self._run(name, *args, **options)

    def together(self, *calls: Callable[[Any], Awaitable[Any]]) -> list[Any]:
        """Run coroutines concurrently, for an `AsyncProducer` only."""
        assert self._loop is not None

        async def all_of_them() -> list[Any]:
            return await asyncio.gather(*(call(self.producer) for call in calls))

        return self._loop.run_until_complete(all_of_them())

    def close(self) -> None:
        self._run("close")
        if self._loop:
            self._loop.close()


class Topic:
    """A topic as manager and consumers see it, driven by single transitions."""

    def __init__(self, url: str, name: str = "orders") -> None:
        self.name = name
        self.store = open_store(url)
        self.keys = self.store.keys.topic(name)

    def declare(self, *groups: str) -> None:
        for group in groups:
            self.store.call(Declare(self.name, group))

    def waiting(self) -> dict[str, int]:
        """Ids and due times of waiting messages."""
        flat = self.store.ask("ZRANGE", self.keys.waiting, 0, -1, "WITHSCORES")
        return {
            one.decode(): int(float(due)) for one, due in zip(flat[::2], flat[1::2], strict=True)
        }

    def now_ms(self) -> int:
        return self.store.drive(self.store.server_time_ms())

    def promote(self) -> int:
        return self.store.call(Promote(self.name)).moved

    def take(self, group: str, count: int = 100) -> Sequence[Entry]:
        """Deliver what is ready."""
        return self.store.call(Pull(self.name, group, "c1", count)).entries

    def close(self) -> None:
        self.store.close()
