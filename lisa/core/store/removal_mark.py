"""The mark of a group's removal in the options of a topic or shard; its value is a timestamp."""

from __future__ import annotations

from collections.abc import Iterable

from lisa.core.redis.flow import Command, Flow
from lisa.core.store.store import Store
from lisa.core.transitions.base import text

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
