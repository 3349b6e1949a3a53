"""Plain reads over many topics in few round trips, to find those that need a script call.

A script call costs the server and this process about twenty times as much as a pipelined read, and
most topics need no work most of the time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, TypeVar

from lisa.core.model.clock import score_ms
from lisa.core.model.keys import GroupKeys, LaneKeys
from lisa.core.redis.flow import Command
from lisa.core.store.store import SyncStore, chunks

PAGE = 128
"""Topics per pipeline, which takes about 0.2 ms of server time."""

K = TypeVar("K")
Name = TypeVar("Name", bound=str)


def ask_all(store: SyncStore, commands: Sequence[Command]) -> list[Any]:
    """Run plain commands in one round trip; returns raw replies, with errors as values.

    Raises ServerUnavailable if the server cannot be reached; does not retry.
    """
    return store.drive(store.commands_once(commands))


def ask_each(store: SyncStore, questions: Mapping[K, Sequence[Command]]) -> dict[K, list[Any]]:
    """The replies to the commands of each key, all in one round trip; see `ask_all`."""
    commands = [command for own in questions.values() for command in own]
    replies = iter(ask_all(store, commands))
    return {key: list(islice(replies, len(own))) for key, own in questions.items()}


class Turns:
    """Picks a few of many topics at a time, so that each has its turn."""

    def __init__(self) -> None:
        self._last = ""

    def next(self, topics: Sequence[Name], most: int = PAGE) -> Sequence[Name]:
        """Up to `most` topics: those that follow the last ones, in order of name."""
        if len(topics) <= most:
            return topics
        by_name = sorted(topics)
        first = bisect_right(by_name, self._last)
        part = (by_name[first:] + by_name[:first])[:most]
        self._last = part[-1]
        return part


def group_keys(store: SyncStore, topic: str) -> list[GroupKeys]:
    """The keys of a topic's known groups."""
    keys = store.keys.topic(topic)
    return [keys.group(name) for name in store.known_groups(topic) or ()]


def lane_keys(store: SyncStore, topic: str) -> list[LaneKeys]:
    """The keys of the lanes of a topic's known groups."""
    keys = store.keys.topic(topic)
    return [keys.lanes(name) for name in store.known_groups(topic) or ()]


def head_command(zset: str) -> tuple[str | int, ...]:
    """The command that reads the first member of a ZSET and its score."""
    return ("ZRANGE", zset, 0, 0, "WITHSCORES")


def head_ms(reply: Any) -> int | None:
    """The score in the reply to `head_command`; None for an empty ZSET or an error."""
    return score_ms(reply[1]) if isinstance(reply, list) and reply else None


def int_or(reply: Any, default: int) -> int:
    """The integer in a topic's option; the default if the option is missing or unreadable.

    A script that reads an unreadable option reports the error for this topic.
    """
    return int(reply) if isinstance(reply, bytes) and reply.isdigit() else default


def topics_with_keys(store: SyncStore, keys: Mapping[str, Sequence[str]]) -> list[str]:
    """The topics for which at least one of the given keys exists, or cannot be read.

    One EXISTS covers a page of topics; only if it finds a key, each topic gets its own EXISTS. On
    a cluster, where the keys are on several nodes, each topic gets its own EXISTS from the start.
    """
    pages = list(chunks([topic for topic in keys if keys[topic]], PAGE))
    if not store.has_nodes:
        counts = ask_all(
            store, [("EXISTS", *[key for topic in page for key in keys[topic]]) for page in pages]
        )
        pages = [page for page, count in zip(pages, counts, strict=True) if count != 0]
    found: list[str] = []
    for page in pages:
        counts = ask_all(store, [("EXISTS", *keys[topic]) for topic in page])
        found += [topic for topic, count in zip(page, counts, strict=True) if count != 0]
    return found
