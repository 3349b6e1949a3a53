"""Conditions on fields of JSON bodies: `$.order=42`, `$.name~^An`, `$.items[0].price>10`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lisa.core.model.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import Column

# A step of a path: .name, [number], ['any name'] or [*].
_FORM = re.compile(
    r"\s*(\$(?:\.[^.\[\]=!<>~\s]+|\[\d+\]|\[\*\]|\['[^']*'\])*)\s*(!=|<=|>=|=|<|>|~)\s*(.*)",
    re.DOTALL,
)

_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)

_EXACT = 2**53
"""From this number on, doubles cannot represent every integer."""


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
