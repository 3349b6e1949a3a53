"""Refuses what cannot be followed yet: the journals of a topic that is split over shards.

Each shard writes a journal of its own. An archive knows one order of events for each topic, so it
would take the topic's first journal for the whole of it, and a restore would send again what the
shards settled.
"""

from __future__ import annotations

from collections.abc import Sequence

from lisa.core.errors import ConfigError
from lisa.core.flow import Flow
from lisa.core.store import Store

__all__ = ["refuse_shards"]


def refuse_shards(store: Store, topics: Sequence[str], *, what: str) -> Flow[None]:
    """Raise ConfigError where a shard of one of the topics has written a journal.

    what: the thing that cannot be done, as a sentence begins with it.
    """
    layouts = yield from store.layouts(topics)
    shards = [
        (topic, place) for topic, layout in zip(topics, layouts, strict=True)
        for place in layout.counted(topic) if place != topic
    ]  # fmt: skip
    written = yield from store.commands(
        [("HGET", store.keys.topic(place).stats, "journaled") for _, place in shards]
    )
    found = sorted({topic for (topic, _), count in zip(shards, written, strict=True) if count})
    if found:
        raise ConfigError(
            f"{what} does not follow the journals of shards yet, and topic {', '.join(found)} has "
            "some: name other topics, or keep a topic with a journal in one place (shards=1)"
        )
