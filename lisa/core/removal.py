"""Takes a group away from a topic, page by page; what was cut short anyone may finish.

The first step takes the declaration away and leaves a mark with an instant in the topic's options;
further steps renew the mark, and the last one takes it away. While the group owes messages in a
place its declaration is refused there: it would revive what other calls knew nothing of meanwhile.
A group that is declared has no mark, so what has begun ends where somebody declares it anew.

Where a topic is split, each shard has a mark of its own, and the topic's spans them: first the
topic lets the group go, then all shards do, then what they owe is settled; the topic's goes last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from lisa.core.flow import Command, Flow
from lisa.core.keys import GroupKeys
from lisa.core.pages import START, member_page, readable
from lisa.core.store import Store, chunks
from lisa.core.transitions.base import text
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.undeclare import Undeclare

__all__ = [
    "ABANDONED_MS",
    "age_ms",
    "finish",
    "is_mark",
    "mark_command",
    "marked",
    "owed",
    "remove",
    "withdraw",
]

ABANDONED_MS = 60_000
"""A removal whose mark is so old has ended half-way: its steps take milliseconds."""

MOST_IDS = 100
"""One step takes no more ids of a page, however few groups there are."""

_MARK = "removing:"


def is_mark(field: str) -> bool:
    """Whether a field of the options hash tells of a removal on this very server."""
    return field.startswith(_MARK)


def marked(fields: Iterable[bytes | str]) -> set[str]:
    """The groups with a mark among a topic's options: their removal has begun and not ended."""
    names = map(text, fields)
    return {name[len(_MARK) :] for name in names if is_mark(name)}


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
    May be repeated after a crash at any point. None: there is no such group. Where somebody
    declares it anew meanwhile, it stays, with what it is given from then on.
    """
    if not (yield from _is_anywhere(store, topic, group)):
        return None
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
            if settled is not None:
                total = (total or 0) + settled
    return total


def withdraw(store: Store, topic: str, group: str, places: Sequence[str]) -> Flow[int]:
    """Take a group away from shards of a topic that does not declare it; how many ended with it.

    A shard was told of it that late, or by another hand.
    """

    def is_still_gone() -> Flow[bool]:
        return not (yield from _is_declared(store, topic, group))

    reached, _ = yield from _let_go(store, topic, group, places, is_still_gone)
    total = 0
    for place in reached:
        total = yield from _settle_all(store, place, group, total, _tells_nobody)
    return total


def _tells_nobody(_: int) -> None:
    pass


def _remove(
    store: Store, topic: str, group: str, progress: Callable[[int], None], *, begun: bool
) -> Flow[int | None]:
    """None: what had begun has ended meanwhile, or the group was declared anew."""

    def goes_on() -> Flow[bool]:
        return not (yield from store.run(Undeclare(topic, group, begun=True))).gone

    if (yield from store.run(Undeclare(topic, group, begun=begun))).gone:
        return None
    # Asked only now: shards made before that first step may have the group, later ones do not.
    parts = (yield from store.layout(topic)).counted(topic)
    shards = yield from _those_with(store, [one for one in parts if one != topic], group)
    reached, is_ours = yield from _let_go(store, topic, group, shards, goes_on)
    total = 0
    for place in reached:
        total = yield from _settle_all(store, place, group, total, progress, goes_on=goes_on)
    if is_ours:
        total = yield from _settle_all(store, topic, group, total, progress)
    return total


def _let_go(
    store: Store, topic: str, group: str, places: Sequence[str], goes_on: Callable[[], Flow[bool]]
) -> Flow[tuple[list[str], bool]]:
    """Take the group's declaration from shards while nobody declares it anew at their topic.

    Those of them that owe what is to be settled, and whether it still goes on.
    """
    reached, is_ours = list[str](), True
    for place in places:
        is_ours = yield from goes_on()
        if not is_ours:
            break
        yield from store.run(Undeclare(place, group))
        reached.append(place)
    else:
        is_ours = not reached or (yield from goes_on())
    if not is_ours and reached and (yield from _is_declared(store, topic, group)):
        # The last one may have been reached after that: what it owes may be the new group's.
        last = reached.pop()
        yield from store.run(Configure(last, {_MARK + group: None}))
        yield from store.run(Declare(last, group))
    return reached, is_ours


def _is_declared(store: Store, topic: str, group: str) -> Flow[bool]:
    return bool((yield from store.command("HEXISTS", store.keys.topic(topic).groups, group)))


def _is_anywhere(store: Store, topic: str, group: str) -> Flow[bool]:
    if (yield from _those_with(store, [topic], group)):
        return True
    parts = (yield from store.layout(topic)).counted(topic)
    return bool((yield from _those_with(store, parts, group)))


def _those_with(store: Store, places: Sequence[str], group: str) -> Flow[list[str]]:
    """The places where a group is declared, or anything is left of it.

    That includes a mark alone: what is empty today may be filled again by another change.
    """
    commands = list[Command]()
    for place in places:
        keys = store.keys.topic(place)
        commands += [
            ("HEXISTS", keys.groups, group), ("EXISTS", *keys.group(group)),
            mark_command(store, place, group),
        ]  # fmt: skip
    if not commands:
        return []
    replies = yield from store.commands(commands)
    return [
        place for i, place in enumerate(places)
        if replies[3 * i] or replies[3 * i + 1] or replies[3 * i + 2] is not None
    ]  # fmt: skip


def _settle_all(
    store: Store, topic: str, group: str, settled: int, progress: Callable[[int], None], *,
    goes_on: Callable[[], Flow[bool]] | None = None,
) -> Flow[int]:  # fmt: skip
    """Settle what one place owes; how many were settled by then, with those before.

    goes_on: renews the mark of the topic whose shard this is, with each page.
    """
    keys = store.keys.topic(topic).group(group)
    while True:
        for command, key in (
            ("HSCAN", keys.entries), ("ZSCAN", keys.retry), ("ZSCAN", keys.garbage),
        ):  # fmt: skip
            cursor = None
            while cursor != START:
                cursor, ids = yield from member_page(store, command, key, cursor or START)
                settled += yield from _settle(store, topic, group, ids)
                if ids and goes_on is not None:
                    yield from goes_on()
                progress(settled)
        if (yield from store.run(Undeclare(topic, group, drop=True, begun=True))).gone:
            return settled


def _settle(store: Store, topic: str, group: str, ids: list[bytes]) -> Flow[int]:
    names, foreign = readable(ids)
    settled = 0
    for some in chunks(names, min(MOST_IDS, store.batch_size(topic, Undeclare))):
        settled += (yield from store.run(Undeclare(topic, group, some, begun=True))).settled
    if foreign:
        keys = store.keys.topic(topic).group(group)
        yield from store.command("HDEL", keys.entries, *foreign)
        yield from store.command("ZREM", keys.retry, *foreign)
        yield from store.command("ZREM", keys.garbage, *foreign)
    return settled
