"""Lays out tables for a terminal of some width, row by row as they arrive."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice, zip_longest

SAMPLE = 200
"""The rows that decide the widths of the columns."""

GAP = "  "
PROSE = 24
"""A column of longer text is wrapped to no less than this before other columns are dropped."""


def lines(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    width: int | None = None,
    drop: Sequence[str] = (),
) -> Iterator[str]:
    """The lines of a table that is at most `width` characters wide, if its words allow it.

    columns: their names; a name that ends with a space marks a column of numbers, aligned right.
        Without any name the table has no head.
    rows: read on demand; the first 200 decide the widths, and a longer cell moves those beside it.
    width: None for lines of any length, which are never wrapped.
    drop: names of columns that a narrow table omits, in this order. Then cells are wrapped between
        words; no word is broken or cut.
    """
    cells = ([cell.splitlines() or [""] for cell in row] for row in rows)
    first = list(islice(cells, SAMPLE))
    head = [[name.strip()] for name in columns]
    natural = [max(map(_longest_line, column)) for column in zip(head, *first, strict=True)]
    words = [max(map(_longest_word, column)) for column in zip(head, *first, strict=True)]
    kept = list(range(len(columns)))
    if width is not None:
        kept = _kept(columns, natural, words, width, drop)
        _shrink(kept, natural, words, width)
    above: list[list[list[str]]] = []
    if any(name for (name,) in head):
        above = [head, [["-" * min(one, width or one)] for one in natural]]
    wrap = _as_it_is if width is None else _wrapped
    for row in chain(above, first, cells):
        yield from _shown(row, kept, columns, natural, wrap)


def _kept(
    columns: Sequence[str],
    natural: Sequence[int],
    words: Sequence[int],
    width: int,
    drop: Sequence[str],
) -> list[int]:
    """The columns that fit, by their numbers."""
    wanted = [min(one, max(word, PROSE)) for one, word in zip(natural, words, strict=True)]
    names = [name.strip() for name in columns]
    kept = list(range(len(columns)))
    dropped: list[int] = []
    for name in drop:
        if name in names and _total([wanted[i] for i in kept]) > width:
            dropped.append(names.index(name))
            kept.remove(dropped[-1])
    for column in reversed(dropped):  # a narrow one may fit beside what is left
        if _total([wanted[i] for i in (*kept, column)]) <= width:
            kept.append(column)
    return sorted(kept)


def _shrink(kept: Sequence[int], natural: list[int], words: Sequence[int], width: int) -> None:
    """Make the widest columns narrower, down to their longest words, until the table fits."""
    while _total([natural[i] for i in kept]) > width:
        wide = [i for i in kept if natural[i] > words[i]]
        if not wide:
            return
        natural[max(wide, key=lambda i: natural[i])] -= 1


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(GAP) * (len(widths) - 1)


def _shown(
    row: Sequence[list[str]],
    kept: Sequence[int],
    columns: Sequence[str],
    widths: Sequence[int],
    wrap: Callable[[str, int], list[str]],
) -> Iterator[str]:
    """The lines of one row."""
    wrapped = [[part for line in row[i] for part in wrap(line, widths[i])] for i in kept]
    for parts in zip_longest(*wrapped, fillvalue=""):
        padded = []
        for i, part in zip(kept, parts, strict=True):
            space = " " * (widths[i] - cell_width(part))
            padded.append(space + part if columns[i].endswith(" ") else part + space)
        yield GAP.join(padded).rstrip()


def _as_it_is(line: str, _width: int) -> list[str]:
    return [line]


def _wrapped(line: str, width: int) -> list[str]:
    if cell_width(line) <= width:
        return [line]
    parts = textwrap.wrap(line, max(1, width), break_long_words=False, break_on_hyphens=False)
    return parts or [""]


def _longest_line(cell: Iterable[str]) -> int:
    return max(map(cell_width, cell))


def _longest_word(cell: Iterable[str]) -> int:
    return max((cell_width(word) for line in cell for word in line.split()), default=0)


def cell_width(text: str) -> int:
    """The columns that a text takes on a terminal, where some characters take two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)
