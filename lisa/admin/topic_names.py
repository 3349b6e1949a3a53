"""Topics whose names may be mistyped: topics without consumers, or without any messages."""

from __future__ import annotations

from collections.abc import Sequence

from lisa.admin import roles
from lisa.admin.topics import TopicState
from lisa.core.redis.flow import Flow
from lisa.core.store.store import Store

MOST_NAMED = 5
MOST_TOPICS = 1_000
"""Of more topics, consumers are not read."""

_HANDLED = ("acked", "retried", "deferred", "garbage")
"""Counters of messages that a handler had."""


def suspected_names(store: Store, states: Sequence[TopicState]) -> Flow[list[str]]:
    """What is strange about topics, in one line for each kind; nothing for many topics."""
    if not states or len(states) > MOST_TOPICS:
        return []
    consumers = yield from roles.consumers(store, [one.topic for one in states])
    consumed = {one.record.topic for one in consumers if one.state != "gone"}
    without_group, without_consumer, never_sent = list[str](), list[str](), list[str]()
    for one in states:
        due = one.ready + one.in_flight + one.retry
        was_used = due or one.waiting or one.garbage or one.total("sent") or one.total("restored")
        if one.waiting and not one.groups and one.topic not in consumed:
            without_group.append(f"{one.topic} ({one.waiting:,})")
        elif due and not any(map(one.total, _HANDLED)) and one.topic not in consumed:
            without_consumer.append(f"{one.topic} ({due:,})")
        elif not was_used and (one.groups or one.topic in consumed):
            never_sent.append(one.topic)
    kinds = {
        "no group takes the messages of": without_group,
        "no consumer has ever handled the messages of": without_consumer,
        "consumers name a topic that nothing was ever sent to:": never_sent,
    }
    told = ((what, _listed(names)) for what, names in kinds.items() if names)
    return [f"{what} {names}; is the name right?" for what, names in told]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more:,} more" if more > 0 else "")
