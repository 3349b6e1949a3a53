"""Resolves the group for which a consumer takes a topic's messages."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from lisa.core.delivery.source import LOOK_AGAIN_S
from lisa.core.model.backoff import Backoff
from lisa.core.model.errors import ConfigError, ServerUnavailable
from lisa.core.model.sharding import Shard, Topic, own_shard, topic_of
from lisa.core.redis.errors import is_full
from lisa.core.redis.flow import Flow, Pause
from lisa.core.store import presence
from lisa.core.store.store import Store
from lisa.core.transitions.groups import Declare

log = logging.getLogger("lisa")


class SeveralGroups(ConfigError):
    """A topic has several groups, and the caller named none."""

    def __init__(self, topic: Topic, groups: tuple[str, ...]) -> None:
        names = ", ".join(groups)
        super().__init__(f"topic {topic!r} has several groups ({names}): name one with group=")
        self.topic = topic


def find_group(store: Store, topic: Topic) -> Flow[str | None]:
    """The topic's only group; None if there is none. Raises SeveralGroups."""
    groups = yield from store.groups(topic)
    if len(groups) > 1:
        raise SeveralGroups(topic, groups)
    return groups[0] if groups else None


def join(store: Store, shard: Shard, wanted: str) -> Flow[str | None]:
    """The group to consume for; None if the topic has no group and none is wanted.

    Declares the wanted group. A full server refuses the declaration but should still be drained, so
    a group that already exists is joined anyway. Raises LisaError.
    """
    topic = topic_of(shard)
    yield from store.check_schema()
    try:
        yield from store.register([shard])
        for known in sorted({own_shard(topic), shard}) if wanted else ():
            is_new = yield from store.run(Declare(known, wanted))
            if is_new and known == own_shard(topic):
                yield from _log_new_group(store, topic, wanted)
    except ServerUnavailable as error:
        if not is_full(error.__cause__):
            raise
        if wanted and wanted not in (yield from store.groups(shard)):
            raise
    if wanted:
        return wanted
    found = yield from find_group(store, topic)
    # A new shard may not have received the declaration yet.
    is_there = shard == own_shard(topic) or found in (yield from store.groups(shard))
    return found if is_there else None


def was_never_sent_to(store: Store, shard: Shard) -> Flow[bool]:
    """Whether no message of the topic was ever sent or restored: perhaps its name is mistyped."""
    if shard != own_shard(topic_of(shard)):
        return False
    stats = store.keys.topic(shard).stats
    if any((yield from store.command("HMGET", stats, "sent", "restored"))):
        return False
    return not (yield from store.layout(topic_of(shard))).number


def _log_new_group(store: Store, topic: Topic, group: str) -> Flow[None]:
    """Log a group that a consumer has declared: a warning if its name may be a typing error."""
    others = [other for other in (yield from store.groups(topic)) if other != group]
    if not others:
        log.info("topic %s: declared group %s", topic, group)
        return
    log.warning(
        "topic %s: declared group %s beside %s; each group gets a copy of every message from now "
        "on. If the name is wrong: lisa topic group remove %s %s",
        topic,
        group,
        ", ".join(others),
        topic,
        group,
    )


def wait_for_group(
    store: Store,
    shard: Shard,
    name: str,
    resolve: Callable[[], Flow[str | None]],
    left_s: Callable[[], float],
    *,
    announced: Callable[[bool], None],
    is_patient: bool,
) -> Flow[str | None]:
    """The group that `resolve` finds (see `join`); None if `left_s` seconds end before it does.

    Asks the managers to declare a group, then calls `announced` with whether this consumer had no
    record on the topic. If `is_patient`, ends only with the time while the server is unavailable.
    Raises LisaError.
    """
    asked_at, backoff = -math.inf, Backoff(longest_s=LOOK_AGAIN_S)
    while True:
        try:
            group = yield from resolve()
            if group is not None:
                return group
            if time.monotonic() - asked_at >= presence.BEAT.total_seconds():
                announced((yield from ask_for_group(store, shard, name)))
                asked_at = time.monotonic()
        except ServerUnavailable:
            if not is_patient or left_s() <= 0:
                raise
        if left_s() <= 0:
            return None
        yield Pause(backoff.take(max(0.0, left_s())))


def declared_again(store: Store, shard: Shard, group: str, wanted: str) -> Flow[str | None]:
    """The group to continue with after a removal; None until one is declared.

    If no group is wanted by name, this may be the topic's only group.
    """
    topic = topic_of(shard)
    groups = yield from store.groups(topic)
    if group not in groups and not wanted and len(groups) == 1:
        group = groups[0]
    is_there = group in groups
    if is_there and shard != own_shard(topic):  # a shard receives the declaration later
        is_there = group in (yield from store.groups(shard))
    return group if is_there else None


def ask_for_group(store: Store, shard: Shard, name: str) -> Flow[bool]:
    """Announce a consumer that waits for a group, and wake the managers, which declare one.

    Returns whether this consumer had no record on the topic.
    """
    waiting = presence.ConsumerPresence(name=name, topic=topic_of(shard), state="waiting")
    is_new = yield from presence.announce_consumer(store, waiting, shard)
    yield from store.wake(shard)
    return is_new


def is_former_shard(store: Store, shard: Shard) -> Flow[bool]:
    """Whether the topic has other shards by now.

    A consumer that has not followed yet must not write to a former shard: its keys may have been
    deleted, and a shard that is listed again counts as one whose layout was lost.
    """
    topic = topic_of(shard)
    if shard == own_shard(topic):
        return False
    layout = yield from store.layout(topic)
    return bool(layout.number) and shard not in layout.active(topic)


def is_emptied(store: Store, shard: Shard, name: str, *, is_announced: bool = True) -> Flow[bool]:
    """Whether the shard's server has lost its data since this consumer announced itself.

    A lost group was not removed by an operator. The schema alone is not sufficient evidence:
    another role may have written it again, and on a cluster it may be on another node. A missing
    record proves nothing if none was written yet.
    """
    if not store.has_nodes and (yield from store.command("GET", store.keys.schema)) is None:
        return True
    if not is_announced:
        return False
    record = yield from store.command("HEXISTS", store.keys.topic(shard).consumers, name)
    return not record


def was_emptied(store: Store, shard: Shard, name: str, group: str) -> Flow[bool]:
    """Whether a missing group was lost with the server's data rather than removed."""
    if not (yield from is_emptied(store, shard, name)):
        return False
    return not (yield from has_traces(store, shard, group))


def has_traces(store: Store, shard: Shard, group: str) -> Flow[bool]:
    """Whether counters of a missing group remain, which means that it was removed.

    Consumer records are not evidence, because a manager deletes outdated ones. Nor are topic-wide
    data, which may have been written again after the server lost its data.
    """
    return any(name.endswith(f"@{group}") for name in (yield from store.stats(shard)))
