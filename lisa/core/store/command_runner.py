"""Runs plain commands, and repeats those without a reply until their patience runs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from lisa.core.model.backoff import MOVING_S
from lisa.core.model.keys import Keys
from lisa.core.redis import errors
from lisa.core.redis.connection import AsyncConnection, Connection
from lisa.core.redis.flow import (
    Chain,
    Command,
    Execute,
    ExecuteMany,
    ExecuteOnEach,
    Flow,
    Pause,
)
from lisa.core.redis.patience import LONGEST_S, Patience


class CommandRunner:
    """Runs plain commands as flows. `where` names the server in errors."""

    connection: Connection | AsyncConnection

    def __init__(self, keys: Keys, where: str, patience: timedelta) -> None:
        self.keys = keys
        self.where = where
        self._patience_s = patience.total_seconds()

    def patience(self) -> Patience:
        """A new time budget for one call."""
        return Patience(self._patience_s)

    def command(self, *command: str | bytes | float) -> Flow[Any]:
        """Run one plain command that is safe to repeat. Returns the raw reply."""
        return self._repeated(Execute(command))

    def commands(self, commands: Sequence[Command]) -> Flow[list[Any]]:
        """Run plain commands, safe to repeat, in one round trip. Raises the first error."""
        return self._repeated(ExecuteMany(commands))

    def _beside(self, key: str, *command: str) -> Flow[Any]:
        """Run a command without keys on the node that holds `key`."""
        (reply,) = yield from self._repeated(Chain(key, [command]))
        return reply

    def transaction(self, key: str, commands: Sequence[Command]) -> Flow[list[Any] | None]:
        """Run plain commands, safe to repeat, as one transaction on the node that holds `key`.

        Returns the replies, or None if a command was refused, for example by another node.
        """
        step = Chain(key, [("MULTI",), *commands, ("EXEC",)])
        *_, replies = yield from self._repeated(step, raises=lambda _: False)
        is_done = isinstance(replies, list)
        is_refused = not is_done or any(isinstance(one, Exception) for one in replies)
        return None if is_refused else replies

    def _answered(self, key: str, commands: Sequence[Command]) -> Flow[list[Any]]:
        """Run plain commands, safe to repeat, in one round trip, on the node that holds `key`.

        The replies may include errors that repeating the commands would not change.
        """
        return self._repeated(Chain(key, commands), raises=errors.passes)

    def _repeated(
        self,
        step: Execute | ExecuteMany | Chain,
        raises: Callable[[Exception], bool] = lambda _: True,
        patience: Patience | None = None,
    ) -> Flow[Any]:
        """Repeat a step until there are replies. raises: whether an error among them counts."""
        patience = patience or self.patience()
        while True:
            try:
                reply = yield step
                for one in () if isinstance(step, Execute) else reply:
                    if isinstance(one, Exception) and raises(one):
                        raise one
            except errors.ClientError as error:
                yield from self._wait(error, patience)
            else:
                return reply

    def commands_once(self, commands: Sequence[Command]) -> Flow[list[Any]]:
        """Run plain commands in one round trip; the replies may include errors of the server.

        Raises LisaError if there are no replies; does not repeat the commands.
        """
        return self._once(ExecuteMany(commands))

    def command_once(self, *command: str | bytes | float) -> Flow[Any]:
        """Run one plain command without repeating it. Returns the raw reply."""
        return self._once(Execute(command))

    def on_each_node(self, *command: str | bytes | float) -> Flow[dict[str, Any]]:
        """Run one plain command on every primary of a cluster, or on the single server, named "".

        Returns by node the raw reply, or a LisaError. Raises LisaError if there are no replies.
        """
        replies = yield from self._once(ExecuteOnEach(command))
        return {
            node: errors.translated(reply, node or self.where)
            if isinstance(reply, Exception)
            else reply
            for node, reply in replies
        }

    def _once(self, step: Execute | ExecuteMany | ExecuteOnEach | Chain) -> Flow[Any]:
        try:
            return (yield step)
        except errors.ClientError as error:
            raise errors.translated(error, self.where) from error

    def _wait(self, error: BaseException, patience: Patience) -> Flow[None]:
        most_s = MOVING_S if errors.is_moving(error) else LONGEST_S
        pause = patience.next_pause(most_s) if errors.passes(error) else None
        if pause is None:
            raise errors.translated(error, self.where) from error
        yield Pause(pause)
