"""Output of commands: tables for people, one JSON document for programs."""

from __future__ import annotations

import base64
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import click
import msgspec

from lisa.core.model.clock import human, ms_datetime, utc_text
from lisa.core.model.display import visible

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 10_000
"""Width of output to a pipe or file, where lines must not wrap."""


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


def text_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    width: int | None = None,
    drop: Sequence[str] = (),
) -> Iterator[str]:
    """The lines of a table with any cells; see `tables.lines` for the rest."""
    from lisa.cli import tables

    cells = (["" if cell is None else printable(str(cell)) for cell in row] for row in rows)
    return tables.lines(columns, cells, width, drop)


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
