"""A consumer whose handlers get usable database connections."""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any

from django.db import close_old_connections

from lisa.consumer import Consumer
from lisa.consumer.handlers import Handlers


def with_connections(handler: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A handler that closes broken and outdated connections before and after, as requests do.

    Django's connections belong to threads, and those of a consumer live for weeks. `async def`
    handlers reach the database through Django's own threads and stay as they are.
    """
    if iscoroutinefunction(handler):
        return handler

    @functools.wraps(handler)
    def handle(message: Any) -> Any:
        close_old_connections()
        try:
            return handler(message)
        finally:
            close_old_connections()

    return handle


class ConnectedHandlers(Handlers):
    """Handlers that are wrapped with `with_connections`."""

    def add(self, topic: str, handler: Callable[[Any], Any], **options: Any) -> None:
        """Add a handler; see `Handlers.add`."""
        super().add(topic, with_connections(handler), **options)


class DjangoConsumer(Consumer):
    """A `Consumer` whose handlers get usable database connections."""

    _new_handlers = ConnectedHandlers
