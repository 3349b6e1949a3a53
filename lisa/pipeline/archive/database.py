"""PostgreSQL and MariaDB as Spark reaches them: address, driver, statements, what went wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame

from lisa.core.errors import ConfigError, LisaError, ServerUnavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Connection", "Database", "jdbc_settings"]

JARS = Path("/usr/share/java")
"""Where Debian's packages put their drivers."""

CONNECT_SECONDS = 10

FETCH_ROWS = 200
"""So many may each carry an envelope of 1 MiB without filling a worker's memory."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What differs between the kinds of database, besides their SQL."""

    name: str
    driver: str
    jar: str
    package: str
    settings: Mapping[str, str]


KINDS = {
    kind.name: kind
    for kind in (
        Kind("postgresql", "org.postgresql.Driver", "postgresql.jar", "libpostgresql-jdbc-java", {
            "reWriteBatchedInserts": "true", "connectTimeout": str(CONNECT_SECONDS),
            "tcpKeepAlive": "true", "ApplicationName": "lisa",
        }),
        Kind("mariadb", "org.mariadb.jdbc.Driver", "mariadb-java-client.jar", "libmariadb-java", {
            "rewriteBatchedStatements": "true", "connectTimeout": str(1000 * CONNECT_SECONDS),
            "tcpKeepAlive": "true",
            # Spark and our SQL quote names as the standard says, and a backslash is a backslash.
            "sessionVariables": "sql_mode='ANSI_QUOTES,NO_BACKSLASH_ESCAPES,STRICT_TRANS_TABLES,"
                                "NO_ENGINE_SUBSTITUTION'",
        }),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Database:
    """One database, and the prefix of the archive's tables in it."""

    url: str
    kind: Kind
    properties: Mapping[str, str] = field(repr=False)  # user and password among them
    prefix: str = ""

    @classmethod
    def of(cls, where: str, properties: Mapping[str, str]) -> Database:
        """A database by its JDBC URL.

        properties: `user`, `password`, `table_prefix` (empty unless given); any other goes to the
        driver. Raises ConfigError for what is none.
        """
        rest = dict(properties)
        prefix = rest.pop("table_prefix", "")
        if not re.fullmatch(r"([a-z][a-z0-9_]{0,23})?", prefix):
            raise ConfigError(
                f"table_prefix {prefix!r} is not up to 24 characters a-z 0-9 _, a letter first"
            )
        kind = kind_of(where)
        return cls(where, kind, {**kind.settings, **rest}, prefix)

    @property
    def shown(self) -> str:
        """The URL without what may hold a password."""
        return re.sub(r"//[^/@]*@", "//", re.split("[?;]", self.url)[0])

    def statements(self, name: str, **parts: str) -> list[str]:
        """The statements of that name, ready to run."""
        text = _library(self.kind.name)[name]
        for part, value in {"p": self.prefix, **parts}.items():
            text = text.replace(f"{{{part}}}", value)
        return [one.strip() for one in text.split(";\n") if one.strip()]

    def read(self, spark: SparkSession, *queries: str) -> DataFrame:
        """What the queries find, each read by a worker of its own."""
        # Spark has a list of conditions for that, but on that way it turns the names of the
        # driver's settings into lower case, and the driver then knows none of them.
        reader = spark.read.format("jdbc").options(**self._options(), fetchsize=str(FETCH_ROWS))
        found = [reader.option("dbtable", f"({query}) AS found").load() for query in queries]
        return reduce(DataFrame.unionAll, found)

    def insert(self, rows: DataFrame, table: str, *, batch: int) -> None:
        """Append rows to a table, by Spark's workers. batch: rows in one insert."""
        writer = rows.write.format("jdbc").options(**self._options(), batchsize=str(batch))
        writer.option("dbtable", self.prefix + table).mode("append").save()

    def _options(self) -> dict[str, str]:
        return {**self.properties, "url": self.url, "driver": self.kind.driver}

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Raise what the database or its driver says as one line: an error of Lisa's family.

        ConfigError for a password, right or name that is wrong, ServerUnavailable where nobody
        answers.
        """
        try:
            yield
        except LisaError:
            raise
        except Exception as error:
            told = _told(error)
            if told is None:
                raise
            state, text = told
            if state.startswith(("28", "3D", "42")):
                raise ConfigError(f"{self.shown} refused: {text}") from None
            if state.startswith(("08", "57P", "53", "70")):
                raise ServerUnavailable(f"{self.shown} does not answer: {text}") from None
            raise LisaError(f"{self.shown} failed: {text}") from error


def kind_of(where: str) -> Kind:
    """The kind of database that a JDBC URL names. Raises ConfigError."""
    found = re.match(r"jdbc:(\w+)://", where)
    if not found or found[1] not in KINDS:
        raise ConfigError(
            f"{re.split('[?;@]', where)[0]!r} is not jdbc:postgresql://HOST/DATABASE or "
            "jdbc:mariadb://HOST/DATABASE"
        )
    return KINDS[found[1]]


def jdbc_settings(where: str, driver_jar: str | Path | None = None) -> dict[str, str]:
    """What a new Spark session has to be told so that it finds the database's driver.

    driver_jar: a file; without it the one of Debian's package, where that is installed. Raises
    ConfigError for a file that is not there.
    """
    kind = kind_of(where)
    jar = Path(driver_jar) if driver_jar else JARS / kind.jar
    if jar.is_file():
        return {"spark.jars": str(jar.resolve())}
    if driver_jar:
        raise ConfigError(f"there is no driver {jar}")
    return {}  # spark-submit may have been given it; `connect` says so if it was not


class Connection:
    """A connection of the driver process itself: what it does is one transaction, or a lock."""

    def __init__(self, spark: SparkSession, database: Database) -> None:
        self._database = database
        # Spark offers JDBC to tables only; transactions need the driver's own interface.
        self._jvm: Any = spark._jvm  # noqa: SLF001
        with database.telling():
            self._connection = self._connect()

    def run(self, name: str, **parts: str) -> None:
        """Run the statements of that name."""
        statement = self._connection.createStatement()
        try:
            for text in self._database.statements(name, **parts):
                statement.execute(text)
        finally:
            statement.close()

    def put(self, name: str, *values: str | int | None) -> None:
        """Run one statement with values."""
        for text in self._database.statements(name):
            with self._prepared(text, values) as prepared:
                prepared.executeUpdate()

    def ask(self, text: str, *values: str | int | None) -> list[tuple[Any, ...]]:
        """The rows of a query, columns as text, None where null."""
        with self._prepared(text, values) as prepared:
            found = prepared.executeQuery()
            width = range(1, found.getMetaData().getColumnCount() + 1)
            rows = []
            while found.next():
                rows.append(tuple(found.getString(column) for column in width))
            return rows

    def has_tables(self) -> bool:
        """Whether there is an archive."""
        return self.ask(self._database.statements("exists")[0]) != [("0",)]

    def has_shards(self) -> bool:
        """Whether its tables tell of which shard an event is; those of layout 1 do not."""
        return self.ask(self._database.statements("has_shards")[0]) != [("0",)]

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All or nothing of what is run inside."""
        self._connection.setAutoCommit(False)
        try:
            yield
            self._connection.commit()
        except BaseException:
            if self.alive():
                self._connection.rollback()
            raise
        finally:
            if self.alive():
                self._connection.setAutoCommit(True)

    def alive(self) -> bool:
        """Whether the database still answers on this connection."""
        return bool(self._connection.isValid(CONNECT_SECONDS))

    def close(self) -> None:
        """Give it up, and every lock it holds."""
        self._connection.close()

    @contextmanager
    def _prepared(self, text: str, values: tuple[str | int | None, ...]) -> Iterator[Any]:
        prepared = self._connection.prepareStatement(text)
        try:
            for place, value in enumerate(values, 1):
                if value is None:
                    prepared.setNull(place, self._jvm.java.sql.Types.NULL)
                elif isinstance(value, int):
                    prepared.setLong(place, value)
                else:
                    prepared.setString(place, value)
            yield prepared
        finally:
            prepared.close()

    def _connect(self) -> Any:
        kind = self._database.kind
        # DriverManager sees only what the JVM was started with, not the files of spark.jars.
        loader = self._jvm.java.lang.Thread.currentThread().getContextClassLoader()
        try:
            driver = loader.loadClass(kind.driver).newInstance()
        except Exception as error:
            if "ClassNotFoundException" not in str(error):
                raise
            raise ConfigError(
                f"Spark has no driver for {kind.name} ({kind.driver}): apt-get install "
                f"{kind.package}, or name the file: --driver-jar FILE (spark-submit: --jars FILE)"
            ) from None
        settings = self._jvm.java.util.Properties()
        for name, value in self._database.properties.items():
            settings.setProperty(name, value)
        return driver.connect(self._database.url, settings)


@cache
def _library(kind: str) -> dict[str, str]:
    text = (Path(__file__).parent / "sql" / f"{kind}.sql").read_text("utf-8")
    found = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)
    return dict(zip(found[1::2], found[2::2], strict=True))


def _told(error: BaseException) -> tuple[str, str] | None:
    """SQLSTATE and text of the first SQLException among an error's causes; None if there is none.

    What failed in a task of Spark's comes as text only.
    """
    cause = getattr(error, "java_exception", None) or getattr(error, "_origin", None)
    while cause is not None:
        if _is(cause, "java.sql.SQLException"):
            return cause.getSQLState() or "", _line(cause.getMessage())
        cause = cause.getCause()
    found = re.search(
        r"java\.sql\.\w*Exception: (.*)|\w*(?:PSQL|SQL\w*)Exception: (.*)", str(error)
    )
    return ("", _line(found[1] or found[2])) if found else None


def _is(thing: Any, name: str) -> bool:
    kind = thing.getClass()
    while kind is not None and kind.getName() != name:
        kind = kind.getSuperclass()
    return kind is not None


def _line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]
