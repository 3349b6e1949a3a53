"""Errors that a role logged and survived: tracebacks in the logs."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BEGINS = "Traceback (most recent call last):"
EXPECTED = "tests.torture.handlers.Trouble:"
"""Exceptions that the handlers of a run raise on purpose."""

NOT_JUDGED = ("archive", "restore")  # a JVM reports each killed server in its own way


def read_traces(folder: Path) -> Iterator[str]:
    """Tracebacks of unexpected exceptions: file, line, and their last line.

    One torn by a kill has no last line: the next process's output follows, or nothing.
    """
    for path in sorted(folder.glob("*.log")):
        if not path.name.startswith(NOT_JUDGED):
            yield from _of_one(path)


def _of_one(path: Path) -> Iterator[str]:
    began = 0
    with path.open(encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            if line.startswith(BEGINS):
                began = number
            elif BEGINS in line:  # an exception group's, indented and framed
                yield f"{path.name}:{number}: {line.strip()}"
            elif began and line.strip() and not line.startswith(" "):
                is_torn = line[:4].isdigit() or not line.endswith("\n")  # begins with a time
                if not is_torn and not line.startswith(EXPECTED):
                    yield f"{path.name}:{began}: {line.strip()}"
                began = 0
