"""Which minutes are open in a torture run, for messages with windows.

Messages with even numbers are open in even minutes: by the window of the topic, in a zone that
their header names. Those with odd numbers are open in odd minutes, by windows of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.torture.world import MINUTE_MS

if TYPE_CHECKING:
    from collections.abc import Iterable

SPANS = 38
"""As many minutes as fit into the text of a window; the topic's begin at noon."""

CLOSES_WITHIN_MS, SHORTLY_MS = 8_000, 200

NOON = 12 * 60
DAY = 24 * 60


def topic_window() -> str:
    """The window of the topic: even minutes after noon, in the zone of the header `zone`."""
    return f"{_text(range(NOON, NOON + 2 * SPANS, 2))}; tz=@zone|UTC"


def options_of(number: int, now_ms: int) -> dict[str, Any]:
    """The options with which a message is sent."""
    minute = now_ms // MINUTE_MS % DAY
    if number % 2 == 0:  # somewhere, it is between noon and one
        return {"headers": {"zone": f"{12 - minute // 60:+03}:00"}}
    first = minute + 1 - minute % 2
    return {"window": _text(one % DAY for one in range(first, first + 2 * SPANS, 2)), "tz": "UTC"}


def _text(minutes: Iterable[int]) -> str:
    return ",".join(f"{m // 60}:{m % 60:02}-{(m + 1) // 60}:{(m + 1) % 60:02}" for m in minutes)


def is_open(number: int, at_us: int) -> bool:
    """Whether a message may be handed over at an instant."""
    return at_us // 1000 // MINUTE_MS % 2 == number % 2


def opening(number: int, at_ms: int) -> int:
    """When a message may be handed over next, in ms."""
    return at_ms if is_open(number, at_ms * 1000) else (at_ms // MINUTE_MS + 1) * MINUTE_MS


def shortly_before_it_closes(number: int, now_ms: int, delay_ms: int) -> int:
    """A delay to right before the window of a message closes, if it is open until then.

    Its delivery must then be deferred, unless its handler starts at once.
    """
    left_ms = MINUTE_MS - now_ms % MINUTE_MS
    if not is_open(number, now_ms * 1000) or left_ms > CLOSES_WITHIN_MS:
        return delay_ms
    return max(0, left_ms - delay_ms % SHORTLY_MS)
