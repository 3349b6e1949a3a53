"""The shards of topics; a topic that was never split is its own only shard."""

from __future__ import annotations

from collections.abc import Sequence

from lisa.core.model.sharding import Shard, Topic
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store


def shards(store: Store, topic: str) -> Flow[list[Shard]]:
    """Names of all shards that may contain messages of a topic."""
    whole = Topic(topic)
    return (yield from store.layout(whole)).active(whole)


def shards_of_id(store: Store, topic: str, message_id: str) -> Flow[list[Shard]]:
    """Names of the shards that may contain an id: the current one, then older ones."""
    whole = Topic(topic)
    return (yield from store.layout(whole)).shards_of_id(whole, message_id)


def counted(store: Store, topics: Sequence[str]) -> Flow[dict[str, list[Shard]]]:
    """By topic, all shards that ever had messages; their counters belong to the topic."""
    names = list(map(Topic, topics))
    layouts = yield from store.layouts(names)
    return {topic: layout.counted(topic) for topic, layout in zip(names, layouts, strict=True)}


def counted_pairs(store: Store, topics: Sequence[str]) -> Flow[list[tuple[str, Shard]]]:
    """The shards of `counted`, each with its topic, in the order of the topics."""
    parts = yield from counted(store, topics)
    return [(topic, shard) for topic, shards in parts.items() for shard in shards]
