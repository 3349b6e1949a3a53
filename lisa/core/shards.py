"""Shards: a topic whose messages lie in several places, each a whole topic at the level of keys.

A place is one key tag. A topic that was never split has a single place of its own name. One with
*n* shards has the places `orders~0ofN`, `orders~1ofN` ...; an id always belongs to the same one of
them. Places of one number are no places of another, so after a change each holds only what was
sent under its own number: the older places are served until they are empty.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, Self
from zlib import crc32

__all__ = [
    "CHANGED",
    "MARK",
    "MOST_SHARDS",
    "PLAIN",
    "Layout",
    "base",
    "bases",
    "count_of",
    "is_of_layout",
    "name",
    "place_of",
    "shard_of",
    "share",
]

MARK = "~"
"""Stands in the name of a place that is not a whole topic; no topic may hold it."""

CHANGED = MARK
"""Follows a topic's name on the wake channel where its layout has changed."""

MOST_SHARDS = 64


def base(place: str) -> str:
    """The topic that a place belongs to."""
    return place.partition(MARK)[0]


def bases(places: Iterable[str]) -> list[str]:
    """The topics of some places, each once, in order of name."""
    return sorted(set(map(base, places)))


def count_of(place: str) -> int:
    """The number of shards that a place is one of."""
    return int(place.rpartition("of")[2]) if MARK in place else 1


def shard_of(place: str) -> str | None:
    """Which shard of its topic a place is, as in `3of8`; None for the topic's own place."""
    return place.partition(MARK)[2] or None


def place_of(topic: str, shard: str | None) -> str:
    """The place of one shard of a topic, as `shard_of` tells it."""
    return f"{topic}{MARK}{shard}" if shard else topic


def name(topic: str, number: int, count: int) -> str:
    """The place of one shard out of `count`."""
    return topic if count == 1 else f"{topic}{MARK}{number}of{count}"


def is_of_layout(field: str) -> bool:
    """Whether a field of the options hash tells how this very server holds the topic."""
    return field in ("layout", "accepts", "lasting") or field.startswith("emptied:")


def share(total: int, count: int) -> int:
    """What one of `count` shards has of a topic's bound, rounded up."""
    return -(-total // count)


class Layout(NamedTuple):
    """Where a topic's messages are.

    number: how often it was changed. shards: how many take new messages. older: earlier numbers of
    shards that still hold something, the latest first. gone: those that hold nothing any more but
    what they counted.
    """

    number: int = 0
    shards: int = 1
    older: tuple[int, ...] = ()
    gone: tuple[int, ...] = ()

    @classmethod
    def read(cls, stored: bytes | str | None) -> Self:
        """From its field in the topic's options; what a foreign hand wrote there is no layout."""
        text = stored.decode("ascii", "replace") if isinstance(stored, bytes) else stored or ""
        try:
            number, count, older, gone = text.split(":")
            return cls(int(number), int(count), _numbers(older), _numbers(gone))
        except ValueError:
            return cls()

    @property
    def is_split(self) -> bool:
        """Whether any place but the topic's own holds messages."""
        return self.shards != 1 or bool(self.older)

    def place(self, topic: str, message_id: str, count: int | None = None) -> str:
        """Where an id belongs; by another number than the present one if `count` says so."""
        count = count or self.shards
        return name(topic, crc32(message_id.encode()) % count, count) if count > 1 else topic

    def current(self, topic: str) -> list[str]:
        """The places that take new messages."""
        return _places(topic, (self.shards,))

    def draining(self, topic: str) -> list[str]:
        """The places that only give away."""
        return _places(topic, self.older)

    def places(self, topic: str) -> list[str]:
        """All places that may hold messages."""
        return _places(topic, (self.shards, *self.older))

    def counted(self, topic: str) -> list[str]:
        """All places that ever held messages, for what they counted."""
        return _places(topic, dict.fromkeys((self.shards, *self.older, *self.gone)))


PLAIN = Layout()
"""That of a topic which was never split."""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(",") if one)


def _places(topic: str, counts: Iterable[int]) -> list[str]:
    return [name(topic, number, count) for count in counts for number in range(count)]
