"""Decides whether a reader sends its acks with the next read, or waits for more acks."""

from __future__ import annotations

SHARE_WITHIN_S = 0.005
"""How long acks wait for others; the settler waits as long."""

WEIGHT = 0.2
"""Weight of the last interval in the average."""

MOST = 16
"""With this many acks, the reader sends them without waiting."""


class AckSharing:
    """Tracks the intervals between one reader's messages, and how long its acks have waited.

    A call for several acks costs the server and the consumer little more than a call for one.
    """

    def __init__(self) -> None:
        self._interval_s = 1.0
        self._arrived_at = 0.0
        self._waiting_since: float | None = None

    def arrived(self, now: float) -> None:
        """Record that a read returned messages."""
        interval_s = min(1.0, now - self._arrived_at)
        self._interval_s += WEIGHT * (interval_s - self._interval_s)
        self._arrived_at = now

    def wait_ms(self, acks: int, now: float) -> int:
        """How many milliseconds to read without sending the acks; 0 to send them with this read.

        Acks wait only if the next message is expected in time to share their call.
        """
        since = now if self._waiting_since is None else self._waiting_since
        left_s = since + SHARE_WITHIN_S - now
        if not 0 < acks < MOST or left_s < self._interval_s:
            self._waiting_since = None
            return 0
        self._waiting_since = since
        return max(1, round(1_000 * left_s))
