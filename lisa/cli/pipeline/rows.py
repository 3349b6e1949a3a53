"""Selects the columns of messages from the rows that `lisa pipeline schedule` reads."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sf
from pyspark.sql.types import DecimalType

from lisa.cli.pipeline.reading import Rows, col, given_text, is_text, misfit, moment
from lisa.core.model.clock import duration_ms, parse_duration, parse_zone
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.model.late import own_late
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.model.windows.window import parse as parse_window
from lisa.pipeline.json_objects import BODY, KIND, JsonRows
from lisa.pipeline.source.columns import CORRUPT

TIMES = frozenset({"due", "delay", "at_local"})
NAMED_ONLY = frozenset({"at_local", "tz", "window", "late"})
"""Parts of a message that a column becomes only if an option names it."""

_LIKE_TIMES = re.compile(r"due(at|on|date|time|ms)?|delay(ms)?")


def as_messages(
    rows: Rows | JsonRows, named: dict[str, str | None], *, all_to: str | None
) -> DataFrame:
    """Select the message columns: those named by options, else those with the standard names.

    A column named like a part in NAMED_ONLY remains part of the body, unless an option names it.
    Without --body and a column `body`, the body is the row without the columns that became other
    parts of the message. Values of a CSV are numbers or Booleans in such a body if they look the
    same when printed, and otherwise text.
    """
    names = rows.names
    parts = {
        name: name if wanted is None else wanted
        for name, wanted in named.items()
        if name != "body"
        and (wanted is not None or (name in names and _is_implied(name, named, all_to)))
    }
    if TIMES.isdisjoint(parts):
        _check_times(names)
    body = named["body"] or ("body" if "body" in names else None)
    used = set() if body == "*" else set(parts.values())
    if body == "*":
        body = None
    if body is None and used.issuperset(names):
        raise ConfigError(
            f"no column is left for the body ({', '.join(names)}): name one with --body, or give "
            "--body '*' for all of them"
        )
    if body is not None and body not in names:
        raise _missing("body", body, names)
    table, content, kind = _content(rows, parts, body, used)
    made: list[Column] = []
    misfits = [sf.col(CORRUPT)] if CORRUPT in table.columns else []
    for part, wanted in parts.items():
        column = _part(table, names, part, wanted)
        if part in _CONVERTED and wanted in names and is_text(table, wanted):
            misfits.append(misfit(part, given_text(col(wanted)), column))
        made.append(column.alias(part))
    if kind is not None:
        made.append(kind.alias("kind"))
    if misfits:
        wrong = sf.coalesce(*misfits)
        content = sf.when(wrong.isNull(), content)  # its values may not be of their types
        made.append(wrong.alias(CORRUPT))
    return table.select(*made, content.alias("body"))


_CONVERTED = frozenset({"due", "headers"})
"""Parts that text is converted to, here."""


def _check_times(names: Collection[str]) -> None:
    """Raises ConfigError for a column that is probably meant to be a time."""
    for name in names:
        if _LIKE_TIMES.fullmatch(re.sub("[^a-z]", "", name.lower())):
            part = "delay" if name.strip().lower().startswith("delay") else "due"
            raise ConfigError(
                f"the column {name!r} is not used as {part!r}, so all rows would be due now: "
                f"add --{part} {name!r}; or --delay 0 if they are due now"
            )


def _content(
    rows: Rows | JsonRows, parts: Mapping[str, str], body: str | None, used: Collection[str]
) -> tuple[DataFrame, Column, Column | None]:
    """A table with the columns of all parts; body and, unless it follows from its type, its kind.

    body: the column of the body; None for the row without the columns `used`.
    """
    if isinstance(rows, JsonRows):
        columns = {name: part for part, name in parts.items() if name in rows.names}
        table = rows.table(columns, body, used)
        return table, sf.col(BODY), sf.col(KIND)
    table, rest = rows.table, [name for name in rows.names if name not in used]
    if body is not None:
        return table, col(body), None
    if rows.are_texts:
        values = (sf.concat(sf.lit(f"{_quoted(name)}:"), _json_value(col(name))) for name in rest)
        return table, sf.concat(sf.lit("{"), sf.concat_ws(",", *values), sf.lit("}")), sf.lit("j")
    return table, sf.struct(*map(col, rest)), None


def _is_implied(name: str, named: dict[str, str | None], all_to: str | None) -> bool:
    """Whether a column with a part's name becomes this part although no option names it."""
    if name == "topic":
        return all_to is None
    if name in NAMED_ONLY:
        return False
    return name not in TIMES or all(named[other] is None for other in TIMES)


_PRINTED_AS_READ = (
    r"^(0|-?[1-9][0-9]{0,17}"
    # At most 15 digits, which a double holds exactly; it prints smaller ones with an exponent.
    r"|(?=.{1,16}\z)(?!-?0[.]0000)-?(0|[1-9][0-9]*)[.](0|[0-9]*[1-9])"
    r"|true|false)\z"
)
"""Numbers and Booleans that look the same after they were read and printed: not 007, not 1.10."""


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json_value(column: Column) -> Column:
    """The JSON of a CSV's value; it does not depend on other rows."""
    array = sf.to_json(sf.array(column))
    text = sf.substring(array, sf.lit(2), sf.length(array) - 2)
    return (
        sf.when(column.isNull(), "null")
        .when(column.rlike(_PRINTED_AS_READ), column)
        .otherwise(text)
    )


def _missing(part: str, wanted: str, names: Collection[str]) -> ConfigError:
    option = part.replace("_", "-")
    return ConfigError(f"--{option}: no column {wanted!r}; the columns are {', '.join(names)}")


def _part(table: DataFrame, names: Collection[str], part: str, wanted: str) -> Column:
    if wanted not in names:
        if part in ("delay", "ttl", *_CONSTANTS):
            return _constant(part, wanted, names)
        raise _missing(part, wanted, names)
    column, kind = col(wanted), table.schema[wanted].dataType
    if isinstance(kind, DecimalType) and kind.scale == 0:  # such as Parquet's uint64
        return column.try_cast("string" if part == "id" else "bigint")
    if not is_text(table, wanted):
        return column
    column = given_text(column)
    if part == "headers":
        return sf.from_json(column, "map<string,string>")
    if part == "due":
        # Epoch milliseconds, or a time; microseconds are rounded up, so that no message is early.
        micros = sf.unix_micros(moment(column))
        up = ((micros + sf.pmod(-micros, sf.lit(1000))) / 1000).cast("bigint")
        return sf.coalesce(column.try_cast("bigint"), up)
    return column


_CONSTANTS: dict[str, Callable[[str], object]] = {
    "retry": RetryPolicy.parse,
    "late": own_late,
    "tz": parse_zone,
    "window": parse_window,
}
"""Options that take one text for all rows -> the check of that text."""


def _constant(name: str, value: str, columns: Collection[str]) -> Column:
    try:
        if check := _CONSTANTS.get(name):
            check(value)
            return sf.lit(value)
        return sf.lit(duration_ms(parse_duration(value))).cast("bigint")
    except InvalidMessage as error:
        raise ConfigError(
            f"--{name}: {value!r} is neither a column ({', '.join(columns)}) nor a value: {error}"
        ) from None
