"""The producer role: sends messages, takes them back, moves and finds them."""

from lisa.core.transitions.cancel import Cancelled
from lisa.core.transitions.enqueue import OnDuplicate, Sent
from lisa.core.transitions.reschedule import Rescheduled
from lisa.producer.found import FoundInGroup, FoundMessage, State
from lisa.producer.plan import Outgoing, RetryDelays, SendOptions
from lisa.producer.producer import AsyncProducer, Producer
from lisa.producer.report import SendOutcome, SendReport

__all__ = [
    "AsyncProducer",
    "Cancelled",
    "FoundInGroup",
    "FoundMessage",
    "OnDuplicate",
    "Outgoing",
    "Producer",
    "Rescheduled",
    "RetryDelays",
    "SendOptions",
    "SendOutcome",
    "SendReport",
    "Sent",
    "State",
]
