"""Lisa: delayed messages on Redis Streams, never early, within milliseconds, never lost.

    import lisa
    from datetime import timedelta

    lisa.send("orders", {"order": 42}, delay=timedelta(minutes=30))

A `Producer` sends, a `Manager` moves what is due, a `Consumer` hands it to handlers. Every name is
loaded when it is first used, so `import lisa` costs nothing of the client's or scheduler's start.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lisa.consumer import Batch, Consumer
    from lisa.core.durability import Replicas, replicas
    from lisa.core.errors import (
        ConfigError,
        DuplicateMessage,
        GroupRemoved,
        InvalidMessage,
        LisaError,
        NotReplicated,
        RemovalUnfinished,
        ServerUnavailable,
        TopicFull,
    )
    from lisa.core.message import Message
    from lisa.core.options import TopicOptions
    from lisa.core.outcomes import Discard, Retry
    from lisa.core.retry_policy import RetryPolicy
    from lisa.core.signals import (
        message_acked,
        message_dead,
        message_expired,
        message_received,
        message_retrying,
    )
    from lisa.manager import Manager
    from lisa.producer import AsyncProducer, Outgoing, Producer
    from lisa.producer.shared import (
        cancel,
        cancel_many,
        close,
        fire_now,
        get,
        reschedule,
        send,
        send_many,
        send_stream,
    )

__version__ = "0.1.0"

__all__ = [
    "AsyncProducer",
    "Batch",
    "ConfigError",
    "Consumer",
    "Discard",
    "DuplicateMessage",
    "GroupRemoved",
    "InvalidMessage",
    "LisaError",
    "Manager",
    "Message",
    "NotReplicated",
    "Outgoing",
    "Producer",
    "RemovalUnfinished",
    "Replicas",
    "Retry",
    "RetryPolicy",
    "ServerUnavailable",
    "TopicFull",
    "TopicOptions",
    "__version__",
    "cancel",
    "cancel_many",
    "close",
    "fire_now",
    "get",
    "message_acked",
    "message_dead",
    "message_expired",
    "message_received",
    "message_retrying",
    "replicas",
    "reschedule",
    "send",
    "send_many",
    "send_stream",
]

_ERRORS = (
    "ConfigError",
    "DuplicateMessage",
    "GroupRemoved",
    "InvalidMessage",
    "LisaError",
    "NotReplicated",
    "RemovalUnfinished",
    "ServerUnavailable",
    "TopicFull",
)
_HOMES = {
    "lisa.consumer": ("Batch", "Consumer"),
    "lisa.core.durability": ("Replicas", "replicas"),
    "lisa.core.errors": _ERRORS,
    "lisa.core.message": ("Message",),
    "lisa.core.options": ("TopicOptions",),
    "lisa.core.outcomes": ("Discard", "Retry"),
    "lisa.core.retry_policy": ("RetryPolicy",),
    "lisa.core.signals": (
        "message_acked",
        "message_dead",
        "message_expired",
        "message_received",
        "message_retrying",
    ),
    "lisa.manager": ("Manager",),
    "lisa.producer": ("AsyncProducer", "Outgoing", "Producer"),
    "lisa.producer.shared": (
        "cancel",
        "cancel_many",
        "close",
        "fire_now",
        "get",
        "reschedule",
        "send",
        "send_many",
        "send_stream",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> object:
    """Load a public name at its first use (PEP 562)."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOME_OF.keys())
