"""What the demo's processes write down, outside the server: one line an event.

A process appends to a file of its own, in one write a line, so that nothing it saw is lost when it
is killed. The report counts these lines and nothing else.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

__all__ = ["Event", "Ledger", "Reader"]


class Event(NamedTuple):
    """One line. `number` is a due time, lateness or attempt, as the kind of event says."""

    kind: str
    id: str
    number: int


class Ledger:
    """The writing end."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, *events: Event) -> None:
        """Append events."""
        lines = "".join(f"{event.kind} {event.id} {event.number}\n" for event in events)
        os.write(self._file, lines.encode())


class Reader:
    """The reading end: follows a file that another process appends to."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_events(self) -> list[Event]:
        """What was written since the last call; half a line is left for the next one."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows = (line.split() for line in whole.decode().splitlines())
        return [Event(kind, message_id, int(number)) for kind, message_id, number in rows]
