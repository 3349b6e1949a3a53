"""in flight -> settled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, NamedTuple

from lisa.core.model.envelope import fence_of
from lisa.core.model.keys import TopicKeys
from lisa.core.model.lateness import kept_ms, letter
from lisa.core.model.message import Message
from lisa.core.model.sharding import KEY_END
from lisa.core.transitions.base import KEYED, Argument, ById, OfGroup
from lisa.core.transitions.loader import NONE, Features

STRAYS: Features = frozenset({"strays"})

NO_LATENESS = " "
"""Placeholder for a delivery without a lateness value: any but the first attempt."""


class Acked(StrEnum):
    """Outcome of one ack.

    LATE: settled, although the lease had ended. STALE: another delivery has taken its place, or the
    message is gone; nothing was changed. REPEATED: an earlier call settled it.
    """

    ACKED = "acked"
    LATE = "late"
    STALE = "stale"
    REPEATED = "repeated"


class Settlement(NamedTuple):
    """One delivery to settle.

    `fence` is token and mark of the delivered envelope; `lateness` is a letter of
    core.model.lateness, or NO_LATENESS; `late_ms` is the result of `kept_ms` there.
    """

    id: str
    entry: str
    fence: str
    due_ms: int
    attempt: int
    lateness: str = NO_LATENESS
    late_ms: int = 0


def settlement_of(message: Message, entry: str, data: bytes, handed_us: int) -> Settlement:
    """The settlement of a delivery at `handed_us`, in microseconds of Redis's clock."""
    due_ms, attempt = message.due_ms, message.attempt
    late, late_ms = NO_LATENESS, 0
    if attempt == 1:
        late_us = handed_us - due_ms * 1000
        late, late_ms = letter(late_us), kept_ms(late_us)
    # Half as long as the named tuple's constructor.
    return tuple.__new__(
        Settlement, (message.id, entry, fence_of(data), due_ms, attempt, late, late_ms)
    )


def lateness_argument(letters: Iterable[str], late_ms: Iterable[int]) -> str:
    """One letter per delivery, then the highest lateness in ms if it is to be kept."""
    return "".join(letters) + str(max(late_ms) or "")


@dataclass(frozen=True)
class Ack(OfGroup, ById[Acked]):
    """Settle deliveries of one group. `state` is acked, or expired if they exceeded their ttl."""

    script: ClassVar[str] = "ack"
    steps: ClassVar[int] = 4
    group_steps: ClassVar[float | None] = 0.15
    columns: ClassVar[tuple[str, ...]] = ("settlements",)
    outcomes: ClassVar[Mapping[str, Any]] = {
        "a": Acked.ACKED,
        "l": Acked.LATE,
        "s": Acked.STALE,
        "r": Acked.REPEATED,
    }
    settlements: Sequence[Settlement]
    state: str = "acked"

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        ids = [settlement.id for settlement in self.settlements]
        return keys.bodies(ids) + keys.tombstones(ids)

    def args(self) -> Sequence[Argument]:
        ids, entries, fences, dues, attempts, lateness, late_ms = zip(
            *self.settlements, strict=True
        )
        state = self.state
        return [
            state,
            lateness_argument(lateness, late_ms),
            len(ids),
            *ids,
            *entries,
            *[
                f"{fence}{state},{due},{attempt},"
                for fence, due, attempt in zip(fences, dues, attempts, strict=True)
            ],
        ]

    @property
    def features(self) -> Features:
        entries = {settlement.entry for settlement in self.settlements}
        strays = NONE if len(entries) == len(self.settlements) else STRAYS
        is_keyed = any(KEY_END in settlement.id for settlement in self.settlements)
        return strays | KEYED if is_keyed else strays

    def is_nowhere(self, result: Acked) -> bool:
        return result is Acked.STALE
