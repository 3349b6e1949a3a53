"""Runs transitions: the one place that sends scripts, and repeats what is safe to repeat.

Every transition may be repeated, so a call whose reply was lost is sent again, with growing pauses,
until `patience` is used up. What is missing on the server is brought there: a script that was
flushed, a stream that a foreign hand deleted; what this process did not know, it learns: groups.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, TypeVar

from lisa.core import failures, scripts
from lisa.core.connection import AsyncConnection, Connection
from lisa.core.durability import Replicas, TooFew, confirmed, lacks_command
from lisa.core.errors import (
    ConfigError,
    GroupRemoved,
    LisaError,
    Misplaced,
    NotReplicated,
    ServerUnavailable,
)
from lisa.core.flow import Chain, Command, Execute, ExecuteMany, Flow, Pause
from lisa.core.keys import Keys, TopicKeys
from lisa.core.options import PRODUCER_RETRY_TIME
from lisa.core.patience import Patience
from lisa.core.transitions.base import Transition, text
from lisa.core.transitions.declare import Declare

__all__ = ["Runner"]

T = TypeVar("T")

WAIT_SHARE = 0.8
SHORTEST_WAIT_S = 0.1


class Runner:
    """Flows of transitions and plain commands. `where` names the server in errors.

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

    def run(self, transition: Transition[T]) -> Flow[T]:
        """Run one transition at the place that its topic names.

        Raises what `transition.refuse` raises, and LisaError.
        """
        return self._run(transition, Patience(self._patience_s))

    def run_at(
        self,
        transition: Transition[T],
        layout: str,
        patience: Patience,
        durability: Replicas | None = None,
    ) -> Flow[T]:
        """Run one at a place that was chosen by a layout, named by its number.

        Raises Misplaced if it is another by now.
        """
        return self._run(transition, patience.again(), layout, durability)

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
        self,
        transitions: Sequence[Transition[T]],
        layout: str = "",
        patience: Patience | None = None,
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
        patience, unavailable = patience or self.patience(), False
        for transition, reply in zip(transitions, replies, strict=True):
            if isinstance(reply, list) and reply[0] == b"OK":
                results.append(transition.parse(reply[1:]))
                continue
            # All of them share one patience, or many would wait for a dead server in turn.
            if unavailable and not patience.left_s and failures.passes(reply):
                results.append(failures.translated(reply, self.where))
                continue
            # Whatever went wrong (script flushed, groups changed, connection cut), _run knows.
            try:
                results.append((yield from self._run(transition, patience.again(), layout)))
            except LisaError as error:
                unavailable = unavailable or isinstance(error, ServerUnavailable)
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

    def _groups_for(
        self, transition: Transition[Any], keys: TopicKeys, patience: Patience
    ) -> Flow[tuple[str, ...]]:
        groups = self._groups.get(keys.topic)
        own = transition.own_group
        if groups is not None and (own is None or own in groups):
            return groups
        if own is None:
            return ()
        while True:
            try:
                reply = yield Execute(("HKEYS", keys.groups))
                break
            except failures.ClientError as error:
                yield from self._wait(error, patience)
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
                    mend = Declare(keys.topic, group, only_mend=True)
                    yield Execute(_call(mend, keys, (group,), self.actor))
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
