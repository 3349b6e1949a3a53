"""Reads live messages from Redis, in pages of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import InputPartition

from lisa.admin.reading import (
    Position,
    pending_entries,
    sorted_page,
    unread_entries,
)
from lisa.core.model.stream import parse_entry
from lisa.core.redis.flow import Flow
from lisa.core.store.paging import readable
from lisa.core.store.store import Store, chunks
from lisa.core.transitions.inspect import Inspect, parted
from lisa.pipeline.source.live_rows import LiveMessages, RowCollector

if TYPE_CHECKING:
    import pyarrow as pa

    from lisa.core.store.store import SyncStore

ABOVE = b"\xff" * 257
"""Greater than any member of a sorted set."""

PAGE = 400


@dataclass(frozen=True)
class ReadPart(InputPartition):
    """The messages that one task reads: some states and groups of a topic, or some ids.

    topic: the topic, or one shard of a sharded topic.
    after, until: bounds of the range of a sorted set; `until` is inclusive.
    """

    topic: str
    states: Collection[str]
    groups: tuple[str, ...] = ()
    after: Position | None = None
    until: Position | None = None
    ids: tuple[str, ...] | None = None


def read_part(store: SyncStore, part: ReadPart, rows: RowCollector) -> Iterator[pa.RecordBatch]:
    """The messages of a part as record batches.

    The states of a group are read in the order in which messages pass through them: a message that
    moves during the read is found twice and deduplicated, rather than missed.
    """
    for pages in _pages(store, part):
        for found in pages:
            store.drive(rows.add(store, found))
            if rows.full:
                yield rows.take()
    if len(rows):
        yield rows.take()


def _pages(store: SyncStore, part: ReadPart) -> Iterator[Iterator[LiveMessages]]:
    if part.ids is not None:
        yield _by_id(store, part)
        return
    keys = store.keys.topic(part.topic)
    if "waiting" in part.states:
        yield _sorted(store, part, keys.waiting, "waiting", None)
    for name in part.groups:
        own = keys.group(name)
        if "ready" in part.states:
            yield _stream(store, part.topic, name, "ready", _ready)
        if "in_flight" in part.states:
            yield _stream(store, part.topic, name, "in_flight", _in_flight)
        for state, key in (("retry", own.retry), ("garbage", own.garbage)):
            if state in part.states:
                yield _sorted(store, part, key, state, name)


def _sorted(
    store: SyncStore, part: ReadPart, key: str, state: str, group: str | None
) -> Iterator[LiveMessages]:
    after = part.after
    while True:
        page = store.drive(sorted_page(store, key, after, PAGE))
        inside = page
        if part.until is not None:
            inside = [one for one in page if one <= part.until]
        ids, dues = [], []
        for score, member in inside:
            for name in readable([member])[0]:
                ids.append(name)
                dues.append(score)
        found = LiveMessages(state, group, ids, dues)
        if group is not None and ids:
            store.drive(_failures(store, part.topic, group, found))
        yield found
        if len(inside) < PAGE:
            return
        after = inside[-1]


def _failures(store: Store, topic: str, group: str, found: LiveMessages) -> Flow[None]:
    """Set the number of failed attempts and the last reason."""
    own = store.keys.topic(topic).group(group)
    attempts, reasons = yield from store.commands(
        [
            ("HMGET", own.attempts, *found.ids),
            ("HMGET", own.reasons, *found.ids),
        ]
    )
    found.attempts = [int(one or 0) for one in attempts]
    found.reasons = [None if one is None else parted(one).reason for one in reasons]


_Page = Callable[[Store, str, str, str], Flow[tuple[list[tuple[Any, str | None]], str | None]]]


def _stream(
    store: SyncStore, topic: str, group: str, state: str, read: _Page
) -> Iterator[LiveMessages]:
    """Messages in a group's stream, if the group's index refers to their entry."""
    own = store.keys.topic(topic).group(group)
    position: str | None = ""
    while position is not None:
        items, position = store.drive(read(store, own.ready, group, position))
        entries = [(parse_entry(item), consumer) for item, consumer in items]
        named = [one for one in entries if one[0].id and readable([one[0].id.encode()])[0]]
        if not named:
            continue
        indexed = store.ask("HMGET", own.entries, *(entry.id for entry, _ in named))
        held = [
            one
            for one, index in zip(named, indexed, strict=True)
            if index is not None and index.decode() == one[0].entry
        ]
        if not held:
            continue
        found = LiveMessages(
            state, group, [entry.id for entry, _ in held], [entry.due_ms for entry, _ in held]
        )
        store.drive(_failures(store, topic, group, found))
        found.consumers = [consumer for _, consumer in held]
        yield found


def _ready(
    store: Store, key: str, group: str, position: str
) -> Flow[tuple[list[tuple[Any, str | None]], str | None]]:
    items = yield from unread_entries(store, key, group, position, PAGE)
    behind = items[-1][0].decode() if len(items) == PAGE else None
    return [(item, None) for item in items], behind


def _in_flight(
    store: Store, key: str, group: str, position: str
) -> Flow[tuple[list[tuple[Any, str | None]], str | None]]:
    start = f"({position}" if position else "-"
    held = yield from pending_entries(store, key, group, start, PAGE)
    items = [(item, row[1].decode("utf-8", "replace")) for row, item in held if item]
    return items, held[-1][0][0].decode() if len(held) == PAGE else None


def _by_id(store: SyncStore, part: ReadPart) -> Iterator[LiveMessages]:
    """Look up ids in all states of the part."""
    ids, _ = readable([one.encode("utf-8", "replace") for one in part.ids or ()])
    for some in chunks(ids, store.batch_size(part.topic, Inspect)):
        seen = store.call(Inspect(part.topic, some, bodies=False))
        for one, inspection in zip(some, seen, strict=True):
            if inspection.waiting_due_ms is not None and "waiting" in part.states:
                yield LiveMessages("waiting", None, [one], [inspection.waiting_due_ms])
            for held in inspection.group_states:
                if held.group in part.groups and held.state in part.states:
                    found = LiveMessages(held.state, held.group, [one], [])
                    found.dues = [held.due_ms]
                    found.attempts = [held.failed_attempts]
                    found.reasons, found.consumers = [held.reason], [held.consumer]
                    yield found
