"""waiting, retry, ready past its ttl -> settled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

from lisa.core.keys import TopicKeys
from lisa.core.transitions.base import Argument, Transition, letters

__all__ = ["Expire", "Expired"]


class Expired(StrEnum):
    """What became of one id. `ORPHAN`: there was a ttl without a live message."""

    EXPIRED = "expired"
    IN_FLIGHT = "in_flight"
    NOT_DUE = "not_due"
    ORPHAN = "orphan"


_OUTCOMES = {
    "x": Expired.EXPIRED, "f": Expired.IN_FLIGHT, "n": Expired.NOT_DUE, "o": Expired.ORPHAN,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Expire(Transition[list[tuple[Expired, bytes]]]):
    """End messages that are past their ttl; with `wanted` also answers their envelopes."""

    script: ClassVar[str] = "expire"
    steps: ClassVar[int] = 8
    topic: str
    ids: Sequence[str]
    wanted: bool = False

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        return [key(message_id) for message_id in self.ids for key in (keys.body, keys.done)]

    def args(self) -> Sequence[Argument]:
        return [int(self.wanted), len(self.ids), *self.ids]

    def parse(self, reply: Sequence[Any]) -> list[tuple[Expired, bytes]]:
        said = letters(reply[0])
        return [(_OUTCOMES[letter], reply[i]) for i, letter in enumerate(said, 1)]
