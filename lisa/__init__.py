"""Lisa: delayed messages on Redis Streams, never early, within milliseconds, never lost.

    import lisa
    from datetime import timedelta

    lisa.send("orders", {"order": 42}, delay=timedelta(minutes=30))

A `Producer` sends messages, a `Manager` promotes those that are due, and a `Consumer` calls
handlers. Every name is loaded at first use, so `import lisa` does not import the Redis client or
the scheduler.
"""

from __future__ import annotations

import importlib
import importlib.machinery
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lisa.consumer import (
        AsyncConsumer,
        AsyncDelivery,
        Batch,
        Consumer,
        Delivery,
        HandlerOptions,
        Lifespan,
        Settled,
    )
    from lisa.core.model.durability import Replicas, replicas
    from lisa.core.model.errors import (
        ConfigError,
        DuplicateMessage,
        GroupRemoved,
        InvalidMessage,
        KeyFull,
        LisaError,
        NotReplicated,
        RemovalUnfinished,
        ScheduleChanged,
        ServerUnavailable,
        StartupFailed,
        TooManyGroups,
        TopicFull,
    )
    from lisa.core.model.lanes import KeyOrder, Rate
    from lisa.core.model.late import LateAction, LatePolicy, Ramp
    from lisa.core.model.message import Message
    from lisa.core.model.options import TopicOptions
    from lisa.core.model.outcomes import Defer, Discard, Limited, Retry
    from lisa.core.model.retry_policy import RetryPolicy
    from lisa.core.model.signals import (
        message_acked,
        message_dead,
        message_expired,
        message_received,
        message_retrying,
    )
    from lisa.core.redis.address import Address
    from lisa.manager import Manager
    from lisa.middleware import Middleware
    from lisa.producer import (
        AsyncProducer,
        Cancelled,
        FoundInGroup,
        FoundMessage,
        KeyOutcome,
        Late,
        OnDuplicate,
        Outgoing,
        Producer,
        Rescheduled,
        RetryDelays,
        ScheduleDefinition,
        ScheduleInfo,
        SendCall,
        SendOptions,
        SendOutcome,
        SendReport,
        Sent,
        State,
    )
    from lisa.producer.on_commit import OnCommit
    from lisa.producer.producer import (
        backfill_schedule,
        cancel,
        cancel_key,
        cancel_many,
        close,
        count_key,
        fire_key,
        fire_now,
        get,
        get_schedule,
        list_key,
        next_ticks,
        on_commit,
        pause_schedule,
        remove_schedule,
        reschedule,
        reschedule_key,
        resume_schedule,
        run_schedule,
        schedule,
        schedules,
        send,
        send_many,
        send_one,
        send_stream,
    )

__version__ = "0.2.0.dev0"

__all__ = [
    "Address",
    "AsyncConsumer",
    "AsyncDelivery",
    "AsyncProducer",
    "Batch",
    "Cancelled",
    "ConfigError",
    "Consumer",
    "Defer",
    "Delivery",
    "Discard",
    "DuplicateMessage",
    "FoundInGroup",
    "FoundMessage",
    "GroupRemoved",
    "HandlerOptions",
    "InvalidMessage",
    "KeyFull",
    "KeyOrder",
    "KeyOutcome",
    "Late",
    "LateAction",
    "LatePolicy",
    "Lifespan",
    "Limited",
    "LisaError",
    "Manager",
    "Message",
    "Middleware",
    "NotReplicated",
    "OnCommit",
    "OnDuplicate",
    "Outgoing",
    "Producer",
    "Ramp",
    "Rate",
    "RemovalUnfinished",
    "Replicas",
    "Rescheduled",
    "Retry",
    "RetryDelays",
    "RetryPolicy",
    "ScheduleChanged",
    "ScheduleDefinition",
    "ScheduleInfo",
    "SendCall",
    "SendOptions",
    "SendOutcome",
    "SendReport",
    "Sent",
    "ServerUnavailable",
    "Settled",
    "StartupFailed",
    "State",
    "TooManyGroups",
    "TopicFull",
    "TopicOptions",
    "__version__",
    "backfill_schedule",
    "cancel",
    "cancel_key",
    "cancel_many",
    "close",
    "count_key",
    "fire_key",
    "fire_now",
    "get",
    "get_schedule",
    "list_key",
    "message_acked",
    "message_dead",
    "message_expired",
    "message_received",
    "message_retrying",
    "next_ticks",
    "on_commit",
    "pause_schedule",
    "remove_schedule",
    "replicas",
    "reschedule",
    "reschedule_key",
    "resume_schedule",
    "run_schedule",
    "schedule",
    "schedules",
    "send",
    "send_many",
    "send_one",
    "send_stream",
]

_HOMES = {
    "lisa.consumer": (
        "AsyncConsumer",
        "AsyncDelivery",
        "Batch",
        "Consumer",
        "Delivery",
        "HandlerOptions",
        "Lifespan",
        "Settled",
    ),
    "lisa.core.model.durability": ("Replicas", "replicas"),
    "lisa.core.model.message": ("Message",),
    "lisa.core.model.options": ("TopicOptions",),
    "lisa.core.model.outcomes": ("Defer", "Discard", "Limited", "Retry"),
    "lisa.core.model.lanes": ("KeyOrder", "Rate"),
    "lisa.core.model.late": ("LateAction", "LatePolicy", "Ramp"),
    "lisa.core.model.retry_policy": ("RetryPolicy",),
    "lisa.core.model.signals": (
        "message_acked",
        "message_dead",
        "message_expired",
        "message_received",
        "message_retrying",
    ),
    "lisa.manager": ("Manager",),
    "lisa.middleware": ("Middleware",),
    "lisa.core.redis.address": ("Address",),
    "lisa.producer": (
        "AsyncProducer",
        "Cancelled",
        "FoundInGroup",
        "FoundMessage",
        "KeyOutcome",
        "OnDuplicate",
        "Outgoing",
        "Producer",
        "Rescheduled",
        "Late",
        "RetryDelays",
        "ScheduleDefinition",
        "ScheduleInfo",
        "SendCall",
        "SendOptions",
        "SendOutcome",
        "SendReport",
        "Sent",
        "State",
    ),
    "lisa.producer.on_commit": ("OnCommit",),
    "lisa.producer.producer": (
        "backfill_schedule",
        "cancel",
        "cancel_key",
        "cancel_many",
        "close",
        "count_key",
        "fire_key",
        "fire_now",
        "get",
        "get_schedule",
        "list_key",
        "next_ticks",
        "on_commit",
        "pause_schedule",
        "remove_schedule",
        "reschedule",
        "reschedule_key",
        "resume_schedule",
        "run_schedule",
        "schedule",
        "schedules",
        "send",
        "send_many",
        "send_one",
        "send_stream",
    ),
}
_HOME_OF = dict.fromkeys(__all__, "lisa.core.model.errors") | {
    name: home for home, names in _HOMES.items() for name in names
}
"""The module of every public name; names that `_HOMES` does not list are errors."""


# Without the extra `standard` there is no manager: `from lisa import *` imports the other names.
if importlib.machinery.PathFinder.find_spec("apscheduler") is None:
    del __all__[__all__.index("Manager")]  # type checkers know it nevertheless


def __getattr__(name: str) -> object:
    """Load a public name at its first use (PEP 562)."""
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOME_OF.keys())
