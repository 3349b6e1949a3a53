"""What an archive knows besides its two tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from lisa.core.shards import place_of

__all__ = ["Gap", "TopicRecord"]


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """A topic as it was last seen: enough to build it anew on an empty server.

    options: as they stand in Redis. groups: those declared.
    """

    options: Mapping[str, str]
    groups: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Gap:
    """Events that no archive ever saw.

    after_id, after_number: entry id and number of the last event before them; None at the start.
    to_id, to_number: of the first event behind them, None where there was none yet. at: when the
    gap was met, or the time of the event before it. shard: whose journal lacks them.
    """

    topic: str
    after_id: str | None
    after_number: int | None
    to_id: str | None
    to_number: int | None
    reason: str
    at: datetime
    shard: str | None = None

    @property
    def place(self) -> str:
        """Where the journal is that lacks them."""
        return place_of(self.topic, self.shard)
