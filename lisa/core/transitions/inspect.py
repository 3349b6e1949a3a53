"""Where an id stands, in every group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lisa.core.keys import TopicKeys
from lisa.core.transitions.base import Argument, ById, text

__all__ = ["Inspect", "Inspection", "Place", "Tombstone"]


class Place(NamedTuple):
    """Where one group has the message: `state` is ready, in_flight, retry or garbage.

    `due_ms` is the due time of the next or present attempt; in garbage, the time of death.
    """

    group: str
    state: str
    due_ms: int | None
    failed_attempts: int
    consumer: str | None
    idle_ms: int | None
    reason: str | None
    entry: str | None


class Tombstone(NamedTuple):
    """What is left of a settled message."""

    token: str
    state: str
    due_ms: int | None
    attempts: int
    at_ms: int


class Inspection(NamedTuple):
    """All that is known of one id; all empty if it is unknown.

    `envelope` is the whole of it if bodies were wanted, else its head.
    """

    envelope: bytes
    tombstone: Tombstone | None
    waiting_due_ms: int | None
    expires_ms: int | None
    places: list[Place]


def _number(value: bytes) -> int | None:
    return int(float(value)) if value else None


def _place(row: Sequence[Any]) -> Place:
    group, state, due, failed, consumer, idle, reason, entry = row
    return Place(
        text(group), text(state), _number(due), int(failed), text(consumer) or None,
        idle if isinstance(idle, int) else None, text(reason) or None, text(entry) or None,
    )  # fmt: skip


def _tombstone(value: bytes) -> Tombstone | None:
    if not value:
        return None
    state, due, attempts, at = text(value[9:]).split(",")
    return Tombstone(text(value[:8]), state, int(due) if due else None, int(attempts), int(at))


@dataclass(frozen=True, slots=True)
class Inspect(ById[Inspection]):
    """Look at ids without changing anything."""

    script: ClassVar[str] = "inspect"
    steps: ClassVar[int] = 4
    minds_layout: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("ids",)
    topic: str
    ids: Sequence[str]
    bodies: bool = True

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return [key(message_id) for message_id in self.ids for key in (keys.body, keys.done)]

    def args(self) -> Sequence[Argument]:
        return [int(self.bodies), len(self.ids), *self.ids]

    @property
    def message_ids(self) -> Sequence[str]:
        return self.ids

    def is_nowhere(self, result: Inspection) -> bool:
        return not (result.envelope or result.tombstone or result.places)

    def may_be_settled(self, result: Inspection) -> bool:
        return result.tombstone is not None and not result.envelope

    def parse(self, reply: Sequence[Any]) -> list[Inspection]:
        return [
            Inspection(
                envelope, _tombstone(stone), _number(due), _number(ends),
                [_place(row) for row in places],
            )
            for envelope, stone, due, ends, *places in reply[1:]
        ]  # fmt: skip
