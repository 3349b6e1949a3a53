"""A consumer whose handlers get usable database connections."""

from __future__ import annotations

import functools
from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any

from django.apps import apps
from django.db import Error, IntegrityError, close_old_connections, connections
from django.db.transaction import atomic, set_rollback

from lisa.consumer import Consumer
from lisa.consumer.handlers import Handler, Handlers, is_async_handler, is_success
from lisa.core.model.callables import function_name
from lisa.core.model.errors import ConfigError
from lisa.core.model.message import Message
from lisa.outbox import inbox_rows


def with_connections(handler: Callable[..., Any]) -> Callable[..., Any]:
    """A handler that closes broken and outdated connections before and after, as requests do.

    Django's connections belong to threads, and those of a consumer live for weeks. `async def`
    handlers reach the database through Django's own threads and stay as they are.
    """
    if iscoroutinefunction(handler):
        return handler

    @functools.wraps(handler)
    def handle(*arguments: Any) -> Any:
        close_old_connections()
        try:
            return handler(*arguments)
        finally:
            close_old_connections()

    return handle


def in_transaction(handler: Handler, using: str) -> Handler:
    """A function that calls a handler in a transaction, once for each send of a message.

    The transaction holds the delivery's row, as that of `lisa.outbox.Inbox` does.
    """
    model = apps.get_model("lisa_outbox", "HandledDelivery")
    handled, rows = model.objects.using(using), inbox_rows.InboxRows(inbox_rows.KEEP)

    def handle(message: Message) -> Any:
        row, is_inserted = rows.row_of(message), False
        try:
            with atomic(using=using):
                handled.create(**row._asdict())
                is_inserted = True
                result = handler(message)
                if not is_success(result):
                    set_rollback(True, using=using)
                else:
                    try:  # another delivery's row expires later
                        handled.select_for_update().get(**row._asdict())
                    except (Error, model.DoesNotExist) as error:
                        raise ConfigError(f"{inbox_rows.ROLLED_BACK}an inner atomic()") from error
        except IntegrityError:
            if is_inserted or not handled.filter(pk=row.digest).exists():
                raise
            inbox_rows.log_handled(message)
            return None
        delete_expired()
        return result

    def delete_expired() -> None:
        if not rows.begin_deleting():
            return
        try:
            expired = handled.filter(expires_ms__lte=inbox_rows.now_ms())
            digests = list(expired.values_list("pk", flat=True)[: inbox_rows.PORTION])
            handled.filter(pk__in=digests).delete()
        except Exception as error:  # noqa: BLE001  the handler's result stands, whatever it is
            inbox_rows.log_not_deleted(error)
        else:
            rows.deleted(len(digests))

    return handle


class ConnectedHandlers(Handlers):
    """Handlers that are wrapped with `with_connections`."""

    def add(
        self, topic: str, handler: Callable[..., Any], *, once_in: Any = None, **options: Any
    ) -> None:
        """Add a handler; see `Handlers.add`. `once_in` may be the alias of a database."""
        if not isinstance(once_in, str):  # see `_once`
            handler = with_connections(handler)
        super().add(topic, handler, once_in=once_in, **options)

    def _once(self, topic: str, handler: Callable[..., Any], once_in: Any) -> Handler:
        if not isinstance(once_in, str):
            return super()._once(topic, handler, once_in)
        name = function_name(handler)
        if is_async_handler(handler):
            raise ConfigError(
                f"topic {topic!r}: the handler {name} is `async def`, and transactions of Django "
                "are not asynchronous; define it without async"
            )
        if once_in not in connections:
            raise ConfigError(
                f"topic {topic!r}: once_in={once_in!r} is none of DATABASES: "
                f"{', '.join(connections)}"
            )
        if not apps.is_installed("lisa.django.outbox"):
            raise ConfigError(
                f"topic {topic!r}: once_in={once_in!r} needs the table of lisa.django.outbox; add "
                "the app to INSTALLED_APPS, and migrate"
            )
        # Around the transaction, because it closes connections, and would roll back.
        return with_connections(in_transaction(handler, once_in))


class DjangoConsumer(Consumer):
    """A `Consumer` whose handlers get usable database connections."""

    _new_handlers = ConnectedHandlers
