"""A change of a schedule, with its occurrences: new -> waiting; waiting, ready -> settled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lisa.core.model.errors import TopicFull
from lisa.core.model.keys import TopicKeys
from lisa.core.transitions.base import Argument, Recorded, Transition, text


class NewOccurrence(NamedTuple):
    """A message to create. due_ms: epoch ms. ttl_ms, policy: None without its own."""

    id: str
    due_ms: int
    envelope: bytes
    ttl_ms: int | None = None
    policy: str | None = None


class ScheduleOutcome(NamedTuple):
    """What a call did.

    state: done; held (an earlier occurrence prevented the new one); changed (the schedule was not
    as the caller saw it, and nothing was done); gone (a message to replace no longer waited, and
    nothing was done). fence: the schedule's fence before the call; empty if there was none.
    outcomes: one letter per message: a created, d known already, n not created.
    """

    state: str
    fence: str
    outcomes: str


@dataclass(frozen=True, eq=False, repr=False)
class Schedule(Recorded, Transition[ScheduleOutcome]):
    """Replace a schedule's record if its fence is still `fence`; create and drop occurrences.

    fence: empty for a new schedule. record: empty to remove it. score: when managers look next.
    drops: ids that are removed if they still wait. earlier: ids of occurrences that may prevent the
    creation, as `overlap` says; then `held` and `held_score` are written. swaps: change nothing
    unless all drops still wait. Raises TopicFull.
    """

    script: ClassVar[str] = "schedule"
    checks_layout: ClassVar[bool] = True
    name: str
    fence: str | bytes
    record: bytes
    score: int | None = None
    creates: Sequence[NewOccurrence] = ()
    drops: Sequence[str] = ()
    earlier: Sequence[str] = ()
    overlap: str = "allow"
    held: bytes = b""
    held_score: int | None = None
    swaps: bool = False

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        ids = [*[created.id for created in self.creates], *self.drops, *self.earlier]
        return [keys.schedules, keys.ticks, *keys.bodies_and_tombstones(ids)]

    def args(self) -> Sequence[Argument]:
        arguments: list[Argument] = [
            self.name,
            self.fence,
            self.record,
            "" if self.score is None else self.score,
            self.overlap,
            self.held,
            "" if self.held_score is None else self.held_score,
            int(self.swaps),
            len(self.drops),
            len(self.earlier),
            len(self.creates),
        ]
        for create in self.creates:
            ttl = "" if create.ttl_ms is None else create.ttl_ms
            policy = "" if create.policy is None else f"={create.policy}"  # "": no retries
            arguments += (create.due_ms, create.envelope, ttl, policy)
        return arguments

    def parse(self, reply: Sequence[Any]) -> ScheduleOutcome:
        return ScheduleOutcome(*map(text, reply))

    def refuse(self, reply: Sequence[Any]) -> None:
        if reply[0] == b"FULL":
            raise TopicFull(
                f"topic {self.topic!r} holds {reply[1]} live messages and allows at most "
                f"{reply[2]} (its option capacity); schedule {self.name!r} created nothing"
            )
        Transition.refuse(self, reply)
