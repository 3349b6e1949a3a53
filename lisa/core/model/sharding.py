"""Shards: a topic may spread its messages over several shards, each with its own full set of keys.

A shard is identified by its name, which is the hash tag of its keys. A topic that was never split
has one shard with the topic's own name. A topic with *n* shards has `orders~0ofN`, `orders~1ofN`
and so on; an id always maps to the same shard of a given *n*. Different counts share no shards, so
after a change each shard holds only messages sent under its own count. Shards of earlier counts are
served until they are empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, NewType, Self
from zlib import crc32

Topic = NewType("Topic", str)
"""The name of a topic, as users know it."""

Shard = NewType("Shard", str)
"""The name of a shard, which identifies its keys."""

MARK = "~"
"""Separates topic and shard in the name of a shard; not allowed in topic names."""

KEY_END = "\x1f"
"""Ends the key at the start of a message's id; no key, and no other part of an id, contains it."""

CHANGED = MARK
"""Suffix of a topic's name on the wake channel, announcing a change of its layout."""

MOST_SHARDS = 64

REMOVED = "removed:"
"""Prefix of an options field: an earlier shard count whose keys are to be deleted."""

JOURNALED = "journaled:"
"""Prefix of an options field: the last journal number of a deleted shard."""


def key_of(message_id: str) -> str | None:
    """The key of a message, from its id; None if it has none."""
    key, end, _ = message_id.partition(KEY_END)
    return key if end else None


def topic_of(shard: str) -> Topic:
    """The topic that a shard belongs to."""
    return Topic(shard.partition(MARK)[0])


def topics_of(shards: Iterable[str]) -> list[Topic]:
    """The topics of the given shards, without duplicates, sorted by name."""
    return sorted(set(map(topic_of, shards)))


def own_shard(topic: Topic) -> Shard:
    """The shard that bears the topic's name: the one with the options; the only one by default."""
    return Shard(topic)


def count_of(shard: str) -> int:
    """The shard count that a shard's name refers to."""
    return int(shard.rpartition("of")[2]) if MARK in shard else 1


def shard_suffix(shard: str) -> str | None:
    """The part of a shard's name after the topic, such as `3of8`; None for an unsplit topic."""
    return shard.partition(MARK)[2] or None


def shard_named(topic: str, suffix: str | None) -> Shard:
    """The name of a shard from its topic and the result of `shard_suffix`."""
    return Shard(f"{topic}{MARK}{suffix}" if suffix else topic)


def name(topic: Topic, number: int, count: int) -> Shard:
    """The name of shard `number` out of `count`."""
    return Shard(topic if count == 1 else f"{topic}{MARK}{number}of{count}")


def is_of_layout(field: str) -> bool:
    """Whether a field of the options hash describes the layout, or other state, of this server."""
    marks = ("emptied:", REMOVED, JOURNALED)
    names = ("layout", "accepts", "lasting", "limits", "lanes_changed")
    return field in names or field.startswith(marks)


def share(total: int, count: int) -> int:
    """One shard's part of a topic-wide limit, rounded up."""
    return -(-total // count)


class Layout(NamedTuple):
    """The shards of a topic.

    number: version of the layout, incremented by each change. shards: number of shards that accept
    new messages. older: earlier shard counts whose shards still hold messages, latest first. gone:
    earlier shard counts whose shards hold only counters.
    """

    number: int = 0
    shards: int = 1
    older: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()

    @classmethod
    def read(cls, stored: bytes | str | None) -> Self:
        """Read the layout field of a topic's options; an unreadable field yields the default."""
        text = stored.decode("ascii", "replace") if isinstance(stored, bytes) else stored or ""
        try:
            number, count, older, gone = text.split(":")
            return cls(int(number), int(count), _numbers(older), _numbers(gone))
        except ValueError:
            return cls()

    @property
    def is_split(self) -> bool:
        """Whether any shard other than the topic's own may hold messages."""
        return self.shards != 1 or bool(self.older)

    def shard_for(self, topic: Topic, message_id: str, count: int | None = None) -> Shard:
        """The shard of an id, under the current shard count or under `count`."""
        count = count or self.shards
        if count == 1:
            return own_shard(topic)
        # Messages with the same key share a shard.
        return name(topic, crc32(message_id.partition(KEY_END)[0].encode()) % count, count)

    def shards_of_id(self, topic: Topic, message_id: str) -> list[Shard]:
        """Names of the shards that may contain an id: the current one, then older ones."""
        counts = dict.fromkeys((self.shards, *self.older))
        return [self.shard_for(topic, message_id, count) for count in counts]

    def current(self, topic: Topic) -> list[Shard]:
        """The shards that accept new messages."""
        return _shard_names(topic, (self.shards,))

    def draining(self, topic: Topic) -> list[Shard]:
        """The shards of earlier counts, which accept no new messages."""
        return _shard_names(topic, self.older)

    def active(self, topic: Topic) -> list[Shard]:
        """All shards that may hold messages."""
        return _shard_names(topic, (self.shards, *self.older))

    def counted(self, topic: Topic) -> list[Shard]:
        """All shards that ever held messages, including those that hold only counters."""
        return _shard_names(topic, dict.fromkeys((self.shards, *self.older, *self.gone)))


PLAIN = Layout()
"""The layout of a topic that was never split."""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(",") if part)


def _shard_names(topic: Topic, counts: Iterable[int]) -> list[Shard]:
    return [name(topic, number, count) for count in counts for number in range(count)]
