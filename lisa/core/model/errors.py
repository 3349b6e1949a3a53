"""Lisa's errors.

    LisaError
    +-- InvalidMessage (also ValueError)    an argument that can never succeed
    +-- DuplicateMessage                    on_duplicate="reject" and the id is known
    +-- TopicFull                           the topic has reached its capacity
    |   +-- KeyFull                         the key has as many messages as `max_per_key` allows
    +-- GroupRemoved                        an operator removed the group
    +-- RemovalUnfinished                   the group's removal must finish before it is declared
    +-- TopicInUse                          the topic cannot be deleted now
    +-- ScheduleChanged                     the schedule has another version than `if_version`
    +-- ServerUnavailable                   the server did not answer in time, or refused
    |   +-- NotReplicated                   written, but not to enough replicas in time
    |   +-- Misplaced                       the topic's shards are being changed
    +-- ConfigError                         a setting, permission or password is wrong
    |   +-- TooManyGroups                   the topic has its maximum number of groups
    |   +-- MissingExtra (also ModuleNotFoundError)  an extra must be installed
    +-- StartupFailed                       a consumer's lifespan raised an error at startup

Errors of the Redis client are always converted to one of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class LisaError(Exception):
    """Base class of all errors that Lisa raises.

    `sent`: if a `send_many` fails, the number of messages, from the first, that were settled before
    (accepted, duplicate, ...); the rest is `bodies[error.sent:]`.
    `outcomes`: if only some shards of a topic refused a call, the outcome of each message of that
    call; None for the refused messages. Of a call for all messages of a key, what was done before.
    """

    sent: int = 0
    outcomes: Sequence[Any] = ()


class InvalidMessage(LisaError, ValueError):
    """A topic, id, due time, body or option that can never be accepted."""


class DuplicateMessage(LisaError):
    """The message id is live or was settled within the topic's retention."""


class TopicFull(LisaError):
    """The topic holds as many live messages as its `capacity` allows; the call sent nothing.

    Earlier calls of the same `send_many` were sent: see `sent`.
    """


class KeyFull(TopicFull):
    """A key has as many live messages as the topic's `max_per_key` allows; the call sent nothing.

    A `send_many` sends no message of the same call, whatever its key.
    """


class GroupRemoved(LisaError):
    """The consumer's group has been removed from the topic."""


class RemovalUnfinished(LisaError):
    """A removed group still owes messages, so it cannot be declared again yet.

    A manager finishes an interrupted removal within two minutes; repeating the command also
    finishes it. For a topic with shards, the removal itself raises this error if the group is
    declared again before every shard has removed it.
    """


class ScheduleChanged(LisaError):
    """The schedule has another version than the caller's `if_version`; nothing was changed."""


class TopicInUse(LisaError):
    """The topic cannot be deleted now; the message says what uses it."""


class ServerUnavailable(LisaError):
    """The server gave no usable answer within the time allowed."""


class SlotMoving(ServerUnavailable):
    """The keys of a topic are on two nodes of a cluster, because its slot moves."""


class NotReplicated(ServerUnavailable):
    """Written, but not confirmed by as many replicas as `durability` requires.

    The call may be repeated: a message sent again with the same id is not added twice. `ids` are
    the ids of the messages in the failed call.
    """

    ids: Sequence[str] = ()


class Misplaced(ServerUnavailable):
    """A topic's shards are being changed; the client finds the new ones and repeats the call."""


class ConfigError(LisaError):
    """An invalid setting; the message names the setting and the fix."""


class TooManyGroups(ConfigError):
    """The topic has as many groups as its `max_groups` allows; existing groups are not affected."""


class MissingExtra(ConfigError, ModuleNotFoundError):
    """A package is not installed; the message names the extra of Lisa that contains it."""


class StartupFailed(LisaError):
    """A consumer's lifespan raised an error at startup, which is this error's `__cause__`."""
