"""The consumer role: read due messages, run handlers and settle the outcomes."""

from lisa.consumer.batches import Batch
from lisa.consumer.consumer import Consumer
from lisa.consumer.delivery import Delivery

__all__ = ["Batch", "Consumer", "Delivery"]
