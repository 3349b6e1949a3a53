"""The consumer role: read due messages, run handlers and settle the outcomes."""

from lisa.consumer.async_consumer import AsyncConsumer
from lisa.consumer.consumer import Consumer, HandlerOptions
from lisa.consumer.handlers import Batch
from lisa.consumer.lifespan import Lifespan
from lisa.consumer.pull import AsyncDelivery, Delivery
from lisa.consumer.settler import Settled

__all__ = [
    "AsyncConsumer",
    "AsyncDelivery",
    "Batch",
    "Consumer",
    "Delivery",
    "HandlerOptions",
    "Lifespan",
    "Settled",
]
