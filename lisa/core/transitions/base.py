"""Base classes of the transitions, and the layout of their calls."""

from __future__ import annotations

import random
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar

from lisa.core.model.errors import GroupRemoved, LisaError
from lisa.core.model.keys import TopicKeys
from lisa.core.transitions.loader import NONE, Features

T = TypeVar("T")
Argument = str | bytes | int

SEVERAL_GROUPS: Features = frozenset({"groups", "retries"})
"""What every call of a topic with several groups, or with none, uses."""

LANES = "lanes"
"""The feature of every script for topics that use lanes: it comes with further keys."""

KEYED: Features = frozenset({"keys"})
"""What calls with ids of messages that have a key use."""

STEPS_PER_CALL = 500
"""Maximum number of steps (ids times groups) per script call, so that none blocks for 5 ms."""


class HasWindow(LisaError):
    """A message may have a window: read its headers, and call again with what follows from them."""


class ListChanged(LisaError):
    """The list of a key is not as the caller read it: read it again."""


class Listed(NamedTuple):
    """A part of a key's list, as its reader found it: its number, and its stored value."""

    number: int
    stored: bytes


@dataclass(frozen=True, eq=False, repr=False)
class Transition(ABC, Generic[T]):
    """One call of one Lua script: its keys, its arguments, and the meaning of its reply.

    A transition knows its topic and, if it concerns a single group, that group. The store supplies
    the declared groups, and builds the call again if they have changed. Its positional fields are
    the topic, then those of the other bases from the last to the first, then its own.

    call_id: identifies a call whose repeats get the first call's answer; empty if there is none.
    """

    script: ClassVar[str]
    steps: ClassVar[int] = 1
    """Cost of one id in a call, as measured by benchmarks/safety; see `Store.batch_size`."""
    group_steps: ClassVar[float | None] = None
    """Additional cost of each further group of the topic; None: the same as `steps`."""
    kept_ms: ClassVar[int] = 30_000
    """How long the answer to a call is stored; must exceed the time in which callers repeat it."""
    checks_layout: ClassVar[bool] = False
    """Whether the script compares the caller's layout number with that of the shard."""
    topic: str
    call_id: str = field(default="", kw_only=True, compare=False)

    @property
    def fixed_groups(self) -> tuple[str, ...] | None:
        """The groups to pass regardless of what is declared; None to pass the declared groups."""
        return None

    @property
    def features(self) -> Features:
        """The features of its script that this call uses, beside those of its topic."""
        return NONE

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:  # noqa: ARG002  used by overrides
        """The keys of individual messages, in the order given in the script's header."""
        return ()

    @abstractmethod
    def args(self) -> Sequence[Argument]:
        """The script's own arguments, without the index of the own group."""

    @abstractmethod
    def parse(self, reply: Sequence[Any]) -> T:
        """Parse a reply, given without its leading OK."""

    def remainder(self, result: T) -> Transition[T] | None:  # noqa: ARG002  used by overrides
        """The call for what remains after a call stopped at its byte budget; None if complete.

        Its result is appended to the first one.
        """
        return None

    def refuse(self, reply: Sequence[Any]) -> None:
        """Raise the error for a reply other than OK."""
        if reply[0] == b"WINDOW":
            raise HasWindow(f"a message of topic {self.topic!r} has a window")
        if reply[0] == b"LISTED":
            raise ListChanged(f"the messages of a key of topic {self.topic!r} are changing")
        raise AssertionError(f"{self.script} answered {reply!r}")

    def build(
        self,
        keys: TopicKeys,
        groups: tuple[str, ...],
        actor: str,
        layout: str = "",
        features: Features = NONE,
    ) -> tuple[list[str], list[Argument]]:
        """KEYS and ARGV for the given groups. Raises GroupRemoved if the own group is not one.

        layout: number of the layout by which this shard was chosen; empty to skip the check.
        features: those of the script.
        """
        all_keys = list(keys.shared)
        for name in groups:
            all_keys += keys.group(name)
        if LANES in features:
            all_keys.append(keys.limits)
            for name in groups:
                all_keys += keys.lanes(name)
        all_keys += self.id_keys(keys)
        arguments: list[Argument] = [keys.wake, keys.topic, actor, len(groups), *groups]
        if isinstance(self, OfGroup):
            if self.group not in groups:
                raise GroupRemoved(f"group {self.group!r} is not declared on topic {self.topic!r}")
            arguments.append(groups.index(self.group) + 1)
        if self.checks_layout:
            arguments.append(layout)
        arguments += self.args()
        return all_keys, arguments


@dataclass(frozen=True, eq=False, repr=False)
class OfGroup:
    """A transition that moves the messages of a single group."""

    group: str


def _new_call_id() -> str:
    return f"{random.getrandbits(64):016x}"


@dataclass(frozen=True, eq=False, repr=False)
class Recorded:
    """A transition whose answer the server stores for repeated calls with the same `call_id`."""

    call_id: str = field(default_factory=_new_call_id, kw_only=True, compare=False)


@dataclass(frozen=True, eq=False, repr=False)
class OfIds:
    """A transition of message ids, whose script gets the keys of each body and tombstone."""

    columns: ClassVar[tuple[str, ...]] = ("ids",)
    ids: Sequence[str]

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        """The keys of each message."""
        return keys.bodies_and_tombstones(self.ids)

    def args(self) -> Sequence[Argument]:
        """The number of ids, and the ids."""
        return [len(self.ids), *self.ids]


@dataclass(frozen=True, eq=False, repr=False)
class OfKey:
    """A transition that may concern messages of one key.

    listed: change nothing, and raise ListChanged, if this part of their key's list has changed.
    """

    listed: Listed | None = field(default=None, kw_only=True)

    @property
    def features(self) -> Features:
        """The features of its script that this call uses."""
        return NONE if self.listed is None else KEYED

    @property
    def list_args(self) -> Sequence[Argument]:
        """The part's number and stored value; empty to skip the check."""
        return self.listed or ("", "")


class Elsewhere(StrEnum):
    """An older shard's answer about a message that it does not hold; see `ById.first_of`."""

    UNKNOWN = "unknown"
    SETTLED = "settled"


@dataclass(frozen=True, eq=False, repr=False)
class ById(Transition[list[T]]):
    """A transition of individual messages, which a split topic spreads over its shards.

    `columns` names the fields that have one item per message, in the same order; the items of the
    first are ids, or tuples that begin with the id. The result has one item per message.
    """

    columns: ClassVar[tuple[str, ...]]
    outcomes: ClassVar[Mapping[str, Any]]
    """The result for each letter of a reply that has one letter per message."""

    @property
    def asks_older(self) -> Literal["first", "after", "never"]:
        """Whether to ask older shards before the current one (`first_of`), after it, or never."""
        return "after"

    @property
    def message_ids(self) -> Sequence[str]:
        """The message ids, in order."""
        return [
            item if isinstance(item, str) else item[0] for item in getattr(self, self.columns[0])
        ]

    def parse(self, reply: Sequence[Any]) -> list[T]:
        """Parse a reply with one letter per message."""
        return list(map(self.outcomes.__getitem__, text(reply[0])))

    def is_nowhere(self, result: T) -> bool:
        """Whether this shard did not have the message, so that another one may."""
        return not result

    def may_be_settled(self, result: T) -> bool:  # noqa: ARG002  used by overrides
        """Whether this shard answered from a tombstone; the id may be live in an older shard."""
        return False

    def first_of(self, shard: str, picks: Sequence[int]) -> Transition[list[Any]]:
        """The transition that asks an older shard about the picked messages first."""
        raise NotImplementedError(f"{self.script} asks older shards after the current one")

    def told(self, answer: Any) -> T | Elsewhere:
        """What one answer to `first_of` says."""
        return answer  # type: ignore[no-any-return]

    def revived(self, result: T) -> T:
        """The current shard's result for a message that an older shard has settled."""
        return result

    def with_known_ids(self) -> Self:
        """A copy for a repeat, after an earlier call may have taken effect."""
        return self

    def part(self, shard: str, picks: Sequence[int]) -> Self:
        """A copy for the picked messages, to run on one shard."""
        n = len(self.message_ids)
        columns = {name: getattr(self, name) for name in self.columns}
        cut: dict[str, Any] = {
            name: [column[i] for i in picks] for name, column in columns.items() if len(column) == n
        }
        if self.call_id and len(picks) < n:  # a separate call id, stable for the same messages
            cut["call_id"] = f"{self.call_id}-{zlib.crc32(repr(list(picks)).encode()):08x}"
        return replace(self, topic=shard, **cut)


def text(value: bytes | str | int) -> str:
    """Decode a string in a reply; invalid UTF-8 is replaced."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def exact_text(value: bytes) -> str:
    """Decode a string in a reply; bytes that are not UTF-8 become lone surrogates."""
    return value.decode("utf-8", "surrogateescape")
