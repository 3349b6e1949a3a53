"""Back-off: the pauses between attempts. Callers sleep themselves, on a thread or on asyncio."""

from __future__ import annotations

import math

from lisa.core.model.errors import ServerUnavailable, SlotMoving

FIRST_S = 0.02
LONGEST_S = 5.0

LONGEST_AWAY_S = 0.5
"""Maximum pause before the next attempt in loops that continue while the server, or a topic's node,
is down; keeps recovery fast once the server is back."""

MOVING_S = 0.1
"""The same while a topic's slot moves: its nodes answer, and the move may end at any moment."""


def longest_after(error: BaseException) -> float:
    """The maximum pause in seconds between attempts that fail with an error."""
    if isinstance(error, SlotMoving):
        return MOVING_S
    return LONGEST_AWAY_S if isinstance(error, ServerUnavailable) else LONGEST_S


class Backoff:
    """Pauses that double from `first_s` to `longest_s`. `pause_s` is the next one, in seconds."""

    __slots__ = ("_first_s", "_longest_s", "pause_s")

    def __init__(self, first_s: float = FIRST_S, longest_s: float = LONGEST_S) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self.pause_s = first_s

    def take(self, most_s: float = math.inf) -> float:
        """The next pause, at most `most_s`; the one after it is twice as long."""
        pause_s = min(self.pause_s, most_s)
        self.pause_s = min(2 * pause_s, self._longest_s)
        return pause_s

    def lengthen(self, longest_s: float = math.inf) -> None:
        """Double the next pause, up to `longest_s` or the general limit."""
        self.pause_s = min(2 * self.pause_s, longest_s, self._longest_s)

    def reset(self) -> None:
        """Return to the first pause, after a success."""
        self.pause_s = self._first_s
