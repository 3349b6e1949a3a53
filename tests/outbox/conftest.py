"""Databases of an application: SQLite always, PostgreSQL and MariaDB where they are installed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from tests import databases
from tests.databases import DatabaseServer

DRIVERS = {
    "sqlite": ("pysqlite", "aiosqlite"),
    "postgresql": ("psycopg", "asyncpg"),
    "mariadb": ("pymysql", "asyncmy"),
}
CLEAR = {
    "postgresql": ("DROP SCHEMA public CASCADE", "CREATE SCHEMA public"),
    "mariadb": ("DROP DATABASE archive", "CREATE DATABASE archive", "USE archive"),
}


@dataclass(frozen=True)
class Database:
    """An empty database, with its URL for each kind of engine."""

    kind: str
    url: str
    async_url: str


@pytest.fixture(scope="session")
def postgresql() -> Iterator[DatabaseServer]:
    """A PostgreSQL, one for the session."""
    yield from server_of("postgresql")


@pytest.fixture(scope="session")
def mariadb() -> Iterator[DatabaseServer]:
    """A MariaDB, one for the session."""
    yield from server_of("mariadb")


def server_of(kind: str) -> Iterator[DatabaseServer]:
    """One server of that kind; skips the test if it is not installed."""
    if lacks := databases.missing(kind):
        pytest.skip(lacks)
    server = databases.start(kind)
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "postgresql", pytest.param("mariadb", marks=pytest.mark.full)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> Database:
    """An empty database of each kind."""
    kind = request.param
    if kind == "sqlite":
        urls = [f"sqlite+{driver}:///{tmp_path / 'shop.db'}" for driver in DRIVERS[kind]]
        return Database(kind, *urls)
    server: DatabaseServer = request.getfixturevalue(kind)
    urls = [server.sqlalchemy_url(driver) for driver in DRIVERS[kind]]
    emptying = create_engine(urls[0], poolclass=NullPool)
    with emptying.begin() as connection:
        for statement in CLEAR[kind]:
            connection.execute(text(statement))
    return Database(kind, *urls)


@pytest.fixture
def engine(database: Database) -> Iterator[Engine]:
    """An engine on the empty database."""
    made = create_engine(database.url)
    yield made
    made.dispose()


@pytest.fixture
async def async_engine(database: Database) -> AsyncIterator[AsyncEngine]:
    """An engine for asyncio on the same database as `engine`."""
    made = create_async_engine(database.async_url)
    yield made
    await made.dispose()
