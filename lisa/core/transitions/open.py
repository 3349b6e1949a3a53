"""ready -> in flight: the bodies, and the instant of hand-over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from lisa.core.keys import TopicKeys
from lisa.core.stream import Entry
from lisa.core.transitions.base import Argument, Transition, letters

__all__ = ["Open", "Opened"]


class Opened(NamedTuple):
    """What is behind some entries; `envelopes` and `past_ttl` have one item for each of them.

    An envelope is None where there is nothing to hand out: it was cleared, or went back because
    the topic is paused.
    """

    now_us: int
    ack_timeout_ms: int
    paused: bool
    past_ttl: list[bool]
    envelopes: list[bytes | None]


@dataclass(frozen=True, slots=True)
class Open(Transition[Opened]):
    """Open what XREADGROUP or pull gave to this group's consumer."""

    script: ClassVar[str] = "open"
    steps: ClassVar[int] = 2
    topic: str
    group: str
    entries: Sequence[Entry]
    ack_timeout_ms: int | None = None

    @property
    def own_group(self) -> str:
        return self.group

    def id_keys(self, keys: TopicKeys) -> Iterable[str]:
        body = keys.body("")
        return [body + entry.id for entry in self.entries]

    def args(self) -> Sequence[Argument]:
        return [
            "" if self.ack_timeout_ms is None else self.ack_timeout_ms, len(self.entries),
            *[entry.id for entry in self.entries], *[entry.entry for entry in self.entries],
        ]  # fmt: skip

    def parse(self, reply: Sequence[Any]) -> Opened:
        now_us, timeout, paused, past_ttl, *envelopes = reply
        expired = [letter == "x" for letter in letters(past_ttl)]
        return Opened(int(now_us), int(timeout), bool(paused), expired, envelopes)
