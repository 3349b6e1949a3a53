"""The supported databases: JDBC drivers and connection settings."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lisa.core.model.errors import ConfigError

JARS = Path("/usr/share/java")
"""Directory in which Debian's packages install JDBC drivers."""

CONNECT_SECONDS = 10


@dataclass(frozen=True, slots=True)
class Kind:
    """JDBC driver and connection settings of one kind of database."""

    name: str
    driver: str
    jar: str
    package: str
    settings: Mapping[str, str]


KINDS = {
    kind.name: kind
    for kind in (
        Kind(
            "postgresql",
            "org.postgresql.Driver",
            "postgresql.jar",
            "libpostgresql-jdbc-java",
            {
                "reWriteBatchedInserts": "true",
                "connectTimeout": str(CONNECT_SECONDS),
                "tcpKeepAlive": "true",
                "ApplicationName": "lisa",
            },
        ),
        Kind(
            "mariadb",
            "org.mariadb.jdbc.Driver",
            "mariadb-java-client.jar",
            "libmariadb-java",
            {
                "rewriteBatchedStatements": "true",
                "connectTimeout": str(1000 * CONNECT_SECONDS),
                "tcpKeepAlive": "true",
                # Spark and our SQL quote names as in standard SQL; backslash escapes nothing.
                "sessionVariables": "sql_mode='ANSI_QUOTES,NO_BACKSLASH_ESCAPES,"
                "STRICT_TRANS_TABLES,NO_ENGINE_SUBSTITUTION'",
            },
        ),
    )
}


def kind_of(where: str) -> Kind:
    """The kind of database that a JDBC URL names. Raises ConfigError."""
    found = re.match(r"jdbc:(\w+)://", where)
    if not found or found[1] not in KINDS:
        shown = re.match(r"(jdbc:)?\w*", where)  # the rest may hold a password
        raise ConfigError(
            f"{shown and shown[0]}... is not jdbc:postgresql://HOST/DATABASE or "
            "jdbc:mariadb://HOST/DATABASE"
        )
    return KINDS[found[1]]


def jdbc_settings(where: str, driver_jar: str | Path | None = None) -> dict[str, str]:
    """Spark settings with which a new session finds the database's driver.

    driver_jar: a file; by default the driver of Debian's package, if installed. Raises ConfigError
    if the file does not exist.
    """
    kind = kind_of(where)
    jar = Path(driver_jar) if driver_jar else JARS / kind.jar
    if jar.is_file():
        return {"spark.jars": str(jar.resolve())}
    if driver_jar:
        raise ConfigError(f"driver file {jar} does not exist")
    return {}  # spark-submit may provide the driver; connecting fails if not
