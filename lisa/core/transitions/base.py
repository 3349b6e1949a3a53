"""What every transition has in common: how its call is laid out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from lisa.core.errors import GroupRemoved
from lisa.core.keys import TopicKeys

__all__ = ["STEPS_PER_CALL", "Argument", "Transition", "letters", "text"]

T = TypeVar("T")
Argument = str | bytes | int

STEPS_PER_CALL = 500
"""One script call does at most so many id-times-group steps, so that none blocks for 5 ms."""


class Transition(ABC, Generic[T]):
    """One call of one Lua script: what it is given, and what its reply means.

    A transition knows its topic and, where it concerns one group, that group; the groups that are
    declared come from the store, which builds the call again if they have changed meanwhile.
    """

    __slots__ = ()

    script: ClassVar[str]
    steps: ClassVar[int] = 1
    """What one id of a call costs, against one that is enqueued: see `Store.batch_size`."""
    topic: str

    @property
    def own_group(self) -> str | None:
        """The group whose messages are moved; None if the topic's are."""
        return None

    @property
    def fixed_groups(self) -> tuple[str, ...] | None:
        """The groups to name whatever is declared; None to name those declared."""
        return None

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:  # noqa: ARG002  for those that have some
        """The keys of single messages, in the order of the script's header."""
        return ()

    @abstractmethod
    def args(self) -> Sequence[Argument]:
        """The script's own arguments, without the number of the own group."""

    @abstractmethod
    def parse(self, reply: Sequence[Any]) -> T:
        """The meaning of a reply, which comes without its leading OK."""

    def refuse(self, reply: Sequence[Any]) -> None:
        """Raise the error that a reply other than OK stands for."""
        raise AssertionError(f"{self.script} answered {reply!r}")

    def build(
        self, keys: TopicKeys, groups: tuple[str, ...], actor: str
    ) -> tuple[list[str], list[Argument]]:
        """KEYS and ARGV for the groups given. Raises GroupRemoved if the own one is not there."""
        all_keys = list(keys.shared)
        for name in groups:
            all_keys += keys.group(name)
        all_keys += self.id_keys(keys)
        arguments: list[Argument] = [keys.wake, keys.topic, actor, len(groups), *groups]
        own = self.own_group
        if own is not None:
            if own not in groups:
                raise GroupRemoved(f"group {own!r} is not declared on topic {self.topic!r}")
            arguments.append(groups.index(own) + 1)
        arguments += self.args()
        return all_keys, arguments


def text(value: bytes | str | int) -> str:
    """A reply's string, whatever hands wrote it."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def letters(value: bytes | str) -> str:
    """A reply that holds one letter a message."""
    return value.decode("ascii") if isinstance(value, bytes) else value
