"""waiting, retry, ready past its ttl, or waiting and too late -> settled, or garbage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from lisa.core.transitions.base import Argument, OfIds, Recorded, Transition, text


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


@dataclass(frozen=True, slots=True)
class Expire(Recorded, OfIds, Transition[list[Expired]]):
    """End messages that have exceeded their ttl, or are too late for their late policy.

    newer: for each id, the ids of newer occurrences of its schedule, which the policy `collapse`
        asks for; None if one of them was promoted. Empty if no policy asks.
    """

    script: ClassVar[str] = "expire"
    steps: ClassVar[int] = 8
    kept_ms: ClassVar[int] = 600_000
    topic: str
    ids: Sequence[str]
    newer: Sequence[Sequence[str] | None] = ()

    def args(self) -> Sequence[Argument]:
        newer = self.newer or ((),) * len(self.ids)
        arguments: list[Argument] = [len(self.ids)]
        for message_id, ids in zip(self.ids, newer, strict=True):
            arguments += (message_id, -1 if ids is None else len(ids))
        return arguments + [one for ids in newer if ids for one in ids]

    def parse(self, reply: Sequence[Any]) -> list[Expired]:
        return [_OUTCOMES[letter] for letter in text(reply[0])]
