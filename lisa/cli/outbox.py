"""`lisa outbox`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.options import Chosen, common, together, warn_of_database_password
from lisa.cli.output import confirm, print_json, print_table
from lisa.core.model.clock import human
from lisa.core.model.errors import ConfigError, ServerUnavailable
from lisa.core.model.extras import requires

if TYPE_CHECKING:
    from sqlalchemy import Connection

    from lisa.outbox.relay import Queries


@click.group()
def outbox() -> None:
    """Print the tables as SQL; list, retry or discard rows that were set aside."""


@outbox.command("sql")
@click.argument("dialect", type=click.Choice(["postgresql", "mysql", "mariadb", "sqlite"]))
@click.option("--outbox", metavar="NAME", default="lisa_outbox", show_default=True)
@click.option("--inbox", metavar="NAME", default="lisa_inbox", show_default=True)
@click.option("--schema", metavar="NAME", help="The database's schema. Default: the connection's.")
def sql_(dialect: str, outbox: str, inbox: str, schema: str | None) -> None:
    r"""Print the statements that create the tables.

    \b
    lisa outbox sql postgresql | psql shop
    """
    with requires("sql"):
        from lisa.outbox import Tables
        from lisa.outbox.migrations import sql
    click.echo(sql(dialect, Tables(outbox=outbox, inbox=inbox, schema=schema)), nl=False)


_database = together(
    click.option(
        "--database",
        metavar="URL",
        help="The application's database (LISA_RELAY__DATABASE), unless --config names it.",
    ),
    common,
)
_rows = together(
    click.argument("numbers", metavar="[SEQ]...", nargs=-1, type=int),
    click.option("--all", "everything", is_flag=True, help="All rows that were set aside."),
)


@outbox.command()
@_database
def count(chosen: Chosen, database: str | None) -> None:
    """Count the rows that wait, and those that were set aside."""
    with _table(chosen, database) as (connection, queries):
        found = queries.count(connection)
    age = f", the oldest for {human(round(found.age_s * 1000))}" if found.rows else ""
    chosen.answer(found._asdict(), f"{found.rows:,} waiting{age}; {found.set_aside:,} set aside")


@outbox.command("list")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True)
@_database
def list_(chosen: Chosen, database: str | None, limit: int) -> None:
    """List the rows that were set aside, with their reasons, the oldest first.

    A relay sets aside what can never be sent as it is. Later operations on the same message wait
    behind it.
    """
    with _table(chosen, database) as (connection, queries):
        found = queries.set_aside(connection, limit)
    named = [row._replace(operation=_name(row.operation)) for row in found]
    if chosen.json:
        print_json([row._asdict() for row in named])
        return
    print_table(
        ["seq ", "operation", "topic", "id", "reason", "age", "behind "],
        [(*row[:5], human(row.age_ms), row.behind) for row in named],
        drop=["behind", "age", "operation"],
    )


@outbox.command()
@_rows
@_database
def retry(
    chosen: Chosen, database: str | None, numbers: tuple[int, ...], *, everything: bool
) -> None:
    """Have relays try rows again that were set aside, and the rows behind them.

    Exit code 1 if one of SEQ was not set aside.
    """
    _check_choice(numbers, everything=everything)
    _release(chosen, database, numbers, "retried")


@outbox.command()
@_rows
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@_database
def discard(
    chosen: Chosen, database: str | None, numbers: tuple[int, ...], *, everything: bool, yes: bool
) -> None:
    """Delete rows that were set aside; relays try the rows behind them.

    Exit code 1 if one of SEQ was not set aside.
    """
    _check_choice(numbers, everything=everything)
    what = "all rows that were set aside" if everything else f"{len(numbers)} rows"
    confirm(f"Permanently delete {what}?", yes=yes)
    _release(chosen, database, numbers, "discarded")


def _check_choice(numbers: Sequence[int], *, everything: bool) -> None:
    if bool(numbers) == everything:
        raise click.UsageError("give either SEQ or --all")


def _release(chosen: Chosen, database: str | None, numbers: Sequence[int], verb: str) -> None:
    """Retry or discard rows, given by their numbers, or all."""
    from lisa.core.store.store import chunks

    wanted, done = list(numbers), list[int]()
    if not wanted:
        with _table(chosen, database) as (connection, queries):
            wanted = [row.seq for row in queries.set_aside(connection)]
    for part in chunks(wanted, 500):
        with _table(chosen, database) as (connection, queries):
            done += queries.release(connection, part, discard=verb == "discarded")
    missing = sorted({*numbers} - {*done})
    chosen.answer({verb: len(done), "not_set_aside": missing}, f"{len(done)} {verb}")
    for seq in missing:
        click.echo(f"lisa: row {seq} is not set aside", err=True)
    if missing:
        raise click.exceptions.Exit(1)


def _name(operation: str) -> str:
    from lisa.outbox.outbox import OPERATIONS

    return OPERATIONS.get(operation, operation)


@contextmanager
def _table(chosen: Chosen, database: str | None) -> Iterator[tuple[Connection, Queries]]:
    """A transaction on the database of the options, the environment or the configuration.

    Raises ConfigError, and ServerUnavailable.
    """
    with requires("sql"):
        from sqlalchemy.exc import DBAPIError, OperationalError

        from lisa.outbox import Tables
        from lisa.outbox.relay import Queries, engine_of
    from lisa.core.settings import RelaySettings

    warn_of_database_password(database)
    own: dict[str, Any] = {"database": database}
    given = RelaySettings.load(chosen.config, relay=own).relay
    engine = engine_of(given.require_database())
    try:
        with engine.begin() as connection:
            yield connection, Queries(Tables(outbox=given.outbox, schema=given.database_schema))
    except DBAPIError as error:
        kind = ServerUnavailable if isinstance(error, OperationalError) else ConfigError
        raise kind(f"the database: {error.orig}") from None
    finally:
        engine.dispose()
