"""Records that an archive has besides its two tables: topics and gaps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import NamedTuple

from lisa.core.model.sharding import shard_named


class TopicRecord(NamedTuple):
    """A topic when last seen, as needed to restore it on an empty server.

    options: as stored in Redis. groups: the declared groups.
    """

    options: Mapping[str, str]
    groups: tuple[str, ...]


class Removed(NamedTuple):
    """Number of deleted rows of `messages` and of `message_log`."""

    messages: int
    events: int


@dataclass(frozen=True, slots=True)
class ArchiveGap:
    """Events that are missing from the archive.

    after_id, after_number: entry id and number of the last event before the gap; None at the start
        of the journal.
    to_id, to_number: the same of the first event after the gap; None if there was none yet.
    at: when the gap was found, or the time of the event before it.
    shard: the shard whose journal has the gap; None for the topic's own journal.
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
    def journal(self) -> str:
        """The journal that has the gap, as in `orders` or `orders~3of8`."""
        return shard_named(self.topic, self.shard)
