"""`lisa-consumer handlers` runs this handler."""

from shop import Order, sessions  # type: ignore[import-not-found]
from sqlalchemy import update

from lisa import Consumer, Message

consumer = Consumer(concurrency=100)


@consumer.on("orders")
async def cancel_unpaid(message: Message) -> None:
    """Cancel an order that is still unpaid; doing so twice changes nothing."""
    unpaid = (Order.id == message.body["order"]) & (Order.state == "new")
    async with sessions.begin() as session:
        await session.execute(update(Order).where(unpaid).values(state="cancelled"))
