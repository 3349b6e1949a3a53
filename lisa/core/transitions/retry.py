"""in flight -> retry, or garbage once the attempts are used up."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Literal, NamedTuple

from lisa.core.transitions.ack import NO_LATENESS
from lisa.core.transitions.base import Argument, ById, text

__all__ = ["Failed", "Failure", "Retried", "Retry", "new_seed", "parse_failed"]


class Failed(StrEnum):
    """Where a failed message went."""

    RETRYING = "retrying"
    DEAD = "dead"
    STALE = "stale"


class Failure(NamedTuple):
    """One failed delivery. `delay`: None by policy, milliseconds, or 'discard' (garbage now)."""

    id: str
    entry: str
    reason: str
    delay: int | Literal["discard"] | None = None
    lateness: str = NO_LATENESS


class Retried(NamedTuple):
    """What became of it; `due_ms` is that of the next attempt, None if there is none."""

    outcome: Failed
    due_ms: int | None
    failed_attempts: int


def new_seed() -> int:
    """Lua's random numbers start the same in every script, so callers bring a seed."""
    return random.getrandbits(31)


def parse_failed(outcome: bytes, failed_attempts: int) -> Retried:
    """The letter of one failed message: 'r' and its due, 'g' or 's'."""
    said = text(outcome)
    if said[0] == "r":
        return Retried(Failed.RETRYING, int(said[1:]), failed_attempts)
    return Retried(Failed.DEAD if said == "g" else Failed.STALE, None, failed_attempts)


@dataclass(frozen=True, slots=True)
class Retry(ById[Retried]):
    """Give up deliveries of one group for this time."""

    script: ClassVar[str] = "retry"
    steps: ClassVar[int] = 4
    columns: ClassVar[tuple[str, ...]] = ("failures",)
    topic: str
    group: str
    failures: Sequence[Failure]
    seed: int = field(default_factory=new_seed)

    @property
    def own_group(self) -> str:
        return self.group

    def args(self) -> Sequence[Argument]:
        lateness = "".join([one.lateness for one in self.failures])
        arguments: list[Argument] = [self.seed, lateness, len(self.failures)]
        for message_id, entry, reason, delay, _ in self.failures:
            arguments += (
                message_id, entry, "" if delay is None else delay,
                reason.encode("utf-8", "replace")[:1024],
            )  # fmt: skip
        return arguments

    @property
    def message_ids(self) -> Sequence[str]:
        return [one.id for one in self.failures]

    def is_nowhere(self, result: Retried) -> bool:
        return result.outcome is Failed.STALE

    def parse(self, reply: Sequence[Any]) -> list[Retried]:
        pairs = reply[1:]
        return [parse_failed(pairs[i], pairs[i + 1]) for i in range(0, len(pairs), 2)]
