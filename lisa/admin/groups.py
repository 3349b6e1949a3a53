"""Groups of a topic: added at once, removed page by page.

A removal writes a mark into the topic's options before its first step and takes it away after its
last. So one that was cut short can be told from a group whose declaration a foreign hand deleted:
the former is finished by the same command (or `fsck --repair`), the latter declared again.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from lisa.admin import push
from lisa.admin.parts import counted, places
from lisa.admin.reading import START, member_page, readable
from lisa.core.flow import Command, Flow
from lisa.core.keys import GroupKeys, check_group
from lisa.core.spread import spread
from lisa.core.store import Store, chunks
from lisa.core.transitions.base import text
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.undeclare import Undeclare

__all__ = [
    "MARK_RENEWED_S",
    "add",
    "mark_age_ms",
    "mark_command",
    "owed",
    "owed_in_all",
    "remove",
    "removing",
]

MARK_RENEWED_S = 5.0
"""How often a running removal renews its mark."""

IDS_PER_STEP = 100


_MARK = "removing:"


def _mark(group: str) -> str:
    return _MARK + group


def removing(store: Store, topic: str) -> Flow[set[str]]:
    """The groups whose removal has begun and not ended."""
    fields = yield from store.command("HKEYS", store.keys.topic(topic).options)
    names = (text(name) for name in fields)
    return {name[len(_MARK) :] for name in names if name.startswith(_MARK)}


def mark_command(store: Store, topic: str, group: str) -> Command:
    """Reads a removal's mark; None: no removal is at work."""
    return ("HGET", store.keys.topic(topic).options, _mark(group))


def mark_age_ms(store: Store, topic: str, group: str) -> Flow[int | None]:
    """How long ago a removal of this group was at work, by Redis's clock; None: none is."""
    mark = yield from store.command(*mark_command(store, topic, group))
    if mark is None or not mark.isdigit():
        return None
    now_ms = (yield from store.server_time_us()) // 1000
    return max(0, now_ms - int(mark))


def _write_mark(store: Store, topic: str, group: str) -> Flow[None]:
    now_ms = (yield from store.server_time_us()) // 1000
    yield from store.run(Configure(topic, {_mark(group): str(now_ms)}))


def owed_in_all(store: Store, topic: str, group: str) -> Flow[int]:
    """How many messages a group owes, in all shards of a topic."""
    total = 0
    for place in (yield from places(store, topic)):
        total += yield from owed(store, store.keys.topic(place).group(group))
    return total


def owed(store: Store, keys: GroupKeys) -> Flow[int]:
    """How many messages stand in a group's places."""
    counts = yield from store.commands([
        ("HLEN", keys.entries), ("ZCARD", keys.retry), ("ZCARD", keys.garbage),
    ])  # fmt: skip
    return sum(counts)


def add(store: Store, topic: str, group: str) -> Flow[bool]:
    """Declare a group: it gets what is promoted from now on. Answers whether it is new."""
    check_group(group)
    yield from store.register([topic])
    yield from store.run(Configure(topic, {_mark(group): None}))
    is_new = yield from store.run(Declare(topic, group))
    yield from spread(store, topic)
    return is_new


def remove(
    store: Store, topic: str, group: str, *, progress: Callable[[int], None] | None = None
) -> Flow[int | None]:
    """Take a group away and settle what it owed; answers how many messages ended with it.

    From the first step on it is given nothing more; messages that other groups owe stay theirs.
    May be repeated after a crash at any point. None: there is no such group.
    """
    # Also where nothing is left: what is empty today may be filled again by another change.
    parts = (yield from counted(store, [topic]))[topic]
    if len(parts) == 1:
        return (yield from _remove(store, topic, group, progress))
    known = group in (yield from store.groups(topic))
    if not known and (yield from mark_age_ms(store, topic, group)) is None:
        return None
    yield from _write_mark(store, topic, group)  # until all have let it go
    yield from store.run(Undeclare(topic, group))
    total = 0

    def told(n: int) -> None:
        if progress is not None:
            progress(total + n)

    for place in sorted(parts, key=lambda one: one == topic):
        total += (yield from _remove(store, place, group, told)) or 0
    return total


def _remove(
    store: Store, topic: str, group: str, progress: Callable[[int], None] | None
) -> Flow[int | None]:
    keys = store.keys.topic(topic).group(group)
    declared = group in (yield from store.groups(topic))
    left = yield from store.command("EXISTS", *keys)
    mark = yield from mark_age_ms(store, topic, group)
    if not declared and not left and mark is None:
        return None
    yield from _write_mark(store, topic, group)
    renewed, settled = time.monotonic(), 0
    yield from push.remove(store, topic, group)  # or a gateway would join the group anew
    yield from store.run(Undeclare(topic, group))
    gone = False
    while not gone:
        for command, key in (
            ("HSCAN", keys.entries), ("ZSCAN", keys.retry), ("ZSCAN", keys.garbage),
        ):  # fmt: skip
            cursor = None
            while cursor != START:
                cursor, ids = yield from member_page(store, command, key, cursor or START)
                settled += yield from _settle(store, topic, group, ids)
                if progress is not None:
                    progress(settled)
                if time.monotonic() - renewed > MARK_RENEWED_S:
                    yield from _write_mark(store, topic, group)
                    renewed = time.monotonic()
        gone = (yield from store.run(Undeclare(topic, group, drop=True))).gone
    yield from store.run(Configure(topic, {_mark(group): None}))
    return settled


def _settle(store: Store, topic: str, group: str, ids: list[bytes]) -> Flow[int]:
    names, foreign = readable(ids)
    settled = 0
    for some in chunks(names, IDS_PER_STEP):
        settled += (yield from store.run(Undeclare(topic, group, some))).settled
    if foreign:
        keys = store.keys.topic(topic).group(group)
        yield from store.command("HDEL", keys.entries, *foreign)
        yield from store.command("ZREM", keys.retry, *foreign)
        yield from store.command("ZREM", keys.garbage, *foreign)
    return settled
