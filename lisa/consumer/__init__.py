"""The consumer role: reader, dispatcher, settler, heartbeat, signals."""

from lisa.consumer.batches import Batch
from lisa.consumer.consumer import Consumer
from lisa.consumer.delivery import Delivery

__all__ = ["Batch", "Consumer", "Delivery"]
