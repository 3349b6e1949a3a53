"""Lisa in Django projects: add "lisa.django" to INSTALLED_APPS.

    LISA = {"server": "redis://localhost:6379/0", "concurrency": 8}     # settings.py

    from lisa.django import consumer, producer                          # shop/handlers.py

    @consumer.on("orders")
    def cancel_unpaid(message): ...

`python manage.py lisa_consumer` imports the module `handlers` of every app and runs them. Handlers
get usable database connections, as views do. `lisa.django.tasks.LisaBackend` runs Django's tasks.

The setting LISA holds arguments of `Consumer`; `server`, `prefix` and `middleware` are also the
producer's.
Without it, both use LISA_REDIS_URL.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lisa.django.handling import DjangoConsumer
    from lisa.producer import Producer

    consumer: DjangoConsumer
    producer: Producer

__all__ = ["consumer", "producer"]


def __getattr__(name: str) -> object:
    """Create `consumer` and `producer` at their first use, when the settings can be read."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from django.conf import settings

    options = getattr(settings, "LISA", {})
    if name == "consumer":
        from lisa.django.handling import DjangoConsumer

        value: object = DjangoConsumer(**options)
    else:
        from lisa.producer import Producer

        value = Producer(
            options.get("server"),
            prefix=options.get("prefix"),
            middleware=options.get("middleware", ()),
        )
    return globals().setdefault(name, value)
