"""The tables as migrations: SQL for any tool, and operations of Alembic.

    from lisa.outbox.migrations import create_tables, drop_tables

    def upgrade() -> None:
        create_tables(op)

    def downgrade() -> None:
        drop_tables(op)

The SQL of the usual names is in `lisa/outbox/sql/`; `lisa outbox sql` prints that of other names.
Autogenerate of Alembic finds the tables by `Tables(metadata=Base.metadata)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sqlalchemy.engine import make_url
from sqlalchemy.schema import CreateIndex, CreateTable, DropTable, ExecutableDDLElement

from lisa.outbox.tables import Tables

DIALECTS = ("postgresql", "mysql", "sqlite")
"""The dialects that have a file of SQL; that of MySQL is MariaDB's, too."""

FILES = Path(__file__).parent / "sql"

_HEAD = """\
-- Lisa's tables in an application's database: the outbox holds operations that wait for a relay,
-- the inbox deliveries that were handled. `lisa outbox sql` prints this with other names.

"""


def create_tables(op: Any, tables: Tables | None = None) -> None:
    """Create the tables with their indexes.

    op: `alembic.op`, in a migration. With `alembic upgrade --sql`, the SQL is printed.
    """
    for statement in _statements(tables or Tables()):
        op.execute(statement)


def drop_tables(op: Any, tables: Tables | None = None) -> None:
    """Drop the tables, and with them all operations that wait for a relay."""
    tables = tables or Tables()
    for table in (tables.outbox, tables.inbox):
        op.execute(DropTable(table))


def sql(dialect: str, tables: Tables | None = None) -> str:
    """The statements that create the tables, as a script for `psql`, `mariadb` or `sqlite3`."""
    spoken = make_url(f"{dialect}://").get_dialect()()
    parts = []
    for statement in _statements(tables or Tables()):
        text = str(statement.compile(dialect=spoken)).strip().replace("\n)E", "\n) E")
        parts += ["\n".join(line.rstrip().replace("\t", "    ") for line in text.split("\n"))]
    return _HEAD + ";\n\n".join(parts) + ";\n"


def _statements(tables: Tables) -> Iterator[ExecutableDDLElement]:
    for table in (tables.outbox, tables.inbox):
        yield CreateTable(table)
        yield from map(CreateIndex, table.indexes)
