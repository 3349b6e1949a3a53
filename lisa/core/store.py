"""What Lisa asks of the server about topics, and the transitions of a whole topic, as flows.

`Store` writes the flows (see core.flow) and holds what is known of topics' groups and shards;
`SyncStore` and `AsyncStore` run them on a connection.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from lisa.core import routing
from lisa.core.connection import AsyncConnection, Connection
from lisa.core.durability import Replicas
from lisa.core.errors import ConfigError
from lisa.core.flow import Flow, adrive, drive
from lisa.core.keys import Keys, is_place
from lisa.core.options import PRODUCER_RETRY_TIME, TopicOptions
from lisa.core.runner import Runner
from lisa.core.shards import Layout, bases
from lisa.core.transitions.base import STEPS_PER_CALL, ById, Transition, text

__all__ = ["SCHEMA_VERSION", "AsyncStore", "Store", "SyncStore", "chunks", "counters", "pairs"]

T = TypeVar("T")
S = TypeVar("S")

SCHEMA_VERSION = 1
"""The layout of keys and envelopes that this build reads and writes."""


def chunks(items: Sequence[S], size: int) -> Iterator[Sequence[S]]:
    """Consecutive pieces of at most `size` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def pairs(flat: Sequence[bytes] | dict[bytes, bytes]) -> dict[bytes, bytes]:
    """A hash's reply as a dict, whichever shape the protocol gave it."""
    if isinstance(flat, dict):
        return flat
    return dict(zip(flat[::2], flat[1::2], strict=True))


def counters(flat: Sequence[bytes] | dict[bytes, bytes]) -> dict[str, int]:
    """A topic's counters out of the reply; not what a foreign hand wrote among them."""
    return {text(name): int(n) for name, n in pairs(flat).items() if n.isdigit()}


class Store(Runner):
    """Flows for all that Lisa asks of the server, see `Runner`."""

    def __init__(
        self, keys: Keys, where: str, patience: timedelta = PRODUCER_RETRY_TIME, who: str = "lisa"
    ) -> None:
        super().__init__(keys, where, patience, who)
        self._layouts: dict[str, Layout] = {}

    def run_by_id(self, transition: ById[S], durability: Replicas | None = None) -> Flow[list[S]]:
        """Run one for each of its messages, in whichever place of the topic it belongs or stands.

        With `durability` it is done once so many replicas have it; else raises NotReplicated.
        Where some of several places refuse, the error's `outcomes` have what became of the rest.
        """
        return routing.by_id(self, transition, durability)

    def groups(self, topic: str) -> Flow[tuple[str, ...]]:
        """The groups declared on a topic, in order of name, asked of the server."""
        keys = self.keys.topic(topic)
        reply = yield from self.command("HKEYS", keys.groups)
        found = tuple(sorted(text(name) for name in reply))
        self._groups[topic] = found
        return found

    def known_groups(self, topic: str) -> tuple[str, ...] | None:
        """The groups of a topic as last heard of, or None if nothing was; asks nobody."""
        return self._groups.get(topic)

    def options(self, topic: str) -> Flow[TopicOptions]:
        """A topic's options as they stand on the server."""
        reply = yield from self.command("HGETALL", self.keys.topic(topic).options)
        return TopicOptions.from_hash(pairs(reply))

    def stats(self, topic: str) -> Flow[dict[str, int]]:
        """A topic's counters by name (`sent`, `acked@<group>`, `late:<letter>@<group>`, ...)."""
        reply = yield from self.command("HGETALL", self.keys.topic(topic).stats)
        return counters(reply)

    def topics(self) -> Flow[list[str]]:
        """The topics that are registered, in order of name; not what a foreign hand wrote there."""
        return bases((yield from self.places()))

    def places(self) -> Flow[list[str]]:
        """The same with all places of those that are split, each by its own name."""
        reply = yield from self.command("ZRANGE", self.keys.topics, 0, -1)
        return sorted(name for name in map(text, reply) if is_place(name))

    def layout(self, topic: str) -> Flow[Layout]:
        """Where the messages of a topic are, asked of the server."""
        return (yield from self.layouts([topic]))[0]

    def layouts(self, topics: Sequence[str]) -> Flow[list[Layout]]:
        """The same for many, in the order given."""
        replies = yield from self.commands(
            [("HGET", self.keys.topic(topic).options, "layout") for topic in topics]
        )
        found = list(map(Layout.read, replies))
        for topic, layout in zip(topics, found, strict=True):
            self.learn_layout(topic, layout)
        return found

    def known_layout(self, topic: str) -> Layout | None:
        """The layout as last heard of, None if it was never split; asks nobody."""
        return self._layouts.get(topic)

    def learn_layout(self, topic: str, layout: Layout) -> None:
        """Take notice of a topic's layout."""
        if layout.number:
            self._layouts[topic] = layout
        else:
            self._layouts.pop(topic, None)

    def register(self, topics: Iterable[str]) -> Flow[None]:
        """Make topics known to all managers."""
        now = int(time.time() * 1000)
        seen = [part for topic in topics for part in (now, topic)]
        if seen:
            yield from self.command("ZADD", self.keys.topics, *seen)

    def check_schema(self) -> Flow[None]:
        """Refuse to work on a newer layout; write ours where there is none. Raises ConfigError."""
        found = yield from self.command("GET", self.keys.schema)
        if found is None:
            # Asked first: a replica or a full server refuses writes, yet can be read and drained.
            yield from self.command("SET", self.keys.schema, SCHEMA_VERSION, "NX")
            found = yield from self.command("GET", self.keys.schema)
        if found is not None and int(found) > SCHEMA_VERSION:
            raise ConfigError(
                f"{self.where} holds layout {int(found)} of prefix {self.keys.prefix!r}; this "
                f"build knows {SCHEMA_VERSION}: upgrade it, or use another prefix"
            )

    def server_time_us(self) -> Flow[int]:
        """Redis's clock in microseconds."""
        seconds, micros = yield from self.command("TIME")
        return int(seconds) * 1_000_000 + int(micros)

    def batch_size(self, topic: str, kind: type[Transition[Any]] | None = None) -> int:
        """How many ids one script call may hold for a topic, by the groups known so far."""
        steps = (kind.steps if kind else 1) * max(1, len(self._groups.get(topic, ())))
        return max(1, STEPS_PER_CALL // steps)


class SyncStore(Store):
    """The same, run at once, blocking; safe to share between threads."""

    connection: Connection

    def __init__(
        self,
        connection: Connection,
        keys: Keys,
        patience: timedelta = PRODUCER_RETRY_TIME,
        who: str = "lisa",
    ) -> None:
        super().__init__(keys, connection.address.shown, patience, who)
        self.connection = connection

    def drive(self, flow: Flow[T]) -> T:
        """Run any flow on this store's connection."""
        return drive(flow, self.connection)

    def call(self, transition: Transition[T]) -> T:
        """Run one transition at the place that its topic names. Raises LisaError."""
        return drive(self.run(transition), self.connection)

    def call_by_id(self, transition: ById[S]) -> list[S]:
        """Run one wherever its messages stand (see `run_by_id`). Raises LisaError."""
        return drive(self.run_by_id(transition), self.connection)

    def ask(self, *command: str | bytes | float) -> Any:
        """One plain command that is safe to repeat; answers the raw reply."""
        return drive(self.command(*command), self.connection)

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()


class AsyncStore(Store):
    """The same for asyncio."""

    connection: AsyncConnection

    def __init__(
        self,
        connection: AsyncConnection,
        keys: Keys,
        patience: timedelta = PRODUCER_RETRY_TIME,
        who: str = "lisa",
    ) -> None:
        super().__init__(keys, connection.address.shown, patience, who)
        self.connection = connection

    async def drive(self, flow: Flow[T]) -> T:
        """Run any flow on this store's connection."""
        return await adrive(flow, self.connection)

    async def call(self, transition: Transition[T]) -> T:
        """Run one transition at the place that its topic names. Raises LisaError."""
        return await adrive(self.run(transition), self.connection)

    async def call_by_id(self, transition: ById[S]) -> list[S]:
        """Run one wherever its messages stand (see `run_by_id`). Raises LisaError."""
        return await adrive(self.run_by_id(transition), self.connection)

    async def close(self) -> None:
        """Close the connection."""
        await self.connection.close()
