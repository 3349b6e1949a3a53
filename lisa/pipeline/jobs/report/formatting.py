"""Formats numbers, durations and text for people."""

from __future__ import annotations

from lisa.core.model.clock import human

count = "{:,}".format
"""A number as 1,234,567."""


def human_us(micros: int) -> str:
    """A duration with three digits: 0 s, 850 us, 1.25 ms, 3.4 s, 2m 5s."""
    if micros >= 60_000_000:
        return human(micros // 1_000_000 * 1_000)
    for size, unit in ((1_000_000, "s"), (1_000, "ms")):
        if micros >= size:
            return f"{micros / size:.3g} {unit}"
    return f"{micros} µs" if micros else "0 s"


def share(part: int, whole: int) -> str:
    """A fraction in per cent; empty if `whole` is 0."""
    return f"{100 * part / whole:.3g} %" if whole else ""


def kept(part: int, whole: int) -> str:
    """A fraction in per cent, rounded down: only if all are in it, it is 100 %."""
    return f"{10_000 * part // whole / 100:g} %" if whole else ""


def change(before: int, now: int) -> str:
    """A change in per cent with its sign; empty if there was nothing before."""
    return f"{100 * (now - before) / before:+.3g} %" if before else ""


def clipped(text: str, most: int) -> str:
    """Text shortened to at most `most` characters, with an ellipsis if it was longer."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def printable(text: str, most: int) -> str:
    """Text on one line without control characters, clipped to `most` characters."""
    return clipped(" ".join("".join(c if c.isprintable() else " " for c in text).split()), most)
