"""What a handler may raise to say outright what becomes of its message."""

from __future__ import annotations

from datetime import timedelta

from lisa.core.errors import InvalidMessage

__all__ = ["Discard", "Retry"]


class Retry(Exception):
    """Try again: after `delay` if given, else after the policy's pause. Counts as an attempt."""

    def __init__(self, reason: str = "", *, delay: timedelta | None = None) -> None:
        if delay is not None and delay < timedelta(0):
            raise InvalidMessage(f"a retry's delay cannot be negative: {delay}")
        super().__init__(reason or "the handler asked for a retry")
        self.delay = delay


class Discard(Exception):
    """Give up: to garbage at once, with the reason."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason or "the handler discarded it")
