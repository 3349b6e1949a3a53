"""Asks the server about many ids, and sends it many messages, in bounded steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from lisa.core.flow import Flow
from lisa.core.shards import PLAIN
from lisa.core.store import Store, chunks
from lisa.core.transitions.base import STEPS_PER_CALL
from lisa.core.transitions.inspect import Inspect, Inspection

__all__ = ["by_topic", "inspected", "known", "portions"]

T = TypeVar("T")

CALL_BYTES = 1024 * 1024
"""A call holds no more than this, or one message: the server takes it in without a pause."""


def by_topic(rows: Iterable[T], topic_of: Callable[[T], str]) -> dict[str, list[T]]:
    """Rows by their topic, in the order in which they came."""
    found: dict[str, list[T]] = {}
    for row in rows:
        found.setdefault(topic_of(row), []).append(row)
    return found


def portions(
    items: Sequence[T], most: int, size_of: Callable[[T], int], most_bytes: int = CALL_BYTES
) -> Iterator[list[T]]:
    """Consecutive pieces of at most so many items and bytes, each of one item at least."""
    piece: list[T] = []
    size = 0
    for item in items:
        own = size_of(item)
        if piece and (len(piece) == most or size + own > most_bytes):
            yield piece
            piece, size = [], 0
        piece.append(item)
        size += own
    if piece:
        yield piece


def inspected(store: Store, topic: str, ids: Sequence[str]) -> Flow[list[Inspection]]:
    """Where each id stands, without its body."""
    found: list[Inspection] = []
    for some in chunks(ids, store.batch_size(topic, Inspect)):
        found += yield from store.run_by_id(Inspect(topic, some, bodies=False))
    return found


def known(
    store: Store, topic: str, ids: Sequence[str], counts: Sequence[int] = ()
) -> Flow[dict[str, Inspection]]:
    """Those ids that the server knows, live or by their tombstone.

    Two commands tell that it knows none of five hundred, which is what a lost server answers.

    counts: numbers of shards that the topic has had; asked where its own server lost the layout.
    """
    keys, layout = store.keys.topic(topic), (yield from store.layout(topic))
    found: dict[str, Inspection] = {}
    for some in chunks(ids, STEPS_PER_CALL):
        live, settled = yield from store.commands([
            ("EXISTS", *map(keys.body, some)), ("EXISTS", *map(keys.done, some)),
        ])  # fmt: skip
        if live or settled or layout.is_split:
            seen = yield from inspected(store, topic, some)
            found |= _there(some, seen)
        for count in () if layout.number else counts:
            there = yield from _in_shards(store, topic, some, count)
            found |= {one: is_ for one, is_ in there.items() if is_.envelope or one not in found}
    return found


def _in_shards(
    store: Store, topic: str, ids: Sequence[str], count: int
) -> Flow[dict[str, Inspection]]:
    """Those that one of so many shards knows, whatever the topic's own server says of shards."""
    found: dict[str, Inspection] = {}
    for place, own in by_topic(ids, lambda one: PLAIN.place(topic, one, count)).items():
        for some in chunks(own, store.batch_size(place, Inspect)):
            found |= _there(some, (yield from store.run(Inspect(place, some, bodies=False))))
    return found


def _there(ids: Sequence[str], seen: Sequence[Inspection]) -> dict[str, Inspection]:
    pairs = zip(ids, seen, strict=True)
    return {one: is_ for one, is_ in pairs if is_.envelope or is_.tombstone}
