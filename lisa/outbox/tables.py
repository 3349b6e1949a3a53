"""The tables in an application's database, for SQLAlchemy."""

from __future__ import annotations

from typing import Any

from sqlalchemy import BigInteger, Column, Index, LargeBinary, MetaData, Table
from sqlalchemy.dialects.mysql import BINARY

_OPTIONS: dict[str, Any] = {
    f"{dialect}_{option}": value
    for dialect in ("mysql", "mariadb")
    for option, value in (("engine", "InnoDB"), ("charset", "utf8mb4"))
}


class Tables:
    """The tables, with names of your choice, for PostgreSQL, MariaDB, MySQL and SQLite.

    inbox: the name of the table of handled deliveries; the attribute is the table.
    schema: the database's schema; by default that of the connection.
    metadata: what the tables are added to, so that migrations find them; a new one by default.
    """

    def __init__(
        self,
        *,
        inbox: str = "lisa_inbox",
        schema: str | None = None,
        metadata: MetaData | None = None,
    ) -> None:
        self.metadata = MetaData() if metadata is None else metadata
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
