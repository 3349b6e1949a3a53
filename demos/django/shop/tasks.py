"""Tasks of Django, which Lisa runs."""

from shop.models import Order

try:
    from django.tasks import task
except ImportError:  # before Django 6
    from django_tasks import task


@task()
def send_apology(order: int) -> None:
    """Tell the customer."""
    Order.objects.filter(pk=order).update(state="apology")
