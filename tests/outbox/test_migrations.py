"""The tables as SQL files, by Alembic, and with other names."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config
from click.testing import CliRunner
from sqlalchemy import Engine, inspect, text
from sqlalchemy.engine import Connection

from lisa.cli.main import main
from lisa.outbox import Outbox, Tables
from lisa.outbox.migrations import DIALECTS, FILES, sql
from tests.outbox.conftest import Database

ENV = """
from alembic import context
from sqlalchemy import Column, Integer, MetaData, Table, create_engine
from lisa.outbox import Tables

metadata = MetaData()
Table("orders", metadata, Column("id", Integer, primary_key=True))
Tables(metadata=metadata)
url = context.config.get_main_option("url")
options = dict(target_metadata=metadata, compare_server_default=True)
if context.is_offline_mode():
    context.configure(url=url, literal_binds=True, **options)
    context.run_migrations()
else:
    engine = create_engine(url)
    with engine.connect() as connection:
        context.configure(connection=connection, **options)
        with context.begin_transaction():
            context.run_migrations()
    engine.dispose()
"""
TEMPLATE = """
from alembic import op
import sqlalchemy as sa
${imports or ""}
revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}

def upgrade():
    ${upgrades or "pass"}

def downgrade():
    ${downgrades or "pass"}
"""
BY_HAND = """
from alembic import op
from sqlalchemy import Column, Integer
from lisa.outbox.migrations import create_tables, drop_tables

revision = "1"
down_revision = None

def upgrade():
    create_tables(op)
    op.create_table("orders", Column("id", Integer, primary_key=True))

def downgrade():
    op.drop_table("orders")
    drop_tables(op)
"""


class Alembic:
    """An environment of Alembic without a revision; its commands return what they print."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder / "alembic"
        self.versions = self.folder / "versions"
        self.versions.mkdir(parents=True)
        (self.folder / "env.py").write_text(ENV)
        (self.folder / "script.py.mako").write_text(TEMPLATE)
        self._url = url

    def __call__(self, name: str, *words: str, **options: object) -> str:
        said = io.StringIO()
        config = Config(stdout=said, output_buffer=said)
        config.set_main_option("script_location", str(self.folder))
        config.set_main_option("path_separator", "os")
        config.set_main_option("url", self._url.replace("%", "%%"))
        with contextlib.redirect_stdout(said):
            getattr(command, name)(config, *words, **options)
        return said.getvalue()


@pytest.fixture
def alembic(tmp_path: Path, database: Database) -> Alembic:
    return Alembic(tmp_path, database.url)


def run_script(connection: Connection, script: str) -> None:
    for statement in script.split(";\n"):
        if any(line and not line.startswith(("--", "BEGIN")) for line in statement.splitlines()):
            connection.execute(text(statement))


def works(engine: Engine, tables: Tables) -> bool:
    """Whether the tables take what is written to them."""
    with engine.begin() as connection:
        Outbox(tables=tables).send(connection, "orders", 42, delay="1m")
        connection.execute(tables.inbox.insert().values(digest=b"\xff" * 16, expires_ms=2**41))
        (row,) = connection.execute(tables.outbox.select()).all()
        return (row.topic, row.try_ms) == ("orders", 0)


def names(engine: Engine) -> set[str]:
    return set(inspect(engine).get_table_names())


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_files_are_current(dialect: str) -> None:
    written = (FILES / f"{dialect}.sql").read_text(encoding="utf-8")
    assert written == sql(dialect), "run: make reference"


def test_a_file_creates_the_tables(engine: Engine) -> None:
    dialect = {"mariadb": "mysql"}.get(engine.dialect.name, engine.dialect.name)
    with engine.begin() as connection:
        run_script(connection, (FILES / f"{dialect}.sql").read_text(encoding="utf-8"))
    assert works(engine, Tables())


def test_the_command_prints_other_names(engine: Engine) -> None:
    dialect = {"mariadb": "mysql"}.get(engine.dialect.name, engine.dialect.name)
    options = ["outbox", "sql", dialect, "--outbox", "shop_out", "--inbox", "shop_in"]
    printed = CliRunner().invoke(main, options).output
    with engine.begin() as connection:
        run_script(connection, printed)
    assert names(engine) == {"shop_out", "shop_in"}
    assert works(engine, Tables(outbox="shop_out", inbox="shop_in"))
    assert "CREATE TABLE app.lisa_outbox" in sql("postgresql", Tables(schema="app"))


def test_a_migration_of_alembic(engine: Engine, alembic: Alembic) -> None:
    (alembic.versions / "1.py").write_text(BY_HAND)
    alembic("upgrade", "head")
    assert works(engine, Tables())
    alembic("check")  # raises if the tables differ from those that the models describe
    alembic("downgrade", "base")
    assert names(engine) == {"alembic_version"}


def test_a_migration_as_sql(engine: Engine, alembic: Alembic) -> None:
    (alembic.versions / "1.py").write_text(BY_HAND)
    script = alembic("upgrade", "head", sql=True)
    with engine.begin() as connection:
        run_script(connection, script.replace("COMMIT;", ""))
    assert works(engine, Tables())


def test_autogenerate_of_alembic(engine: Engine, alembic: Alembic) -> None:
    alembic("revision", "tables", autogenerate=True)
    alembic("upgrade", "head")
    assert works(engine, Tables())
    alembic("check")
    if engine.dialect.name == "sqlite":  # a number must not come again
        with engine.connect() as connection:
            query = text("SELECT sql FROM sqlite_master WHERE name = 'lisa_outbox'")
            assert "AUTOINCREMENT" in connection.execute(query).scalar_one()
