"""The shop's table."""

from functools import partial

from django.db import models, transaction

from lisa.django import producer


class Order(models.Model):
    """An order is new, then paid or cancelled."""

    state = models.CharField(max_length=9, default="new")

    @classmethod
    def place(cls, *, minutes: float) -> "Order":
        """Place an order that is cancelled if it is not paid in time."""
        with transaction.atomic():
            order = cls.objects.create()
            # After the commit: a message of an order that was rolled back would find nothing.
            send = partial(producer.send, "order-timeouts", {"order": order.pk})
            transaction.on_commit(partial(send, id=f"order-{order.pk}", delay=f"{60 * minutes}s"))
        return order

    def pay(self) -> None:
        """Pay; the timeout is cancelled, or finds the order paid."""
        Order.objects.filter(pk=self.pk, state="new").update(state="paid")
        producer.cancel("order-timeouts", f"order-{self.pk}")
