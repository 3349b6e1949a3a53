"""The last known state of messages: the archive combined with the tail of the journal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from lisa.core.model.errors import ConfigError
from lisa.core.model.sharding import topics_of
from lisa.pipeline.archive.schemas import EVENT_SCHEMA
from lisa.pipeline.jobs import journal_tail

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lisa.pipeline.archive import Archive
    from lisa.pipeline.server import Server

KEY = ["topic", "id"]


def topics_in(archive: Archive, topics: Sequence[str] | None) -> list[str]:
    """The given topics, by default all topics of the archive, sorted.

    Raises ConfigError if the archive lacks one of them.
    """
    known = {*archive.topics(), *topics_of(archive.offsets())}
    unknown = sorted({*(topics or ())} - known)
    if unknown:
        raise ConfigError(
            f"the archive has no topic {', '.join(unknown)}; "
            f"its topics are {', '.join(sorted(known)) or 'none'}"
        )
    return sorted({*(topics or known)})


def selected(
    rows: DataFrame, topics: Sequence[str] | None = None, ids: Sequence[str] | None = None
) -> DataFrame:
    """The rows of some topics and ids; None means no restriction."""
    if topics is not None:
        rows = rows.where(sf.col("topic").isin(list(topics)))
    if ids is not None:
        rows = rows.where(sf.col("id").isin(list(ids)))
    return rows


def fold_with_archive(archive: Archive, rest: DataFrame) -> DataFrame:
    """Fold the messages concerned by newer events, from archived and newer events: MESSAGES_SCHEMA.

    rest: events after the archive's last ones, rows of EVENT_SCHEMA.
    """
    from lisa.pipeline.archive.fold import fold

    rest = rest.where(sf.col("id").isNotNull())
    earlier = archive.log().join(rest.select(KEY).distinct(), KEY, "left_semi")
    events = EVENT_SCHEMA.names
    return fold(earlier.select(*events).unionByName(rest.select(*events)))


def merged(archive: Archive, fresh: DataFrame | None) -> DataFrame:
    """The archive's messages; rows of `fresh` replace those of the same topic and id."""
    messages = archive.messages()
    if fresh is None:
        return messages
    touched = fresh.select(KEY).distinct()
    return messages.join(touched, KEY, "left_anti").unionByName(fresh.select(*messages.columns))


def latest_lives(
    spark: SparkSession, reopen: Callable[[], Archive], server: Server, ids: DataFrame
) -> DataFrame | None:
    """The lives of some ids (rows of topic, id), MESSAGES_SCHEMA; None without ids.

    Reopens the archive, then reads the tail of the journal: everything that the server forgot
    before this call is in one of them. A life may occur twice, as archived and as it is now.
    """
    topics = [row.topic for row in ids.select("topic").distinct().collect()]
    if not topics:
        return None
    archive = reopen()
    with server.open() as store:
        ahead = store.drive(journal_tail.find_remainders(store, archive, topics))
    rest = journal_tail.read(spark, server, ahead)
    known = archive.messages().join(ids, KEY, "left_semi")
    if rest is None:
        return known
    behind = rest.join(ids, KEY, "left_semi")
    return known.unionByName(fold_with_archive(archive, behind))
