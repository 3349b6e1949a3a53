"""`lisa outbox`."""

from __future__ import annotations

import click

from lisa.core.model.extras import requires


@click.group()
def outbox() -> None:
    """Print the tables of outbox and inbox as SQL."""


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
