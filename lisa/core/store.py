"""Runs transitions: the one place that sends scripts, and repeats what is safe to repeat.

`Store` writes flows (see core.flow) and holds what is known of the topics' groups; `SyncStore`
and `AsyncStore` run them on a connection. Every transition may be repeated, so a call whose reply
was lost is sent again, with growing pauses, until `patience` is used up.
"""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from lisa.core import failures, routing, scripts
from lisa.core.connection import AsyncConnection, Connection
from lisa.core.durability import Replicas, TooFew, confirmed, lacks_command
from lisa.core.errors import ConfigError, GroupRemoved, LisaError, Misplaced, NotReplicated
from lisa.core.flow import Chain, Command, Execute, ExecuteMany, Flow, Pause, adrive, drive
from lisa.core.keys import Keys, TopicKeys, is_place
from lisa.core.options import PRODUCER_RETRY_TIME, TopicOptions
from lisa.core.shards import Layout, bases
from lisa.core.transitions.base import STEPS_PER_CALL, ById, Transition, text
from lisa.core.transitions.declare import Declare

__all__ = ["SCHEMA_VERSION", "AsyncStore", "Store", "SyncStore", "chunks", "counters", "pairs"]

T = TypeVar("T")
S = TypeVar("S")

SCHEMA_VERSION = 1
"""The layout of keys and envelopes that this build reads and writes."""

FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 1.0
MOST_MENDS = 20
WAIT_SHARE = 0.8
SHORTEST_WAIT_S = 0.1


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


class Patience:
    """What one call may spend: growing pauses until a deadline, and a number of repairs.

    Each pause lies somewhere in the upper half of its length.
    """

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds
        self._pause = FIRST_PAUSE_S
        self._mends = 0

    def mend(self, error: BaseException, where: str) -> None:
        """Count a repair on the server; raise when it is of no use again and again."""
        self._mends += 1
        if self._mends > MOST_MENDS:
            raise failures.translated(error, where)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, none of them negative."""
        return max(0.0, self._ends - time.monotonic())

    def next_pause(self) -> float | None:
        left = self._ends - time.monotonic()
        if left <= 0:
            return None
        pause = min(self._pause * random.uniform(0.5, 1.0), left)
        self._pause = min(self._pause * 2, LONGEST_PAUSE_S)
        return pause


class Store:
    """Flows for all that Lisa asks of the server. `where` names it in errors.

    `who` (producer, manager, ...) is named in the journal, with this machine and process.
    """

    connection: Connection | AsyncConnection

    def __init__(
        self, keys: Keys, where: str, patience: timedelta = PRODUCER_RETRY_TIME, who: str = "lisa"
    ) -> None:
        self.keys = keys
        self.where = where
        self.actor = f"{who}@{socket.gethostname()}:{os.getpid()}"
        self._patience_s = patience.total_seconds()
        self._groups: dict[str, tuple[str, ...]] = {}
        self._layouts: dict[str, Layout] = {}

    def run(self, transition: Transition[T]) -> Flow[T]:
        """Run one transition at the place that its topic names.

        Raises what `transition.refuse` raises, and LisaError.
        """
        return self._run(transition, Patience(self._patience_s))

    def run_by_id(self, transition: ById[S], durability: Replicas | None = None) -> Flow[list[S]]:
        """Run one for each of its messages, in whichever place of the topic it belongs or stands.

        With `durability` it is done once so many replicas have it; else raises NotReplicated.
        Where some of several places refuse, the error's `outcomes` have what became of the rest.
        """
        return routing.by_id(self, transition, durability)

    def run_at(
        self, transition: Transition[T], layout: str, durability: Replicas | None = None
    ) -> Flow[T]:
        """Run one at a place that was chosen by a layout, named by its number.

        Raises Misplaced if it is another by now.
        """
        return self._run(transition, Patience(self._patience_s), layout, durability)

    def patience(self) -> Patience:
        """What one call may spend on waiting."""
        return Patience(self._patience_s)

    def _run(
        self,
        transition: Transition[T],
        patience: Patience,
        layout: str = "",
        durability: Replicas | None = None,
    ) -> Flow[T]:
        keys = self.keys.topic(transition.topic)
        while True:
            groups = transition.fixed_groups
            if groups is None:
                groups = yield from self._groups_for(transition, keys, patience)
            command = _call(transition, keys, groups, self.actor, layout)
            try:
                if durability is None:
                    reply = yield Execute(command)
                else:
                    reply = yield from self._durably(command, keys, durability, patience)
            except TooFew as few:
                yield from self._wait_for_replicas(few.count, durability, patience)
                continue
            except failures.ClientError as error:
                yield from self._recover(error, transition.script, keys, groups, patience)
                continue
            if reply[0] == b"OK":
                return transition.parse(reply[1:])
            if reply[0] == b"SHARDS":
                raise Misplaced(f"topic {keys.topic!r} is being split anew: try again")
            if reply[0] != b"GROUPS":
                transition.refuse(reply)
            self._groups[keys.topic] = tuple(sorted(text(name) for name in reply[1:]))

    def run_many(
        self, transitions: Sequence[Transition[T]], layout: str = ""
    ) -> Flow[list[T | LisaError]]:
        """Run transitions in one round trip; what fails alone stands as an error in its place."""
        commands: list[Command] = []
        for transition in transitions:
            keys = self.keys.topic(transition.topic)
            groups = transition.fixed_groups
            if groups is None:
                groups = self._groups.get(keys.topic, ())
            own = transition.own_group
            known = own is None or own in groups
            # Something harmless, that every role has the right to, keeps the place of what waits.
            commands.append(
                _call(transition, keys, groups, self.actor, layout) if known else ("TIME",)
            )
        try:
            replies = yield ExecuteMany(commands)
        except failures.ClientError as error:
            replies = [error] * len(commands)
        results: list[T | LisaError] = []
        patience = Patience(self._patience_s)
        for transition, reply in zip(transitions, replies, strict=True):
            if isinstance(reply, list) and reply[0] == b"OK":
                results.append(transition.parse(reply[1:]))
                continue
            # Whatever went wrong (script flushed, groups changed, connection cut), _run knows;
            # all of them share one patience, or many would wait for a dead server in turn.
            try:
                results.append((yield from self._run(transition, patience, layout)))
            except LisaError as error:
                results.append(error)
        return results

    def command(self, *command: str | bytes | float) -> Flow[Any]:
        """One plain command that is safe to repeat; answers the raw reply."""
        patience = Patience(self._patience_s)
        while True:
            try:
                return (yield Execute(command))
            except failures.ClientError as error:
                yield from self._wait(error, patience)

    def commands(self, commands: Sequence[Command]) -> Flow[list[Any]]:
        """Plain commands, safe to repeat, in one round trip. Raises the first error among them."""
        patience = Patience(self._patience_s)
        while True:
            error: BaseException | None = None
            try:
                replies: list[Any] = yield ExecuteMany(commands)
            except failures.ClientError as raised:
                error = raised
            else:
                error = next((one for one in replies if isinstance(one, Exception)), None)
                if error is None:
                    return replies
            yield from self._wait(error, patience)

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

    def _groups_for(
        self, transition: Transition[Any], keys: TopicKeys, patience: Patience
    ) -> Flow[tuple[str, ...]]:
        groups = self._groups.get(keys.topic)
        own = transition.own_group
        if groups is not None and (own is None or own in groups):
            return groups
        if own is None:
            return ()
        try:
            reply = yield Execute(("HKEYS", keys.groups))
        except failures.ClientError as error:
            yield from self._wait(error, patience)
            return (yield from self._groups_for(transition, keys, patience))
        found = self._groups[keys.topic] = tuple(sorted(text(name) for name in reply))
        if own not in found:
            raise GroupRemoved(f"group {own!r} is not declared on topic {keys.topic!r}")
        return found

    def _durably(
        self, command: Command, keys: TopicKeys, wanted: Replicas, patience: Patience
    ) -> Flow[Any]:
        # Well within the time that a reply may take; what is left of the patience, if that is less.
        slice_s = self.connection.address.socket_timeout_s * WAIT_SHARE
        within_s = min(slice_s, max(patience.left_s, SHORTEST_WAIT_S))
        try:
            return (yield from confirmed(command, keys.confirm, wanted, within_s))
        except failures.ClientError as error:
            if lacks_command(error):
                raise ConfigError(
                    f"{self.where} has no WAITAOF: fsync=True needs Redis 7.2 or Valkey"
                ) from error
            raise

    def _wait_for_replicas(
        self, count: int, wanted: Replicas | None, patience: Patience
    ) -> Flow[None]:
        """Let a call be repeated: it writes nothing twice. Raises NotReplicated at the end."""
        pause = patience.next_pause()
        if pause is None:
            raise NotReplicated(
                f"written by {self.where}, but {count} replicas confirmed it within "
                f"{self._patience_s:g} s where {wanted} is asked for; the same call, with the "
                "same id, may be repeated and adds nothing"
            )
        yield Pause(pause)

    def _recover(
        self,
        error: BaseException,
        name: str,
        keys: TopicKeys,
        groups: tuple[str, ...],
        patience: Patience,
    ) -> Flow[None]:
        """Do what makes the next try worth it, or raise Lisa's error."""
        try:
            if failures.is_missing_script(error):
                patience.mend(error, self.where)
                yield from _load(name, keys)
            elif failures.is_missing_group(error) and groups:
                patience.mend(error, self.where)
                for group in groups:
                    yield from _load(Declare.script, keys)
                    yield Execute(_call(Declare(keys.topic, group), keys, (group,), self.actor))
            else:
                yield from self._wait(error, patience)
        except failures.ClientError as another:
            if not failures.is_missing_script(another):  # flushed once more: the next try loads it
                yield from self._wait(another, patience)

    def _wait(self, error: BaseException, patience: Patience) -> Flow[None]:
        pause = patience.next_pause() if failures.passes(error) else None
        if pause is None:
            raise failures.translated(error, self.where) from error
        yield Pause(pause)


def _load(script: str, keys: TopicKeys) -> Flow[None]:
    """Give a script to the node that lacks it; others, which may be gone, are none the worse."""
    (reply,) = yield Chain(keys.waiting, [("SCRIPT", "LOAD", scripts.load(script).source)])
    if isinstance(reply, Exception):
        raise reply


def _call(
    transition: Transition[Any],
    keys: TopicKeys,
    groups: tuple[str, ...],
    actor: str,
    layout: str = "",
) -> Command:
    script = scripts.load(transition.script)
    all_keys, arguments = transition.build(keys, groups, actor, layout)
    return ("EVALSHA", script.sha, len(all_keys), *all_keys, *arguments)


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
