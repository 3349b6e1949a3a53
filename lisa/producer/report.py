"""Outcomes of the messages of a `send_many`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from lisa.core.transitions.enqueue import Sent


class SendOutcome(NamedTuple):
    """One message: its id and its outcome, as `Producer.send_one` states them."""

    id: str
    outcome: Sent


class SendReport:
    """Counts outcomes and iterates them in the order of sending.

    Takes about 31 bytes per message with a generated id: the ids of one script call are one string,
    joined by line feeds (no id contains a control character) and split on demand.
    """

    __slots__ = ("_calls", "_counts")

    def __init__(self) -> None:
        self._calls: list[tuple[str, Sequence[Sent]]] = []
        self._counts: Counter[Sent] = Counter()

    def add(self, ids: Sequence[str], outcomes: Sequence[Sent]) -> None:
        """Add the messages of one script call."""
        self._calls.append(("\n".join(ids), outcomes))
        self._counts.update(outcomes)

    @property
    def accepted(self) -> int:
        """Number of new messages."""
        return self._counts[Sent.ACCEPTED]

    @property
    def duplicate(self) -> int:
        """Number of messages whose id was known; the earlier message is unchanged."""
        return self._counts[Sent.DUPLICATE]

    @property
    def replaced(self) -> int:
        """Number of messages that replaced an earlier one, which no consumer held."""
        return self._counts[Sent.REPLACED]

    @property
    def replaced_in_flight(self) -> int:
        """Number of messages that replaced one whose handler may be running, or may still start."""
        return self._counts[Sent.REPLACED_IN_FLIGHT]

    @property
    def updated(self) -> int:
        """Number of messages that took the place and the due time of an earlier one."""
        return self._counts[Sent.UPDATED]

    @property
    def rejected(self) -> int:
        """Number of messages whose id was known, with `on_duplicate="reject"`."""
        return self._counts[Sent.REJECTED]

    def __len__(self) -> int:
        return self._counts.total()

    def __iter__(self) -> Iterator[SendOutcome]:
        for ids, outcomes in self._calls:
            yield from map(SendOutcome, ids.split("\n"), outcomes)

    def __repr__(self) -> str:
        counts = " ".join(f"{name}={self._counts[name]}" for name in Sent)
        return f"<SendReport {counts}>"
