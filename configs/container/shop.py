"""An example of handlers, for `lisa-consumer shop`: put your own in its place."""

import logging

from lisa import Consumer, Message

consumer = Consumer()
log = logging.getLogger(__name__)


@consumer.on("orders")
def cancel_unpaid(message: Message) -> None:
    """Called when an order's time to be paid is up."""
    log.info("order %s was not paid in time", message.body)
