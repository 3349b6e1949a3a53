"""The places of topics that are split over shards, for those who look at topics as a whole."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lisa.core.flow import Flow
from lisa.core.store import Store

__all__ = ["counted", "places", "places_of_id", "summed"]


def places(store: Store, topic: str) -> Flow[list[str]]:
    """All places that may hold messages of a topic; its own name where it was never split."""
    return (yield from store.layout(topic)).places(topic)


def places_of_id(store: Store, topic: str, message_id: str) -> Flow[list[str]]:
    """Where one id may be: where it would be sent now, then the older places."""
    layout = yield from store.layout(topic)
    counts = dict.fromkeys((layout.shards, *layout.older))
    return [layout.place(topic, message_id, count) for count in counts]


def counted(store: Store, topics: Sequence[str]) -> Flow[dict[str, list[str]]]:
    """By topic, all places that ever held messages: what they counted is the topic's."""
    layouts = yield from store.layouts(topics)
    return {
        topic: layout.counted(topic) for topic, layout in zip(topics, layouts, strict=True)
    }  # fmt: skip


def summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counters of several places as one topic's."""
    total: dict[str, int] = {}
    for part in parts:
        for name, n in part.items():
            total[name] = total.get(name, 0) + n
    return total
