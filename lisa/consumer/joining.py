"""Which group a consumer takes a topic's messages for."""

from __future__ import annotations

from lisa.core import presence
from lisa.core.errors import ConfigError, ServerUnavailable
from lisa.core.failures import is_full
from lisa.core.flow import Flow
from lisa.core.shards import base
from lisa.core.store import Store
from lisa.core.transitions.declare import Declare

__all__ = ["ask_for_group", "find_group", "has_traces", "is_emptied", "join", "was_emptied"]


def find_group(store: Store, topic: str) -> Flow[str | None]:
    """The topic's only group; None while there is none. Raises ConfigError for several."""
    groups = yield from store.groups(topic)
    if len(groups) > 1:
        raise ConfigError(
            f"topic {topic!r} has several groups ({', '.join(groups)}): name one with group="
        )
    return groups[0] if groups else None


def join(store: Store, topic: str, wanted: str) -> Flow[str | None]:
    """The group to take messages for; None while the topic has none and none is wanted.

    Declares the wanted one. A server that is full takes no note of it, but is to be drained, so a
    group that is there already is joined all the same. Raises LisaError.
    """
    yield from store.check_schema()
    try:
        yield from store.register([topic])
        for place in sorted({base(topic), topic}) if wanted else ():
            yield from store.run(Declare(place, wanted))
    except ServerUnavailable as error:
        if not is_full(error.__cause__):
            raise
        if wanted and wanted not in (yield from store.groups(topic)):
            raise
    if wanted:
        return wanted
    found = yield from find_group(store, base(topic))
    # A shard that is new may not have been told of all groups yet.
    is_there = base(topic) == topic or found in (yield from store.groups(topic))
    return found if is_there else None


def ask_for_group(store: Store, topic: str, name: str) -> Flow[bool]:
    """Stand as waiting for a group, and wake the managers, which answer by declaring one.

    Whether this consumer had no record there.
    """
    waiting = presence.ConsumerPresence(name=name, topic=base(topic), state="waiting")
    is_new = yield from presence.announce_consumer(store, waiting, topic)
    yield from store.command("PUBLISH", store.keys.wake, topic)
    return is_new


def is_emptied(store: Store, topic: str, name: str) -> Flow[bool]:
    """Whether the server has lost all since this consumer announced itself.

    A group is then gone without anyone having removed it. The schema alone does not tell: another
    role may have written it again already.
    """
    if (yield from store.command("GET", store.keys.schema)) is None:
        return True
    record = yield from store.command("HEXISTS", store.keys.topic(topic).consumers, name)
    return not record


def was_emptied(store: Store, topic: str, name: str, group: str) -> Flow[bool]:
    """The same where a group is found gone: whether nobody has removed it."""
    if not (yield from is_emptied(store, topic, name)):
        return False
    return not (yield from has_traces(store, topic, group))


def has_traces(store: Store, topic: str, group: str) -> Flow[bool]:
    """Whether counters of a group that is gone are left: then somebody removed it.

    A record may be swept, by a manager that heard nothing of its consumer for a while, and what is
    no group's own may have been written again since the server was emptied.
    """
    return any(name.endswith(f"@{group}") for name in (yield from store.stats(topic)))
