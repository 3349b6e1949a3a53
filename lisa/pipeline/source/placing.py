"""Due times of rows by a wall clock, and windows of single rows: as `Producer.send` places them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from operator import itemgetter
from typing import Any, NamedTuple

from lisa.core.model.envelope import encode_headers
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.keys import WINDOW_HEADER
from lisa.core.model.windows.placing import check_window, clock_ms, place

CALENDAR_COLUMNS = ("at_local", "window")
"""The columns that need this module; `tz` belongs to both."""


class CalendarRow(NamedTuple):
    """What places one row. due: as for a script, None for a row with a wall time."""

    due: str | None
    at_local: datetime | str | None
    tz: str | None
    window: str | None
    headers: Mapping[str, str]


class PlacedRow(NamedTuple):
    """Due time for a script, the same before its move into a window, and encoded headers."""

    due: str
    asked: str
    headers: bytes


def row_headers(pairs: Sequence[tuple[str, str]] | None) -> bytes:
    """The encoded headers of a row that this module does not place. Raises InvalidMessage."""
    if not pairs:
        return b"0000"
    headers = dict(sorted(pairs, key=itemgetter(0)))
    if WINDOW_HEADER in headers:
        check_window(headers[WINDOW_HEADER])
    return encode_headers(headers)


REFUSED = PlacedRow("0", "0", b"0000")
"""Stands for a row that cannot be placed."""


class Placing:
    """Places the rows of one batch; equal rows without headers are placed once."""

    def __init__(self, *, is_local: bool) -> None:
        self._is_local = is_local
        self._now_ms = clock_ms()
        self._known: dict[CalendarRow, PlacedRow] = {}

    def rows(
        self,
        dues: Sequence[str | None],
        columns: Mapping[str, Sequence[Any]],
        headers: Sequence[Sequence[tuple[str, str]] | None],
    ) -> list[CalendarRow]:
        """The rows to place, from their columns; a missing column is null in every row."""
        nothing: list[None] = [None] * len(dues)
        named = (columns.get(name, nothing) for name in ("at_local", "tz", "window"))
        given = [dict(sorted(pairs)) if pairs else {} for pairs in headers] or [{}] * len(dues)
        return [CalendarRow(*one) for one in zip(dues, *named, given, strict=True)]

    def place(self, row: CalendarRow) -> PlacedRow:
        """Choose a row's due time. Raises InvalidMessage."""
        if row.headers:
            return self._placed(row)
        key = row._replace(headers=None)  # type: ignore[arg-type]  # a key only
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._placed(row)
        return found

    def _placed(self, row: CalendarRow) -> PlacedRow:
        if self._is_local and row.at_local is None:
            raise InvalidMessage("value is null")
        options = {"at_local": row.at_local, "window": row.window, "headers": row.headers}
        made = place(options, row.due, row.tz, self._now_ms)
        # A wall time is in the headers. Its instant depends on the machine's time zone data.
        asked = row.due if row.due is not None else ""
        return PlacedRow(made.due, asked, encode_headers(made.headers))
