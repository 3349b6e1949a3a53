"""Groups of a topic, in all its shards: added at once, removed page by page."""

from __future__ import annotations

from collections.abc import Callable

from lisa.admin import push
from lisa.admin.parts import places
from lisa.core import removal
from lisa.core.errors import RemovalUnfinished
from lisa.core.flow import Flow
from lisa.core.keys import check_group
from lisa.core.spread import spread
from lisa.core.store import Store
from lisa.core.transitions.declare import Declare

__all__ = ["add", "owed_in_all", "remove"]


def owed_in_all(store: Store, topic: str, group: str) -> Flow[int]:
    """How many messages a group owes, in all shards of a topic."""
    total = 0
    for place in (yield from places(store, topic)):
        total += yield from removal.owed(store, store.keys.topic(place).group(group))
    return total


def add(store: Store, topic: str, group: str) -> Flow[bool]:
    """Declare a group: it gets what is promoted from now on. Answers whether it is new.

    A removal of it that was cut short is finished first.
    """
    check_group(group)
    yield from store.register([topic])
    yield from removal.finish(store, topic, group)
    is_new = yield from store.run(Declare(topic, group))
    yield from spread(store, topic)
    return is_new


def remove(
    store: Store, topic: str, group: str, *, progress: Callable[[int], None] | None = None
) -> Flow[int | None]:
    """Take a group away and settle what it owed, see `removal.remove`; it is pushed no more.

    Raises RemovalUnfinished if somebody declared it anew before all shards had let it go.
    """
    yield from push.remove(store, topic, group)  # or a gateway would join the group anew
    settled = yield from removal.remove(store, topic, group, progress=progress)
    is_split = len((yield from places(store, topic))) > 1
    if settled is not None and is_split and group in (yield from store.groups(topic)):
        raise RemovalUnfinished(
            f"group {group!r} of topic {topic!r} was declared anew while it was being removed, and "
            f"stays; {settled} messages that only it had owed were purged. Stop what declares it "
            "(a consumer, a manager's configuration), then remove it again"
        )
    return settled
