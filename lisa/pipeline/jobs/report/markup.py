"""Pieces of the page. What comes in is data and goes out escaped; only `Markup` goes as it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

__all__ = ["Cell", "Column", "Markup", "Row", "html", "notice", "section", "table", "tiles"]


MANY = 9
"""Tables of more columns are set smaller on paper."""


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Column:
    """A column's heading; text is flush left, numbers flush right."""

    title: str
    text: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a cell, and whether it is to be noticed."""

    text: str
    flag: bool = False


Row = Sequence[str | int | Cell]


def html(value: str) -> str:
    """Escaped, unless it is markup."""
    return value if isinstance(value, Markup) else escape(value, quote=True)


def table(caption: str, columns: Sequence[Column], rows: Iterable[Row]) -> Markup:
    """A table whose first column names the row. On a phone each row is a small card."""
    heads = "".join(
        f'<th scope="col"{_class("t" if one.text else "")}>{html(one.title)}</th>'
        for one in columns
    )
    kind = _class("many" if len(columns) > MANY else "")
    body = "\n".join(_row(columns, row) for row in rows)
    return Markup(
        f"<table{kind}><caption>{html(caption)}</caption><thead><tr>{heads}</tr></thead>\n"
        f"<tbody>{body}</tbody></table>"
    )


def _row(columns: Sequence[Column], row: Row) -> str:
    cells = []
    for number, (column, value) in enumerate(zip(columns, row, strict=True)):
        cell = value if isinstance(value, Cell) else Cell(
            f"{value:,}" if isinstance(value, int) else value)  # fmt: skip
        kinds = ["t" if column.text else "n", *(["zero"] if value == 0 else []),
                 *(["flag"] if cell.flag else []), *([] if cell.text else ["void"])]  # fmt: skip
        if number == 0:
            cells.append(f'<th scope="row"{_class(*kinds)}>{html(cell.text)}</th>')
        else:
            label = escape(column.title, quote=True)
            cells.append(f'<td{_class(*kinds)} data-l="{label}">{html(cell.text)}</td>')
    return f"<tr>{''.join(cells)}</tr>"


def _class(*names: str) -> str:
    found = " ".join(name for name in names if name)
    return f' class="{found}"' if found else ""


def tiles(values: Sequence[tuple[str, Cell, str, str]]) -> Markup:
    """Summary figures: name, value, what it says besides, and `good` or nothing."""
    items = "".join(
        f"<div><dt>{html(name)}</dt><dd{_class('bad' if cell.flag else mood)}>{html(cell.text)}"
        f"</dd><p>{html(said)}</p></div>"
        for name, cell, said, mood in values
    )
    return Markup(f'<dl class="tiles">{items}</dl>')


def notice(kind: str, title: str, text: str) -> Markup:
    """One line of what to see first; kind is `bad` or `warn`."""
    return Markup(f'<li class="{kind}"><p><b>{html(title)}</b> {html(text)}</p></li>')


def section(name: str, title: str, *parts: str) -> Markup:
    """A section that the page's list of contents can point at."""
    inside = "\n".join(
        part if isinstance(part, Markup) else f"<p>{html(part)}</p>" for part in parts
    )
    return Markup(f'<section id="{name}"><h2>{html(title)}</h2>\n{inside}\n</section>')
