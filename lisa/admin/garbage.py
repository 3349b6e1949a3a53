"""Garbage (dead letters): list, count by reason, requeue and purge."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeAlias

from lisa.admin.messages import (
    FoundAt,
    LiveState,
    MessagePage,
    MessageSource,
    Row,
    list_messages,
    rows_of,
    selected_groups,
)
from lisa.admin.reading import positions_in, shards
from lisa.core.model.errors import ConfigError
from lisa.core.redis.flow import Flow, Pause
from lisa.core.store.paging import PAGE
from lisa.core.store.store import Store, chunks, grouped
from lisa.core.transitions.garbage import Purge, Requeue
from lisa.core.transitions.inspect import parted

STEPS_PER_S = 4
"""Steps per second of an action at a pace."""

KIND_LENGTH = 160
_NUMBERS = re.compile(
    r"(?P<code>\b(?:status|code|errno|http|exit)(?: code)?\W{0,3}\d{1,3}\b"
    r"|\b[1-5]\d\d(?= (?-i:[A-Z][a-z])))"
    r"|\b(?:0x[0-9a-f]+|[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]*\d[0-9a-f]{7,}|\d+\.\d+|\d+)\b",
    re.IGNORECASE,
)
"""Numbers in reasons. Those in `code` tell reasons apart: `status 503`, `404 Not Found`."""


READ_AT_ONCE = 500
"""Dead messages whose reasons are read in one round trip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GarbageSelection:
    """Selects dead messages of a topic.

    group: only this group; None selects all groups.
    died_before_ms: only messages that died before this instant, in epoch milliseconds.
    reason: only messages whose reason contains this text, ignoring case.
    kind: only messages whose reason is of this kind, as `kind_of` returns it.
    """

    topic: str
    group: str | None = None
    died_before_ms: int | None = None
    reason: str | None = None
    kind: str | None = None

    def matches(self, reason: str | None) -> bool:
        """Whether a message with this reason is selected."""
        if self.kind is not None and kind_of(reason) != self.kind:
            return False
        return self.reason is None or self.reason.lower() in (reason or "").lower()


def kind_of(reason: str | None) -> str:
    """A reason's first line without the parts that vary: ids and numbers, except status codes."""
    first = (reason or "no reason recorded").partition("\n")[0]
    return _NUMBERS.sub(lambda one: one["code"] or "#", first)[:KIND_LENGTH]


Action: TypeAlias = Callable[[Store, str, str, Sequence[str]], Flow[list[bool]]]
"""`requeue` or `purge`."""


def listed(
    store: Store,
    selection: GarbageSelection,
    *,
    cursor: str | None = None,
    limit: int = 100,
    most: int | None = None,
) -> Flow[MessagePage]:
    """Up to `limit` matching dead messages, oldest first.

    most: stop after examining this many messages; the cursor continues from there.
    """
    has_filter = selection.reason is not None or selection.kind is not None
    rows: list[Row] = []
    looked = 0
    while len(rows) < limit and (most is None or looked < most):
        left = limit - len(rows)
        # Whole pages with a filter: few of many messages may match.
        step = PAGE if has_filter else min(PAGE, left)
        page, found = yield from _page(store, selection, cursor, step)
        while len(found) > left:  # read less again, so that the cursor follows the last of them
            step = page.rows.index(found[left - 1]) + 1
            page, found = yield from _page(store, selection, cursor, step)
        rows += found
        cursor, looked = page.cursor, looked + step
        if cursor is None:
            break
    return MessagePage(tuple(rows), cursor)


def _page(
    store: Store, selection: GarbageSelection, cursor: str | None, limit: int
) -> Flow[tuple[MessagePage, list[Row]]]:
    """A page of dead messages, and those of them that match."""
    page = yield from list_messages(
        store,
        selection.topic,
        LiveState.GARBAGE,
        group=selection.group,
        cursor=cursor,
        due_before_ms=selection.died_before_ms,
        limit=limit,
    )
    return page, [row for row in page.rows if selection.matches(row.reason)]


def matching(store: Store, selection: GarbageSelection) -> Flow[int]:
    """Count the selected messages: O(log n), or with a reason O(n)."""
    if selection.reason is None and selection.kind is None:
        total = 0
        end = "+inf" if selection.died_before_ms is None else f"({selection.died_before_ms}"
        for shard in (yield from shards(store, selection.topic)):
            keys = store.keys.topic(shard)
            for group in (yield from selected_groups(store, selection.topic, selection.group)):
                total += yield from store.command("ZCOUNT", keys.group(group).garbage, "-inf", end)
        return total
    total, cursor = 0, None
    while True:
        found = yield from listed(store, selection, cursor=cursor, limit=PAGE)
        total, cursor = total + len(found.rows), found.cursor
        if cursor is None:
            return total


def requeue(store: Store, topic: str, group: str, ids: Sequence[str]) -> Flow[list[bool]]:
    """Make dead messages due now and reset their attempts; False for ids not in garbage."""
    return (yield from _each(store, topic, group, ids, Requeue))


def purge(store: Store, topic: str, group: str, ids: Sequence[str]) -> Flow[list[bool]]:
    """Delete dead messages permanently; False for ids not in garbage."""
    return (yield from _each(store, topic, group, ids, Purge))


def _each(
    store: Store, topic: str, group: str, ids: Sequence[str], kind: type[Requeue | Purge]
) -> Flow[list[bool]]:
    done: list[bool] = []
    for part in chunks(ids, store.batch_size(topic, kind)):
        done += yield from store.run_by_id(kind(topic, group, part))
    return done


def act_on(
    store: Store, selection: GarbageSelection, ids: Sequence[str], action: Action
) -> Flow[tuple[int, list[str]]]:
    """Apply `action` to some ids in the selected groups.

    Returns how many messages it affected, and the ids that were in the garbage of no group.
    """
    asked, done, found = list(dict.fromkeys(ids)), 0, set[str]()
    for group in (yield from selected_groups(store, selection.topic, selection.group)):
        answers = yield from action(store, selection.topic, group, asked)
        done += sum(answers)
        found.update(message_id for message_id, hit in zip(asked, answers, strict=True) if hit)
    return done, [message_id for message_id in asked if message_id not in found]


def act(
    store: Store,
    selection: GarbageSelection,
    action: Action,
    *,
    rate: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Flow[int]:
    """Apply `action` to all selected messages, the oldest first; returns how many.

    rate: at most this many messages per second.

    Skips messages that die after the start, so that a requeued message that dies again does not
    keep the loop running.
    """
    now_ms = (yield from store.server_time_ms()) + 1
    later = yield from _dated_later(store, selection, now_ms)
    before_ms = selection.died_before_ms
    until = now_ms if before_ms is None else min(now_ms, before_ms)
    bounded = replace(selection, died_before_ms=until)
    step = PAGE if rate is None else max(1, min(PAGE, rate // STEPS_PER_S))
    done, cursor, rest = 0, None, chunks(later, step)
    is_last = False
    while True:
        if not is_last:
            found = yield from listed(store, bounded, cursor=cursor, limit=step)
            dead: Sequence[tuple[str, str]] = [(row.group or "", row.id) for row in found.rows]
            cursor = found.cursor
            is_last = cursor is None
        elif not (dead := next(rest, ())):
            return done
        for group, ids in grouped(dead).items():
            done += sum((yield from action(store, selection.topic, group, ids)))
            if progress is not None:
                progress(done)
        if rate is not None and (later or not is_last):
            yield Pause(len(dead) / rate)


def _dated_later(
    store: Store, selection: GarbageSelection, from_ms: int
) -> Flow[list[tuple[str, str]]]:
    """Group and id of the selected messages whose time of death is still to come.

    They died before the server's clock was set back.
    """
    found: list[tuple[str, str]] = []
    names = yield from shards(store, selection.topic)
    for group in (yield from selected_groups(store, selection.topic, selection.group)):
        keys = [store.keys.topic(shard).group(group).garbage for shard in names]
        left = sum((yield from store.commands([("ZCOUNT", key, from_ms, "+inf") for key in keys])))
        own = replace(selection, group=group)
        cursor: str | None = f"{group}/{from_ms}:"
        while left > 0 and cursor is not None:  # no longer: others may die meanwhile
            page = yield from listed(store, own, cursor=cursor, limit=PAGE, most=PAGE)
            found += [(group, row.id) for row in page.rows]
            cursor, left = page.cursor, left - PAGE
    return found


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
        for dead, reason in zip(page, reasons, strict=True):
            at = dead
            if selection.matches(reason):
                found.append(dead)
            if len(found) == limit:
                break
        if len(page) < step and (not page or at == page[-1]):
            at = None
            break
    rows = yield from rows_of(
        store, [FoundAt(dead.source, dead.id) for dead in found if dead.source]
    )
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
        for dead, reason in zip(page, (yield from _reasons(store, page)), strict=True):
            if selection.matches(reason):
                kind = kind_of(reason)
                messages[kind] += 1
                last_ms.setdefault(kind, dead.died_ms)
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
        MessageSource(shard, group, LiveState.GARBAGE, before)
        for shard in names
        for group in groups
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
            own += [dead for dead in page if at is None or dead.order < at.order]
            offset += limit
            if len(page) < limit:
                break
        found += own
    return sorted(found, key=lambda one: one.order, reverse=True)[:limit]


def _reasons(store: Store, page: Sequence[_Dead]) -> Flow[list[str | None]]:
    by_source = grouped((dead.source, dead.id) for dead in page if dead.source is not None)
    found: dict[tuple[MessageSource | None, bytes], str | None] = {}
    for source, ids in by_source.items():
        key = store.keys.topic(source.shard).group(source.group).reasons
        reply = yield from store.command("HMGET", key, *ids)
        found |= {
            (source, message_id): parted(noted or b"").reason
            for message_id, noted in zip(ids, reply, strict=True)
        }
    return [found[dead.source, dead.id] for dead in page]
