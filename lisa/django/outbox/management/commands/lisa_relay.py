"""`manage.py lisa_relay`: forwards the operations of an outbox."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import DEFAULT_DB_ALIAS, connections
from sqlalchemy import Engine, create_engine
from sqlalchemy.engine import URL

from lisa.cli.relay import main as lisa_relay
from lisa.django import _options
from lisa.django.outbox import tables

OF_REDIS = ("server", "prefix")
"""The keys of LISA that are arguments of `Relay`, too."""

DRIVERS = {"MySQLdb": "mysqldb", "sqlite3": "pysqlite"}
"""SQLAlchemy's names of drivers that have another one."""

OF_DJANGO = {
    "postgresql": {"context", "cursor_factory", "prepare_threshold", "pool"},
    "mysql": {"conv"},
    "sqlite": {"detect_types", "check_same_thread", "uri"},
}
"""Parameters of connections with which Django adapts drivers to itself."""


class Command(BaseCommand):  # type: ignore[misc]
    """Runs `lisa-relay` with the connection parameters of Django and the setting LISA."""

    help = (
        "Forward the operations of the outbox to Redis until SIGTERM. Takes the options of "
        "lisa-relay after '--', as in: manage.py lisa_relay -- --http 127.0.0.1:8090"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Accept the alias of a database, and any options."""
        parser.add_argument("--database", default=DEFAULT_DB_ALIAS, choices=list(connections))
        parser.add_argument("options", nargs="*", help="options of lisa-relay")

    def handle(self, *_: Any, database: str, options: list[str], **__: Any) -> None:
        """Run until a signal comes."""
        given = {name: value for name, value in _options().items() if name in OF_REDIS and value}
        arguments = {"database": engine_of(database), "tables": tables(), **given}
        lisa_relay.main(options, "lisa-relay", obj=arguments)


def engine_of(alias: str) -> Engine:
    """An engine of SQLAlchemy for a database of the setting DATABASES."""
    connection = connections[alias]
    parameters = connection.get_connection_params()
    for name in OF_DJANGO[connection.vendor]:
        parameters.pop(name, None)
    driver = connection.Database.__name__.partition(".")[0]
    take = parameters.pop
    url = URL.create(
        f"{connection.vendor}+{DRIVERS.get(driver, driver)}",
        username=take("user", None),
        host=take("host", None),
        port=int(take("port", 0)) or None,
        database=take("dbname", None) or take("database", None),
    )
    # The password is not part of the URL.
    return create_engine(url, connect_args=parameters, pool_size=2, max_overflow=2)
