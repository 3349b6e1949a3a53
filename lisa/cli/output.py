"""Output of commands: tables for people, one JSON document for programs."""

from __future__ import annotations

import base64
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice, zip_longest
from typing import TYPE_CHECKING, Any, NoReturn

import click
import msgspec

from lisa.core.model.clock import human, ms_datetime, utc_text
from lisa.core.model.display import visible

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress


WIDE = 10_000
"""Width of output to a pipe or file, where lines must not wrap."""


SAMPLE = 200
"""The rows that decide the widths of the columns."""

GAP = "  "

PROSE = 24
"""A column of longer text is wrapped to no less than this before other columns are dropped."""


def print_json(document: Any) -> None:
    """Print a document on one line."""
    click.echo(msgspec.json.encode(document).decode())


def console(*, err: bool = False) -> Console:
    """A console that prints text literally: ids and bodies are data, not mark-up."""
    from rich.console import Console

    stream = sys.stderr if err else sys.stdout
    width = None if stream.isatty() else WIDE
    return Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    title: str = "",
    *,
    drop: Sequence[str] = (),
) -> None:
    """Print a table and an empty line; see `text_table`. A pipe or file gets every column."""
    if title:
        print(printable(title))
    for line in text_table(columns, rows, terminal_width(), drop):
        print(line)
    print(flush=True)  # a closed pipe must fail here, not at the end of Python


def terminal_width() -> int | None:
    """The columns of the terminal; None for a pipe or file, where lines have any length."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def printable(text: str) -> str:
    """Text that cannot control a terminal, hide or reorder other text, or leave its column."""
    return visible(text).replace("\t", "\\t")


def when(ms: int | None, now_ms: int) -> str:
    """An instant in local time and its distance from now: `... (in 29m 58s)`."""
    return "" if ms is None else f"{local(ms)} ({distance(ms, now_ms)})"


def local(ms: int | None) -> str:
    """An instant in local time, to the second; empty for None."""
    if ms is None:
        return ""
    try:
        moment = ms_datetime(ms).astimezone()
    except (OverflowError, OSError):  # a zone ahead of UTC, in the last hours of the year 9999
        moment = ms_datetime(ms)
    return f"{moment:%Y-%m-%d %H:%M:%S}"


def distance(ms: int | None, now_ms: int) -> str:
    """How far an instant is from now: `in 29m 58s` or `12s ago`; empty for None."""
    if ms is None:
        return ""
    return f"in {human(ms - now_ms)}" if ms > now_ms else f"{human(now_ms - ms)} ago"


def iso(ms: int | None) -> str | None:
    """An instant for JSON: ISO 8601 in UTC with milliseconds."""
    return None if ms is None else utc_text(ms_datetime(ms))


def number(value: float | None, digits: int = 1) -> str:
    """A number for a table; empty for None."""
    return "" if value is None else f"{value:,.{digits}f}"


def body_fields(body: Any) -> dict[str, Any]:
    """A body for JSON: bytes become base64; `body_encoding` is base64, text or json."""
    if isinstance(body, bytes):
        return {"body": base64.b64encode(body).decode(), "body_encoding": "base64"}
    return {"body": body, "body_encoding": "text" if isinstance(body, str) else "json"}


def progress_bar(text: str) -> Progress:
    """A bar on stderr, beside a text of its task; not shown unless stderr is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (TextColumn(text), BarColumn(), MofNCompleteColumn())
    is_hidden = not sys.stderr.isatty()
    return Progress(*columns, console=console(err=True), transient=True, disable=is_hidden)


@contextmanager
def counting(verb: str) -> Iterator[Callable[[int], None]]:
    """Show the progress of long work on stderr: how many items are done."""
    with console(err=True).status("") as status:
        yield lambda n: status.update(f"{n} {verb}")


def confirm(question: str, *, yes: bool) -> None:
    """Ask for confirmation; exit with code 1 unless the answer is yes."""
    if not yes and not click.confirm(question, err=True):
        fail("nothing was changed")


def fail(line: str) -> NoReturn:
    """End the command with an error on stderr and exit code 1."""
    click.echo(f"lisa: {line}", err=True)
    raise click.exceptions.Exit(1)


def text_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
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
    cells = ([_cell(value) for value in row] for row in rows)
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
        above = [head, [["-" * min(column, width or column)] for column in natural]]
    wrap = _as_it_is if width is None else _wrapped
    for row in chain(above, first, cells):
        yield from _shown(row, kept, columns, natural, wrap)


def _cell(value: object) -> list[str]:
    """The lines of a cell."""
    return [""] if value is None else printable(str(value)).splitlines() or [""]


def _kept(
    columns: Sequence[str],
    natural: Sequence[int],
    words: Sequence[int],
    width: int,
    drop: Sequence[str],
) -> list[int]:
    """The columns that fit, by their numbers."""
    wanted = [min(size, max(word, PROSE)) for size, word in zip(natural, words, strict=True)]
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
