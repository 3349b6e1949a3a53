"""`manage.py lisa_relay`: forwards the operations of an outbox."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import DEFAULT_DB_ALIAS, connections
from sqlalchemy import Engine, create_engine
from sqlalchemy.engine import URL

from lisa.core.daemon.process_signals import Mailbox, stopping
from lisa.django import _options
from lisa.django.outbox import tables
from lisa.outbox import Relay

DRIVERS = {"MySQLdb": "mysqldb", "sqlite3": "pysqlite"}
"""SQLAlchemy's names of drivers that have another one."""

OF_DJANGO = {
    "postgresql": {"context", "cursor_factory", "prepare_threshold", "pool"},
    "mysql": {"conv"},
    "sqlite": {"detect_types", "check_same_thread", "uri"},
}
"""Parameters of connections with which Django adapts drivers to itself."""


class Command(BaseCommand):  # type: ignore[misc]
    """Runs a relay with the connection parameters of Django."""

    help = "Forward the operations of the outbox to Redis until SIGTERM."

    def add_arguments(self, parser: CommandParser) -> None:
        """Accept the alias of a database."""
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, choices=list(connections))

    def handle(self, *_: Any, database: str, **__: Any) -> None:
        """Run until a signal comes."""
        options = _options()
        relay = Relay(
            engine_of(database),
            options.get("server"),
            prefix=options.get("prefix"),
            tables=tables(),
        )
        mailbox = Mailbox[int]()
        with mailbox.handling_signals(mailbox.post, stopping()), relay:
            mailbox.get()


def engine_of(alias: str) -> Engine:
    """An engine of SQLAlchemy for a database of the setting DATABASES."""
    connection = connections[alias]
    parameters = connection.get_connection_params()
    for name in OF_DJANGO[connection.vendor]:
        parameters.pop(name, None)
    driver = connection.Database.__name__.partition(".")[0]
    url = URL.create(
        f"{connection.vendor}+{DRIVERS.get(driver, driver)}",
        database=parameters.pop("database", None),
    )
    return create_engine(url, connect_args=parameters, pool_size=2, max_overflow=2)
