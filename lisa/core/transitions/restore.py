"""Restores messages to their state before their server was lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, Literal, NamedTuple

from lisa.core.model.errors import GroupRemoved
from lisa.core.model.keys import TopicKeys
from lisa.core.transitions.base import Argument, ById, Elsewhere, Recorded, Transition
from lisa.core.transitions.inspect import Inspect, Inspection
from lisa.core.transitions.loader import NONE, Features


class Restored(StrEnum):
    """Outcome for one message: restored, or already known and left unchanged."""

    RESTORED = "restored"
    LIVE = "live"
    SETTLED = "settled"


class RestoreState(NamedTuple):
    """A message's state in one group: in retry until `score_ms`, or in garbage since then.

    `attempts` is the number of failed attempts.
    """

    group: str
    kind: Literal["retry", "garbage"]
    score_ms: int
    attempts: int = 0


class RestoreItem(NamedTuple):
    """One message. Without `group_states` it waits until `due_ms`, for every group."""

    id: str
    envelope: bytes
    due_ms: int
    expires_ms: int | None = None
    policy: str | None = None
    group_states: tuple[RestoreState, ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Restore(Recorded, ById[Restored]):
    """Restore messages; each id at most once per call. Their groups must be declared."""

    script: ClassVar[str] = "restore"
    steps: ClassVar[int] = 5
    checks_layout: ClassVar[bool] = True
    columns: ClassVar[tuple[str, ...]] = ("items",)
    outcomes: ClassVar[Mapping[str, Any]] = {
        "y": Restored.RESTORED,
        "l": Restored.LIVE,
        "s": Restored.SETTLED,
    }
    items: Sequence[RestoreItem]

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return keys.bodies_and_tombstones(self.message_ids)

    def build(
        self,
        keys: TopicKeys,
        groups: tuple[str, ...],
        actor: str,
        layout: str = "",
        features: Features = NONE,
    ) -> tuple[list[str], list[Argument]]:
        all_keys, arguments = Transition.build(self, keys, groups, actor, layout, features)
        # 0 for an unknown group: the script first reports the declared groups.
        number = {name: i for i, name in enumerate(groups, 1)}
        arguments.append(len(self.items))
        for item in self.items:
            group_states = " ".join(
                f"{number.get(state.group, 0)}:{state.kind[0]}:{state.score_ms}:{state.attempts}"
                for state in item.group_states
            )
            arguments += [
                item.id,
                item.envelope,
                item.due_ms,
                "" if item.expires_ms is None else item.expires_ms,
                "" if item.policy is None else f"={item.policy}",  # an empty one: no retries
                group_states,
                item.reason,
            ]
        return all_keys, arguments

    def args(self) -> Sequence[Argument]:
        return ()

    def refuse(self, reply: Sequence[Any]) -> None:
        if reply[0] == b"UNDECLARED":
            named = sorted({state.group for item in self.items for state in item.group_states})
            raise GroupRemoved(
                f"one of the groups {', '.join(named)} is not declared on topic {self.topic!r}"
            )
        Transition.refuse(self, reply)

    @property
    def asks_older(self) -> Literal["first", "after", "never"]:
        return "first"

    def first_of(self, shard: str, picks: Sequence[int]) -> Inspect:
        return Inspect(shard, [self.items[i].id for i in picks], bodies=False)

    def told(self, answer: Inspection) -> Restored | Elsewhere:
        if answer.envelope:
            return Restored.LIVE
        return Restored.SETTLED if answer.tombstone else Elsewhere.UNKNOWN
