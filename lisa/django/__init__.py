"""Lisa in Django projects: add "lisa.django" to INSTALLED_APPS.

    LISA = {"server": "redis://localhost:6379/0", "concurrency": 8}     # settings.py

    from lisa.django import consumer, producer                          # shop/handlers.py

    @consumer.on("orders")
    def cancel_unpaid(message): ...

`python manage.py lisa_consumer` imports the module `handlers` of every app and runs them. Handlers
get usable database connections, as views do. `lisa.django.tasks.LisaBackend` runs Django's tasks,
and `lisa.django.outbox` writes messages in transactions.

The setting LISA holds arguments of `Consumer`; `server`, `prefix` and `middleware` are also the
producer's. Without it, both use LISA_REDIS_URL.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any

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
    options = _options()
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


def _options() -> Mapping[str, Any]:
    """The setting LISA. Raises ConfigError for anything but arguments of `Consumer`."""
    from django.conf import settings

    from lisa.consumer import Consumer
    from lisa.core.model.errors import ConfigError

    options = getattr(settings, "LISA", {})
    known = list(signature(Consumer).parameters)
    if not isinstance(options, Mapping):
        raise ConfigError(
            f"the setting LISA is a dict, as in {{'server': 'redis://localhost:6379/0'}}, "
            f"not {options!r}"
        )
    if unknown := [name for name in options if name not in known]:
        raise ConfigError(
            f"the setting LISA has no key {unknown[0]!r}; its keys are {', '.join(known)}"
        )
    return options
