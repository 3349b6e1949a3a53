"""Runs transitions, and repeats calls that are safe to repeat.

Every transition is idempotent. A call whose reply was lost is repeated with growing pauses until
`patience` runs out. The runner also reloads flushed scripts, recreates deleted streams, and updates
its cached list of groups when the server reports that the list is out of date.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from datetime import timedelta
from typing import Any, TypeVar

from lisa.core.model.durability import Replicas
from lisa.core.model.errors import (
    ConfigError,
    GroupRemoved,
    LisaError,
    Misplaced,
    NotReplicated,
    ServerUnavailable,
)
from lisa.core.model.keys import Keys, TopicKeys
from lisa.core.redis import errors
from lisa.core.redis.durability import TooFewReplicas, confirmed, lacks_command
from lisa.core.redis.flow import Chain, Command, Execute, ExecuteMany, Flow, Pause
from lisa.core.redis.patience import Patience
from lisa.core.store.command_runner import CommandRunner
from lisa.core.transitions import loader
from lisa.core.transitions.base import Transition, text
from lisa.core.transitions.declare import Declare

T = TypeVar("T")

READERS_SCRIPT = "inspect"
"""The script that the role `reader` runs."""

caller: ContextVar[str] = ContextVar("caller", default="")
"""On whose behalf this task calls the server, for the journal: the name of a gateway's token.

Empty for calls of the process itself. Tasks inherit the variable from the task that starts them.
"""

WAIT_SHARE = 0.8
SHORTEST_WAIT_S = 0.1


class Runner(CommandRunner):
    """Runs transitions as flows.

    The journal records `who` (producer, manager, ...), the caller if any, this host and process id.
    """

    def __init__(self, keys: Keys, where: str, patience: timedelta, who: str) -> None:
        super().__init__(keys, where, patience)
        self._who = who
        self._host = socket.gethostname()
        self._groups: dict[str, tuple[str, ...]] = {}

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

    def run(self, transition: Transition[T]) -> Flow[T]:
        """Run one transition on the shard named by its topic.

        Raises the errors of `transition.refuse`, and LisaError.
        """
        return self._run(transition, self.patience())

    def run_at(
        self,
        transition: Transition[T],
        layout: str,
        patience: Patience,
        durability: Replicas | None = None,
    ) -> Flow[T]:
        """Run one transition on a shard that was chosen by the layout of that number.

        Raises Misplaced if the shard follows another layout.
        """
        return self._run(transition, patience.again(), layout, durability)

    def _run(
        self,
        transition: Transition[T],
        patience: Patience,
        layout: str = "",
        durability: Replicas | None = None,
    ) -> Flow[T]:
        keys = self.keys.topic(transition.topic)
        whole: Any = None
        while True:
            groups = transition.fixed_groups
            if groups is None:
                groups = yield from self._groups_for(transition, keys, patience)
            command = _call(transition, keys, groups, self.actor, layout)
            reply = yield from self._reply(
                command, transition.script, keys, groups, patience, durability=durability
            )
            if reply[0] == b"OK":
                part = transition.parse(reply[1:])
                whole = part if whole is None else whole + part
                rest = transition.remainder(part)
                if rest is None:
                    return whole  # type: ignore[no-any-return]  # a list, where there are parts
                transition = rest
                continue
            if reply[0] == b"SHARDS":
                raise Misplaced(f"the shards of topic {keys.topic!r} are being changed; try again")
            if reply[0] != b"GROUPS":
                transition.refuse(reply)
            self.learn_groups(keys.topic, reply[1:])

    def _reply(
        self,
        command: Command,
        script: str,
        keys: TopicKeys,
        groups: tuple[str, ...],
        patience: Patience,
        *,
        durability: Replicas | None,
    ) -> Flow[Any]:
        """The reply to a script call, which is repeated until the server replies.

        A call that wrote without enough replicas fails with NotReplicated, whatever ends it.
        """
        unconfirmed: TooFewReplicas | None = None
        while True:
            try:
                if durability is None:
                    return (yield Execute(command))
                return (yield from self._durably(command, keys, durability, patience))
            except TooFewReplicas as few:
                unconfirmed = few
                yield from self._wait_for_replicas(few.count, durability, patience)
            except errors.ClientError as error:
                try:
                    yield from self._recover(error, script, keys, groups, patience)
                except ServerUnavailable:
                    if unconfirmed is None:
                        raise
                    raise self._not_replicated(unconfirmed.count, durability) from error

    def run_many(
        self,
        transitions: Sequence[Transition[T]],
        layout: str = "",
        patience: Patience | None = None,
    ) -> Flow[list[T | LisaError]]:
        """Run transitions in one round trip; a failed one yields its error as its result.

        A transition without an answer is repeated within `patience`; `Patience(0)` never repeats.
        """
        commands = [self._call_if_known(transition, layout) for transition in transitions]
        try:
            replies = yield ExecuteMany(commands)
        except errors.ClientError as error:
            replies = [error] * len(commands)
        results: list[T | LisaError] = []
        is_once = patience is not None and not patience.left_s
        patience, unavailable = patience or self.patience(), False
        for transition, reply in zip(transitions, replies, strict=True):
            # All transitions share one patience, or each would wait in turn for a dead server.
            if (unavailable or is_once) and not patience.left_s and errors.passes(reply):
                results.append(errors.translated(reply, self.where))
                continue
            is_done = isinstance(reply, list) and reply[0] == b"OK"
            try:
                if is_done:
                    results.append((yield from self._rest(transition, reply, patience, layout)))
                else:
                    # _run handles every cause: flushed script, changed groups, lost connection.
                    results.append((yield from self._run(transition, patience.again(), layout)))
            except LisaError as error:
                unavailable = unavailable or (not is_done and isinstance(error, ServerUnavailable))
                results.append(error)
        return results

    def _call_if_known(self, transition: Transition[Any], layout: str) -> Command:
        """The call with the known groups; a placeholder if its own group is not among them."""
        keys = self.keys.topic(transition.topic)
        groups = transition.fixed_groups
        if groups is None:
            groups = self._groups.get(keys.topic, ())
        own = transition.own_group
        if own is not None and own not in groups:
            return ("TIME",)  # keeps the order of replies; every role may run TIME
        return _call(transition, keys, groups, self.actor, layout)

    def _rest(
        self, transition: Transition[T], reply: Sequence[Any], patience: Patience, layout: str
    ) -> Flow[T]:
        """The result of a call that succeeded, and of the calls for what it left."""
        part: Any = transition.parse(reply[1:])
        rest = transition.remainder(part)
        if rest is not None:
            part = part + (yield from self._run(rest, patience.again(), layout))
        return part  # type: ignore[no-any-return]  # a list, where there are parts

    def _groups_for(
        self, transition: Transition[Any], keys: TopicKeys, patience: Patience
    ) -> Flow[tuple[str, ...]]:
        groups = self._groups.get(keys.topic)
        own = transition.own_group
        if groups is not None and (own is None or own in groups):
            return groups
        if own is None:
            return ()
        reply = yield from self._repeated(Execute(("HKEYS", keys.groups)), patience=patience)
        found = self.learn_groups(keys.topic, reply)
        if own not in found:
            raise GroupRemoved(f"group {own!r} is not declared on topic {keys.topic!r}")
        return found

    def _durably(
        self, command: Command, keys: TopicKeys, wanted: Replicas, patience: Patience
    ) -> Flow[Any]:
        # Stay well below the socket timeout, and within the remaining patience.
        slice_s = self.connection.address.socket_timeout_s * WAIT_SHARE
        within_s = min(slice_s, max(patience.left_s, SHORTEST_WAIT_S))
        try:
            return (yield from confirmed(command, keys.confirm, wanted, within_s))
        except errors.ClientError as error:
            if lacks_command(error):
                raise ConfigError(
                    f"{self.where} has no WAITAOF: fsync=True needs Redis 7.2 or Valkey"
                ) from error
            raise

    def _wait_for_replicas(
        self, count: int, wanted: Replicas | None, patience: Patience
    ) -> Flow[None]:
        """Pause before repeating a call that wrote. Raises NotReplicated at the deadline."""
        pause = patience.next_pause()
        if pause is None:
            raise self._not_replicated(count, wanted)
        yield Pause(pause)

    def _not_replicated(self, count: int, wanted: Replicas | None) -> NotReplicated:
        return NotReplicated(
            f"written by {self.where}, but only {count} replicas confirmed within "
            f"{self._patience_s:g} s; {wanted} is required. Repeating the call with the same "
            "id is safe and adds nothing"
        )

    def _recover(
        self,
        error: BaseException,
        name: str,
        keys: TopicKeys,
        groups: tuple[str, ...],
        patience: Patience,
    ) -> Flow[None]:
        """Prepare the next attempt, or raise Lisa's error."""
        try:
            if errors.is_missing_script(error):
                patience.mend(error, self.where)
                yield from _load(name, keys)
            elif errors.is_missing_group(error) and groups:
                patience.mend(error, self.where)
                for group in groups:
                    yield from _load(Declare.script, keys)
                    mend = Declare(keys.topic, group, only_mend=True)
                    yield Execute(_call(mend, keys, (group,), self.actor))
            else:
                yield from self._wait(error, patience)
        except errors.ClientError as another:
            if not errors.is_missing_script(another):  # flushed again: the next attempt loads it
                yield from self._wait(another, patience)


def _load(script: str, keys: TopicKeys) -> Flow[None]:
    """Load a script on the node that lacks it, without depending on other nodes.

    Also that of readers, who may not load scripts.
    """
    names = dict.fromkeys((script, READERS_SCRIPT))
    calls = [("SCRIPT", "LOAD", loader.load(name).source) for name in names]
    reply, *_ = yield Chain(keys.waiting, calls)
    if isinstance(reply, Exception) and errors.is_refused(reply):
        raise ConfigError(
            f"the server has lost the script {script!r}, as after a restart, and this user may not "
            "load scripts: another role loads the script with its next call, such as a manager"
        )
    if isinstance(reply, Exception):
        raise reply


def _call(
    transition: Transition[Any],
    keys: TopicKeys,
    groups: tuple[str, ...],
    actor: str,
    layout: str = "",
) -> Command:
    script = loader.load(transition.script)
    all_keys, arguments = transition.build(keys, groups, actor, layout)
    if transition.call_id:
        all_keys.append(keys.reply(transition.call_id))
        arguments.append(transition.kept_ms)
    return ("EVALSHA", script.sha, len(all_keys), *all_keys, *arguments)
