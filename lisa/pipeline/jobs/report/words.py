"""Figures as people read them."""

from __future__ import annotations

from datetime import datetime, tzinfo

from lisa.core.clock import human

__all__ = ["clipped", "count", "instant", "length", "printable", "share"]


def count(n: int, *, short: bool = False) -> str:
    """1,234,567, or for an axis 1.2M."""
    if short:
        for size, letter in ((1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")):
            if abs(n) >= size:
                return f"{n / size:.3g}{letter}"
    return f"{n:,}"


def length(micros: int) -> str:
    """A length of time with three digits: 0 s, 850 us, 1.25 ms, 3.4 s, 2m 5s."""
    if micros >= 60_000_000:
        return human(micros // 1_000_000 * 1_000)
    for size, unit in ((1_000_000, "s"), (1_000, "ms")):
        if micros >= size:
            return f"{micros / size:.3g} {unit}"
    return f"{micros} µs" if micros else "0 s"


def share(part: int, whole: int) -> str:
    """A part in per cent, empty where there is no whole."""
    return f"{100 * part / whole:.3g} %" if whole else ""


def instant(moment: datetime | None, zone: tzinfo) -> str:
    """An instant in the zone, to the minute."""
    return "" if moment is None else f"{moment.astimezone(zone):%Y-%m-%d %H:%M}"


def clipped(text: str, most: int) -> str:
    """Text of at most so many characters; an ellipsis stands for what is left out."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def printable(text: str, most: int) -> str:
    """Text of one line without control characters, clipped."""
    return clipped(" ".join("".join(c if c.isprintable() else " " for c in text).split()), most)
