"""The tables in an application's database, for SQLAlchemy."""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    BigInteger,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
)
from sqlalchemy.dialects.mysql import BINARY, LONGBLOB
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement

_OPTIONS: dict[str, Any] = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (
        ("engine", "InnoDB"),
        ("charset", "utf8mb4"),
        ("collate", "utf8mb4_bin"),
    )
}


class Tables:
    """The tables, with names of your choice, for PostgreSQL, MariaDB, MySQL and SQLite.

    outbox, inbox: the names of the table of operations that a relay forwards, and of the table of
        handled deliveries; the attributes are the tables.
    schema: the database's schema; by default that of the connection.
    metadata: what the tables are added to, so that migrations find them; a new one by default.
    """

    def __init__(
        self,
        *,
        outbox: str = "lisa_outbox",
        inbox: str = "lisa_inbox",
        schema: str | None = None,
        metadata: MetaData | None = None,
    ) -> None:
        self.metadata = MetaData() if metadata is None else metadata
        self.outbox = Table(
            outbox,
            self.metadata,
            Column("seq", BigInteger().with_variant(Integer, "sqlite"), primary_key=True),
            Column("id_hash", BigInteger, nullable=False),
            Column("created_ms", BigInteger, nullable=False),
            Column("try_ms", BigInteger, server_default="0"),
            Column("reason", Text),
            Column("operation", String(1), nullable=False),
            Column("topic", String(128), nullable=False),
            Column("message_id", String(513), nullable=False),
            Column("token", String(8), nullable=False),
            Column("due", String(64), nullable=False),
            Column("options", Text),
            Column("envelope", LargeBinary().with_variant(LONGBLOB(), "mysql", "mariadb")),
            Index(f"{outbox}_id_hash", "id_hash", "seq"),
            schema=schema,
            sqlite_autoincrement=True,  # a number must not come again
            **_OPTIONS,
        )
        digest = LargeBinary(16).with_variant(BINARY(16), "mysql", "mariadb")
        self.inbox = Table(
            inbox,
            self.metadata,
            Column("digest", digest, primary_key=True),
            Column("expires_ms", BigInteger, nullable=False),
            Index(f"{inbox}_expires_ms", "expires_ms"),
            schema=schema,
            **_OPTIONS,
        )


class database_ms(FunctionElement[int]):  # noqa: N801  named as functions of SQLAlchemy are
    """The database's clock in epoch milliseconds, rounded up."""

    type = BigInteger()
    inherit_cache = True


@compiles(database_ms)
def _standard(*_: Any, **__: Any) -> str:
    return "CAST(CEIL(EXTRACT(EPOCH FROM clock_timestamp()) * 1000) AS BIGINT)"


@compiles(database_ms, "mysql")
@compiles(database_ms, "mariadb")
def _mysql(*_: Any, **__: Any) -> str:
    since = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6))"
    return f"CAST(CEIL({since} / 1000) AS SIGNED)"


@compiles(database_ms, "sqlite")
def _sqlite(*_: Any, **__: Any) -> str:
    return "CAST((julianday('now') - 2440587.5) * 86400000 AS INTEGER) + 1"
