"""Runs commands, transitions and queries of topics, as flows (see core.redis.flow).

Every transition is idempotent. A call whose reply was lost is repeated with growing pauses until
`patience` runs out. The store also reloads flushed scripts, recreates deleted streams, and updates
what it knows of a topic (its groups and its shards) when the server reports that this is out of
date. `SyncStore` and `AsyncStore` run the flows on their connection.
"""

from __future__ import annotations

import math
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, Generic, TypeVar

from lisa.core.model.backoff import MOVING_S
from lisa.core.model.durability import Replicas
from lisa.core.model.errors import (
    ConfigError,
    InvalidMessage,
    LisaError,
    Misplaced,
    NotReplicated,
    ServerUnavailable,
    TopicFull,
)
from lisa.core.model.keys import Keys, TopicKeys, is_shard_name
from lisa.core.model.options import BYTES_PER_CALL, PRODUCER_RETRY_TIME, TopicOptions, group_options
from lisa.core.model.sharding import PLAIN, Layout, Shard, Topic, own_shard, topic_of, topics_of
from lisa.core.redis import errors
from lisa.core.redis.connection import AsyncConnection, Connection
from lisa.core.redis.flow import (
    LONGEST_PAUSE_S,
    Chain,
    Command,
    Execute,
    ExecuteMany,
    ExecuteOnEach,
    Flow,
    Patience,
    Pause,
    adrive,
    confirmed,
    drive,
    lacks_command,
)
from lisa.core.store.registration import TopicRegistration
from lisa.core.store.replies import counters, microseconds, pairs
from lisa.core.store.server_checks import check_for_roles, is_seen
from lisa.core.transitions import loader
from lisa.core.transitions.base import (
    LANES,
    SEVERAL_GROUPS,
    STEPS_PER_CALL,
    ById,
    Elsewhere,
    OfGroup,
    Transition,
    text,
)
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.loader import NONE, Features, Script

K = TypeVar("K")
T = TypeVar("T")
S = TypeVar("S")
R = TypeVar("R")

SCHEMA_VERSION = 1
"""Version of the keys and envelopes that this build reads and writes."""

ROLES_THAT_WARN = ("producer", "consumer", "manager", "gateway")
"""Those that warn of a server's configuration; for the command line there is `lisa doctor`."""

READERS_SCRIPT = "inspect"
"""The script that the role `reader` runs."""

caller: ContextVar[str] = ContextVar("caller", default="")
"""On whose behalf this task calls the server, for the journal: the name of a gateway's token.

Empty for calls of the process itself. Tasks inherit the variable from the task that starts them.
"""

UNSPLIT = str(PLAIN.number)

PLACEHOLDER: Command = ("TIME",)
"""Keeps the order of replies in place of a call that cannot be built; every role may run TIME."""

FEATURES_AGE_S = 600.0
"""How long the features of topics are kept, so that topics soon pay for fewer if they use fewer."""

LAYOUT_AGE_S = 1.0
"""Maximum age of a layout that callers follow without a write to tell them of a change."""

MOST_REMEMBERED = 10_000
"""Topics whose time of the last read is kept."""

WAIT_SHARE = 0.8
SHORTEST_WAIT_S = 0.1


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


class Store:
    """Flows for all queries and operations.

    `who` (producer, manager, ...) is recorded in the journal, with the caller if any, this host and
    process id. `where` names the server in errors.
    """

    connection: Connection | AsyncConnection

    def __init__(
        self,
        connection: Any,
        keys: Keys,
        patience: timedelta = PRODUCER_RETRY_TIME,
        who: str = "lisa",
    ) -> None:
        self.connection = connection
        self.keys = keys
        self.where: str = connection.address.shown
        self._patience_s = patience.total_seconds()
        self._who = who
        self._host = socket.gethostname()
        self._groups: dict[str, tuple[str, ...]] = {}
        self._features: dict[str, Features] = {}
        self._features_since = 0.0
        self._layouts: dict[Topic, Layout] = {}
        self._layout_read: dict[Topic, float] = {}
        self.has_nodes: bool = connection.address.kind == "cluster"
        """Whether keys are spread over several servers, any of which may be down alone."""
        self._registration = TopicRegistration(
            "the schema and the list of topics",
            lambda topics: self._list(keys.topics, topics, patience=Patience(0)),
            lambda: self.verify_schema(Patience(0)),
        )
        self._local_registration = TopicRegistration(
            "the list of topics with wall times",
            lambda topics: self._list(keys.scheduled, topics, "NX", patience=Patience(0)),
        )

    @property
    def actor(self) -> str:
        """Who makes the current task's calls: `who@host:pid`, or `who/caller@host:pid`."""
        name = caller.get()
        who = f"{self._who}/{name}" if name else self._who
        return f"{who}@{self._host}:{os.getpid()}"  # asked again, as the process may have forked

    def learn_groups(self, topic: str, reply: Iterable[bytes]) -> tuple[str, ...]:
        """Take note of a topic's groups from the reply to HKEYS; returns them sorted by name."""
        found = self._groups[topic] = tuple(sorted(map(text, reply)))
        return found

    def known_groups(self, topic: str) -> tuple[str, ...] | None:
        """The last known groups of a topic, without asking the server; None if none are known."""
        return self._groups.get(topic)

    def known_layout(self, topic: Topic) -> Layout | None:
        """The last known layout, without asking the server; None if none is known."""
        return self._layouts.get(topic)

    def learn_layout(self, topic: Topic, layout: Layout) -> None:
        """Remember a topic's layout."""
        if layout.number:
            self._layouts[topic] = layout
        else:
            self._layouts.pop(topic, None)

    def forget(self, shard: str) -> None:
        """Drop what is known of a shard, and of its topic if it is the topic's own."""
        self._groups.pop(shard, None)
        self._features.pop(shard, None)
        if shard == own_shard(topic := topic_of(shard)):
            self._layouts.pop(topic, None)
            self._layout_read.pop(topic, None)

    def patience(self) -> Patience:
        """A new time budget for one call."""
        return Patience(self._patience_s)

    def command(self, *command: str | bytes | float, patience: Patience | None = None) -> Flow[Any]:
        """Run one plain command that is safe to repeat. Returns the raw reply.

        patience: by default, a new budget. `Patience(0)` never repeats.
        """
        return self._repeated(Execute(command), patience=patience)

    def commands(
        self, commands: Sequence[Command], raises: Callable[[Exception], bool] = lambda _: True
    ) -> Flow[list[Any]]:
        """Run plain commands, safe to repeat, in one round trip. Raises the first error.

        raises: whether an error is raised; others are among the replies.
        """
        return self._repeated(ExecuteMany(commands), raises)

    def _beside(self, key: str, *command: str) -> Flow[Any]:
        """Run a command without keys; on a cluster, on the node that holds `key` if given."""
        if not (key and self.has_nodes):
            return (yield from self.command(*command))
        return (yield from self._repeated(Chain(key, [command])))[0]

    def chain(
        self, key: str, commands: Sequence[Command], patience: Patience | None = None
    ) -> Flow[list[Any]]:
        """Run plain commands, safe to repeat, in one round trip, on the node that holds `key`.

        The replies may include errors that repeating the commands would not change.
        """
        return self._repeated(Chain(key, commands), errors.passes, patience)

    def _repeated(
        self,
        step: Execute | ExecuteMany | ExecuteOnEach | Chain,
        raises: Callable[[Exception], bool] = lambda _: True,
        patience: Patience | None = None,
    ) -> Flow[Any]:
        """Repeat a step until there are replies. raises: whether an error among them counts."""
        if isinstance(step, ExecuteMany) and not step.commands:
            return []
        patience = patience or self.patience()
        while True:
            try:
                reply = yield step
                for answer in () if isinstance(step, Execute) else reply:
                    if isinstance(answer, Exception) and raises(answer):
                        raise answer
            except errors.ClientError as error:
                yield from self._wait(error, patience)
            else:
                return reply

    def commands_once(self, commands: Sequence[Command]) -> Flow[list[Any]]:
        """Run plain commands in one round trip; the replies may include errors of the server.

        Raises LisaError if there are no replies; does not repeat the commands.
        """
        return self._repeated(ExecuteMany(commands), raises=lambda _: False, patience=Patience(0))

    def command_once(self, *command: str | bytes | float) -> Flow[Any]:
        """Run one plain command without repeating it. Returns the raw reply."""
        return self.command(*command, patience=Patience(0))

    def on_each_node(self, *command: str | bytes | float) -> Flow[dict[str, Any]]:
        """Run one plain command on every primary of a cluster, or on the single server, named "".

        Returns by node the raw reply, or a LisaError. Raises LisaError if there are no replies.
        """
        replies = yield from self._repeated(ExecuteOnEach(command), patience=Patience(0))
        return {
            node: errors.translated(reply, node or self.where)
            if isinstance(reply, Exception)
            else reply
            for node, reply in replies
        }

    def _wait(self, error: BaseException, patience: Patience) -> Flow[None]:
        most_s = MOVING_S if errors.is_moving(error) else LONGEST_PAUSE_S
        pause = patience.next_pause(most_s) if errors.passes(error) else None
        if pause is None:
            raise errors.translated(error, self.where) from error
        yield Pause(pause)

    def run(
        self,
        transition: Transition[T],
        layout: str = "",
        patience: Patience | None = None,
        durability: Replicas | None = None,
        reply: Any = None,
    ) -> Flow[T]:
        """Run one transition on the shard named by its topic.

        layout: number of the layout by which the shard was chosen. patience: a new budget by
        default. reply: that of a call that was made already. Raises the errors of
        `transition.refuse`, Misplaced if the shard follows another layout, and LisaError.
        """
        patience = patience or self.patience()
        keys = self.keys.topic(transition.topic)
        whole: Any = None
        while True:
            if reply is None:
                groups = self._groups_for(transition)
                if groups is None:
                    groups = yield from self.groups(keys.topic, patience)
                script, command = self._call(transition, keys, groups, layout)
                try:
                    if durability is None:
                        reply = yield Execute(command)
                    else:
                        reply = yield from self._confirmed(
                            command, script, keys, groups, patience, wanted=durability
                        )
                except errors.ClientError as error:
                    yield from self._recover(error, script, keys, groups, patience)
                    continue
            if reply[0] == b"OK":
                part = transition.parse(reply[1:])
                whole = part if whole is None else whole + part
                rest = transition.remainder(part)
                if rest is None:
                    return whole  # type: ignore[no-any-return]  # a list, where there are parts
                transition = rest
            else:
                self._learn(transition, keys.topic, reply)
            reply = None

    def _learn(self, transition: Transition[Any], topic: str, reply: Sequence[Any]) -> None:
        """Take note of what another call needs. Raises the error for any other refusal."""
        if reply[0] == b"GROUPS":
            self.learn_groups(topic, reply[1:])
        elif reply[0] == b"FEATURES":
            if not self._features:
                self._features_since = time.monotonic()
            missing = frozenset(map(text, reply[1:]))
            self._features[topic] = self._features.get(topic, NONE) | missing
        elif reply[0] == b"SHARDS":
            raise Misplaced(f"the shards of topic {topic!r} are being changed; try again")
        else:
            transition.refuse(reply)

    def run_many(
        self,
        transitions: Sequence[Transition[T]],
        layout: str = "",
        patience: Patience | None = None,
    ) -> Flow[list[T | LisaError]]:
        """Run transitions in one round trip; a failed one yields its error as its result.

        A transition without an answer is repeated within `patience`; `Patience(0)` never repeats.
        """
        if not transitions:
            return []
        commands = [self.call_for(transition, layout) for transition in transitions]
        try:
            replies = yield ExecuteMany(commands)
        except errors.ClientError as error:
            replies = [error] * len(commands)
        results: list[T | LisaError] = []
        is_once = patience is not None and not patience.left_s
        patience, unavailable = patience or self.patience(), False
        for transition, command, reply in zip(transitions, commands, replies, strict=True):
            # All transitions share one patience, or each would wait in turn for a dead server.
            if (unavailable or is_once) and not patience.left_s and errors.passes(reply):
                results.append(errors.translated(reply, self.where))
                continue
            # `run` handles every cause: flushed script, changed groups, lost connection.
            first = None if isinstance(reply, Exception) or command == PLACEHOLDER else reply
            flow = self.run(transition, layout, patience.again(), reply=first)
            try:
                results.append((yield from flow))
            except LisaError as error:
                unavailable = unavailable or isinstance(error, ServerUnavailable)
                results.append(error)
        return results

    def call_for(self, transition: Transition[Any], layout: str = "") -> Command:
        """The call with the known groups; a placeholder if its own group is not among them.

        A reply that does not begin with OK has its cause in what is known: run the transition.
        """
        keys = self.keys.topic(transition.topic)
        groups = self._groups_for(transition)
        if groups is None:
            return PLACEHOLDER
        return self._call(transition, keys, groups, layout)[1]

    def _call(
        self,
        transition: Transition[Any],
        keys: TopicKeys,
        groups: tuple[str, ...],
        layout: str = "",
    ) -> tuple[Script, Command]:
        """A transition's script, for the features that topic and call use, and the command."""
        features = transition.features
        if self._features:
            features |= self._features_of(keys.topic)
        if len(groups) != 1:
            features |= SEVERAL_GROUPS
        script = loader.load(transition.script, features)
        all_keys, arguments = transition.build(keys, groups, self.actor, layout, script.features)
        if transition.call_id:
            all_keys.append(keys.reply(transition.call_id))
            arguments.append(transition.kept_ms)
        return script, ("EVALSHA", script.sha, len(all_keys), *all_keys, *arguments)

    def uses_lanes(self, topic: str) -> bool:
        """Whether this store knows that a topic has lanes."""
        return bool(self._features) and LANES in self._features_of(topic)

    def _features_of(self, topic: str) -> Features:
        if time.monotonic() - self._features_since > FEATURES_AGE_S:
            self._features.clear()
        return self._features.get(topic, NONE)

    def _groups_for(self, transition: Transition[Any]) -> tuple[str, ...] | None:
        """The groups to pass; None if the known ones lack the transition's own."""
        fixed = transition.fixed_groups
        groups = self._groups.get(transition.topic, ()) if fixed is None else fixed
        is_lacking = isinstance(transition, OfGroup) and transition.group not in groups
        return None if is_lacking else groups

    def _confirmed(
        self,
        command: Command,
        script: Script,
        keys: TopicKeys,
        groups: tuple[str, ...],
        patience: Patience,
        *,
        wanted: Replicas,
    ) -> Flow[Any]:
        """The reply to a script call that enough replicas have confirmed.

        A call that wrote without enough replicas fails with NotReplicated, whatever ends it.
        """
        count: int | None = None
        while True:
            # Stay well below the socket timeout, and within the remaining patience.
            slice_s = self.connection.address.socket_timeout_s * WAIT_SHARE
            within_s = min(slice_s, max(patience.left_s, SHORTEST_WAIT_S))
            try:
                reply, count = yield from confirmed(command, keys.confirm, wanted, within_s)
            except errors.ClientError as error:
                if lacks_command(error):
                    raise ConfigError(
                        f"{self.where} has no WAITAOF: fsync=True needs Redis 7.2 or Valkey"
                    ) from error
                if count is None:
                    raise
                try:
                    yield from self._recover(error, script, keys, groups, patience)
                except ServerUnavailable:
                    raise self._not_replicated(count, wanted) from error
            else:
                if count >= wanted.count:
                    return reply
                pause = patience.next_pause()
                if pause is None:
                    raise self._not_replicated(count, wanted)
                yield Pause(pause)

    def _not_replicated(self, count: int, wanted: Replicas) -> NotReplicated:
        return NotReplicated(
            f"written by {self.where}, but only {count} replicas confirmed within "
            f"{self._patience_s:g} s; {wanted} is required. Repeating the call with the same "
            "id is safe and adds nothing"
        )

    def _recover(
        self,
        error: BaseException,
        script: Script,
        keys: TopicKeys,
        groups: tuple[str, ...],
        patience: Patience,
    ) -> Flow[None]:
        """Prepare the next attempt, or raise Lisa's error."""
        try:
            if errors.is_missing_script(error):
                patience.mend(error, self.where)
                yield from _load(script, keys)
            elif errors.is_missing_group(error) and groups:
                patience.mend(error, self.where)
                for group in groups:
                    mend = Declare(keys.topic, group, only_mend=True)
                    declare, command = self._call(mend, keys, (group,))
                    yield from _load(declare, keys)
                    yield Execute(command)
            else:
                yield from self._wait(error, patience)
        except errors.ClientError as another:
            if not errors.is_missing_script(another):  # flushed again: the next attempt loads it
                yield from self._wait(another, patience)

    def run_by_id(self, transition: ById[T], durability: Replicas | None = None) -> Flow[list[T]]:
        """Run a transition for each of its messages, on the shard that holds the message.

        With `durability` the call returns once that many replicas have the write, and otherwise
        raises NotReplicated. If only some shards refuse, `outcomes` of the error holds the results
        of the other messages.
        """
        topic, patience, results = Topic(transition.topic), Patience(self._patience_s), list[T]()
        layout = self._layouts.get(topic)
        if layout is None:
            try:
                results = yield from self.run(transition, UNSPLIT, patience, durability)
            except Misplaced:
                transition = transition.with_known_ids()
            else:
                if transition.checks_layout or not any(map(transition.is_nowhere, results)):
                    return results
            layout = yield from self.layout(topic)
            if results and not layout.number:
                return results
        search = _Search(
            self, transition, layout, results, patience=patience, durability=durability
        )
        return (yield from search.run())

    def layout(self, topic: Topic) -> Flow[Layout]:
        """Read the layout of a topic from the server."""
        return (yield from self.layouts([topic]))[0]

    def layouts(self, topics: Sequence[Topic]) -> Flow[list[Layout]]:
        """Read the layouts of many topics from the server, in the same order."""
        replies = yield from self.commands(
            [("HGET", self.keys.topic(topic).options, "layout") for topic in topics]
        )
        found = list(map(Layout.read, replies))
        for topic, layout in zip(topics, found, strict=True):
            self.learn_layout(topic, layout)
        return found

    def recent_layout(self, topic: Topic) -> Flow[Layout]:
        """A topic's layout, read from the server at most once in `LAYOUT_AGE_S`."""
        now = time.monotonic()
        if now - self._layout_read.get(topic, -math.inf) > LAYOUT_AGE_S:
            if len(self._layout_read) >= MOST_REMEMBERED:
                self._layout_read.clear()
            self._layout_read[topic] = now
            yield from self.layout(topic)
        return self.known_layout(topic) or PLAIN

    def _finish(self) -> Flow[None]:
        yield from self._registration.finish()
        yield from self._local_registration.finish()

    def groups(self, topic: str, patience: Patience | None = None) -> Flow[tuple[str, ...]]:
        """Read the groups declared on a topic, sorted by name."""
        reply = yield from self.command("HKEYS", self.keys.topic(topic).groups, patience=patience)
        return self.learn_groups(topic, reply)

    def options(self, topic: str, group: str | None = None) -> Flow[TopicOptions]:
        """Read a topic's options; those that apply to one group, if it is given."""
        reply = yield from self.command("HGETALL", self.keys.topic(topic).options)
        return TopicOptions.from_hash(pairs(reply), group)

    def group_options(self, topic: str) -> Flow[dict[str, dict[str, Any]]]:
        """Read the values of options that groups have of their own, by group and option."""
        reply = yield from self.command("HGETALL", self.keys.topic(topic).options)
        return group_options(pairs(reply))

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
        yield from self._list(self.keys.topics, topics)
        return True

    def list_again(self, topics: Iterable[str]) -> Flow[None]:
        """List topics that may be missing from the list; listed topics keep their times."""
        yield from self._list(self.keys.topics, topics, "NX")

    def list_scheduled(self, topic: str) -> Flow[None]:
        """Tell the managers that a topic has schedules."""
        yield from self._list(self.keys.scheduled, [topic], "NX")

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

    def server_time_us(self, key: str = "") -> Flow[int]:
        """Redis's clock in microseconds; on a cluster the clock of the node that holds `key`."""
        return microseconds((yield from self._beside(key, "TIME")))

    def server_time_ms(self, key: str = "") -> Flow[int]:
        """Redis's clock in milliseconds; see `server_time_us`."""
        return (yield from self.server_time_us(key)) // 1000

    def wake(self, topic: str) -> Flow[None]:
        """Wake the managers for a topic; on a cluster, through the topic's own node."""
        key = self.keys.topic(topic).consumers
        yield from self._beside(key, "PUBLISH", self.keys.wake, topic)

    def _list(
        self, key: str, topics: Iterable[str], *flags: str, patience: Patience | None = None
    ) -> Flow[None]:
        now = int(time.time() * 1000)
        members = [part for topic in topics for part in (now, topic)]
        if members:
            yield from self.command("ZADD", key, *flags, *members, patience=patience)

    def verify_schema(self, patience: Patience | None = None) -> Flow[None]:
        """Like `check_schema`, but raises ServerUnavailable if the schema's node is down."""
        key = self.keys.schema
        if is_seen(self.where):
            found = yield from self.command("GET", key, patience=patience)
        else:
            found = yield from self._first_contact(patience)
        if found is None:
            # Read first: a replica or a full server refuses writes but can still be drained.
            yield from self.command("SET", key, SCHEMA_VERSION, "NX", patience=patience)
            found = yield from self.command("GET", key, patience=patience)
        is_number = found is not None and found.isdigit() and len(found) < 10
        if found is not None and not (is_number and int(found) <= SCHEMA_VERSION):
            shown = int(found) if is_number else repr(text(found))
            raise ConfigError(
                f"{self.where} has schema {shown} under prefix {self.keys.prefix!r}, but this "
                f"build supports up to {SCHEMA_VERSION}: upgrade Lisa, or use another prefix"
            )

    def _first_contact(self, patience: Patience | None) -> Flow[bytes | None]:
        """Read the schema and check the server in one round trip."""
        key = self.keys.schema
        found, about = yield from self.chain(key, [("GET", key), ("INFO",)], patience)
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


def _load(script: Script, keys: TopicKeys) -> Flow[None]:
    """Load a script on the node that lacks it, without depending on other nodes.

    Also that of readers, who may not load scripts.
    """
    sources = dict.fromkeys((script.source, loader.load(READERS_SCRIPT).source))
    calls = [("SCRIPT", "LOAD", source) for source in sources]
    reply, *_ = yield Chain(keys.waiting, calls)
    if isinstance(reply, Exception) and errors.is_refused(reply):
        raise ConfigError(
            f"the server has lost the script {script.name!r}, as after a restart, and this user "
            "may not load scripts: another role loads it with its next call, such as a manager"
        )
    if isinstance(reply, Exception):
        raise reply


class _Search(Generic[T]):
    """Finds the shard of each message of one transition, and keeps the results so far.

    A shard refuses sends and calls by id from clients that use a layout other than its own. A
    client therefore needs no initial query, and an answer "unknown" always comes from the right
    shard. Shards of older layouts are asked as well: after the current one, or before it where an
    id must not be accepted twice. A shard remembers the messages settled there even if the id is
    live again in an older shard, so only a live message is a final answer.
    """

    def __init__(
        self,
        store: Store,
        transition: ById[T],
        layout: Layout,
        known: Sequence[T],
        *,
        patience: Patience,
        durability: Replicas | None,
    ) -> None:
        self._store = store
        self._transition = transition
        self._topic = topic_of(transition.topic)
        self._layout = layout
        self._patience = patience
        self._durability = durability
        self._ids = transition.message_ids
        self._results: list[T | None] = list(known) or [None] * len(self._ids)
        self._settled_before: set[int] = set()
        self._misplaced: set[int] = set()
        self._failed: set[int] = set()
        self._error: LisaError | None = None

    def run(self) -> Flow[list[T]]:
        """Repeat until every message has its result. Raises LisaError."""
        todo = self._open()
        while True:
            yield from self._round(todo)
            misplaced = sorted(self._misplaced)
            if self._error is not None and not (misplaced and _refuses(self._error)):
                self._error.outcomes = self._results
                raise self._error
            before = self._layout
            if misplaced or (not self._transition.checks_layout and self._open()):
                self._layout = yield from self._store.layout(self._topic)
            if self._layout == before:
                if not misplaced:
                    return self._results  # type: ignore[return-value]  # every result is set
                pause = self._patience.next_pause()
                if pause is None:
                    error = Misplaced(
                        f"the shards of topic {self._topic!r} are being changed and no manager "
                        "finished the change in time; check that a manager is running"
                    )
                    error.outcomes = self._results
                    raise error
                yield Pause(pause)
            # A failed call may have reached a shard that has become an older one.
            self._transition = self._transition.with_known_ids()
            todo = misplaced or self._open()

    def _open(self) -> list[int]:
        """The messages without a result, or not found so far."""
        is_nowhere = self._transition.is_nowhere
        return [i for i, result in enumerate(self._results) if result is None or is_nowhere(result)]

    def _round(self, todo: list[int]) -> Flow[None]:
        """Ask the shards of one layout; a shard with another layout refuses."""
        layout, when = self._layout, self._transition.asks_older
        self._misplaced, asked = set(), todo
        if when == "first":
            asked = yield from self._ask_older_first(todo)
        yield from self._ask(asked, layout.shards, str(layout.number))
        if when == "after":
            for count in layout.older:
                yield from self._ask_older(todo, count)

    def _answered(self, todo: Sequence[int]) -> list[int]:
        """The messages whose shards all answered."""
        return [i for i in todo if i not in self._misplaced and i not in self._failed]

    def _ask_older_first(self, todo: list[int]) -> Flow[list[int]]:
        """Ask the older shards, which must all be closed. Returns the unresolved messages."""
        closed = f"-{self._layout.number}"
        for count in self._layout.older:
            picks = self._by_shard(todo, count)
            calls = [self._transition.first_of(shard, some) for shard, some in picks.items()]
            results = yield from self._run(calls, list(picks.values()), closed, self._durability)
            for i, answer in results:
                result = self._transition.told(answer)
                if result is Elsewhere.SETTLED:
                    self._settled_before.add(i)
                elif not isinstance(result, Elsewhere):
                    self._results[i] = result
            todo = [i for i in self._answered(todo) if self._results[i] is None]
        return todo

    def _ask_older(self, todo: list[int], count: int) -> Flow[None]:
        """Ask older shards about missing messages, and about settled ids that may be live there."""
        nowhere, asked = set(self._open()), self._answered(todo)
        settled = [i for i in asked if i not in nowhere and self._may_be_settled(i)]
        picks = self._by_shard(settled, count)
        from lisa.core.transitions.inspect import Inspect  # late: only for split topics

        looks = [
            Inspect(shard, [self._ids[i] for i in some], bodies=False)
            for shard, some in picks.items()
        ]
        seen = yield from self._run(looks, list(picks.values()))
        live = {i for i, found in seen if found.envelope}
        yield from self._ask([i for i in asked if i in nowhere or i in live], count, "")

    def _may_be_settled(self, i: int) -> bool:
        result = self._results[i]
        return result is not None and self._transition.may_be_settled(result)

    def _ask(self, todo: list[int], count: int, layout: str) -> Flow[None]:
        """Run the transition on the shards of one count."""
        transition, picks = self._transition, self._by_shard(todo, count)
        calls = [transition.part(shard, some) for shard, some in picks.items()]
        results = yield from self._run(calls, list(picks.values()), layout, self._durability)
        for i, result in results:
            if self._results[i] is None or not transition.is_nowhere(result):
                revived = i in self._settled_before
                self._results[i] = transition.revived(result) if revived else result

    def _by_shard(self, todo: Sequence[int], count: int) -> dict[Shard, list[int]]:
        shard_for = self._layout.shard_for
        return grouped((shard_for(self._topic, self._ids[i], count), i) for i in todo)

    def _run(
        self,
        calls: Sequence[Transition[list[R]]],
        picks: Sequence[list[int]],
        layout: str = "",
        durability: Replicas | None = None,
    ) -> Flow[list[tuple[int, R]]]:
        """Run calls together. Returns results by message, without those of shards that refused.

        A refused message stays unresolved: it may be in that shard, so no other one may take it.
        """
        results: list[tuple[int, R]] = []
        replies = yield from self._replies(calls, layout, durability)
        for indexes, reply in zip(picks, replies, strict=True):
            if isinstance(reply, Misplaced):
                self._misplaced.update(indexes)
            elif isinstance(reply, LisaError):
                # Prefer an error that does not rule out a write.
                if self._error is None or (_refuses(self._error) and not _refuses(reply)):
                    self._error = reply
                self._failed.update(indexes)
                for i in indexes:
                    self._results[i] = None
            else:
                results += zip(indexes, reply, strict=True)
        return results

    def _replies(
        self, calls: Sequence[Transition[list[R]]], layout: str, durability: Replicas | None
    ) -> Flow[list[list[R] | LisaError]]:
        if len(calls) != 1 and durability is None:
            return (yield from self._store.run_many(calls, layout, self._patience))
        replies: list[list[R] | LisaError] = []
        for call in calls:  # replicas confirm on the connection of the write
            try:
                patience = self._patience.again()
                replies.append((yield from self._store.run(call, layout, patience, durability)))
            except LisaError as error:
                replies.append(error)
        return replies


def _refuses(error: LisaError) -> bool:
    """Whether the error guarantees that the shard wrote nothing of that call."""
    return isinstance(error, (InvalidMessage, TopicFull))
