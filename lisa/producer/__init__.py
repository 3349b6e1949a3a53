"""The producer role: send, cancel, reschedule and look up messages.

What few programs need is loaded at first use: start-up time matters to services that only send.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from lisa.core.transitions.change import Cancelled, Rescheduled
from lisa.core.transitions.enqueue import OnDuplicate, SendOutcome, Sent
from lisa.producer.calls import SendCall, SendReport, Single
from lisa.producer.plan import DueOptions, Late, Outgoing, RetryDelays, SendOptions, option_texts
from lisa.producer.producer import AsyncProducer, Producer

if TYPE_CHECKING:
    from lisa.core.model.recurring.definition import ScheduleDefinition
    from lisa.core.store.inspection import FoundInGroup, FoundMessage, State
    from lisa.core.store.keyed import KeyOutcome
    from lisa.core.store.schedules import ScheduleInfo
    from lisa.producer.gateway_producer import GatewayProducer

__all__ = [
    "AsyncProducer",
    "Cancelled",
    "DueOptions",
    "FoundInGroup",
    "FoundMessage",
    "GatewayProducer",
    "KeyOutcome",
    "Late",
    "OnDuplicate",
    "Outgoing",
    "Producer",
    "Rescheduled",
    "RetryDelays",
    "ScheduleDefinition",
    "ScheduleInfo",
    "SendCall",
    "SendOptions",
    "SendOutcome",
    "SendReport",
    "Sent",
    "Single",
    "State",
    "option_texts",
]

_LATE = dict.fromkeys(("FoundInGroup", "FoundMessage", "State"), "lisa.core.store.inspection")
_LATE["KeyOutcome"] = "lisa.core.store.keyed"
_LATE["ScheduleInfo"] = "lisa.core.store.schedules"
_LATE["ScheduleDefinition"] = "lisa.core.model.recurring.definition"
_LATE["GatewayProducer"] = "lisa.producer.gateway_producer"


def __getattr__(name: str) -> object:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATE[name]), name)
    return value
