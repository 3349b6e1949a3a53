"""Parses replies of plain commands."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lisa.core.model.keys import HIGHEST_LATENESS
from lisa.core.transitions.base import text


def pairs(flat: Sequence[bytes] | dict[bytes, bytes]) -> dict[bytes, bytes]:
    """A hash reply as a dict, from either protocol's form."""
    if isinstance(flat, dict):
        return flat
    return dict(zip(flat[::2], flat[1::2], strict=True))


def microseconds(clock: Sequence[bytes]) -> int:
    """The reply of TIME in microseconds."""
    return int(clock[0]) * 1_000_000 + int(clock[1])


def counters(flat: Sequence[bytes] | dict[bytes, bytes]) -> dict[str, int]:
    """A topic's counters from an HGETALL reply; ignores values that are not numbers."""
    return {text(name): int(n) for name, n in pairs(flat).items() if n.isdigit()}


def summed(parts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """The sum of several counters by name, such as those of a topic's shards.

    Of a group's highest lateness, the maximum.
    """
    total: dict[str, int] = {}
    for part in parts:
        for name, n in part.items():
            known = total.get(name, 0)
            total[name] = max(known, n) if name.startswith(HIGHEST_LATENESS) else known + n
    return total
