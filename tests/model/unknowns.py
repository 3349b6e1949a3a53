"""Values that only the server knows, and how a model without them is compared with the server.

Redis's clock cannot be set, and Redis names entries itself. So the model writes a *placeholder*
for such a value. A placeholder knows the bounds of its value (the clock is read before and after
each call); the first reading of the key space gives it that value, which is then as fixed as any
other. Nothing else is normalised.
"""

from __future__ import annotations

from functools import total_ordering
from typing import Any


class Unknown:
    """An integer that only the server knows, within bounds, until it is read."""

    def __init__(self, low: int, high: int) -> None:
        self.low = low
        self.high = high

    def settle(self, seen: int) -> bool:
        """Accept the value read; returns whether it is within the bounds."""
        fits = self.low <= seen <= self.high
        if fits:
            self.low = self.high = seen
        return fits


@total_ordering
class Instant:
    """An unknown plus some milliseconds. In comparisons it counts as its lowest value.

    That is exact: a call compares its own instant only with itself and with times at least an hour
    away, and after the call the value is known.
    """

    def __init__(self, unknown: Unknown, offset: int = 0) -> None:
        self.unknown = unknown
        self.offset = offset

    def settle(self, seen: Any) -> bool:
        return self.unknown.settle(int(seen) - self.offset)

    def __int__(self) -> int:
        return self.unknown.low + self.offset

    def __add__(self, ms: int | Instant) -> Instant:
        if isinstance(ms, Instant):
            both = Unknown(self.unknown.low + ms.unknown.low, self.unknown.high + ms.unknown.high)
            return Instant(both, self.offset + ms.offset)
        return Instant(self.unknown, self.offset + ms)

    __radd__ = __add__

    def __neg__(self) -> Instant:
        return Instant(Unknown(-self.unknown.high, -self.unknown.low), -self.offset)

    def __sub__(self, other: int | Instant) -> Instant:
        return self + -other

    def __rsub__(self, ms: int) -> Instant:
        return -self + ms

    def __eq__(self, other: object) -> bool:
        return isinstance(other, int | Instant) and int(self) == int(other)

    def __lt__(self, other: int | Instant) -> bool:
        return int(self) < int(other)

    def __hash__(self) -> int:
        return hash(int(self))

    def __repr__(self) -> str:
        low, high = int(self), self.unknown.high + self.offset
        return str(low) if low == high else f"<{low} to {high}>"


class LateReason:
    """The reason for which a late policy moved a message to garbage: it names the lateness."""

    def __init__(self, late_ms: Instant | int) -> None:
        self._late_ms = late_ms

    def settle(self, seen: Any) -> bool:
        words = str(seen).split(" ")
        is_it = words[:3] == ["LatePolicy:", "first", "promoted"]
        if isinstance(self._late_ms, int) or not is_it:
            return is_it and words[3] == str(self._late_ms)
        return self._late_ms.settle(words[3])

    def __str__(self) -> str:
        return f"LatePolicy: first promoted {int(self._late_ms)} ms after its due time"


class Note:
    """What a group notes of a message in retry."""

    def __init__(
        self, reason: str, times: int, entry: EntryId | str, first_due: Instant | int | None
    ) -> None:
        self.reason, self.times, self.entry, self.first_due = reason, times, entry, first_due

    def settle(self, seen: Any) -> bool:
        start, _, first_due = str(seen).rpartition(" ")
        if isinstance(self.first_due, Instant) and not self.first_due.settle(first_due):
            return False
        return f"{start} {first_due}" == str(self)

    def __str__(self) -> str:
        first_due = "" if self.first_due is None else int(self.first_due)
        return f"{self.reason}\0\0{self.times} {self.entry} {first_due}"

    __repr__ = __str__


class Clock:
    """One call's instants, from readings of Redis's clock (microseconds) before and after it.

    actor: the caller, for the journal.
    """

    def __init__(self, before_us: int, after_us: int, actor: str) -> None:
        self.before_us, self.after_us, self.actor = before_us, after_us, actor
        self.now = self._instant()
        """Milliseconds, rounded down: what the call compares with, and writes."""
        self.now_up = Instant(Unknown(-(-before_us // 1000), -(-after_us // 1000)))
        """Milliseconds, rounded up: what a delay is added to, so that nothing is early."""
        self.written = self._instant()
        """A second reading in the same call: a tombstone's expiry, a delivery's time."""

    def _instant(self) -> Instant:
        return Instant(Unknown(self.before_us // 1000, self.after_us // 1000))

    def late_us(self, due: int | Instant) -> Instant:
        """How late a delivery in this call is, in microseconds."""
        return Instant(Unknown(self.before_us, self.after_us), -1000 * int(due))


class EntryId:
    """The server's id for a stream entry: the instant at which it was added, and a number."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seen: str | None = None

    def settle(self, seen: str) -> bool:
        added_ms = int(seen.partition("-")[0])
        if self.seen is None and (
            self._clock.before_us // 1000 <= added_ms <= self._clock.after_us // 1000
        ):
            self.seen = seen
        return self.seen == seen

    def __str__(self) -> str:
        assert self.seen is not None, "this entry was not read yet"
        return self.seen

    def __repr__(self) -> str:
        return self.seen or "<entry id>"


def differences(expected: Any, seen: Any, where: str = "") -> list[str]:
    """How two values differ, in words; placeholders in `expected` are set from `seen`."""
    if isinstance(expected, Instant | EntryId | LateReason | Note):
        fits = seen is not None and expected.settle(seen)
        return [] if fits else [f"{where}: expected {expected!r}, found {seen!r}"]
    if isinstance(expected, dict) and isinstance(seen, dict):
        found = [f"{where}/{key}: missing" for key in expected.keys() - seen.keys()]
        found += [f"{where}/{key}: not expected, {seen[key]!r}" for key in seen.keys() - expected]
        for key in expected.keys() & seen.keys():
            found += differences(expected[key], seen[key], f"{where}/{key}")
        return sorted(found)
    if isinstance(expected, list | tuple) and isinstance(seen, list | tuple):
        if len(expected) != len(seen):
            return [f"{where}: expected {expected!r}, found {seen!r}"]
        pairs = enumerate(zip(expected, seen, strict=True))
        return [one for i, (a, b) in pairs for one in differences(a, b, f"{where}[{i}]")]
    return [] if expected == seen else [f"{where}: expected {expected!r}, found {seen!r}"]
