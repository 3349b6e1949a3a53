"""Conditions on fields of JSON bodies: `$.order=42`, `$.name~^An`, `$.items[0].price>10`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lisa.core.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import Column

__all__ = ["FieldTest"]

# A step of a path: .name, [number], ['any name'] or [*].
_FORM = re.compile(
    r"\s*(\$(?:\.[^.\[\]=!<>~\s]+|\[\d+\]|\[\*\]|\['[^']*'\])*)\s*(!=|<=|>=|=|<|>|~)\s*(.*)",
    re.DOTALL,
)

_EXACT = 2**53
"""From here on not every whole number is a double."""


@dataclass(frozen=True, slots=True)
class FieldTest:
    """One condition: a JSON path, one of = != < > <= >= ~, and a value.

    Numbers are compared as numbers where both sides are, else as text; so is whether numbers of
    sixteen digits and more are equal, which a double does not tell apart; `~` finds a regular
    expression anywhere in the text. A body without the field meets no condition, nor does a body
    that is not JSON.
    """

    path: str
    operator: str
    value: str

    @classmethod
    def parse(cls, given: str) -> FieldTest:
        """Read one condition. Raises ConfigError that says how one is written."""
        found = _FORM.fullmatch(given)
        if found is None:
            raise ConfigError(
                f"{given!r} is no condition; write PATH=VALUE as in '$.order=42', with one of "
                "= != < > <= >= ~ (~ is a regular expression)"
            )
        path, operator, value = found.groups()
        if operator == "~":
            try:
                re.compile(value)
            except re.error as error:
                raise ConfigError(
                    f"{given!r}: {value!r} is no regular expression: {error}"
                ) from None
        return cls(path, operator, value)

    def holds(self, json: Column) -> Column:
        """Whether it holds for JSON text."""
        from pyspark.sql import functions as sf

        found = sf.get_json_object(json, self.path)
        if self.operator == "~":
            return sf.coalesce(found.rlike(self.value), sf.lit(False))  # noqa: FBT003
        compared = _compared(found, sf.lit(self.value), self.operator)
        try:
            number = float(self.value)
        except ValueError:
            return sf.coalesce(compared, sf.lit(False))  # noqa: FBT003
        if self.operator in ("=", "!=") and abs(number) >= _EXACT:
            # As doubles, neighbours are one: two orders of eighteen digits, say.
            return sf.coalesce(compared, sf.lit(False))  # noqa: FBT003
        numbers = _compared(found.try_cast("double"), sf.lit(number), self.operator)
        return sf.coalesce(numbers, compared, sf.lit(False))  # noqa: FBT003


def _compared(left: Column, right: Column, operator: str) -> Column:
    return {
        "=": left == right, "!=": left != right, "<": left < right,
        ">": left > right, "<=": left <= right, ">=": left >= right,
    }[operator]  # fmt: skip
