"""Builds every key that Lisa writes.

All keys of a topic (or of one of its shards) share a hash tag, so a transition touches a single
slot and works on Redis Cluster.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.sharding import KEY_END, Shard

DEFAULT_PREFIX = "lisa"
DEFAULT_GROUP = "lisa"
"""The group that is declared on a topic if no group is named."""

MAX_ID_BYTES = 256
SHOWN_END = " / "
"""What people read between a key and the rest of an id."""

COALESCED_IDS = ("~1", "~2")
"""The own ids of the two messages that the coalescing sends of a key share."""

WINDOW_HEADER = "lisa-window"
"""The header with a message's own window: the first one, so that scripts find it quickly."""

LOCAL_HEADER = "lisa-local"
"""The header with the wall time at which a message is due."""

_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}\Z")
_SHARD_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,128}(?:~\d{1,2}of\d{1,2})?\Z")
_PREFIX = re.compile(r"[A-Za-z0-9_.:-]{1,64}\Z")
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f]")

TOPIC_KEYS = (
    "waiting",
    "policy",
    "expiry",
    "options",
    "groups",
    "stats",
    "keyed",
    "events",
)
"""A topic's keys in the order in which every script receives them."""

HIGHEST_LATENESS = "late_max"
"""The field of `stats`, before @<group>, with a group's highest lateness above a second, in ms."""


def check_topic(topic: str) -> str:
    """Return the topic, or raise InvalidMessage if it is not a valid name."""
    return _check_name("topic", topic)


def is_shard_name(name: str) -> bool:
    """Whether `name` is a valid name of a topic or a shard (see core.model.sharding)."""
    return _SHARD_NAME.match(name) is not None


def check_group(group: str) -> str:
    """Return the group, or raise InvalidMessage if it is not a valid name."""
    return _check_name("group", group)


def _check_name(what: str, name: str) -> str:
    if not isinstance(name, str) or not _NAME.match(name):
        raise InvalidMessage(
            f"{what} {name!r} is not allowed: use 1 to 128 of the characters A-Z a-z 0-9 _ . : -"
        )
    return name if type(name) is str else plain_text(name)


def plain_text(text: str) -> str:
    """The text itself, also of a subclass: a member of an Enum would name its class in a key."""
    return text if type(text) is str else str.__str__(text)


def check_id(message_id: str) -> str:
    """Return the id of a message, or raise InvalidMessage.

    It is an id as `check_own_id` describes it, for a message with a key after the key and KEY_END.
    """
    if isinstance(message_id, str) and KEY_END in message_id:
        key, _, own_id = message_id.partition(KEY_END)
        return keyed_id(check_key(key), check_own_id(own_id))
    return check_own_id(message_id)


def check_own_id(message_id: str) -> str:
    """Return an id without a key: 1 to 256 bytes, no control characters. Raises InvalidMessage."""
    return _check_text("message id", message_id)


def check_key(key: str) -> str:
    """Return the key, or raise InvalidMessage: 1 to 256 bytes of UTF-8, no control characters."""
    return _check_text("key", key)


def _check_text(what: str, value: str) -> str:
    if not isinstance(value, str):
        raise InvalidMessage(f"a {what} must be a str, not {type(value).__name__}")
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError:
        raise InvalidMessage(f"{what} {value!r} cannot be written as UTF-8") from None
    if not 1 <= size <= MAX_ID_BYTES:
        raise InvalidMessage(
            f"a {what} has 1 to {MAX_ID_BYTES} bytes; this one has {size}: {value[:32]!r}"
        )
    if not value.isprintable() and _CONTROL.search(value):
        raise InvalidMessage(f"{what} {value!r} contains control characters")
    return plain_text(value)


def keyed_id(key: str | None, own_id: str) -> str:
    """The id of a message from its key, if it has one, and the rest of its id."""
    return own_id if key is None else f"{key}{KEY_END}{own_id}"


def own_id_of(message_id: str) -> str:
    """The rest of an id after the key, if the message has one."""
    return message_id.rpartition(KEY_END)[2]


def shown_id(message_id: str) -> str:
    """An id as people read it: of a message with a key, `key / id`."""
    return message_id.replace(KEY_END, SHOWN_END)


class GroupKeys(NamedTuple):
    """One group's keys, in the order in which every script receives them, group by group."""

    ready: str
    entries: str
    retry: str
    garbage: str
    attempts: str
    reasons: str
    leases: str


GROUP_KEYS = GroupKeys._fields


class LaneKeys(NamedTuple):
    """One group's keys of its lanes, in the order in which scripts receive them."""

    lanes: str
    parked: str
    queues: str
    turns: str
    closed: str


LANE_KEYS = LaneKeys._fields


class TopicKeys:
    """The keys of one topic, or of one shard of a topic."""

    def __init__(self, prefix: str, topic: str) -> None:
        self.topic = topic if is_shard_name(topic) else check_topic(topic)
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
            self.keyed,
            self.events,
        ) = self.shared
        self.consumers = self.root + "consumers"
        self.limits = self.root + "limits"
        self.history = self.root + "history"
        self.archived = self.root + "archived"
        self.confirm = self.root + "confirm"
        self.schedules = self.root + "schedules"
        self.ticks = self.root + "ticks"
        self.local = self.root + "local"
        self.throttled = self.root + "throttled"
        self.run = self.root + "run"
        self._body = self.root + "body:"
        self._done = self.root + "done:"
        self._reply = self.root + "reply:"
        self._groups: dict[str, GroupKeys] = {}

    def group(self, name: str) -> GroupKeys:
        """The keys of one group of this topic."""
        found = self._groups.get(name)
        if found is None:
            head = f"{self.root}g:{check_group(name)}:"
            found = self._groups[name] = GroupKeys(*(head + key for key in GROUP_KEYS))
        return found

    def lanes(self, name: str) -> LaneKeys:
        """The keys of one group's lanes."""
        head = f"{self.root}g:{check_group(name)}:"
        return LaneKeys(*(head + key for key in LANE_KEYS))

    def body(self, message_id: str) -> str:
        """The key of a live message's envelope."""
        return self._body + message_id

    def done(self, message_id: str) -> str:
        """The key of a settled message's tombstone."""
        return self._done + message_id

    def bodies(self, ids: Iterable[str]) -> list[str]:
        """The keys of several messages' envelopes."""
        return list(map(self._body.__add__, ids))

    def tombstones(self, ids: Iterable[str]) -> list[str]:
        """The keys of several messages' tombstones."""
        return list(map(self._done.__add__, ids))

    def bodies_and_tombstones(self, ids: Iterable[str]) -> list[str]:
        """The keys of several messages: body and tombstone of the first, then of the next."""
        return [head + message_id for message_id in ids for head in (self._body, self._done)]

    def reply(self, call_id: str) -> str:
        """The key of the stored answer to a call, which repeated calls read."""
        return self._reply + call_id

    def run_stop(self, run: str) -> str:
        """The key of a request to stop a run on the topic's garbage, and of the answer to it."""
        return f"{self.run}:stop:{run}"

    def bodies_pattern(self) -> str:
        """A SCAN pattern for all bodies of this topic."""
        return _escaped(self._body) + "*"

    def group_of(self, key: str) -> str | None:
        """The group that a key belongs to, or None; the reverse of `group`."""
        head = self.root + "g:"
        if not key.startswith(head):
            return None
        name, _, kind = key[len(head) :].rpartition(":")
        return name if kind in GROUP_KEYS + LANE_KEYS and _NAME.match(name) else None

    def id_of_body(self, key: str) -> str:
        """The id that a body's key belongs to; the reverse of `body`."""
        return key[len(self._body) :]


class Keys:
    """All keys under one prefix.

    The prefix must not contain braces, which would change the hash tag. Raises ConfigError.
    """

    @classmethod
    def of(cls, prefix: str | None) -> Keys:
        """The keys of a prefix; None means LISA_PREFIX, or else `lisa`."""
        if prefix is None:
            prefix = os.environ.get("LISA_PREFIX", "").strip() or DEFAULT_PREFIX
        return cls(prefix)

    def __init__(self, prefix: str = DEFAULT_PREFIX) -> None:
        if not isinstance(prefix, str) or not _PREFIX.match(prefix):
            raise ConfigError(
                f"prefix {prefix!r} is not allowed: "
                "use 1 to 64 of the characters A-Z a-z 0-9 _ . : -"
            )
        self.prefix = prefix
        self.topics = f"{prefix}:topics"
        self.managers = f"{prefix}:managers"
        self.relays = f"{prefix}:relays"
        self.loaders = f"{prefix}:loaders"
        self.scheduled = f"{prefix}:scheduled"
        self.schema = f"{prefix}:schema"
        self.wake = f"{prefix}:wake"
        self.topic = lru_cache(maxsize=16_384)(self._topic)

    def _topic(self, topic: str) -> TopicKeys:
        return TopicKeys(self.prefix, topic)

    def pace(self, run: str, window: int) -> str:
        """The key in which the tasks of one scheduling job count their sends per time window."""
        return f"{self.prefix}:pace:{run}:{window}"

    def logout(self, session: str) -> str:
        """The key that says that a session of the web page has ended; expires with the session."""
        return f"{self.prefix}:logout:{session}"

    def under(self, rest: str) -> str:
        """A key, or the pattern of keys, under the prefix."""
        return f"{self.prefix}:{rest}"

    def patterns(self) -> tuple[str, ...]:
        """Patterns of an ACL for the keys that all roles use, and for no key of another prefix.

        A prefix may begin with this one and a colon, so `prefix:*` would be too wide.
        """
        names = ("{*", "topics", "managers", "relays", "loaders", "scheduled", "schema")
        return tuple(map(self.under, names))

    def structure_pattern(self) -> str:
        """A SCAN pattern for all topic keys except those of single messages, calls and runs."""
        return _escaped(self.prefix) + ":{*}:[^bdr]*"

    def bodies_pattern(self) -> str:
        """A SCAN pattern for the bodies of all topics."""
        return _escaped(self.prefix) + ":{*}:body:*"

    def shard_of(self, key: str) -> Shard | None:
        """The shard that a key belongs to, or None for a key outside any topic."""
        head = f"{self.prefix}:{{"
        if not key.startswith(head):
            return None
        name, brace, _ = key[len(head) :].partition("}:")
        return Shard(name) if brace and is_shard_name(name) else None


def _escaped(text: str) -> str:
    return re.sub(r"([*?\[\]\\^])", r"\\\1", text)
