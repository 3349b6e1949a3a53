"""A run's data and its verdicts so far, shared by all judges."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.torture.causes import Causes, Hold
from tests.torture.verdicts import Verdicts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from tests.torture.reading import Run
    from tests.torture.sent import Change

CLOCKS_US = 2_000
"""How far two processes' readings of Redis's clock may differ, beyond the bounds they note."""

UNSURE_US = 500_000
"""How far off a process's estimate of Redis's clock may be when it could not ask Redis."""


class Case:
    """A run's data.

    `messages` and `handled` are its two tables, the second in order of message, place and begin;
    `is_first` marks the first handling of a message in a group; `least` is the earliest instant at
    which each handling can have begun, `latest` (ms) the latest due time that the answer to its
    sender allows for.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.messages = run.messages.rows
        self.handled = run.handled.rows
        self.causes = Causes.of(run.events, run.stalls)
        self.verdicts = Verdicts()
        rows = self.handled
        self._message = np.ascontiguousarray(rows["message"])  # cached: used for each change
        self.is_first = np.ones(len(rows), bool)
        self.is_first[1:] = (rows["message"][1:] != rows["message"][:-1]) | (
            rows["place"][1:] != rows["place"][:-1]
        )
        self.least = np.where(rows["asked"] == 1, rows["begin"], rows["begin"] - UNSURE_US)
        took = (self.messages["confirmed"] - self.messages["tried"] + CLOCKS_US) // 1000
        self.latest = self.messages["due"] + took + 1

    def number(self, row: int) -> int:
        """The message of a handling."""
        return self.run.messages.number(int(self.handled["message"][row]))

    def hold(self, row: int) -> Hold:
        """One handling."""
        one = self.handled[row]
        return Hold(
            int(one["process"]),
            int(one["begin"]),
            int(one["end"]),
            int(one["verdict"]),
            int(one["attempt"]),
            int(one["begin_by"]),
            int(one["end_from"]),
        )

    def changes(self, kind: str, answer: str) -> Iterator[tuple[int, Change, range]]:
        """Second calls of a kind with that answer: message, call, its handlings."""
        for message, change in self.run.messages.changes.items():
            if change.kind == kind and change.answer == answer:
                here = self.handlings(message)
                yield message, change, range(here.start, here.stop)

    def handlings(self, message: int) -> slice:
        """The rows of a message's handlings."""
        here = np.searchsorted(self._message, np.array([message, message + 1], "i4"))
        return slice(int(here[0]), int(here[1]))

    def owes_its_first(self, message: int, change: Change) -> bool:
        """Whether Redis had confirmed a message before a second call began, and still had it.

        A message that another program deleted, or the server lost, counts as never sent.
        """
        confirmed = int(self.messages["confirmed"][message])
        return bool(
            0 < confirmed <= change.tried
            and not self.causes.loss_of(confirmed)
            and self.run.messages.number(message) not in self.causes.deleted
        )

    def latest_due(self) -> NDArray[np.int64]:
        """By message, in ms: `latest`, or what a confirmed new due time allows for."""
        latest: NDArray[np.int64] = self.latest.copy()
        for message, change, _ in self.changes("R", "r"):
            latest[message] = change.due + (change.ended - change.tried + CLOCKS_US) // 1000 + 1
        return latest
