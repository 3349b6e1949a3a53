"""Takes a group away from a topic, page by page; what was cut short anyone may finish.

The first step takes the declaration away and leaves a mark with an instant in the topic's options;
every further step renews the mark, and the last one takes it away. While messages are left that the
group owes, its declaration is refused: it would revive places of which other calls knew nothing
meanwhile. A group that is declared has no mark, so each removal ends where somebody declares anew.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lisa.core.flow import Command, Flow
from lisa.core.keys import GroupKeys
from lisa.core.pages import START, member_page, readable
from lisa.core.store import Store, chunks
from lisa.core.transitions.base import text
from lisa.core.transitions.undeclare import Undeclare

__all__ = ["ABANDONED_MS", "age_ms", "finish", "mark_command", "marked", "owed", "remove"]

ABANDONED_MS = 60_000
"""A removal whose mark is so old has ended half-way: its steps take milliseconds."""

IDS_PER_STEP = 100
_MARK = "removing:"


def marked(fields: Iterable[bytes | str]) -> set[str]:
    """The groups with a mark among a topic's options: their removal has begun and not ended."""
    names = map(text, fields)
    return {name[len(_MARK) :] for name in names if name.startswith(_MARK)}


def mark_command(store: Store, topic: str, group: str) -> Command:
    """Reads a removal's mark; None: no removal is at work."""
    return ("HGET", store.keys.topic(topic).options, _MARK + group)


def age_ms(store: Store, topic: str, group: str) -> Flow[int | None]:
    """How long ago a removal of this group was at work, by Redis's clock; None: none is."""
    mark = yield from store.command(*mark_command(store, topic, group))
    if mark is None or not mark.isdigit():
        return None
    now_ms = (yield from store.server_time_us()) // 1000
    return max(0, now_ms - int(mark))


def owed(store: Store, keys: GroupKeys) -> Flow[int]:
    """How many messages stand in a group's places."""
    counts = yield from store.commands([
        ("HLEN", keys.entries), ("ZCARD", keys.retry), ("ZCARD", keys.garbage),
    ])  # fmt: skip
    return sum(counts)


def remove(
    store: Store, topic: str, group: str, *, progress: Callable[[int], None] | None = None
) -> Flow[int | None]:
    """Take a group away and settle what it owed; answers how many messages ended with it.

    From the first step on it is given nothing more; messages that other groups owe stay theirs.
    May be repeated after a crash at any point. None: there is no such group.
    """
    return (yield from _remove(store, topic, group, progress or _tells_nobody, begun=False))


def finish(store: Store, topic: str, group: str, older_than_ms: int = 0) -> Flow[int | None]:
    """End a removal that was cut short, in a topic or some of its shards; how many ended with it.

    None: nothing is left of any that nobody has worked at for so long.
    """
    parts = (yield from store.layout(topic)).counted(topic)
    total = None
    for place in sorted(parts, key=lambda one: one != topic):
        age = yield from age_ms(store, place, group)
        if age is not None and age >= older_than_ms:
            settled = yield from _remove(store, place, group, _tells_nobody, begun=True)
            total = (total or 0) + (settled or 0)
    return total


def _tells_nobody(_: int) -> None:
    pass


def _remove(
    store: Store, topic: str, group: str, progress: Callable[[int], None], *, begun: bool
) -> Flow[int | None]:
    # Also places where nothing is left: what is empty today may be filled again by another change.
    parts = (yield from store.layout(topic)).counted(topic)
    is_split = len(parts) > 1 and (yield from _is_there(store, topic, group))
    if is_split and (yield from store.run(Undeclare(topic, group, begun=begun))).gone:
        return 0  # declared anew meanwhile
    found, total = is_split, 0
    for place in sorted(parts, key=lambda one: one == topic):
        # The topic's own mark is renewed until all shards have let the group go.
        if is_split and (yield from store.run(Undeclare(topic, group, begun=True))).gone:
            break
        if (yield from _is_there(store, place, group)):
            found = True
            goes_on = begun if len(parts) == 1 else is_split and place == topic
            if not (yield from store.run(Undeclare(place, group, begun=goes_on))).gone:
                total = yield from _settle_all(store, place, group, total, progress)
    return total if found else None


def _is_there(store: Store, topic: str, group: str) -> Flow[bool]:
    """Whether a group is declared, or anything is left of it."""
    keys = store.keys.topic(topic)
    declared, found, mark = yield from store.commands([
        ("HEXISTS", keys.groups, group), ("EXISTS", *keys.group(group)),
        mark_command(store, topic, group),
    ])  # fmt: skip
    return bool(declared or found) or mark is not None


def _settle_all(
    store: Store, topic: str, group: str, settled: int, progress: Callable[[int], None]
) -> Flow[int]:
    """Settle what one place owes; how many were settled by then, with those before."""
    keys = store.keys.topic(topic).group(group)
    while True:
        for command, key in (
            ("HSCAN", keys.entries), ("ZSCAN", keys.retry), ("ZSCAN", keys.garbage),
        ):  # fmt: skip
            cursor = None
            while cursor != START:
                cursor, ids = yield from member_page(store, command, key, cursor or START)
                settled += yield from _settle(store, topic, group, ids)
                progress(settled)
        if (yield from store.run(Undeclare(topic, group, drop=True, begun=True))).gone:
            return settled


def _settle(store: Store, topic: str, group: str, ids: list[bytes]) -> Flow[int]:
    names, foreign = readable(ids)
    settled = 0
    for some in chunks(names, IDS_PER_STEP):
        settled += (yield from store.run(Undeclare(topic, group, some, begun=True))).settled
    if foreign:
        keys = store.keys.topic(topic).group(group)
        yield from store.command("HDEL", keys.entries, *foreign)
        yield from store.command("ZREM", keys.retry, *foreign)
        yield from store.command("ZREM", keys.garbage, *foreign)
    return settled
