"""Puts messages back as they stood before their server was lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Literal, NamedTuple

from lisa.core.errors import GroupRemoved
from lisa.core.keys import TopicKeys
from lisa.core.transitions.base import Argument, ById, Elsewhere, Transition, letters
from lisa.core.transitions.inspect import Inspect

__all__ = ["Place", "Restore", "RestoreItem", "Restored"]


class Restored(StrEnum):
    """What became of one message: put back, or already known here and left alone."""

    RESTORED = "restored"
    LIVE = "live"
    SETTLED = "settled"


class Place(NamedTuple):
    """Where one group has a message: in retry until `score_ms`, or in garbage since then.

    `attempts` are the failed ones.
    """

    group: str
    kind: Literal["retry", "garbage"]
    score_ms: int
    attempts: int = 0


class RestoreItem(NamedTuple):
    """One message. Without places it waits until `due_ms`, for every group."""

    id: str
    envelope: bytes
    due_ms: int
    expires_ms: int | None = None
    policy: str | None = None
    places: tuple[Place, ...] = ()
    reason: str = ""


_OUTCOMES = {"y": Restored.RESTORED, "l": Restored.LIVE, "s": Restored.SETTLED}


@dataclass(frozen=True, slots=True)
class Restore(ById[Restored]):
    """Put messages back, each id once a call. Its places' groups have to be declared."""

    script: ClassVar[str] = "restore"
    steps: ClassVar[int] = 5
    minds_layout: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("items",)
    topic: str
    items: Sequence[RestoreItem]

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return [key(item.id) for item in self.items for key in (keys.body, keys.done)]

    def build(
        self, keys: TopicKeys, groups: tuple[str, ...], actor: str, layout: str = ""
    ) -> tuple[list[str], list[Argument]]:
        all_keys, arguments = Transition.build(self, keys, groups, actor, layout)
        # 0 for a group that is not known: the script says first which groups there are.
        number = {name: i for i, name in enumerate(groups, 1)}
        arguments.append(len(self.items))
        for item in self.items:
            places = " ".join(
                f"{number.get(one.group, 0)}:{one.kind[0]}:{one.score_ms}:{one.attempts}"
                for one in item.places
            )
            arguments += [
                item.id, item.envelope, item.due_ms,
                "" if item.expires_ms is None else item.expires_ms,
                item.policy or "", places, item.reason,
            ]  # fmt: skip
        return all_keys, arguments

    def args(self) -> Sequence[Argument]:
        return ()

    def refuse(self, reply: Sequence[Any]) -> None:
        if reply[0] == b"UNDECLARED":
            named = sorted({place.group for item in self.items for place in item.places})
            raise GroupRemoved(
                f"of the groups {', '.join(named)} one is not declared on topic {self.topic!r}"
            )
        Transition.refuse(self, reply)

    @property
    def message_ids(self) -> Sequence[str]:
        return [one.id for one in self.items]

    @property
    def asks_older(self) -> Literal["first", "after", "never"]:
        return "first"

    def first_of(self, place: str, picks: Sequence[int]) -> Transition[list[Restored | Elsewhere]]:
        return _Standing(place, [self.items[i].id for i in picks])

    def parse(self, reply: Sequence[Any]) -> list[Restored]:
        return [_OUTCOMES[letter] for letter in letters(reply[0])]


@dataclass(frozen=True, slots=True)
class _Standing(Transition[list[Restored | Elsewhere]]):
    """What an older place knows of ids."""

    script: ClassVar[str] = "inspect"
    minds_layout: ClassVar[bool] = True
    topic: str
    ids: Sequence[str]

    def _look(self) -> Inspect:
        return Inspect(self.topic, self.ids, bodies=False)

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return self._look().id_keys(keys)

    def args(self) -> Sequence[Argument]:
        return self._look().args()

    def parse(self, reply: Sequence[Any]) -> list[Restored | Elsewhere]:
        return [
            Restored.LIVE if seen.envelope else
            Restored.SETTLED if seen.tombstone else Elsewhere.UNKNOWN
            for seen in self._look().parse(reply)
        ]  # fmt: skip
