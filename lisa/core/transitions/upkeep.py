"""Ends messages past their time, and repairs a topic's records."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

from lisa.core.model.keys import TopicKeys
from lisa.core.transitions.base import Argument, OfGroup, OfIds, Recorded, Transition, text


class Expired(StrEnum):
    """Outcome for one id. `ORPHAN`: the id had a ttl but no live message.

    SKIPPED, GARBAGE: its late policy ended it. KEPT: it is late, but the newest of its schedule.
    """

    EXPIRED = "expired"
    SKIPPED = "skipped"
    GARBAGE = "garbage"
    KEPT = "kept"
    IN_FLIGHT = "in_flight"
    NOT_DUE = "not_due"
    ORPHAN = "orphan"


_OUTCOMES = {
    "x": Expired.EXPIRED,
    "s": Expired.SKIPPED,
    "g": Expired.GARBAGE,
    "k": Expired.KEPT,
    "f": Expired.IN_FLIGHT,
    "n": Expired.NOT_DUE,
    "o": Expired.ORPHAN,
}


@dataclass(frozen=True)
class Expire(Recorded, OfIds, Transition[list[Expired]]):
    """End messages that have exceeded their ttl, or are too late for their late policy.

    newer: for each id, the ids of newer occurrences of its schedule, which the policy `collapse`
        asks for; None if one of them was promoted. Empty if no policy asks.
    """

    script: ClassVar[str] = "expire"
    steps: ClassVar[int] = 8
    kept_ms: ClassVar[int] = 600_000
    newer: Sequence[Sequence[str] | None] = ()

    def args(self) -> Sequence[Argument]:
        newer = self.newer or ((),) * len(self.ids)
        arguments: list[Argument] = [len(self.ids)]
        for message_id, ids in zip(self.ids, newer, strict=True):
            arguments += (message_id, -1 if ids is None else len(ids))
        return arguments + [message_id for ids in newer if ids for message_id in ids]

    def parse(self, reply: Sequence[Any]) -> list[Expired]:
        return [_OUTCOMES[letter] for letter in text(reply[0])]


@dataclass(frozen=True)
class Mend(Recorded, Transition[list[list[str]]]):
    """Repair ids. Returns the faults found for each. With `judge`, reports and changes nothing.

    `entry-lost`: the stream entry was missing; `no-place`: live, but in no group's data;
    `second-place`: in two states at the same time; `leftover`: a group has failures recorded for a
    message that it does not owe; `no-body`: a record without a live message.
    """

    script: ClassVar[str] = "mend"
    steps: ClassVar[int] = 4
    ids: Sequence[str]
    judge: bool = False

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return keys.bodies(self.ids)

    def args(self) -> Sequence[Argument]:
        return [len(self.ids), *self.ids, int(self.judge)]

    def parse(self, reply: Sequence[Any]) -> list[list[str]]:
        return [text(faults).split() for faults in reply]


class Trimmed(NamedTuple):
    """Result for one window; `cursor` is None at the end.

    If the stream has fewer `entries` than the index has ids (`indexed`), another program deleted
    some; `Mend` repairs their messages.
    """

    cursor: str | None
    removed: int
    entries: int
    indexed: int


@dataclass(frozen=True)
class Trim(OfGroup, Transition[Trimmed]):
    """Check one window of a group's stream, from `start` on."""

    script: ClassVar[str] = "trim"
    start: str = "-"
    window: int = 200

    def args(self) -> Sequence[Argument]:
        return (self.start, self.window)

    def parse(self, reply: Sequence[Any]) -> Trimmed:
        cursor, removed, entries, indexed = reply
        return Trimmed(text(cursor) or None, removed, entries, indexed)


@dataclass(frozen=True)
class Recount(OfGroup, Transition[list[str]]):
    """Correct the counts of lanes, given by their keys. Returns the keys of those that were wrong.

    judge: only report them.
    """

    script: ClassVar[str] = "recount"
    lanes: Sequence[str]
    judge: bool = False

    def args(self) -> Sequence[Argument]:
        return [int(self.judge), len(self.lanes), *self.lanes]

    def parse(self, reply: Sequence[Any]) -> list[str]:
        return list(map(text, reply))
