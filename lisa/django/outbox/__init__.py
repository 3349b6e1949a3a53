"""The outbox in a Django project: add "lisa.django.outbox" to INSTALLED_APPS, and migrate.

    from lisa.django import outbox

    with transaction.atomic():
        order.save()
        outbox.send("orders", {"order": order.pk}, id=f"order-{order.pk}", delay="30m")

Operations belong to the current transaction of a database alias; `python manage.py lisa_relay`
forwards them after the commit. They are those of `lisa.outbox.Outbox`, with its middleware from the
setting LISA. The setting LISA_OUTBOX names the tables; these are the defaults:

    LISA_OUTBOX = {"outbox": "lisa_outbox", "inbox": "lisa_inbox"}
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple, Unpack, cast

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connections

from lisa.core.model.errors import ConfigError
from lisa.core.model.extras import requires
from lisa.producer.plan import DueOptions, SendOptions, showing

with requires("sql"):
    from sqlalchemy.engine import Connection, Dialect, make_url

    from lisa.outbox import Outbox, Tables

__all__ = ["cancel", "reschedule", "send", "table_names", "tables"]

_NAMES = {"outbox": "lisa_outbox", "inbox": "lisa_inbox"}


def table_names() -> Mapping[str, str]:
    """The names of the tables `outbox` and `inbox`. Raises ConfigError for a wrong LISA_OUTBOX."""
    names = getattr(settings, "LISA_OUTBOX", {})
    if not isinstance(names, Mapping) or not names.keys() <= _NAMES.keys():
        raise ConfigError(
            f"the setting LISA_OUTBOX is a dict of names of tables, as in {_NAMES}, not {names!r}"
        )
    return {**_NAMES, **names}


def tables() -> Tables:
    """The tables, for SQLAlchemy."""
    names = table_names()
    return Tables(outbox=names["outbox"], inbox=names["inbox"])


@showing(SendOptions)
def send(
    topic: str,
    body: Any,
    *,
    id: str | None = None,  # noqa: A002  as in Producer.send
    using: str = DEFAULT_DB_ALIAS,
    **options: Unpack[SendOptions],
) -> str:
    """Send a message if the current transaction commits; returns its id at once.

    See `lisa.outbox.Outbox.send`. Outside of `atomic()`, the message is sent like any other write.

    using: the alias of the database.

    {options}
    """
    return _outbox().send(_session(using), topic, body, id=id, **options)


def cancel(topic: str, message_id: str, *, using: str = DEFAULT_DB_ALIAS) -> None:
    """Cancel a message if the current transaction commits. The outcome is not reported."""
    _outbox().cancel(_session(using), topic, message_id)


@showing(DueOptions)
def reschedule(
    topic: str, message_id: str, *, using: str = DEFAULT_DB_ALIAS, **due: Unpack[DueOptions]
) -> None:
    """Change a due time if the current transaction commits. The outcome is not reported.

    {options}
    """
    _outbox().reschedule(_session(using), topic, message_id, **due)


@functools.cache
def _outbox() -> Outbox:
    from lisa.django import _options

    return Outbox(tables=tables(), middleware=_options().get("middleware", ()))


class _Session(NamedTuple):
    """A connection of Django as the part of SQLAlchemy's Session that an outbox uses."""

    django: Any
    dialect: Dialect

    def connection(self, **_: Any) -> _Session:
        return self

    def execute(self, statement: Any, row: Mapping[str, Any]) -> None:
        compiled = statement.compile(dialect=self.dialect, column_keys=list(row))
        binary = self.django.Database.Binary
        values = {
            name: binary(value) if isinstance(value, bytes) else value
            for name, value in compiled.construct_params(row).items()
        }
        with self.django.cursor() as cursor:
            cursor.execute(str(compiled), values)


def _session(using: str) -> Connection:
    connection = connections[using]
    if connection.vendor not in ("postgresql", "mysql", "sqlite"):
        raise ConfigError(
            f"an outbox needs PostgreSQL, MariaDB, MySQL or SQLite, not {connection.vendor}"
        )
    return cast("Connection", _Session(connection, _dialect(connection.vendor)))


@functools.cache
def _dialect(vendor: str) -> Dialect:
    """Writes statements with the placeholders that all cursors of Django take."""
    dialect: Any = make_url(f"{vendor}://").get_dialect()
    return dialect(paramstyle="pyformat")  # type: ignore[no-any-return]
