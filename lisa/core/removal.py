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
from dataclasses import dataclass
from typing import NamedTuple

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
    "Allowance",
    "Finished",
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


class Finished(NamedTuple):
    """How many messages ended with a removal that was cut short, and whether it is done."""

    settled: int
    is_done: bool


@dataclass(slots=True)
class Allowance:
    """What may be done at once: so many calls that settle messages, and none once `stopped`.

    Looking for them is free, or pages that were settled before would use it up.
    """

    calls: int
    stopped: Callable[[], bool]


class _UsedUp(Exception):
    pass


@dataclass(slots=True)
class _Work:
    progress: Callable[[int], None] | None = None
    allowance: Allowance | None = None
    settled: int = 0

    def ask(self, calls: int = 0) -> None:
        """Before each command, with the calls that it is."""
        left = self.allowance
        if left is None:
            return
        if left.stopped() or left.calls < calls:
            raise _UsedUp
        left.calls -= calls

    def tell(self) -> None:
        if self.progress is not None:
            self.progress(self.settled)


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
    work = _Work(progress)
    return work.settled if (yield from _remove(store, topic, group, work, begun=False)) else None


def finish(
    store: Store,
    topic: str,
    group: str,
    older_than_ms: int = 0,
    *,
    allowance: Allowance | None = None,
) -> Flow[Finished | None]:
    """End a removal that was cut short, in a topic or some of its shards.

    None: nothing is left of any that nobody has worked at for so long. Where the allowance does not
    suffice, the rest is one more that was cut short.
    """
    parts = (yield from store.layout(topic)).counted(topic)
    work, found = _Work(allowance=allowance), False
    for place in sorted(parts, key=lambda one: one != topic):
        age = yield from age_ms(store, place, group)
        if age is not None and age >= older_than_ms:
            try:
                found |= yield from _remove(store, place, group, work, begun=True)
            except _UsedUp:
                return Finished(work.settled, is_done=False)
    return Finished(work.settled, is_done=True) if found else None


def withdraw(store: Store, topic: str, group: str, places: Sequence[str]) -> Flow[int]:
    """Take a group away from shards of a topic that does not declare it; how many ended with it.

    A shard was told of it that late, or by another hand.
    """

    def is_still_gone() -> Flow[bool]:
        return not (yield from _is_declared(store, topic, group))

    reached, _ = yield from _let_go(store, topic, group, places, is_still_gone)
    work = _Work()
    for place in reached:
        yield from _settle_all(store, place, group, work)
    return work.settled


def _remove(store: Store, topic: str, group: str, work: _Work, *, begun: bool) -> Flow[bool]:
    """False: what had begun has ended meanwhile, or the group was declared anew."""

    def goes_on() -> Flow[bool]:
        return not (yield from store.run(Undeclare(topic, group, begun=True))).gone

    if (yield from store.run(Undeclare(topic, group, begun=begun))).gone:
        return False
    # Asked only now: shards made before that first step may have the group, later ones do not.
    parts = (yield from store.layout(topic)).counted(topic)
    shards = yield from _those_with(store, [one for one in parts if one != topic], group)
    reached, is_ours = yield from _let_go(store, topic, group, shards, goes_on)
    for place in reached:
        yield from _settle_all(store, place, group, work, goes_on=goes_on)
    if is_ours:
        yield from _settle_all(store, topic, group, work)
    return True


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
    store: Store, topic: str, group: str, work: _Work, *,
    goes_on: Callable[[], Flow[bool]] | None = None,
) -> Flow[None]:  # fmt: skip
    """Settle what one place owes.

    goes_on: renews the mark of the topic whose shard this is, with each page.
    """
    keys = store.keys.topic(topic).group(group)
    while True:
        for command, key in (
            ("HSCAN", keys.entries), ("ZSCAN", keys.retry), ("ZSCAN", keys.garbage),
        ):  # fmt: skip
            cursor = None
            while cursor != START:
                work.ask()
                cursor, ids = yield from member_page(store, command, key, cursor or START)
                yield from _settle(store, topic, group, ids, work)
                if ids and goes_on is not None:
                    yield from goes_on()
                work.tell()
        if (yield from store.run(Undeclare(topic, group, drop=True, begun=True))).gone:
            return


def _settle(store: Store, topic: str, group: str, ids: list[bytes], work: _Work) -> Flow[None]:
    names, foreign = readable(ids)
    for some in chunks(names, min(MOST_IDS, store.batch_size(topic, Undeclare))):
        work.ask(calls=1)
        page = yield from store.run(Undeclare(topic, group, some, begun=True))
        work.settled += page.settled
    if foreign:
        keys = store.keys.topic(topic).group(group)
        yield from store.command("HDEL", keys.entries, *foreign)
        yield from store.command("ZREM", keys.retry, *foreign)
        yield from store.command("ZREM", keys.garbage, *foreign)
