"""The consumer role: read due messages, run handlers and settle the outcomes."""

from lisa.consumer.async_consumer import AsyncConsumer
from lisa.consumer.batches import Batch
from lisa.consumer.consumer import Consumer
from lisa.consumer.delivery import AsyncDelivery, Delivery
from lisa.consumer.lifespan import Lifespan
from lisa.consumer.registration import HandlerOptions
from lisa.consumer.settled import Settled

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
