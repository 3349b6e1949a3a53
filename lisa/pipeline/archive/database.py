"""PostgreSQL and MariaDB through JDBC: URL, driver, SQL statements, errors, and rows of the tables.

In the database, times are epoch milliseconds; headers and groups are JSON. An unknown token is
empty, not null, because the token is part of the primary key; the same goes for the shard of an
event in the topic's own journal. NUL in text becomes U+FFFD, because PostgreSQL cannot store it.
Envelopes and bodies are stored unchanged, as bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pyspark.sql import DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import (
    ArrayType,
    DataType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from lisa.core.model.errors import ConfigError, LisaError, ServerUnavailable
from lisa.pipeline.archive.schemas import GROUP_SCHEMA, LOG_SCHEMA, MESSAGES_SCHEMA
from lisa.pipeline.paths import without_password
from lisa.pipeline.session import jvm_of

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

FETCH_ROWS = 200
"""Small enough that rows with envelopes of 1 MiB fit into a worker's memory."""


JARS = Path("/usr/share/java")
"""Directory in which Debian's packages install JDBC drivers."""

CONNECT_SECONDS = 10

_LOG_FIELDS = [field for field in LOG_SCHEMA.fields if field.name != "day"]

LOG_COLUMNS = tuple(field.name for field in _LOG_FIELDS)
"""Columns of the table `message_log`, without `day`, which the database computes."""

MESSAGE_COLUMNS = (*MESSAGES_SCHEMA.names, "bizkey", "subtopic", "readable")
"""Columns of the table `messages`, including those that only its views need."""

JSON_COLUMNS = ("headers", "groups")

_GROUP_FIELDS = GROUP_SCHEMA.fields

_GROUPS_IN_MS = ArrayType(
    StructType(
        [
            StructField(
                field.name, LongType() if field.dataType == TimestampType() else field.dataType
            )
            for field in _GROUP_FIELDS
        ]
    )
)


@dataclass(frozen=True, slots=True)
class Database:
    """One database, and the prefix of the archive's tables in it."""

    url: str
    kind: Kind
    properties: Mapping[str, str] = field(repr=False)  # user and password among them
    prefix: str = ""

    @classmethod
    def of(cls, where: str, properties: Mapping[str, str]) -> Database:
        """The database at a JDBC URL.

        properties: `user`, `password`, `table_prefix` (empty by default); all others are passed to
        the driver. Raises ConfigError if the URL or the prefix is not valid.
        """
        rest = dict(properties)
        prefix = rest.pop("table_prefix", "")
        if not re.fullmatch(r"([a-z][a-z0-9_]{0,23})?", prefix):
            raise ConfigError(
                f"table_prefix {prefix!r} is not valid: use up to 24 characters a-z 0-9 _, "
                "starting with a letter"
            )
        kind = kind_of(where)
        return cls(where, kind, {**kind.settings, **rest}, prefix)

    @property
    def shown(self) -> str:
        """The URL without user and query, which may contain a password."""
        return without_password(self.url)

    def statements(self, name: str, **parts: str) -> list[str]:
        """The SQL statements of that name, with {p} and the given parts filled in."""
        text = _library(self.kind.name)[name]
        for part, value in {"p": self.prefix, **parts}.items():
            text = text.replace(f"{{{part}}}", value)
        return [part.strip() for part in text.split(";\n") if part.strip()]

    def read(self, spark: SparkSession, *queries: str) -> DataFrame:
        """The union of the queries' rows; each query is read by its own task."""
        # Not Spark's own `predicates`: it passes the names of the driver's settings in lower case,
        # and the driver ignores them.
        reader = spark.read.format("jdbc").options(**self._options(), fetchsize=str(FETCH_ROWS))
        found = [reader.option("dbtable", f"({query}) AS found").load() for query in queries]
        return reduce(DataFrame.unionAll, found)

    def insert(self, rows: DataFrame, table: str, *, batch: int) -> None:
        """Append rows to a table from Spark's workers. batch: rows per insert."""
        writer = rows.write.format("jdbc").options(**self._options(), batchsize=str(batch))
        writer.option("dbtable", self.prefix + table).mode("append").save()

    def _options(self) -> dict[str, str]:
        return {**self.properties, "url": self.url, "driver": self.kind.driver}

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Turn errors of the database and its driver into Lisa's errors, of one line each.

        Raises ConfigError for a wrong password, name or missing privilege, ServerUnavailable if
        the database cannot be reached, LisaError for any other database error.
        """
        try:
            yield
        except LisaError:
            raise
        except Exception as error:
            found = _sql_error(error)
            if found is None:
                raise
            state, text = found
            if state.startswith(("28", "3D", "42")):
                raise ConfigError(f"{self.shown} refused: {text}") from None
            if state.startswith(("08", "57P", "53", "70")):
                raise ServerUnavailable(f"{self.shown} does not answer: {text}") from None
            raise LisaError(f"{self.shown} failed: {text}") from error


class JdbcConnection:
    """A JDBC connection of Spark's driver process, for transactions and locks."""

    def __init__(self, spark: SparkSession, database: Database) -> None:
        self._database = database
        # Spark's JDBC source only reads and writes tables; transactions need the JDBC driver.
        self._jvm = jvm_of(spark)
        with database.translated_errors():
            self._connection = self._connect()

    def run(self, name: str, **parts: str) -> None:
        """Run the statements of that name, in order."""
        with closing(self._connection.createStatement()) as statement:
            for text in self._database.statements(name, **parts):
                statement.execute(text)

    def put(self, name: str, *values: str | int | None) -> int:
        """Run the statement of that name with values for its parameters; returns affected rows."""
        rows = 0
        for text in self._database.statements(name):
            with self._prepared(text, values) as prepared:
                rows += int(prepared.executeUpdate())
        return rows

    def ask(self, text: str, *values: str | int | None) -> list[tuple[Any, ...]]:
        """The rows of a query; all columns as text, None for null."""
        with self._prepared(text, values) as prepared:
            found = prepared.executeQuery()
            width = range(1, found.getMetaData().getColumnCount() + 1)
            rows = []
            while found.next():
                rows.append(tuple(found.getString(column) for column in width))
            return rows

    def has_tables(self) -> bool:
        """Whether the archive's tables exist."""
        return self.ask(self._database.statements("exists")[0]) != [("0",)]

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Commit at the end, or roll back if an exception is raised."""
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
        """Whether the connection is still valid."""
        return bool(self._connection.isValid(CONNECT_SECONDS))

    def close(self) -> None:
        """Close the connection; the database releases its locks."""
        self._connection.close()

    @contextmanager
    def _prepared(self, text: str, values: tuple[str | int | None, ...]) -> Iterator[Any]:
        with closing(self._connection.prepareStatement(text)) as prepared:
            for position, value in enumerate(values, 1):
                if value is None:
                    prepared.setNull(position, self._jvm.java.sql.Types.NULL)
                elif isinstance(value, int):
                    prepared.setLong(position, value)
                else:
                    prepared.setString(position, value)
            yield prepared

    def _connect(self) -> Any:
        kind = self._database.kind
        # DriverManager only sees the JVM's initial class path, not the files of spark.jars.
        loader = self._jvm.java.lang.Thread.currentThread().getContextClassLoader()
        try:
            driver = loader.loadClass(kind.driver).newInstance()
        except Exception as error:
            if "ClassNotFoundException" not in str(error):
                raise
            raise ConfigError(
                f"Spark has no driver for {kind.name} ({kind.driver}): install it with apt-get "
                f"install {kind.package}, or add --driver-jar FILE (spark-submit: --jars FILE)"
            ) from None
        settings = self._jvm.java.util.Properties()
        for name, value in self._database.properties.items():
            settings.setProperty(name, value)
        return driver.connect(self._database.url, settings)


@cache
def _library(kind: str) -> dict[str, str]:
    statements: dict[str, str] = {}
    for name in ("common", kind):
        text = (Path(__file__).parent / "sql" / f"{name}.sql").read_text("utf-8")
        found = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)
        statements |= zip(found[1::2], found[2::2], strict=True)
    return statements


def _sql_error(error: BaseException) -> tuple[str, str] | None:
    """SQLSTATE and message of the first SQLException among an error's causes; None without one.

    The SQLSTATE is empty for an error in a Spark task, because Spark only passes on the text.
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


def _is(error: Any, name: str) -> bool:
    kind = error.getClass()
    while kind is not None and kind.getName() != name:
        kind = kind.getSuperclass()
    return kind is not None


def _line(text: str | None) -> str:
    return (text or "").strip().partition("\n")[0]


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


def names(columns: Iterable[str]) -> str:
    """A list of quoted column names for SQL."""
    return ", ".join(f'"{name}"' for name in columns)


def to_log_rows(events: DataFrame) -> DataFrame:
    """Rows of LOG_SCHEMA -> rows of the table `message_log`."""
    special = {"shard": sf.coalesce("shard", sf.lit(""))}
    return events.select(*_columns(_LOG_FIELDS, _stored, special))


def from_log_rows(rows: DataFrame) -> DataFrame:
    """Rows of the table `message_log` -> rows of LOG_SCHEMA."""
    special = {"shard": sf.nullif(sf.col("shard"), sf.lit(""))}
    days = sf.coalesce(sf.floor(sf.col("at") / 86_400_000).cast("int"), sf.lit(0))
    day = sf.date_from_unix_date(days).alias("day")
    return rows.select(*_columns(_LOG_FIELDS, _read, special), day).to(LOG_SCHEMA)


def to_message_rows(messages: DataFrame) -> DataFrame:
    """Rows of MESSAGES_SCHEMA -> rows of the table `messages`."""
    groups = sf.transform(
        "groups",
        lambda one: sf.struct(
            *(_in_ms(one[field.name], field.dataType).alias(field.name) for field in _GROUP_FIELDS)
        ),
    )
    special = {
        "token": sf.coalesce(_clean(sf.col("token")), sf.lit("")),
        "headers": sf.to_json("headers"),
        "groups": sf.to_json(groups),
    }
    headers = sf.col("headers")
    text = sf.col("body").cast("string")
    return messages.select(
        *_columns(MESSAGES_SCHEMA.fields, _stored, special),
        _clean(sf.coalesce(headers["bizkey"], headers["bizKey"])).alias("bizkey"),
        _clean(headers["subtopic"]).alias("subtopic"),
        (text.isNull() | (sf.is_valid_utf8(text) & ~sf.contains(text, sf.lit("\0")))).alias(
            "readable"
        ),
    )


def from_message_rows(rows: DataFrame) -> DataFrame:
    """Rows of the table `messages` -> rows of MESSAGES_SCHEMA."""
    groups = sf.transform(
        sf.from_json("groups", _GROUPS_IN_MS),
        lambda one: sf.struct(
            *(_read(field, one[field.name]).alias(field.name) for field in _GROUP_FIELDS)
        ),
    )
    special = {
        "token": sf.nullif(sf.col("token"), sf.lit("")),
        "headers": sf.from_json("headers", "map<string,string>"),
        "groups": sf.coalesce(groups, sf.array()),
    }
    return rows.select(*_columns(MESSAGES_SCHEMA.fields, _read, special)).to(MESSAGES_SCHEMA)


def _columns(
    fields: Iterable[StructField],
    convert: Callable[[StructField], Column],
    special: Mapping[str, Column],
) -> list[Column]:
    """The columns of some fields: the special ones as given, the others converted."""
    return [
        (special[field.name] if field.name in special else convert(field)).alias(field.name)
        for field in fields
    ]


def _stored(field: StructField) -> Column:
    column = sf.col(field.name)
    return _clean(column) if field.dataType == StringType() else _in_ms(column, field.dataType)


def _read(field: StructField, column: Column | None = None) -> Column:
    column = sf.col(field.name) if column is None else column
    # A driver may return a boolean as a bit or a number.
    stored = LongType() if field.dataType == TimestampType() else field.dataType
    column = column.cast(stored)
    if not field.nullable:  # Spark treats all columns read through JDBC as nullable
        column = sf.coalesce(column, sf.lit("" if stored == StringType() else 0).cast(stored))
    return sf.timestamp_millis(column) if field.dataType == TimestampType() else column


def _in_ms(column: Column, kind: DataType) -> Column:
    return sf.unix_millis(column) if kind == TimestampType() else column


def _clean(text: Column) -> Column:
    return sf.translate(text, "\0", "\ufffd")
