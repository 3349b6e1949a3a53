"""Every key that Lisa writes, and nothing else builds one.

All keys of a topic carry the topic as their hash tag, so a transition touches one slot and works
on Redis Cluster.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from lisa.core.errors import ConfigError, InvalidMessage

__all__ = [
    "DEFAULT_PREFIX",
    "GROUP_KEYS",
    "TOPIC_KEYS",
    "GroupKeys",
    "Keys",
    "TopicKeys",
    "check_group",
    "check_id",
    "check_topic",
    "is_place",
    "is_topic",
]

DEFAULT_PREFIX = "lisa"
MAX_ID_BYTES = 256

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")
_PLACE = re.compile(r"[A-Za-z0-9_.:-]{1,128}(?:~\d{1,2}of\d{1,2})?\Z")
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}\Z")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")

TOPIC_KEYS = (
    "waiting", "policy", "expiry", "options", "groups", "stats", "consumers", "events",
)  # fmt: skip
"""A topic's keys in the order in which every script receives them."""

GROUP_KEYS = ("ready", "entries", "retry", "garbage", "attempts", "reasons", "leases")
"""A group's keys in the order in which every script receives them, group by group."""


def check_topic(topic: str) -> str:
    """The topic itself, or InvalidMessage that says what a topic may be called."""
    if not isinstance(topic, str) or not _NAME.match(topic):
        raise InvalidMessage(
            f"topic {topic!r} is not allowed: use 1 to 128 of the characters A-Z a-z 0-9 _ . : -"
        )
    return topic


def is_topic(name: str) -> bool:
    """Whether a topic may be called so."""
    return _NAME.match(name) is not None


def is_place(name: str) -> bool:
    """Whether it is a topic, or one of the places of a topic that is split (see core.shards)."""
    return _PLACE.match(name) is not None


def check_group(group: str) -> str:
    """The group itself, or InvalidMessage that says what a group may be called."""
    if not isinstance(group, str) or not _NAME.match(group):
        raise InvalidMessage(
            f"group {group!r} is not allowed: use 1 to 128 of the characters A-Z a-z 0-9 _ . : -"
        )
    return group


def check_id(message_id: str) -> str:
    """The id itself, or InvalidMessage: 1 to 256 bytes of UTF-8 without control characters."""
    if not isinstance(message_id, str):
        raise InvalidMessage(f"a message id is a str, not {type(message_id).__name__}")
    try:
        size = len(message_id) if message_id.isascii() else len(message_id.encode())
    except UnicodeEncodeError:
        raise InvalidMessage(f"message id {message_id!r} cannot be written as UTF-8") from None
    if not 1 <= size <= MAX_ID_BYTES:
        raise InvalidMessage(
            f"a message id has 1 to {MAX_ID_BYTES} bytes; this one has {size}: {message_id[:32]!r}"
        )
    if not message_id.isprintable() and _CONTROL.search(message_id):
        raise InvalidMessage(f"message id {message_id!r} holds control characters")
    return message_id


class GroupKeys(NamedTuple):
    """One group's keys, in the order of GROUP_KEYS."""

    ready: str
    entries: str
    retry: str
    garbage: str
    attempts: str
    reasons: str
    leases: str


class TopicKeys:
    """One topic's keys, or those of one of the places of a topic that is split."""

    __slots__ = (
        "_body",
        "_done",
        "_groups",
        "archived",
        "confirm",
        "consumers",
        "events",
        "expiry",
        "groups",
        "history",
        "options",
        "policy",
        "root",
        "shared",
        "stats",
        "topic",
        "waiting",
        "wake",
    )

    def __init__(self, prefix: str, topic: str) -> None:
        self.topic = topic if is_place(topic) else check_topic(topic)
        self.root = f"{prefix}:{{{topic}}}:"
        self.wake = f"{prefix}:wake"
        self.shared = tuple(self.root + name for name in TOPIC_KEYS)
        (
            self.waiting,
            self.policy,
            self.expiry,
            self.options,
            self.groups,
            self.stats,
            self.consumers,
            self.events,
        ) = self.shared
        self.history = self.root + "history"
        self.archived = self.root + "archived"
        self.confirm = self.root + "confirm"
        self._body = self.root + "body:"
        self._done = self.root + "done:"
        self._groups: dict[str, GroupKeys] = {}

    def group(self, name: str) -> GroupKeys:
        """The keys of one group of this topic."""
        found = self._groups.get(name)
        if found is None:
            head = f"{self.root}g:{check_group(name)}:"
            found = self._groups[name] = GroupKeys(*(head + key for key in GROUP_KEYS))
        return found

    def body(self, message_id: str) -> str:
        """Where the envelope of a live message stands."""
        return self._body + message_id

    def done(self, message_id: str) -> str:
        """Where the tombstone of a settled message stands."""
        return self._done + message_id

    def bodies_pattern(self) -> str:
        """A SCAN pattern for all bodies of this topic."""
        return _escaped(self._body) + "*"

    def group_of(self, key: str) -> str | None:
        """The group that a key belongs to, or None: the reverse of `group`."""
        head = self.root + "g:"
        if not key.startswith(head):
            return None
        name, _, kind = key[len(head) :].rpartition(":")
        return name if kind in GROUP_KEYS and _NAME.match(name) else None

    def id_of_body(self, key: str) -> str:
        """The id that a body's key belongs to: the reverse of `body`."""
        return key[len(self._body) :]


class Keys:
    """All keys below one prefix.

    The prefix holds no braces, or it would move the hash tag.
    """

    def __init__(self, prefix: str = DEFAULT_PREFIX) -> None:
        if not isinstance(prefix, str) or not _PREFIX.match(prefix):
            raise ConfigError(
                f"prefix {prefix!r} is not allowed: "
                "use 1 to 64 of the characters A-Z a-z 0-9 _ . : -"
            )
        self.prefix = prefix
        self.topics = f"{prefix}:topics"
        self.managers = f"{prefix}:managers"
        self.schema = f"{prefix}:schema"
        self.wake = f"{prefix}:wake"
        self.topic = lru_cache(maxsize=4096)(self._topic)

    def _topic(self, topic: str) -> TopicKeys:
        return TopicKeys(self.prefix, topic)

    def pace(self, run: str, window: int) -> str:
        """Where the tasks of one scheduling job count what they send in one window of time."""
        return f"{self.prefix}:pace:{run}:{window}"

    def structure_pattern(self) -> str:
        """A SCAN pattern for every key of every topic but those of single messages."""
        return _escaped(self.prefix) + ":{*}:[^bd]*"

    def bodies_pattern(self) -> str:
        """A SCAN pattern for the bodies of all topics."""
        return _escaped(self.prefix) + ":{*}:body:*"

    def topic_of(self, key: str) -> str | None:
        """The topic that a key belongs to, or None for a key outside any topic."""
        head = f"{self.prefix}:{{"
        if not key.startswith(head):
            return None
        topic, brace, _ = key[len(head) :].partition("}:")
        return topic if brace and is_place(topic) else None


def _escaped(text: str) -> str:
    return re.sub(r"([*?\[\]\\^])", r"\\\1", text)
