"""`lisa-consumer handlers` runs this handler."""

from __future__ import annotations

from lisa import Consumer, Message

consumer = Consumer(concurrency=100)


@consumer.on("orders")
async def cancel_unpaid(message: Message) -> None:
    """Cancel an order that is still unpaid."""
    print("cancelled", message.body["order"], flush=True)
