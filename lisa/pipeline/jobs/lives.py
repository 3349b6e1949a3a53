"""Messages as they stood last: the archive, and what is left of the journal behind it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from lisa.pipeline.archive.schemas import EVENT_SCHEMA
from lisa.pipeline.jobs import remaining

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from lisa.pipeline.archive import Archive
    from lisa.pipeline.jobs.server import Server

__all__ = ["brought_up_to_date", "by_now", "chosen", "folded"]

KEY = ["topic", "id"]


def chosen(
    rows: DataFrame, topics: Sequence[str] | None = None, ids: Sequence[str] | None = None
) -> DataFrame:
    """The rows of some topics and ids; None is all of them."""
    if topics is not None:
        rows = rows.where(sf.col("topic").isin(list(topics)))
    if ids is not None:
        rows = rows.where(sf.col("id").isin(list(ids)))
    return rows


def folded(archive: Archive, rest: DataFrame) -> DataFrame:
    """The messages that the events behind an archive concern, as they stand with these.

    rest: rows of EVENT_SCHEMA. Gives MESSAGES_SCHEMA.
    """
    from lisa.pipeline.archive.fold import fold

    rest = rest.where(sf.col("id").isNotNull())
    earlier = archive.log().join(rest.select(KEY).distinct(), KEY, "left_semi")
    events = EVENT_SCHEMA.names
    return fold(earlier.select(*events).unionByName(rest.select(*events)))


def brought_up_to_date(archive: Archive, fresh: DataFrame | None) -> DataFrame:
    """The archive's messages, those among them that were folded anew in their new form."""
    messages = archive.messages()
    if fresh is None:
        return messages
    touched = fresh.select(KEY).distinct()
    return messages.join(touched, KEY, "left_anti").unionByName(fresh.select(*messages.columns))


def by_now(
    spark: SparkSession, reopen: Callable[[], Archive], server: Server, ids: DataFrame
) -> DataFrame | None:
    """What is known of some ids (rows of topic, id) by now: how their lives stand, MESSAGES_SCHEMA.

    The archive is opened anew, then the journal behind it read: whatever the server forgot before
    this call is in one of the two. A life may be told twice, as archived and as it stands. None if
    there are no ids.
    """
    topics = [row.topic for row in ids.select("topic").distinct().collect()]
    if not topics:
        return None
    archive = reopen()
    with server.open() as store:
        ahead = store.drive(remaining.look_at(store, archive, topics))
    rest = remaining.read(spark, server, ahead)
    known = archive.messages().join(ids, KEY, "left_semi")
    if rest is None:
        return known
    behind = rest.join(ids, KEY, "left_semi")
    return known.unionByName(folded(archive, behind))
