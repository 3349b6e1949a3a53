"""The shop's table."""

from django.db import models, transaction

from lisa.django import outbox


class Order(models.Model):
    """An order is new, then paid or cancelled."""

    state = models.CharField(max_length=9, default="new")

    @classmethod
    def place(cls, *, minutes: float) -> "Order":
        """Place an order that is cancelled if it is not paid in time."""
        with transaction.atomic():
            order = cls.objects.create()
            outbox.send(
                "order-timeouts",
                {"order": order.pk},
                id=f"order-{order.pk}",
                delay=f"{60 * minutes}s",
            )
        return order

    def pay(self) -> None:
        """Pay, and cancel the time-out; if it has begun, it finds the order paid."""
        with transaction.atomic():
            if Order.objects.filter(pk=self.pk, state="new").update(state="paid"):
                outbox.cancel("order-timeouts", f"order-{self.pk}")
