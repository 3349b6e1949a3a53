"""What every transition has in common: how its call is laid out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

from lisa.core.errors import GroupRemoved
from lisa.core.keys import TopicKeys

__all__ = ["STEPS_PER_CALL", "Argument", "ById", "Elsewhere", "Transition", "letters", "text"]

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
    """What one id of a call costs, by measure (benchmarks/safety): see `Store.batch_size`."""
    minds_layout: ClassVar[bool] = False
    """Whether the script compares the layout that the caller knows with the place's own."""
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
        self, keys: TopicKeys, groups: tuple[str, ...], actor: str, layout: str = ""
    ) -> tuple[list[str], list[Argument]]:
        """KEYS and ARGV for the groups given. Raises GroupRemoved if the own one is not there.

        layout: the number of the layout by which this place was chosen; empty: any will do.
        """
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
        if self.minds_layout:
            arguments.append(layout)
        arguments += self.args()
        return all_keys, arguments


class Elsewhere(StrEnum):
    """What an older place says of a message that is another one's: see `ById.first_of`."""

    UNKNOWN = "unknown"
    SETTLED = "settled"


class ById(Transition[list[T]]):
    """A transition of single messages, which in a topic that is split lie in several places.

    `columns` names the fields that hold something for each message, in one order; one item of the
    result belongs to each.
    """

    __slots__ = ()

    columns: ClassVar[tuple[str, ...]]

    @property
    def asks_older(self) -> Literal["first", "after", "never"]:
        """When the older places of a topic are asked, before the present one by `first_of`."""
        return "after"

    @property
    @abstractmethod
    def message_ids(self) -> Sequence[str]:
        """The ids, in order."""

    def is_nowhere(self, result: T) -> bool:
        """Whether this place did nothing about a message, which may stand in another one."""
        return not result

    def may_be_settled(self, result: T) -> bool:  # noqa: ARG002  for those that do
        """Whether this place answered by a tombstone, while the id may be live in an older one."""
        return False

    def first_of(self, place: str, picks: Sequence[int]) -> Transition[list[T | Elsewhere]]:
        """What an older place is asked about some of the messages before the present one is."""
        raise NotImplementedError(f"{self.script} asks older places after the present one")

    def revived(self, result: T) -> T:
        """The present place's result for a message that an older one remembers as settled."""
        return result

    def with_known_ids(self) -> Self:
        """The same once an earlier call may have arrived somewhere."""
        return self

    def part(self, place: str, picks: Sequence[int]) -> Self:
        """The same for some of the messages, at one place."""
        n = len(self.message_ids)
        columns = {name: getattr(self, name) for name in self.columns}
        cut = {
            name: [column[i] for i in picks] for name, column in columns.items()
            if len(column) == n
        }  # fmt: skip
        return replace(self, topic=place, **cut)  # type: ignore[type-var]  # all are dataclasses


def text(value: bytes | str | int) -> str:
    """A reply's string, whatever hands wrote it."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def letters(value: bytes | str) -> str:
    """A reply that holds one letter a message."""
    return value.decode("ascii") if isinstance(value, bytes) else value
