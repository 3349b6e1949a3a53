"""Ledgers of the demo: each process records its events in a file, one line per event.

Each line is one write, so that a killed process loses no event. The report counts only these
lines.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class DemoEvent(NamedTuple):
    """One line. `number` is a due time, lateness or attempt, depending on `kind`."""

    kind: str
    id: str
    number: int


class DemoLedger:
    """Appends events to a file."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, *events: DemoEvent) -> None:
        """Append events."""
        lines = "".join(f"{event.kind} {event.id} {event.number}\n" for event in events)
        os.write(self._file, lines.encode())


class DemoLedgerReader:
    """Follows a file to which another process appends."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def new_events(self) -> list[DemoEvent]:
        """Events written since the last call; incomplete lines are left for the next call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        rows = (line.split() for line in whole.decode().splitlines())
        return [DemoEvent(kind, message_id, int(number)) for kind, message_id, number in rows]
