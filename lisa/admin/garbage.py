"""Garbage (dead letters): list, requeue and purge."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from lisa.admin.messages import LiveState, MessagePage, Row, list_messages, selected_groups
from lisa.admin.shards import shards
from lisa.core.redis.flow import Flow, Pause
from lisa.core.store.paging import PAGE
from lisa.core.store.store import Store, chunks, grouped
from lisa.core.transitions.garbage import Purge, Requeue

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
    for some in chunks(ids, store.batch_size(topic, kind)):
        done += yield from store.run_by_id(kind(topic, group, some))
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
        found.update(one for one, hit in zip(asked, answers, strict=True) if hit)
    return done, [one for one in asked if one not in found]


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
