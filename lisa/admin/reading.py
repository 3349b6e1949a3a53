"""Reading in bounded steps: pages of hashes, sorted sets, streams and of the key space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lisa.core import failures
from lisa.core.errors import ConfigError, LisaError, ServerUnavailable
from lisa.core.flow import Command, Flow
from lisa.core.pages import PAGE
from lisa.core.store import Store

__all__ = [
    "Position",
    "ask_all",
    "ask_stream",
    "entry_number",
    "info",
    "pairs_of",
    "scan_keys",
    "sorted_page",
    "stream_group",
    "stream_ids",
]


class Position(NamedTuple):
    """A place in a sorted set that stays valid when members come and go."""

    score: int
    member: str


def ask_all(store: Store, commands: Sequence[Command]) -> Flow[list[Any]]:
    """Many plain commands in one round trip; None stands for each that the server refused.

    So one stream that a foreign hand deleted does not hide the rest of a table.
    """
    try:
        return (yield from store.commands(commands))
    except (ServerUnavailable, ConfigError):
        raise
    except LisaError:
        replies: list[Any] = []
        for command in commands:
            replies += [(yield from _ask_or_none(store, command))]
        return replies


def _ask_or_none(store: Store, command: Command) -> Flow[Any]:
    try:
        return (yield from store.command(*command))
    except (ServerUnavailable, ConfigError):
        raise
    except LisaError:
        return None


def ask_stream(store: Store, *command: str | bytes | float) -> Flow[Any]:
    """One command on a stream; None if the stream or its group is not there (any more)."""
    try:
        return (yield from store.command(*command))
    except LisaError as error:
        if error.__cause__ is not None and failures.is_missing_group(error.__cause__):
            return None
        raise


def scan_keys(store: Store, pattern: str, cursor: bytes) -> Flow[tuple[bytes, list[bytes]]]:
    """One step through the key space: the next cursor, and the keys that match."""
    reply = yield from store.command("SCAN", cursor, "MATCH", pattern, "COUNT", 2 * PAGE)
    return reply[0], list(reply[1])


def sorted_page(
    store: Store, key: str, after: Position | None, limit: int
) -> Flow[list[tuple[bytes, int]]]:
    """Members and scores of a sorted set in order, those behind `after`, at most `limit`.

    O(log n + limit) wherever the page begins: no offset is counted off, also among equal scores.
    Fewer than `limit` are there only at the end.
    """
    if after is None:
        return pairs_of((yield from store.command("ZRANGE", key, 0, limit - 1, "WITHSCORES")))
    known = (after.score, after.member.encode("utf-8", "surrogateescape"))
    while True:
        start = yield from _rank_behind(store, key, after)
        # Members before the page may come and go between the two questions. With one member more,
        # the one before the page, it shows: else some would be left out, or the end seem near.
        first = max(0, start - 1)
        reply = yield from store.command("ZRANGE", key, first, start + limit - 1, "WITHSCORES")
        members = pairs_of(reply)
        behind = [one for one in members if (one[1], one[0]) > known]
        joined = start == 0 or len(behind) < len(members)
        if joined and (len(behind) >= limit or len(members) < start + limit - first):
            return behind[:limit]


def pairs_of(reply: Sequence[bytes]) -> list[tuple[bytes, int]]:
    """Members and scores as whole numbers, out of a reply WITHSCORES."""
    return [(reply[i], int(float(reply[i + 1]))) for i in range(0, len(reply), 2)]


def _rank_behind(store: Store, key: str, after: Position) -> Flow[int]:
    member = after.member.encode("utf-8", "surrogateescape")
    score, rank = yield from store.commands([("ZSCORE", key, member), ("ZRANK", key, member)])
    if score is not None and rank is not None and int(float(score)) == after.score:
        return int(rank) + 1
    # It has left. Equal scores stand in order of their bytes: halve the distance.
    low, equal = yield from store.commands([
        ("ZCOUNT", key, "-inf", f"({after.score}"), ("ZCOUNT", key, after.score, after.score),
    ])  # fmt: skip
    high = low + equal
    while low < high:
        middle = (low + high) // 2
        found = yield from store.command("ZRANGE", key, middle, middle, "WITHSCORES")
        if found and (int(float(found[1])), found[0]) <= (after.score, member):
            low = middle + 1
        else:
            high = middle
    return int(low)


def stream_ids(items: Sequence[Any]) -> list[tuple[str, bytes | None, bytes | None]]:
    """Entry id, message id and due time of an XRANGE reply's items; None where not ours."""
    found = []
    for entry, flat in items:
        fields = dict(zip(flat[::2], flat[1::2], strict=False)) if flat else {}
        found.append((entry.decode(), fields.get(b"id"), fields.get(b"due")))
    return found


def stream_group(reply: Sequence[Any] | None, name: str) -> dict[str, Any] | None:
    """One group out of an XINFO GROUPS reply, or None if the stream or the group is not there."""
    for flat in reply or ():
        fields = {flat[i].decode(): flat[i + 1] for i in range(0, len(flat), 2)}
        if fields["name"] == name.encode():
            return fields
    return None


def entry_number(entry: str) -> tuple[int, int]:
    """A stream entry id as numbers, so that entries can be compared."""
    milliseconds, _, sequence = entry.partition("-")
    return int(milliseconds), int(sequence or 0)


def info(reply: bytes | str) -> dict[str, str]:
    """The fields of an INFO reply."""
    text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else reply
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {name: value.strip() for name, _, value in pairs}
