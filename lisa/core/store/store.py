"""Queries about topics and operations on whole topics, as flows.

`Store` defines the flows (see core.redis.flow) and caches topics' groups and shards. `SyncStore`
and `AsyncStore` run the flows on their connection.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import Keys, is_shard_name
from lisa.core.model.options import BYTES_PER_CALL, PRODUCER_RETRY_TIME, TopicOptions
from lisa.core.model.sharding import Shard, Topic, topics_of
from lisa.core.redis import errors
from lisa.core.redis.connection import AsyncConnection, Connection
from lisa.core.redis.flow import Chain, Flow, adrive, drive
from lisa.core.store.registration import TopicRegistration
from lisa.core.store.replies import counters, microseconds, pairs
from lisa.core.store.routing import Router
from lisa.core.store.server_checks import check_for_roles, is_seen
from lisa.core.transitions.base import STEPS_PER_CALL, ById, Transition, text

K = TypeVar("K")
T = TypeVar("T")
S = TypeVar("S")
Ask: TypeAlias = Callable[..., Flow[Any]]

SCHEMA_VERSION = 1
"""Version of the keys and envelopes that this build reads and writes."""


ROLES_THAT_WARN = ("producer", "consumer", "manager", "gateway")
"""Those that warn of a server's configuration; for the command line there is `lisa doctor`."""


def chunks(items: Sequence[S], size: int) -> Iterator[Sequence[S]]:
    """Consecutive slices of at most `size` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]


def portions(items: Iterable[S], most: int, size_of: Callable[[S], int]) -> Iterator[list[S]]:
    """Split items into pieces of at most `most` items and BYTES_PER_CALL, but at least one item."""
    piece: list[S] = []
    size = 0
    for item in items:
        own = size_of(item)
        if piece and (len(piece) == most or size + own > BYTES_PER_CALL):
            yield piece
            piece, size = [], 0
        piece.append(item)
        size += own
    if piece:
        yield piece


def grouped(items: Iterable[tuple[K, S]]) -> dict[K, list[S]]:
    """Key -> its values, in their order, from pairs of a key and a value."""
    found: dict[K, list[S]] = {}
    for key, value in items:
        found.setdefault(key, []).append(value)
    return found


class Store(Router):
    """Flows for all queries and operations."""

    def __init__(
        self,
        connection: Any,
        keys: Keys,
        patience: timedelta = PRODUCER_RETRY_TIME,
        who: str = "lisa",
    ) -> None:
        super().__init__(keys, connection.address.shown, patience, who)
        self.connection = connection
        self._who = who
        self.has_nodes: bool = connection.address.kind == "cluster"
        """Whether keys are spread over several servers, any of which may be down alone."""
        self._registration = TopicRegistration(
            "the schema and the list of topics",
            lambda topics: self._list(keys.topics, topics, self.command_once),
            lambda: self._verify_schema(is_patient=False),
        )
        self._local_registration = TopicRegistration(
            "the list of topics with wall times",
            lambda topics: self._list(keys.scheduled, topics, self.command_once, "NX"),
        )

    def _finish(self) -> Flow[None]:
        yield from self._registration.finish()
        yield from self._local_registration.finish()

    def groups(self, topic: str) -> Flow[tuple[str, ...]]:
        """Read the groups declared on a topic, sorted by name."""
        keys = self.keys.topic(topic)
        reply = yield from self.command("HKEYS", keys.groups)
        return self.learn_groups(topic, reply)

    def known_groups(self, topic: str) -> tuple[str, ...] | None:
        """The last known groups of a topic, without asking the server; None if none are known."""
        return self._groups.get(topic)

    def options(self, topic: str) -> Flow[TopicOptions]:
        """Read a topic's options."""
        reply = yield from self.command("HGETALL", self.keys.topic(topic).options)
        return TopicOptions.from_hash(pairs(reply))

    def stats(self, topic: str) -> Flow[dict[str, int]]:
        """A topic's counters by name (`sent`, `acked@<group>`, `late:<letter>@<group>`, ...)."""
        reply = yield from self.command("HGETALL", self.keys.topic(topic).stats)
        return counters(reply)

    def topics(self) -> Flow[list[Topic]]:
        """The registered topics, sorted by name; ignores invalid names."""
        return topics_of((yield from self.shards()))

    def shards(self) -> Flow[list[Shard]]:
        """The registered topics and shards, sorted by name; ignores invalid names."""
        reply = yield from self.command("ZRANGE", self.keys.topics, 0, -1)
        return sorted(Shard(name) for name in map(text, reply) if is_shard_name(name))

    def register(self, topics: Iterable[str]) -> Flow[bool]:
        """Register topics for all managers. Returns whether they are listed now.

        On a cluster the node of the list may be down while the topics' own nodes are not. Then this
        returns False after a short wait, and the caller tries again later.
        """
        if self.has_nodes:
            return (yield from self._registration.add(topics))
        yield from self._list(self.keys.topics, topics, self.command)
        return True

    def list_again(self, topics: Iterable[str]) -> Flow[None]:
        """List topics that may be missing from the list; listed topics keep their times."""
        yield from self._list(self.keys.topics, topics, self.command, "NX")

    def list_scheduled(self, topic: str) -> Flow[None]:
        """Tell the managers that a topic has schedules."""
        yield from self._list(self.keys.scheduled, [topic], self.command, "NX")

    def list_local(self, topic: str) -> Flow[None]:
        """Tell the managers that a topic has messages with a wall time.

        On a cluster the node of the list may be down, as in `register`.
        """
        if self.has_nodes:
            yield from self._local_registration.add([topic])
        else:
            yield from self.list_scheduled(topic)

    def check_schema(self) -> Flow[bool]:
        """Check the schema version, or write it if there is none. Returns whether this is done.

        Raises ConfigError for a newer version. The first check in a process also checks the server:
        it logs warnings about the configuration, and raises ConfigError if the server is too old.
        On a cluster returns False while the schema's node is down; later calls of `register` or
        `check_schema` complete the check.
        """
        if self.has_nodes:
            return (yield from self._registration.check())
        yield from self.verify_schema()
        return True

    def verify_schema(self) -> Flow[None]:
        """Like `check_schema`, but raises ServerUnavailable if the schema's node is down."""
        yield from self._verify_schema(is_patient=True)

    def server_time_us(self, key: str = "") -> Flow[int]:
        """Redis's clock in microseconds; on a cluster the clock of the node that holds `key`."""
        is_beside = key and self.has_nodes
        flow = self._beside(key, "TIME") if is_beside else self.command("TIME")
        return microseconds((yield from flow))

    def server_time_ms(self, key: str = "") -> Flow[int]:
        """Redis's clock in milliseconds; see `server_time_us`."""
        return (yield from self.server_time_us(key)) // 1000

    def wake(self, topic: str) -> Flow[None]:
        """Wake the managers for a topic; on a cluster, through the topic's own node."""
        key = self.keys.topic(topic).consumers if self.has_nodes else ""
        command = ("PUBLISH", self.keys.wake, topic)
        yield from self._beside(key, *command) if key else self.command(*command)

    def _list(self, key: str, topics: Iterable[str], ask: Ask, *flags: str) -> Flow[None]:
        now = int(time.time() * 1000)
        members = [part for topic in topics for part in (now, topic)]
        if members:
            yield from ask("ZADD", key, *flags, *members)

    def _verify_schema(self, *, is_patient: bool) -> Flow[None]:
        ask: Ask = self.command if is_patient else self.command_once
        if is_seen(self.where):
            found = yield from ask("GET", self.keys.schema)
        else:
            found = yield from self._first_contact(is_patient=is_patient)
        if found is None:
            # Read first: a replica or a full server refuses writes but can still be drained.
            yield from ask("SET", self.keys.schema, SCHEMA_VERSION, "NX")
            found = yield from ask("GET", self.keys.schema)
        is_number = found is not None and found.isdigit() and len(found) < 10
        if found is not None and not (is_number and int(found) <= SCHEMA_VERSION):
            shown = int(found) if is_number else repr(text(found))
            raise ConfigError(
                f"{self.where} has schema {shown} under prefix {self.keys.prefix!r}, but this "
                f"build supports up to {SCHEMA_VERSION}: upgrade Lisa, or use another prefix"
            )

    def _first_contact(self, *, is_patient: bool) -> Flow[bytes | None]:
        """Read the schema and check the server in one round trip."""
        key = self.keys.schema
        commands = [("GET", key), ("INFO",)]
        found, about = yield from (
            self._answered(key, commands) if is_patient else self._once(Chain(key, commands))
        )
        check_for_roles(self.where, about, warns=self._who in ROLES_THAT_WARN)
        if isinstance(found, errors.ClientError):
            raise errors.translated(found, self.where) from found
        return found  # type: ignore[no-any-return]

    def batch_size(self, topic: str, kind: type[Transition[Any]] | None = None) -> int:
        """Maximum number of ids per script call for a topic, given its known groups."""
        steps: float = kind.steps if kind else 1
        further = max(0, len(self._groups.get(topic, ())) - 1)
        each = steps if kind is None or kind.group_steps is None else kind.group_steps
        return max(1, int(STEPS_PER_CALL / (steps + further * each)))


class SyncStore(Store):
    """A store that runs flows blocking; safe to share between threads."""

    connection: Connection

    def drive(self, flow: Flow[T]) -> T:
        """Run a flow on this store's connection."""
        return drive(flow, self.connection)

    def call(self, transition: Transition[T]) -> T:
        """Run one transition on the shard named by its topic. Raises LisaError."""
        return drive(self.run(transition), self.connection)

    def call_by_id(self, transition: ById[S]) -> list[S]:
        """Run one transition on the shards of its messages (see `run_by_id`). Raises LisaError."""
        return drive(self.run_by_id(transition), self.connection)

    def ask(self, *command: str | bytes | float) -> Any:
        """Run one plain command that is safe to repeat. Returns the raw reply."""
        return drive(self.command(*command), self.connection)

    def close(self) -> None:
        """Finish registrations, and close the connection."""
        try:
            self.drive(self._finish())
        finally:
            self.connection.close()


class AsyncStore(Store):
    """A store that runs flows on an event loop."""

    connection: AsyncConnection

    async def drive(self, flow: Flow[T]) -> T:
        """Run a flow on this store's connection."""
        return await adrive(flow, self.connection)

    async def call(self, transition: Transition[T]) -> T:
        """Run one transition on the shard named by its topic. Raises LisaError."""
        return await self.drive(self.run(transition))

    async def call_by_id(self, transition: ById[S]) -> list[S]:
        """Run one transition on the shards of its messages (see `run_by_id`). Raises LisaError."""
        return await self.drive(self.run_by_id(transition))

    async def close(self) -> None:
        """Finish registrations, and close the connection."""
        try:
            await self.drive(self._finish())
        finally:
            for task in [*self._registration.running, *self._local_registration.running]:
                task.cancel()
            await self.connection.close()
