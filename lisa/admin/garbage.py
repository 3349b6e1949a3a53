"""Garbage: look through it, give it a new life, or end it for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lisa.admin.messages import Row, State, list_messages
from lisa.admin.parts import places
from lisa.core.errors import GroupRemoved
from lisa.core.flow import Flow
from lisa.core.pages import PAGE
from lisa.core.store import Store, chunks
from lisa.core.transitions.purge import Purge
from lisa.core.transitions.requeue import Requeue

__all__ = ["Found", "Selection", "act", "groups_of", "listed", "matching", "purge", "requeue"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Which dead messages are meant: those of a topic, of one group or all, that match.

    died_before_ms: only those that died before that instant, epoch milliseconds.
    reason: only those whose reason holds this text; upper and lower case are equal.
    """

    topic: str
    group: str | None = None
    died_before_ms: int | None = None
    reason: str | None = None

    def matches(self, row: Row) -> bool:
        """Whether a row of the list is meant."""
        return self.reason is None or self.reason.lower() in (row.reason or "").lower()


@dataclass(frozen=True, slots=True)
class Found:
    """Some dead messages, and the cursor of what follows; None at the end."""

    rows: tuple[Row, ...]
    cursor: str | None


def groups_of(store: Store, selection: Selection) -> Flow[tuple[str, ...]]:
    """The groups that are meant. Raises GroupRemoved for one that is not declared."""
    declared = yield from store.groups(selection.topic)
    if selection.group is None:
        return declared
    if selection.group not in declared:
        raise GroupRemoved(
            f"group {selection.group!r} is not declared on topic {selection.topic!r}"
        )
    return (selection.group,)


def listed(
    store: Store,
    selection: Selection,
    *,
    cursor: str | None = None,
    limit: int = 100,
    most: int | None = None,
) -> Flow[Found]:
    """Dead messages that match, the oldest first, at most `limit`.

    most: after so many were looked at this ends, too, and the cursor says where to go on.
    """
    rows: list[Row] = []
    looked = 0
    while len(rows) < limit and (most is None or looked < most):
        step = min(PAGE, limit - len(rows))
        page = yield from list_messages(
            store, selection.topic, State.GARBAGE, group=selection.group, cursor=cursor,
            due_before_ms=selection.died_before_ms, limit=step,
        )  # fmt: skip
        rows += [row for row in page.rows if selection.matches(row)]
        cursor, looked = page.cursor, looked + step
        if cursor is None:
            break
    return Found(tuple(rows), cursor)


def matching(store: Store, selection: Selection) -> Flow[int]:
    """How many dead messages are meant. Without a reason O(log n), else all are looked at."""
    if selection.reason is None:
        total = 0
        end = "+inf" if selection.died_before_ms is None else f"({selection.died_before_ms}"
        for place in (yield from places(store, selection.topic)):
            keys = store.keys.topic(place)
            for group in (yield from groups_of(store, selection)):
                total += yield from store.command("ZCOUNT", keys.group(group).garbage, "-inf", end)
        return total
    total, cursor = 0, None
    while True:
        found = yield from listed(store, selection, cursor=cursor, limit=PAGE)
        total, cursor = total + len(found.rows), found.cursor
        if cursor is None:
            return total


def requeue(store: Store, topic: str, group: str, ids: Sequence[str]) -> Flow[list[bool]]:
    """Dead messages become due now, their failed attempts forgotten; False: not in the garbage."""
    done: list[bool] = []
    for some in chunks(ids, store.batch_size(topic, Requeue)):
        done += yield from store.run_by_id(Requeue(topic, group, some))
    return done


def purge(store: Store, topic: str, group: str, ids: Sequence[str]) -> Flow[list[bool]]:
    """Dead messages end for good; False: not in the garbage."""
    done: list[bool] = []
    for some in chunks(ids, store.batch_size(topic, Purge)):
        done += yield from store.run_by_id(Purge(topic, group, some))
    return done


def act(
    store: Store,
    selection: Selection,
    action: Callable[[Store, str, str, Sequence[str]], Flow[list[bool]]],
    *,
    progress: Callable[[int], None] | None = None,
) -> Flow[int]:
    """Requeue or purge (`action`) all that match and had died when this began; answers how many.

    A message that dies again meanwhile is not taken a second time, so this always ends.
    """
    now_ms = (yield from store.server_time_us()) // 1000 + 1
    until = min(now_ms, selection.died_before_ms or now_ms)
    bounded = Selection(
        topic=selection.topic, group=selection.group, died_before_ms=until, reason=selection.reason
    )
    done, cursor = 0, None
    while True:
        found = yield from listed(store, bounded, cursor=cursor, limit=PAGE)
        by_group: dict[str, list[str]] = {}
        for row in found.rows:
            by_group.setdefault(row.group or "", []).append(row.id)
        for group, ids in by_group.items():
            done += sum((yield from action(store, selection.topic, group, ids)))
            if progress is not None:
                progress(done)
        cursor = found.cursor
        if cursor is None:
            return done
