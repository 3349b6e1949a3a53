"""Bounded reads: the shards of topics, pages of sorted sets, streams and the key space."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from lisa.core.model.errors import ConfigError, LisaError, ServerUnavailable
from lisa.core.model.sharding import Shard, Topic
from lisa.core.model.stream import entry_fields
from lisa.core.redis import errors
from lisa.core.redis.flow import Command, Flow
from lisa.core.store.paging import PAGE
from lisa.core.store.store import Store

_ENTRY = re.compile("[0-9]{1,20}(-[0-9]{1,20})?")


class Position(NamedTuple):
    """A member of a sorted set; as a position it stays valid when members are added or removed."""

    score: int
    member: bytes


def ask_all(store: Store, commands: Sequence[Command]) -> Flow[list[Any]]:
    """Send commands in one round trip; the reply is None for each command that fails.

    One deleted or corrupt key therefore does not hide the rest of a table. Raises
    ServerUnavailable and ConfigError.
    """

    def concerns_all(error: Exception) -> bool:
        return isinstance(errors.translated(error, store.where), (ServerUnavailable, ConfigError))

    replies = yield from store.commands(commands, raises=concerns_all)
    return [None if isinstance(reply, Exception) else reply for reply in replies]


def ask_stream(store: Store, *command: str | bytes | float) -> Flow[Any]:
    """Send one stream command; None if the stream or its group does not exist."""
    try:
        return (yield from store.command(*command))
    except LisaError as error:
        if error.__cause__ is not None and errors.is_missing_group(error.__cause__):
            return None
        raise


def scan_keys(store: Store, pattern: str, cursor: bytes) -> Flow[tuple[bytes, list[bytes]]]:
    """One SCAN step: the next cursor and the matching keys."""
    reply = yield from store.command("SCAN", cursor, "MATCH", pattern, "COUNT", 2 * PAGE)
    return reply[0], list(reply[1])


def sorted_page(store: Store, key: str, after: Position | None, limit: int) -> Flow[list[Position]]:
    """Up to `limit` members of a sorted set, with their scores, after a position, in order.

    O(log n + limit) at any position, even among equal scores. Returns fewer than `limit` only at
    the end.
    """
    if after is None:
        return positions_in((yield from store.command("ZRANGE", key, 0, limit - 1, "WITHSCORES")))
    while True:
        start = yield from _rank_after(store, key, after)
        # Members before the page may change between the two commands. Reading the member before
        # the page as well detects this; otherwise members could be skipped.
        first = max(0, start - 1)
        reply = yield from store.command("ZRANGE", key, first, start + limit - 1, "WITHSCORES")
        members = positions_in(reply)
        behind = [member for member in members if member > after]
        joined = start == 0 or len(behind) < len(members)
        if joined and (len(behind) >= limit or len(members) < start + limit - first):
            return behind[:limit]


def positions_in(reply: Sequence[bytes]) -> list[Position]:
    """Members and integer scores of a WITHSCORES reply."""
    return [Position(int(float(reply[i + 1])), reply[i]) for i in range(0, len(reply), 2)]


def _rank_after(store: Store, key: str, after: Position) -> Flow[int]:
    score, rank = yield from store.commands(
        [("ZSCORE", key, after.member), ("ZRANK", key, after.member)]
    )
    if score is not None and rank is not None and int(float(score)) == after.score:
        return int(rank) + 1
    # The member is gone. Members with equal scores are sorted by bytes: use binary search.
    low, equal = yield from store.commands(
        [
            ("ZCOUNT", key, "-inf", f"({after.score}"),
            ("ZCOUNT", key, after.score, after.score),
        ]
    )
    high = low + equal
    while low < high:
        middle = (low + high) // 2
        found = yield from store.command("ZRANGE", key, middle, middle, "WITHSCORES")
        if found and (int(float(found[1])), found[0]) <= after:
            low = middle + 1
        else:
            high = middle
    return int(low)


def stream_ids(items: Sequence[Any]) -> list[tuple[str, bytes | None, bytes | None]]:
    """Entry id, message id and due time of XRANGE items; None for missing fields."""
    found = []
    for entry, flat in items:
        fields = entry_fields(flat)
        found.append((entry.decode(), fields.get(b"id"), fields.get(b"due")))
    return found


def stream_group(reply: Sequence[Any] | None, name: str) -> dict[str, Any] | None:
    """The fields of one group of an XINFO GROUPS reply; None if the group is missing."""
    for flat in reply or ():
        fields = {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}
        if fields["name"] == name.encode():
            return fields
    return None


def pending_entries(
    store: Store, key: str, group: str, start: str, limit: int, *consumer: str
) -> Flow[list[tuple[Sequence[Any], Sequence[Any] | None]]]:
    """Up to `limit` rows of XPENDING from `start` on, of all consumers or of one.

    Each row has its stream entry; None if the entry is gone.
    """
    held = yield from ask_stream(store, "XPENDING", key, group, start, "+", limit, *consumer)
    rows: Sequence[Any] = held or ()
    items = yield from store.commands([("XRANGE", key, row[0], row[0]) for row in rows])
    return [(row, item[0] if item else None) for row, item in zip(rows, items, strict=True)]


def entry_number(entry: str) -> tuple[int, int]:
    """A stream entry id as a pair of numbers, for comparison. Raises ValueError."""
    if not _ENTRY.fullmatch(entry):
        raise ValueError(f"{entry!r} is not the id of a stream entry")
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence or 0)


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
