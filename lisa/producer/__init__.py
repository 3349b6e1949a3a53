"""The producer role: send, cancel, reschedule and look up messages."""

from lisa.core.store.inspection import FoundInGroup, FoundMessage, State
from lisa.core.transitions.cancel import Cancelled
from lisa.core.transitions.enqueue import OnDuplicate, Sent
from lisa.core.transitions.reschedule import Rescheduled
from lisa.producer.calls import Single
from lisa.producer.gateway_producer import GatewayProducer
from lisa.producer.plan import Outgoing, RetryDelays, SendOptions
from lisa.producer.producer import AsyncProducer, Producer
from lisa.producer.report import SendOutcome, SendReport

__all__ = [
    "AsyncProducer",
    "Cancelled",
    "FoundInGroup",
    "FoundMessage",
    "GatewayProducer",
    "OnDuplicate",
    "Outgoing",
    "Producer",
    "Rescheduled",
    "RetryDelays",
    "SendOptions",
    "SendOutcome",
    "SendReport",
    "Sent",
    "Single",
    "State",
]
