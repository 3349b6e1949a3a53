"""in flight -> settled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

from lisa.core.keys import TopicKeys
from lisa.core.transitions.base import Argument, ById, letters

__all__ = ["NO_LATENESS", "Ack", "Acked", "Settlement"]

NO_LATENESS = " "
"""Stands where a delivery makes no lateness figure: any but the first attempt."""


class Acked(StrEnum):
    """What became of one ack. `REPEATED`: an earlier call, its reply lost, had done it."""

    ACKED = "acked"
    LATE = "late"
    STALE = "stale"
    REPEATED = "repeated"


class Settlement(NamedTuple):
    """One delivery to settle.

    `fence` is token and mark of the envelope that was handed out; `lateness` a letter of
    core.lateness, or NO_LATENESS.
    """

    id: str
    entry: str
    fence: str
    due_ms: int
    attempt: int
    lateness: str = NO_LATENESS


_OUTCOMES = {"a": Acked.ACKED, "l": Acked.LATE, "s": Acked.STALE, "r": Acked.REPEATED}


@dataclass(frozen=True, slots=True)
class Ack(ById[Acked]):
    """Settle deliveries of one group. `state` is acked, or expired for those past their ttl."""

    script: ClassVar[str] = "ack"
    steps: ClassVar[int] = 4
    columns: ClassVar[tuple[str, ...]] = ("settlements",)
    topic: str
    group: str
    settlements: Sequence[Settlement]
    state: str = "acked"

    @property
    def own_group(self) -> str:
        return self.group

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        body, done = keys.body(""), keys.done("")
        ids = [one.id for one in self.settlements]
        return [*[body + name for name in ids], *[done + name for name in ids]]

    def args(self) -> Sequence[Argument]:
        ids, entries, fences, dues, attempts, lateness = zip(*self.settlements, strict=True)
        state = self.state
        return [
            state, int(len(set(entries)) == len(entries)), "".join(lateness), len(ids), *ids,
            *entries,
            *[f"{fence}{state},{due},{attempt}," for fence, due, attempt
              in zip(fences, dues, attempts, strict=True)],
        ]  # fmt: skip

    @property
    def message_ids(self) -> Sequence[str]:
        return [one.id for one in self.settlements]

    def is_nowhere(self, result: Acked) -> bool:
        return result is Acked.STALE

    def parse(self, reply: Sequence[Any]) -> list[Acked]:
        return [_OUTCOMES[letter] for letter in letters(reply[0])]
