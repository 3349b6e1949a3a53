"""The job `search`: finds messages by id, state, due time and body, in archive and queue.

Conditions on fields of JSON bodies are `$.order=42`, `$.name~^An`, `$.items[0].price>10`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.errors import AnalysisException, ParseException
from pyspark.sql import DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import StructType

from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import keyed_id
from lisa.pipeline.archive.base import selected
from lisa.pipeline.source.read_columns import READ_SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

    from lisa.pipeline.archive import Archive
    from lisa.pipeline.server import Server

LIVE_STATES = ("in_flight", "ready", "parked", "retry", "garbage", "waiting")
"""In order of precedence: a message of several groups has the first of these states."""

STATES = (*LIVE_STATES, "acked", "cancelled", "expired", "skipped", "purged", "lost")

COLUMNS = (
    "topic",
    "id",
    "token",
    "source",
    "state",
    "due",
    "expires",
    "attempts",
    "reason",
    "groups",
    "headers",
    "kind",
    "body",
    "body_text",
    "body_json",
    "sent_at",
    "updated_at",
    "settled",
    "settled_at",
    "late_us",
)
"""The columns of the result; SQL conditions may use them."""

KEY = ["topic", "id", "token"]
EARLIEST_FIRST = ["due", "topic", "id"]
LIVE_SCHEMA = StructType(
    [
        READ_SCHEMA[name]
        for name in (
            "topic",
            "group",
            "id",
            "state",
            "due",
            "attempts",
            "reason",
            "expires",
            "headers",
            "kind",
            "body",
            "envelope",
        )
    ]
)
GROUP = "struct<group string, state string, attempts int, due timestamp, reason string>"


# A step of a path: .name, [number], ['any name'] or [*].
_FORM = re.compile(
    r"\s*(\$(?:\.[^.\[\]=!<>~\s]+|\[\d+\]|\[\*\]|\['[^']*'\])*)\s*(!=|<=|>=|=|<|>|~)\s*(.*)",
    re.DOTALL,
)

_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)

_EXACT = 2**53
"""From this number on, doubles cannot represent every integer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """Conditions of a search; a message must meet every one. None means no condition.

    due_after, due_before: aware datetimes; `due_after` is inclusive, `due_before` exclusive.
    key: only messages of this key. where: SQL condition on COLUMNS.
    """

    topics: Sequence[str] | None = None
    ids: Sequence[str] | None = None
    key: str | None = None
    states: Sequence[str] | None = None
    due_after: datetime | None = None
    due_before: datetime | None = None
    fields: Sequence[FieldTest] = ()
    where: str | None = None


def search(
    spark: SparkSession,
    query: Query,
    *,
    archive: Archive | None = None,
    server: Server | None = None,
) -> DataFrame:
    """Rows of COLUMNS, one for each life of a message, ordered by due time.

    Column `source` is archive, live or both; a message found in both has its live state. Raises
    ConfigError without archive and server, or if Spark rejects the SQL condition.
    """
    sides = []
    if server is not None:
        sides.append(_matching_body(_live(spark, server, query), query))
    if archive is not None:
        known = _matching_body(_archived(archive, query), query)
        sides = [known] if not sides else _together(sides[0], known)
    if not sides:
        raise ConfigError("a search needs an archive, a server, or both")
    rows = reduce(DataFrame.unionByName, sides)
    rows = rows.withColumn("body_json", sf.try_parse_json(_json_text())).select(*COLUMNS)
    for condition in _conditions(query):
        rows = rows.where(condition)
    if query.where:
        rows = _filtered(rows, query.where)
    return rows.orderBy(*EARLIEST_FIRST)


def _filtered(rows: DataFrame, condition: str) -> DataFrame:
    try:
        return rows.where(condition)
    except (AnalysisException, ParseException) as error:
        first = (error.getMessage() or str(error)).strip().splitlines()[0]
        raise ConfigError(
            f"condition {condition!r} cannot be used: {first} (columns: {', '.join(COLUMNS)})"
        ) from None


def _json_text() -> Column:
    return sf.when(sf.col("kind") == "j", sf.col("body_text"))


def _matching_body(rows: DataFrame, query: Query) -> DataFrame:
    """Add column `body_text`, and filter by the conditions on fields.

    A body never changes within a life, so both sides are filtered before they are joined.
    """
    text = sf.when(sf.col("kind").isin("j", "s"), sf.col("body").cast("string"))
    rows = rows.withColumn("body_text", text)
    for test in query.fields:
        rows = rows.where(test.holds(_json_text()))
    return rows


def _conditions(query: Query) -> list[Column]:
    found = []
    if query.key is not None:
        found.append(sf.col("id").startswith(keyed_id(query.key, "")))
    if query.states is not None:
        found.append(sf.col("state").isin(list(query.states)))
    if query.due_after is not None:
        found.append(sf.col("due") >= sf.lit(query.due_after))
    if query.due_before is not None:
        found.append(sf.col("due") < sf.lit(query.due_before))
    return found


def _archived(archive: Archive, query: Query) -> DataFrame:
    groups = sf.transform(
        "groups",
        lambda one: sf.struct(
            *[one[name].alias(name) for name in ("group", "state", "attempts", "due", "reason")]
        ),
    )
    rows = archive.messages(query.topics, query.ids)
    return rows.withColumns({"groups": groups.cast(f"array<{GROUP}>"), "source": sf.lit("archive")})


def _live(spark: SparkSession, server: Server, query: Query) -> DataFrame:
    """One row per live message, combined from its groups."""
    reader = spark.read.format("lisa").options(**server.as_options()).schema(LIVE_SCHEMA)
    if query.topics is not None:
        reader = reader.option("topic", ",".join(query.topics))
    live = selected(reader.load(), None, query.ids)
    token = sf.substring("envelope", 2, 8).cast("string")
    live = live.withColumn("token", token).drop("envelope")
    rank = sf.array_position(sf.lit(list(LIVE_STATES)), sf.col("state"))
    group = sf.struct("group", "state", "attempts", "due", "reason").cast(GROUP)
    rows = live.groupBy(*KEY).agg(
        sf.min_by("state", rank).alias("state"),
        sf.min_by("due", rank).alias("due"),
        sf.min_by("reason", rank).alias("reason"),
        sf.max("expires").alias("expires"),
        sf.max("attempts").alias("attempts"),
        sf.array_sort(sf.collect_list(sf.when(sf.col("group").isNotNull(), group))).alias("groups"),
        *[sf.first(name).alias(name) for name in ("headers", "kind", "body")],
    )
    unknown = {
        name: sf.lit(None).cast("timestamp") for name in ("sent_at", "updated_at", "settled_at")
    }
    return rows.withColumns(
        {
            **unknown,
            "source": sf.lit("live"),
            "settled": sf.lit(False),  # noqa: FBT003
            "late_us": sf.lit(None).cast("bigint"),
        }
    )


def _together(live: DataFrame, archived: DataFrame) -> list[DataFrame]:
    """Live messages, completed with columns of the archive; and messages only in the archive."""
    columns = [name for name in COLUMNS if name != "body_json"]
    archived = archived.select(*[sf.col(name).alias(f"a_{name}") for name in columns])
    # The token of a life whose send was not archived is unknown. Until that life ends, it is the
    # one that is live.
    is_unknown = sf.col("a_token").isNull() & ~sf.col("a_settled")
    same = [
        sf.col("topic") == sf.col("a_topic"),
        sf.col("id") == sf.col("a_id"),
        sf.col("token").eqNullSafe(sf.col("a_token")) | is_unknown,
    ]
    both = live.join(archived, same, "left").withColumns(
        {
            "source": sf.when(sf.col("a_id").isNotNull(), "both").otherwise("live"),
            **{name: sf.col(f"a_{name}") for name in ("sent_at", "updated_at", "late_us")},
        }
    )
    rest = archived.join(live, same, "left_anti")
    return [
        both.select(*columns),
        rest.select(*[sf.col(f"a_{name}").alias(name) for name in columns]),
    ]


@dataclass(frozen=True, slots=True)
class FieldTest:
    """One condition: a JSON path, one of = != < > <= >= ~, and a value.

    If both sides are numbers, they are compared as numbers, otherwise as text. Large numbers are
    tested for equality as text, because doubles are not exact from 2**53 on. `~` searches for a
    regular expression anywhere in the text. A body that is not JSON, or that lacks the field, meets
    no condition.
    """

    path: str
    operator: str
    value: str

    @classmethod
    def parse(cls, given: str) -> FieldTest:
        """Parse a condition. Raises ConfigError if it is not valid."""
        found = _FORM.fullmatch(given)
        if found is None:
            raise ConfigError(
                f"{given!r} is not a condition; write PATH=VALUE as in '$.order=42', with one of "
                "= != < > <= >= ~ (~ is a regular expression)"
            )
        path, operator, value = found.groups()
        if operator == "~":
            try:
                re.compile(value)
            except re.error as error:
                raise ConfigError(
                    f"{given!r}: {value!r} is not a valid regular expression: {error}"
                ) from None
        return cls(path, operator, value)

    def holds(self, json: Column) -> Column:
        """Whether the condition holds for a column of JSON text; never null."""
        from pyspark.sql import functions as sf

        found = sf.get_json_object(json, self.path)
        if self.operator == "~":
            return sf.coalesce(found.rlike(self.value), sf.lit(False))  # noqa: FBT003
        compared = _compared(found, sf.lit(self.value), self.operator)
        if _NUMBER.fullmatch(self.value) is None:
            return sf.coalesce(compared, sf.lit(False))  # noqa: FBT003
        number = float(self.value)
        if self.operator in ("=", "!=") and abs(number) >= _EXACT:
            # As doubles, different large numbers may be equal, such as ids of eighteen digits.
            return sf.coalesce(compared, sf.lit(False))  # noqa: FBT003
        numbers = _compared(found.try_cast("double"), sf.lit(number), self.operator)
        return sf.coalesce(numbers, compared, sf.lit(False))  # noqa: FBT003


def _compared(left: Column, right: Column, operator: str) -> Column:
    return {
        "=": left == right,
        "!=": left != right,
        "<": left < right,
        ">": left > right,
        "<=": left <= right,
        ">=": left >= right,
    }[operator]
