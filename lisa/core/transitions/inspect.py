"""The state of ids, in every group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from lisa.core.model.clock import score_ms
from lisa.core.transitions.base import Argument, ById, OfIds, text


class GroupState(NamedTuple):
    """A message's state in one group: `state` is ready, in_flight, parked, retry or garbage.

    `due_ms` is the due time of the current or next attempt; in garbage, the time of death. Only
    garbage has a `traceback`, if a handler raised. `deferrals`: how often the message was deferred
    since its last failure. `first_due_ms`: when the first attempt of a message that failed or was
    deferred was due; None if not known, and in garbage.
    """

    group: str
    state: str
    due_ms: int | None
    failed_attempts: int
    consumer: str | None
    idle_ms: int | None
    reason: str | None
    entry: str | None
    traceback: str | None = None
    deferrals: int = 0
    first_due_ms: int | None = None


class Tombstone(NamedTuple):
    """The record of a settled message."""

    token: str
    state: str
    due_ms: int | None
    attempts: int
    at_ms: int


class Inspection(NamedTuple):
    """Everything known about one id; all fields are empty if it is unknown.

    `envelope` is complete if bodies were requested, else only its head.
    """

    envelope: bytes
    tombstone: Tombstone | None
    waiting_due_ms: int | None
    expires_ms: int | None
    group_states: list[GroupState]


def _number(value: bytes) -> int | None:
    return score_ms(value) if value else None


def _group_state(row: Sequence[Any]) -> GroupState:
    group, state, due, failed, consumer, idle, noted, entry = row
    reason, traceback, deferrals, first_due_ms = parted(noted)
    return GroupState(
        text(group),
        text(state),
        _number(due),
        int(failed),
        text(consumer) or None,
        idle if isinstance(idle, int) else None,
        reason,
        text(entry) or None,
        traceback,
        deferrals,
        first_due_ms,
    )


class Noted(NamedTuple):
    """A value of the hash `reasons`, of a message that has failed or was deferred."""

    reason: str | None
    traceback: str | None
    deferrals: int
    first_due_ms: int | None


def parted(noted: bytes) -> Noted:
    """Parse a value of the hash `reasons`: a reason, and after a zero byte one of two notes.

    That of a dead message is a traceback. The other begins with another zero byte: the number of
    deferrals, the entry that was deferred last, and when the first attempt was due.
    """
    reason, _, note = noted.partition(b"\0")
    if note.startswith(b"\0"):
        times, _, first_due = (*note[1:].split(b" "), b"", b"")[:3]
        return Noted(text(reason) or None, None, _digits(times) or 0, _digits(first_due))
    return Noted(text(reason) or None, text(note) or None, 0, None)


def _digits(value: bytes) -> int | None:
    return int(value) if value.lstrip(b"-").isdigit() else None


def _tombstone(value: bytes) -> Tombstone | None:
    if not value:
        return None
    state, due, attempts, at = text(value[9:]).split(",")
    return Tombstone(text(value[:8]), state, int(due) if due else None, int(attempts), int(at))


@dataclass(frozen=True)
class Inspect(OfIds, ById[Inspection]):
    """Read the state of ids without changing anything."""

    script: ClassVar[str] = "inspect"
    steps: ClassVar[int] = 4
    checks_layout: ClassVar[bool] = True
    bodies: bool = True

    def args(self) -> Sequence[Argument]:
        return [int(self.bodies), *OfIds.args(self)]

    def is_nowhere(self, result: Inspection) -> bool:
        return not (result.envelope or result.tombstone or result.group_states)

    def remainder(self, result: list[Inspection]) -> Inspect | None:
        done = len(result)
        return replace(self, ids=self.ids[done:]) if done < len(self.ids) else None

    def may_be_settled(self, result: Inspection) -> bool:
        return result.tombstone is not None and not result.envelope

    def parse(self, reply: Sequence[Any]) -> list[Inspection]:
        return [
            Inspection(
                envelope,
                _tombstone(stone),
                _number(due),
                _number(ends),
                [_group_state(row) for row in group_states],
            )
            for envelope, stone, due, ends, *group_states in reply[1:]
        ]
