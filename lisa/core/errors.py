"""What can go wrong, as a family.

    LisaError
    +-- InvalidMessage (also ValueError)    an argument that no retry will mend
    +-- DuplicateMessage                    on_duplicate="reject" met a known id
    +-- TopicFull                           the topic's capacity is used up
    +-- GroupRemoved                        the group was taken away by an operator
    +-- RemovalUnfinished                   it still owes messages, and cannot be declared again yet
    +-- ServerUnavailable                   the server did not answer, or refused, in time
    |   +-- NotReplicated                   written, but too few replicas had it in time
    |   +-- Misplaced                       the topic is just being split over other shards
    +-- ConfigError                         a setting, a right or a password is wrong

Errors of the Redis client never reach the user raw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = [
    "ConfigError",
    "DuplicateMessage",
    "GroupRemoved",
    "InvalidMessage",
    "LisaError",
    "Misplaced",
    "NotReplicated",
    "RemovalUnfinished",
    "ServerUnavailable",
    "TopicFull",
]


class LisaError(Exception):
    """The root of every error that Lisa raises.

    `sent`: where a `send_many` ends in an error, how many of its messages, from the first on, were
    settled before (accepted, duplicate, ...): what remains is `bodies[error.sent:]`.
    `outcomes`: where a topic is split over shards and only some refused a call, what became of its
    messages, None for those that were refused.
    """

    sent: int = 0
    outcomes: Sequence[Any] = ()


class InvalidMessage(LisaError, ValueError):
    """A topic, id, due time, body or option that can never be accepted."""


class DuplicateMessage(LisaError):
    """The id is live or was settled within the topic's retention."""


class TopicFull(LisaError):
    """The topic holds as many live messages as its `capacity` allows; nothing was sent.

    Of a `send_many` the calls before this one were sent: see `sent`.
    """


class GroupRemoved(LisaError):
    """The consumer's group is no longer declared on the topic."""


class RemovalUnfinished(LisaError):
    """A group that was removed still owes messages: once it owes none it can be declared again.

    A removal that was cut short is taken up by a manager within two minutes, or finished by giving
    the command again. Whoever removes a group of a topic with shards is told so where somebody
    declared it anew before all of them had let it go.
    """


class ServerUnavailable(LisaError):
    """No usable answer from the server within the time allowed."""


class NotReplicated(ServerUnavailable):
    """Written, but not confirmed by as many replicas as `durability` asks for.

    The call may be repeated: sent again with the same id, a message is not added twice. `ids` are
    the messages of the call that failed.
    """

    ids: Sequence[str] = ()


class Misplaced(ServerUnavailable):
    """A topic's shards are being changed; whoever calls finds the new ones by itself."""


class ConfigError(LisaError):
    """A setting that cannot work; the text names it and the cure."""
