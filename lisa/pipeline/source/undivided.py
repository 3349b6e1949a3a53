"""Leaves out what cannot be followed yet: the journals of a topic that is split over shards.

Each shard writes a journal of its own. An archive knows one order of events for each topic, so it
would take the topic's first journal for the whole of it, and a restore would send again what the
shards settled. Whoever names such a topic is refused; who follows all topics goes on with the
others.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache

from lisa.core.errors import ConfigError
from lisa.core.flow import Flow
from lisa.core.store import Store

__all__ = ["leave_out_shards", "refuse_shards"]

_log = logging.getLogger("lisa.pipeline")


def refuse_shards(store: Store, topics: Sequence[str], *, what: str) -> Flow[None]:
    """Raise ConfigError where a shard of one of the topics has written a journal.

    what: the thing that cannot be done, as a sentence begins with it.
    """
    found = yield from _with_journals_of_shards(store, topics)
    if found:
        raise ConfigError(
            f"{what} does not follow the journals of shards yet, and topic {', '.join(found)} has "
            "some: name other topics"
        )


def leave_out_shards(store: Store, topics: Sequence[str]) -> Flow[list[str]]:
    """The topics of which no shard has written a journal; of the others a warning is logged."""
    found = yield from _with_journals_of_shards(store, topics)
    for topic in found:
        _warn(topic)
    return [topic for topic in topics if topic not in found]


@cache
def _warn(topic: str) -> None:
    _log.warning("topic %s is left out: its shards have journals of their own, which cannot be "
                 "followed yet", topic)  # fmt: skip


def _with_journals_of_shards(store: Store, topics: Sequence[str]) -> Flow[list[str]]:
    layouts = yield from store.layouts(topics)
    shards = [
        (topic, place) for topic, layout in zip(topics, layouts, strict=True)
        for place in layout.counted(topic) if place != topic
    ]  # fmt: skip
    written = yield from store.commands(
        [("HGET", store.keys.topic(place).stats, "journaled") for _, place in shards]
    )
    return sorted({topic for (topic, _), count in zip(shards, written, strict=True) if count})
