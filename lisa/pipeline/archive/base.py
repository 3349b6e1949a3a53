"""What jobs read and write, independent of the storage, and the records besides the tables."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, NamedTuple, Protocol

from pyspark.sql import functions as sf

from lisa.core.model.sharding import shard_named

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


KEEP = timedelta(hours=1)
"""How long replaced files are kept for running readers."""


class TopicRecord(NamedTuple):
    """A topic when last seen, as needed to restore it on an empty server.

    options: as stored in Redis, and the limits of keys, such as `limits:customer-42`. groups: the
        declared groups.
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


def selected(
    rows: DataFrame, topics: Sequence[str] | None = None, ids: Sequence[str] | None = None
) -> DataFrame:
    """The rows of some topics and ids; None means no restriction."""
    if topics is not None:
        rows = rows.where(sf.col("topic").isin(list(topics)))
    if ids is not None:
        rows = rows.where(sf.col("id").isin(list(ids)))
    return rows


PresentTopics = Callable[[Sequence[str]], Mapping[str, TopicRecord]]
"""Returns the present options and groups of some topics."""


class Archive(ABC):
    """A snapshot of an archive, taken when it is opened."""

    @abstractmethod
    def log(self) -> DataFrame:
        """Every committed event: LOG_SCHEMA."""

    @abstractmethod
    def messages(
        self, topics: Sequence[str] | None = None, ids: Sequence[str] | None = None
    ) -> DataFrame:
        """One row per message and life, current with the log: MESSAGES_SCHEMA.

        topics, ids: only messages of these; None means no restriction.
        """

    @abstractmethod
    def offsets(self) -> dict[str, tuple[str, int]]:
        """Journal -> entry id and number of its last committed event.

        A journal is named by its topic, or for a sharded topic by its shard, as in `orders~3of8`
        (see core.model.sharding).
        """

    @abstractmethod
    def topics(self) -> dict[str, TopicRecord]:
        """Topic -> its options and groups, as needed to restore it."""

    @abstractmethod
    def gaps(self) -> Sequence[ArchiveGap]:
        """The events that the log lacks."""


class ArchiveWriter(Protocol):
    """The only writer of an archive."""

    def write(self, events: DataFrame, batch: int, query: str) -> tuple[int, Sequence[ArchiveGap]]:
        """Add a batch exactly once; returns the number of new events, and the gaps in it."""

    def offsets(self) -> Mapping[str, tuple[str, int]]:
        """Journal -> entry id and number of its last archived event."""

    def gaps(self) -> Sequence[ArchiveGap]:
        """The recorded gaps."""

    def tidy(self, *, last: bool, behind: bool) -> None:
        """Fold and compact, if due; called between two batches.

        last: this was the last batch. behind: the journal has more events than fit into a batch.
        """

    def close(self) -> None:
        """Release the lock, so that another process can write."""
