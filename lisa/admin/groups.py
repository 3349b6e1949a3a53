"""Adds and removes groups of a topic in all its shards; removal runs page by page."""

from __future__ import annotations

from collections.abc import Callable

from lisa.admin import push
from lisa.admin.shards import shards
from lisa.core.model.errors import RemovalUnfinished
from lisa.core.model.keys import check_group
from lisa.core.model.sharding import Shard, Topic
from lisa.core.redis.flow import Flow
from lisa.core.store import group_removal
from lisa.core.store.reshard import spread
from lisa.core.store.store import Store
from lisa.core.transitions.groups import Declare


def unsettled_in_all(store: Store, topic: str, group: str) -> Flow[int]:
    """Number of messages that a group still has to settle, in all shards of a topic."""
    total = 0
    for shard in (yield from shards(store, topic)):
        total += yield from group_removal.owed(store, store.keys.topic(shard).group(group))
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
    yield from push.remove(store, topic, group)  # otherwise a gateway would declare the group again
    settled = yield from group_removal.remove(store, Topic(topic), group, progress=progress)
    is_split = len((yield from shards(store, topic))) > 1
    if settled is not None and is_split and group in (yield from store.groups(topic)):
        raise RemovalUnfinished(
            f"group {group!r} of topic {topic!r} was declared again during its removal and was "
            f"kept; {settled} of its messages were purged. Stop the consumer, or change the "
            "manager's configuration, that declares it; then remove it again"
        )
    return settled
