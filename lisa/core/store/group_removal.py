"""Removes a group from a topic, page by page; any process can finish an interrupted removal.

The first step deletes the declaration and writes a mark with a timestamp to the topic's options.
Further steps renew the mark, and the last step deletes it. While the group still owes messages in a
shard, it cannot be declared there again: the declaration would revive messages that other calls no
longer account for. A declared group has no mark, so declaring a group again ends its removal.

In a split topic each shard has its own mark. The topic's mark covers the whole removal: the topic
drops the declaration first, then all shards do; then the messages owed in the shards are settled,
and the topic's mark is deleted last. Before that, the limits that single keys had in the group are
removed; the shards' copies of them follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from lisa.core.model.sharding import Shard, Topic, own_shard, topic_of
from lisa.core.redis.flow import Command, Flow
from lisa.core.store import limits
from lisa.core.store.paging import PAGE, START, member_page, readable
from lisa.core.store.store import Store, chunks
from lisa.core.transitions.base import text
from lisa.core.transitions.groups import Declare, Undeclare
from lisa.core.transitions.topic import Configure, LimitKeys

PREFIX = "removing:"

ABANDONED_MS = 60_000
"""A removal with an older mark was interrupted: its steps take milliseconds."""


def is_mark(field: str) -> bool:
    """Whether a field of the options hash marks a removal on this server."""
    return field.startswith(PREFIX)


def marked(fields: Iterable[bytes | str]) -> set[str]:
    """The groups with a removal mark among the fields of a topic's options."""
    names = map(text, fields)
    return {name[len(PREFIX) :] for name in names if is_mark(name)}


def being_removed(store: Store, topic: str) -> Flow[set[str]]:
    """The groups of a topic or shard whose removal has not ended."""
    return marked((yield from store.command("HKEYS", store.keys.topic(topic).options)))


def mark_command(store: Store, topic: str, group: str) -> Command:
    """The command that reads a removal's mark; its reply is None if no removal is in progress."""
    return ("HGET", store.keys.topic(topic).options, PREFIX + group)


def age_ms(store: Store, topic: str, group: str) -> Flow[int | None]:
    """Time since the last step of this group's removal, by Redis's clock; None without removal."""
    mark = yield from store.command(*mark_command(store, topic, group))
    if mark is None or not mark.isdigit():
        return None
    now_ms = yield from store.server_time_ms(store.keys.topic(topic).options)
    return max(0, now_ms - int(mark))


MOST_IDS = 100
"""Maximum number of ids per step, however few groups there are."""


class Finished(NamedTuple):
    """Messages settled by finishing an interrupted removal, and whether it is complete."""

    settled: int
    is_done: bool


class _AllowanceUsed(Exception):
    pass


@dataclass(slots=True)
class Work:
    """What removals have done, and what they may do.

    progress: called after each page with the number of messages settled so far.
    calls: how many settling calls are left. Reading pages is free; otherwise pages that are already
        settled would use up the limit.
    stopped: true ends the work.
    """

    progress: Callable[[int], None] = lambda _: None
    calls: float = math.inf
    stopped: Callable[[], bool] = lambda: False
    settled: int = 0

    def spend(self, calls: int = 0) -> None:
        """Called before each command; `calls` is the number of settling calls that it makes."""
        if self.stopped() or self.calls < calls:
            raise _AllowanceUsed
        self.calls -= calls


def owed(store: Store, shard: str, group: str) -> Flow[int]:
    """Number of messages that a group owes in one shard."""
    keys = store.keys.topic(shard).group(group)
    counts = yield from store.commands(
        [
            ("HLEN", keys.entries),
            ("HLEN", store.keys.topic(shard).lanes(group).parked),
            ("ZCARD", keys.retry),
            ("ZCARD", keys.garbage),
        ]
    )
    return sum(counts)


def remove(store: Store, topic: Topic, group: str, work: Work | None = None) -> Flow[int | None]:
    """Remove a group and settle the messages that it owes. Returns their number.

    The group receives no messages after the first step; messages that other groups owe are not
    affected. Safe to repeat after a crash at any point. Returns None if there is no such group. If
    the group is declared again meanwhile, it stays and keeps the messages received since then.
    """
    if not (yield from _is_anywhere(store, topic, group)):
        return None
    work = work or Work()
    is_removed = yield from _remove(store, own_shard(topic), group, work, begun=False)
    return work.settled if is_removed else None


def finish(
    store: Store,
    first: Shard,
    group: str,
    older_than_ms: int = 0,
    work: Work | None = None,
) -> Flow[Finished | None]:
    """Finish an interrupted removal in a shard, and in all others if it is the topic's own shard.

    Returns None if no removal has been idle for `older_than_ms`. If `work` has no calls left, the
    removal stays interrupted and can be finished later.
    """
    parts = yield from _reach(store, first)
    work, found = work or Work(), False
    before = work.settled
    for shard in sorted(parts, key=lambda one: one != first):
        age = yield from age_ms(store, shard, group)
        if age is not None and age >= older_than_ms:
            try:
                found |= yield from _remove(store, shard, group, work, begun=True)
            except _AllowanceUsed:
                return Finished(work.settled - before, is_done=False)
    return Finished(work.settled - before, is_done=True) if found else None


def withdraw(store: Store, topic: Topic, group: str, shards: Sequence[Shard]) -> Flow[int]:
    """Remove a group from shards of a topic that no longer declares it. Returns messages settled.

    Used if a shard received the declaration late, or from another program.
    """
    own = own_shard(topic)

    def is_still_gone() -> Flow[bool]:
        return not (yield from _is_declared(store, own, group))

    reached, _ = yield from _undeclare(store, own, group, shards, is_still_gone)
    work = Work()
    for shard in reached:
        yield from _settle_all(store, shard, group, work)
    return work.settled


def _remove(store: Store, first: Shard, group: str, work: Work, *, begun: bool) -> Flow[bool]:
    """Remove a group from a shard, and from all others if the shard is the topic's own.

    Returns False if the removal has already ended, or the group was declared again.
    """

    def still_applies() -> Flow[bool]:
        return not (yield from store.run(Undeclare(first, group, begun=True))).gone

    if (yield from store.run(Undeclare(first, group, begun=begun))).gone:
        return False
    # Read after the first step: shards created later do not get the group.
    parts = yield from _reach(store, first)
    shards = yield from _shards_with(store, [shard for shard in parts if shard != first], group)
    reached, is_ours = yield from _undeclare(store, first, group, shards, still_applies)
    for shard in reached:
        yield from _settle_all(store, shard, group, work, still_applies=still_applies)
    if is_ours:
        if first == own_shard(Topic(topic_of(first))):
            yield from _remove_limits(store, first, group, work)
        yield from _settle_all(store, first, group, work)
    return True


def _remove_limits(store: Store, own: Shard, group: str, work: Work) -> Flow[None]:
    work.spend()
    for page in chunks(list((yield from limits.read(store, own, of_group=group))), PAGE):
        work.spend(calls=1)
        yield from store.run(LimitKeys(own, "set", dict.fromkeys(page, "")))


def _reach(store: Store, first: Shard) -> Flow[list[Shard]]:
    """All shards of the topic if `first` is its own shard; other shards have no layout."""
    topic = Topic(first)
    return (yield from store.layout(topic)).counted(topic)


def _undeclare(
    store: Store,
    first: Shard,
    group: str,
    shards: Sequence[Shard],
    still_applies: Callable[[], Flow[bool]],
) -> Flow[tuple[list[Shard], bool]]:
    """Delete the group's declaration from shards, unless the topic declares the group again.

    Returns the shards whose messages are to be settled, and whether the removal still applies.
    """
    reached, is_ours = list[Shard](), True
    for shard in shards:
        is_ours = yield from still_applies()
        if not is_ours:
            break
        yield from store.run(Undeclare(shard, group))
        reached.append(shard)
    else:
        is_ours = not reached or (yield from still_applies())
    if not is_ours and reached and (yield from _is_declared(store, first, group)):
        # The last shard may hold messages of the newly declared group: restore its declaration.
        last = reached.pop()
        yield from store.run(Configure(last, {PREFIX + group: None}))
        yield from store.run(Declare(last, group))
    return reached, is_ours


def _is_declared(store: Store, shard: Shard, group: str) -> Flow[bool]:
    return bool((yield from store.command("HEXISTS", store.keys.topic(shard).groups, group)))


def _is_anywhere(store: Store, topic: Topic, group: str) -> Flow[bool]:
    if (yield from _shards_with(store, [own_shard(topic)], group)):
        return True
    parts = yield from _reach(store, own_shard(topic))
    return bool((yield from _shards_with(store, parts, group)))


def _shards_with(store: Store, shards: Sequence[Shard], group: str) -> Flow[list[Shard]]:
    """The shards that declare a group, or hold any of its data.

    A mark alone counts, because a concurrent change may add data later.
    """
    commands = list[Command]()
    for shard in shards:
        keys = store.keys.topic(shard)
        commands += [
            ("HEXISTS", keys.groups, group),
            ("EXISTS", *keys.group(group), *keys.lanes(group)),
            mark_command(store, shard, group),
        ]
    replies = yield from store.commands(commands)
    return [
        shard
        for i, shard in enumerate(shards)
        if replies[3 * i] or replies[3 * i + 1] or replies[3 * i + 2] is not None
    ]


def _settle_all(
    store: Store,
    shard: Shard,
    group: str,
    work: Work,
    *,
    still_applies: Callable[[], Flow[bool]] | None = None,
) -> Flow[None]:
    """Settle the messages that a group owes in one shard.

    still_applies: called for each page, to renew the topic's mark while a shard is settled.
    """
    keys = store.keys.topic(shard).group(group)
    while True:
        for command, key in (
            ("HSCAN", keys.entries),
            ("HSCAN", store.keys.topic(shard).lanes(group).parked),
            ("ZSCAN", keys.retry),
            ("ZSCAN", keys.garbage),
        ):
            cursor = None
            while cursor != START:
                work.spend()
                cursor, ids = yield from member_page(store, command, key, cursor or START)
                yield from _settle(store, shard, group, ids, work)
                if ids and still_applies is not None:
                    yield from still_applies()
                work.progress(work.settled)
        if (yield from store.run(Undeclare(shard, group, drop=True, begun=True))).gone:
            return


def _settle(store: Store, shard: Shard, group: str, ids: list[bytes], work: Work) -> Flow[None]:
    names, foreign = readable(ids)
    for part in chunks(names, min(MOST_IDS, store.batch_size(shard, Undeclare))):
        work.spend(calls=1)
        page = yield from store.run(Undeclare(shard, group, part, begun=True))
        work.settled += page.settled
    if foreign:
        keys = store.keys.topic(shard).group(group)
        yield from store.command("HDEL", keys.entries, *foreign)
        yield from store.command("ZREM", keys.retry, *foreign)
        yield from store.command("ZREM", keys.garbage, *foreign)
