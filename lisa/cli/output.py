"""Output of commands: tables for people, one JSON document for programs."""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click
import msgspec

from lisa.core.model.clock import human, ms_datetime

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

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


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> Table:
    """A table; a column whose name ends with a space is aligned right, for numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    headed = any(name.strip() for name in columns)
    made = Table(
        box=SIMPLE_HEAD if headed else None,
        show_header=headed,
        pad_edge=False,
        title=title or None,
        title_justify="left",
    )
    for name in columns:
        made.add_column(
            name.strip(), justify="right" if name.endswith(" ") else "left", overflow="fold"
        )
    for row in rows:
        cells = ("" if cell is None else str(cell) for cell in row)
        made.add_row(*(Text(printable(cell)) for cell in cells))
    return made


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], title: str = "") -> None:
    """Print a table."""
    console().print(table(columns, rows, title))


def printable(text: str) -> str:
    """Text with non-printable characters escaped, so that they cannot control a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)


def when(ms: int | None, now_ms: int) -> str:
    """An instant in local time and its distance from now: `... (in 29m 58s)`."""
    if ms is None:
        return ""
    try:
        local = ms_datetime(ms).astimezone()
    except (OverflowError, OSError):  # a zone ahead of UTC, in the last hours of the year 9999
        local = ms_datetime(ms)
    away = f"in {human(ms - now_ms)}" if ms > now_ms else f"{human(now_ms - ms)} ago"
    return f"{local:%Y-%m-%d %H:%M:%S} ({away})"


def iso(ms: int | None) -> str | None:
    """An instant for JSON: ISO 8601 in UTC with milliseconds."""
    if ms is None:
        return None
    moment: datetime = ms_datetime(ms).astimezone(UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


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
        click.echo("lisa: nothing was changed", err=True)
        raise click.exceptions.Exit(1)
