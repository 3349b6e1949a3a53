"""What became of the messages of a `send_many`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lisa.core.transitions.enqueue import Sent

__all__ = ["SendOutcome", "SendReport"]


class SendOutcome(NamedTuple):
    """One message: its id, and accepted, duplicate, replaced or rejected."""

    id: str
    outcome: Sent


class SendReport:
    """Counts outcomes, and iterates them in the order of sending.

    It takes some 31 bytes a message with generated ids: those of one script call are one text,
    split when they are asked for. No id holds a control character, so a line feed parts them.
    """

    __slots__ = ("_calls", "_counts")

    def __init__(self) -> None:
        self._calls: list[tuple[str, Sequence[Sent]]] = []
        self._counts: Counter[Sent] = Counter()

    def add(self, ids: Sequence[str], outcomes: Sequence[Sent]) -> None:
        """Note the messages of one script call."""
        self._calls.append(("\n".join(ids), outcomes))
        self._counts.update(outcomes)

    @property
    def accepted(self) -> int:
        """Messages that are new."""
        return self._counts[Sent.ACCEPTED]

    @property
    def duplicate(self) -> int:
        """Messages whose id was known: the earlier one stays as it is."""
        return self._counts[Sent.DUPLICATE]

    @property
    def replaced(self) -> int:
        """Messages that took the place of an earlier one."""
        return self._counts[Sent.REPLACED]

    @property
    def rejected(self) -> int:
        """Messages whose id was known, under `on_duplicate="reject"`."""
        return self._counts[Sent.REJECTED]

    def __len__(self) -> int:
        return self._counts.total()

    def __iter__(self) -> Iterator[SendOutcome]:
        for ids, outcomes in self._calls:
            yield from map(SendOutcome, ids.split("\n"), outcomes)

    def __repr__(self) -> str:
        counts = " ".join(f"{name}={self._counts[name]}" for name in Sent)
        return f"<SendReport {counts}>"
