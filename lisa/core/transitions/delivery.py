"""ready -> in flight: takes entries of a group, and reads their bodies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lisa.core.model.keys import TopicKeys
from lisa.core.model.stream import Entry, parse_entry
from lisa.core.transitions.base import Argument, OfGroup, Recorded, Transition, text
from lisa.core.transitions.loader import Features


class Pulled(NamedTuple):
    """The entries taken, and the group's last delivered id, from which XREAD waits for more."""

    paused: bool
    last_id: str
    entries: list[Entry]


@dataclass(frozen=True)
class Pull(Recorded, OfGroup, Transition[Pulled]):
    """Take at most `most` messages without waiting; `Open` reads their bodies."""

    script: ClassVar[str] = "pull"
    steps: ClassVar[int] = 2
    group_steps: ClassVar[float | None] = 0
    consumer: str
    most: int
    ack_timeout_ms: int | None = None

    def args(self) -> Sequence[Argument]:
        timeout: Argument = "" if self.ack_timeout_ms is None else self.ack_timeout_ms
        return (self.consumer, self.most, timeout)

    def parse(self, reply: Sequence[Any]) -> Pulled:
        paused, last_id, *items = reply
        return Pulled(bool(paused), text(last_id), [parse_entry(item) for item in items])


class Limits(NamedTuple):
    """What the script compares with Redis's clock, in epoch milliseconds.

    closes_ms: until then the message may be handed over; 0 if its window is closed.
    opens_ms: when the window opens after that.
    """

    closes_ms: int
    opens_ms: int


class Opened(NamedTuple):
    """The first of the entries, as many as the byte budget allows, and at least one.

    `envelopes` and `past_ttl` have one item per opened entry; the caller calls again for the rest.
    An envelope is None if there is nothing to deliver: the entry was cleared, or returned because
    the topic is paused, or moved until its window opens. limits: by entry, if any has a window.
    """

    now_us: int
    ack_timeout_ms: int
    paused: bool
    past_ttl: list[bool]
    envelopes: list[bytes | None]
    limits: Sequence[Limits | None] = ()


@dataclass(frozen=True)
class Open(OfGroup, Transition[Opened]):
    """Open the first of the entries that XREADGROUP or pull gave to this group's consumer.

    late: the consumer's name, if much of the leases may have elapsed; the leases then restart.
    limits: of each entry's window, None for a message without one. Raises HasWindow if they are
        needed and None is given for all.
    """

    script: ClassVar[str] = "open"
    steps: ClassVar[int] = 2
    group_steps: ClassVar[float | None] = 0
    entries: Sequence[Entry]
    ack_timeout_ms: int | None = None
    late: str = ""
    limits: Sequence[Limits | None] | None = None

    @property
    def features(self) -> Features:
        is_exceptional = self.ack_timeout_ms is not None or self.limits is not None
        found = (("late", bool(self.late)), ("exceptions", is_exceptional))
        return frozenset(name for name, is_used in found if is_used)

    def __post_init__(self) -> None:
        # An entry is opened once, so calls with the same first entry are repeats.
        object.__setattr__(self, "call_id", f"open:{self.group}:{self.entries[0].entry}")

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return keys.bodies([entry.id for entry in self.entries])

    def args(self) -> Sequence[Argument]:
        return [
            "" if self.ack_timeout_ms is None else self.ack_timeout_ms,
            self.late,
            len(self.entries),
            *[entry.id for entry in self.entries],
            *[entry.entry for entry in self.entries],
            *(() if self.limits is None else _columns(self.limits)),
        ]

    def parse(self, reply: Sequence[Any]) -> Opened:
        now_us, timeout, paused, past_ttl, *envelopes = reply
        expired = [letter == "x" for letter in text(past_ttl)]
        limits = (self.limits or ())[: len(envelopes)]
        return Opened(int(now_us), int(timeout), bool(paused), expired, envelopes, limits)


def _columns(limits: Sequence[Limits | None]) -> list[Argument]:
    """The columns closes and opens."""
    return [
        *["" if limit is None else limit.closes_ms for limit in limits],
        *["" if limit is None else limit.opens_ms for limit in limits],
    ]
