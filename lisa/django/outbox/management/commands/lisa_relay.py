"""`manage.py lisa_relay`: forwards the operations of an outbox."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandParser
from django.db import DEFAULT_DB_ALIAS, connections
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
        arguments = {"database": url_of(database), "tables": tables(), **given}
        lisa_relay.main(options, "lisa-relay", obj=arguments)


def url_of(alias: str) -> URL:
    """A database of the setting DATABASES as a URL of SQLAlchemy, with the driver's options."""
    connection = connections[alias]
    given = connection.get_connection_params()
    driver = connection.Database.__name__.partition(".")[0]
    ends = {name: given.pop(name, None) for name in ("user", "password", "host", "port")}
    name = given.pop("dbname", None) or given.pop("database")
    options = dict[str, str]()
    for option in given.keys() - OF_DJANGO[connection.vendor]:
        value = given[option]
        if isinstance(value, dict):  # {"ssl": {"ca": ...}} of MySQL is ssl_ca in a URL
            options |= {f"{option}_{inner}": str(one) for inner, one in value.items()}
        else:
            options[option] = str(value)
    return URL.create(
        f"{connection.vendor}+{DRIVERS.get(driver, driver)}",
        username=ends["user"],
        password=ends["password"],
        host=ends["host"],
        port=int(ends["port"] or 0) or None,
        database=str(name),  # may be a Path
        query=options,
    )
