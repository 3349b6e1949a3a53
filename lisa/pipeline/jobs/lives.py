"""Messages as they stood last: the archive, and what is left of the journal behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyspark.sql import functions as sf

from lisa.pipeline.archive.schemas import EVENT_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from lisa.pipeline.archive import Archive

__all__ = ["brought_up_to_date", "chosen", "folded"]

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
