"""`manage.py lisa_consumer` imports this module."""

from lisa import Message
from lisa.django import consumer
from shop.models import Order
from shop.tasks import send_apology


@consumer.on("order-timeouts")
def cancel_unpaid(message: Message) -> None:
    """Cancel an order that is still unpaid; doing so twice changes nothing."""
    order = message.body["order"]
    if Order.objects.filter(pk=order, state="new").update(state="cancelled"):
        send_apology.enqueue(order)
