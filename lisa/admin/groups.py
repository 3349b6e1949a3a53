"""Adds and removes groups of a topic in all its shards, and deletes topics, page by page."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from lisa.admin import push, roles
from lisa.admin.journal import journal
from lisa.admin.messages import LiveState, list_messages
from lisa.admin.reading import shards
from lisa.core.model.errors import RemovalUnfinished, TopicInUse
from lisa.core.model.keys import check_group
from lisa.core.model.sharding import REMOVED, Layout, Shard, Topic
from lisa.core.redis.flow import Flow
from lisa.core.store import group_removal
from lisa.core.store.paging import START, member_page, readable
from lisa.core.store.presence import GONE_AFTER
from lisa.core.store.registration import DELETED_LISTED_MS, IDLE_AFTER_MS
from lisa.core.store.reshard import spread, states_of
from lisa.core.store.store import Store, chunks
from lisa.core.transitions.change import Cancel, Cancelled
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.topic import Clear
from lisa.core.transitions.upkeep import Mend


def unsettled_in_all(store: Store, topic: str, group: str) -> Flow[int]:
    """Number of messages that a group still has to settle, in all shards of a topic."""
    total = 0
    for shard in (yield from shards(store, topic)):
        total += yield from group_removal.owed(store, shard, group)
    return total


def add(store: Store, topic: str, group: str) -> Flow[bool]:
    """Declare a group; it receives messages promoted from now on. Returns whether it is new.

    Finishes an interrupted removal of the group first.
    """
    check_group(group)
    yield from store.register([topic])
    yield from group_removal.finish(store, Shard(topic), group)
    is_new = yield from store.run(Declare(topic, group))
    yield from spread(store, Topic(topic))
    return is_new


def remove(
    store: Store, topic: str, group: str, *, progress: Callable[[int], None] | None = None
) -> Flow[int | None]:
    """Remove a group, its unsettled messages and its push target (see `group_removal.remove`).

    Returns the number of purged messages; None for an unknown group. Raises RemovalUnfinished
    if another process declared the group again before all shards had removed it.
    """
    work = group_removal.Work(progress) if progress else None
    yield from push.remove(store, topic, group)  # otherwise a gateway would declare the group again
    settled = yield from group_removal.remove(store, Topic(topic), group, work)
    is_split = len((yield from shards(store, topic))) > 1
    if settled is not None and is_split and group in (yield from store.groups(topic)):
        raise RemovalUnfinished(
            f"group {group!r} of topic {topic!r} was declared again during its removal and was "
            f"kept; {settled} of its messages were purged. Stop the consumer, or change the "
            "manager's configuration, that declares it; then remove it again"
        )
    return settled


@dataclass(frozen=True, kw_only=True, slots=True)
class Deletion:
    """The messages that ended with a topic: waiting ones, and those that groups still owed."""

    cancelled: int
    purged: int


def delete(
    store: Store, topic: str, *, progress: Callable[[int], None] | None = None
) -> Flow[Deletion]:
    """Delete a topic. Ids of its messages stay known for the retention.

    Repeat the call if it was interrupted, or if it raised TopicInUse: consumers are running,
    messages arrived meanwhile, the topic has several shards, or an archive has not read its journal
    to the end. A topic in a manager's configuration comes back with that configuration.
    """
    yield from _check_consumers(store, topic)
    layout = yield from store.layout(Topic(topic))
    (own,) = yield from states_of(store, Layout().current(Topic(topic)))
    has_removed = any(name.startswith(REMOVED) for name in own.options)
    if layout.shards > 1 or layout.older or layout.gone or has_removed:
        raise TopicInUse(
            f"topic {topic!r} is split into shards: set its option shards to 1, wait until "
            "managers have merged them, and delete it then"
        )
    purged = 0
    for group in own.all_groups:
        purged += (yield from remove(store, topic, group, progress=progress)) or 0
    cancelled = yield from _cancel_waiting(store, topic)
    yield from _drop_orphans(store, topic)
    yield from _check_archives(store, topic)
    (own,) = yield from states_of(store, Layout().current(Topic(topic)))
    if not (yield from store.run(Clear(topic, own.accepts, is_whole_topic=True))):
        raise TopicInUse(
            f"topic {topic!r} got messages or a group while it was being deleted: stop its "
            "producers and consumers, and repeat the command"
        )
    # Managers unlist the topic later, so that a message sent meanwhile is still found.
    score = int(time.time() * 1000) - IDLE_AFTER_MS + DELETED_LISTED_MS
    yield from store.command("ZADD", store.keys.topics, "XX", score, topic)
    return Deletion(cancelled=cancelled, purged=purged)


def _check_consumers(store: Store, topic: str) -> Flow[None]:
    found = yield from roles.consumers(store, [topic])
    alive = sorted(consumer.record.name for consumer in found if consumer.state != "gone")
    if alive:
        others = f" and {len(alive) - 1} more" if len(alive) > 1 else ""
        raise TopicInUse(
            f"topic {topic!r} has the running consumer {alive[0]}{others}: stop it first; for a "
            f"gateway, stop the clients that pull, and try again in {GONE_AFTER.seconds} s"
        )


def _cancel_waiting(store: Store, topic: str) -> Flow[int]:
    total, cursor = 0, None
    while True:
        page = yield from list_messages(store, topic, LiveState.WAITING, cursor=cursor)
        ids = [row.id for row in page.rows]
        if ids:
            outcomes = yield from store.run_by_id(Cancel(topic, ids))
            total += sum(outcome is Cancelled.CANCELLED for outcome in outcomes)
        cursor = page.cursor
        if cursor is None:
            return total


def _drop_orphans(store: Store, topic: str) -> Flow[None]:
    """Delete waiting ids that have no message, which only evictions and other programs leave."""
    key = store.keys.topic(topic).waiting
    cursor = None if (yield from store.command("ZCARD", key)) else START
    while cursor != START:
        cursor, members = yield from member_page(store, "ZSCAN", key, cursor or START)
        ids, foreign = readable(members)
        for part in chunks(ids, store.batch_size(topic, Mend)):
            yield from store.run(Mend(topic, part))
        if foreign:
            yield from store.command("ZREM", key, *foreign)


def _check_archives(store: Store, topic: str) -> Flow[None]:
    """Refuse while an archive has not read all events, such as those of the cancelled messages."""
    found = yield from journal(store, topic)
    behind = [archive for archive in found.archives if archive.behind]
    if found.events and behind:
        raise TopicInUse(
            f"the archive {behind[0].name} has not read {behind[0].behind} events of topic "
            f"{topic!r}: run it, or drop it with `lisa topic journal forget`; then delete the topic"
        )
