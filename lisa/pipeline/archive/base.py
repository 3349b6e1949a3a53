"""The interfaces that jobs use to read and write an archive, independent of its storage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from lisa.pipeline.archive.records import ArchiveGap, TopicRecord

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

PresentTopics = Callable[[Sequence[str]], Mapping[str, TopicRecord]]
"""Returns the present options and groups of some topics."""


class Archive(ABC):
    """A snapshot of an archive, taken when it is opened."""

    @abstractmethod
    def log(self) -> DataFrame:
        """Every committed event: LOG_SCHEMA."""

    @abstractmethod
    def messages(self) -> DataFrame:
        """One row per message and life, current with the log: MESSAGES_SCHEMA."""

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
