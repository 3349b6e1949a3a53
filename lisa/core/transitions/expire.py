"""waiting, retry, ready past its ttl -> settled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from lisa.core.transitions.base import OfIds, Recorded, Transition, text


class Expired(StrEnum):
    """Outcome for one id. `ORPHAN`: the id had a ttl but no live message."""

    EXPIRED = "expired"
    IN_FLIGHT = "in_flight"
    NOT_DUE = "not_due"
    ORPHAN = "orphan"


_OUTCOMES = {
    "x": Expired.EXPIRED,
    "f": Expired.IN_FLIGHT,
    "n": Expired.NOT_DUE,
    "o": Expired.ORPHAN,
}


@dataclass(frozen=True, slots=True)
class Expire(Recorded, OfIds, Transition[list[Expired]]):
    """End messages that have exceeded their ttl."""

    script: ClassVar[str] = "expire"
    steps: ClassVar[int] = 8
    kept_ms: ClassVar[int] = 600_000
    topic: str
    ids: Sequence[str]

    def parse(self, reply: Sequence[Any]) -> list[Expired]:
        return [_OUTCOMES[letter] for letter in text(reply[0])]
