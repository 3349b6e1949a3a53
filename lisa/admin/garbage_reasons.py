"""Garbage by the time of death, newest first, and by the kinds of reasons.

Reads the reasons of many messages at once, and a message's whole state only if it is listed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lisa.admin.garbage import GarbageSelection, kind_of
from lisa.admin.messages import (
    FoundAt,
    LiveState,
    MessagePage,
    MessageSource,
    rows_of,
    selected_groups,
)
from lisa.admin.reading import positions_in
from lisa.admin.shards import shards
from lisa.core.model.errors import ConfigError
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store, grouped
from lisa.core.transitions.inspect import parted

READ_AT_ONCE = 500
"""Dead messages whose reasons are read in one round trip."""


@dataclass(frozen=True, slots=True)
class ReasonCount:
    """The number of dead messages with reasons of one kind, and when the last of them died."""

    kind: str
    messages: int
    last_ms: int


def newest(
    store: Store,
    selection: GarbageSelection,
    *,
    cursor: str | None = None,
    limit: int = 100,
    most: int = 5_000,
) -> Flow[MessagePage]:
    """Up to `limit` matching dead messages, newest first.

    most: stop after examining this many messages; the cursor continues from there.
    """
    sources = yield from _sources(store, selection)
    at = _Dead.read(cursor) if cursor else None
    found: list[_Dead] = []
    looked = 0
    while looked < most and len(found) < limit:
        step = min(READ_AT_ONCE, most - looked)
        page = yield from _before(store, sources, at, step)
        reasons = yield from _reasons(store, page)
        looked += len(page)
        for one, reason in zip(page, reasons, strict=True):
            at = one
            if selection.matches(reason):
                found.append(one)
            if len(found) == limit:
                break
        if len(page) < step and (not page or at == page[-1]):
            at = None
            break
    rows = yield from rows_of(store, [FoundAt(one.source, one.id) for one in found if one.source])
    return MessagePage(tuple(rows), None if at is None else at.cursor)


def by_reason(
    store: Store, selection: GarbageSelection, *, most: int = 5_000
) -> Flow[tuple[list[ReasonCount], int]]:
    """Count the `most` newest dead messages by kind of reason, the most frequent first.

    Returns also how many messages were examined.
    """
    sources = yield from _sources(store, selection)
    messages = Counter[str]()
    last_ms: dict[str, int] = {}
    looked, at = 0, None
    while looked < most:
        page = yield from _before(store, sources, at, min(READ_AT_ONCE, most - looked))
        for one, reason in zip(page, (yield from _reasons(store, page)), strict=True):
            if selection.matches(reason):
                kind = kind_of(reason)
                messages[kind] += 1
                last_ms.setdefault(kind, one.died_ms)
        looked += len(page)
        if len(page) < READ_AT_ONCE:
            break
        at = page[-1]
    counts = [ReasonCount(kind, n, last_ms[kind]) for kind, n in messages.most_common()]
    return counts, looked


class _Dead(NamedTuple):
    """A dead message's place in the order of deaths, which ids and groups make unique."""

    died_ms: int
    id: bytes
    group: str
    source: MessageSource | None = None

    @property
    def order(self) -> tuple[int, bytes, str]:
        return self.died_ms, self.id, self.group

    @property
    def cursor(self) -> str:
        return f"{self.died_ms}:{self.group}:{self.id.decode('utf-8', 'surrogateescape')}"

    @classmethod
    def read(cls, cursor: str) -> _Dead:
        """The place that a cursor names. Raises ConfigError."""
        ms, _, rest = cursor.partition(":")
        group, colon, one = rest.partition(":")
        if not (ms.isascii() and ms.isdigit() and colon):
            raise ConfigError(f"{cursor!r} is not a cursor of this list; omit it")
        return cls(int(ms), one.encode("utf-8", "surrogateescape"), group)


def _sources(store: Store, selection: GarbageSelection) -> Flow[list[MessageSource]]:
    names = yield from shards(store, selection.topic)
    groups = yield from selected_groups(store, selection.topic, selection.group)
    before = selection.died_before_ms
    return [
        MessageSource(one, group, LiveState.GARBAGE, before) for one in names for group in groups
    ]


def _before(
    store: Store, sources: Sequence[MessageSource], at: _Dead | None, limit: int
) -> Flow[list[_Dead]]:
    """The `limit` messages that died last before a place."""
    found: list[_Dead] = []
    for source in sources:
        key = store.keys.topic(source.shard).group(source.group).garbage
        before_ms = source.before_ms
        highest = "+inf" if before_ms is None else f"({before_ms}"
        if at is not None and (before_ms is None or at.died_ms < before_ms):
            highest = str(at.died_ms)
        offset, own = 0, list[_Dead]()
        while len(own) < limit:
            reply = yield from store.command(
                "ZRANGE", key, highest, "-inf", "BYSCORE", "REV", "LIMIT", offset, limit,
                "WITHSCORES",
            )  # fmt: skip
            page = [_Dead(ms, one, source.group, source) for ms, one in positions_in(reply)]
            # Messages that died in the same millisecond may be before or after the place.
            own += [one for one in page if at is None or one.order < at.order]
            offset += limit
            if len(page) < limit:
                break
        found += own
    return sorted(found, key=lambda one: one.order, reverse=True)[:limit]


def _reasons(store: Store, page: Sequence[_Dead]) -> Flow[list[str | None]]:
    by_source = grouped((one.source, one.id) for one in page if one.source is not None)
    found: dict[tuple[MessageSource | None, bytes], str | None] = {}
    for source, ids in by_source.items():
        key = store.keys.topic(source.shard).group(source.group).reasons
        reply = yield from store.command("HMGET", key, *ids)
        found |= {
            (source, one): parted(noted or b"").reason
            for one, noted in zip(ids, reply, strict=True)
        }
    return [found[one.source, one.id] for one in page]
