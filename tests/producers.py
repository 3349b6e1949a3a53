"""Shared by the producer's tests: one interface for both producers."""

import asyncio
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from lisa.core.model.stream import Entry
from lisa.core.redis.address import Address
from lisa.core.transitions.delivery import Pull
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.promote import Promote
from lisa.producer import AsyncProducer, Producer, SendOutcome
from tests.servers import open_store


class Either:
    """A `Producer`, or an `AsyncProducer` with its own event loop, with the same calls."""

    def __init__(self, kind: str, server: str | Address, **options: Any) -> None:
        self._loop = asyncio.new_event_loop() if kind == "async" else None
        self.producer: Any = (AsyncProducer if self._loop else Producer)(server, **options)

    def __getattr__(self, name: str) -> Any:
        """A method of the producer, whose result is awaited if it is asynchronous."""
        method = getattr(self.producer, name)
        if self._loop is None:
            return method
        run = self._loop.run_until_complete
        return lambda *args, **options: run(method(*args, **options))

    def ask(self, name: str, *args: Any, **options: Any) -> Any:
        """Call the method of this name."""
        return self.__getattr__(name)(*args, **options)

    def stream(self, topic: str, bodies: Iterable[object], take: int) -> list[SendOutcome]:
        """The first `take` outcomes of a `send_stream`."""
        outcomes = self.producer.send_stream(topic, bodies)
        if self._loop is None:
            return list(itertools.islice(outcomes, take))

        async def collect() -> list[SendOutcome]:
            got = [await anext(outcomes) for _ in range(take)]
            await outcomes.aclose()
            return got

        return self._loop.run_until_complete(collect())

    def close(self) -> None:
        self.ask("close")
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
