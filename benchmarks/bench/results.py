"""The figures of a run with the values of all repeats, and the targets that they are judged by.

Targets are ratios within one run on two cores, the server included.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from lisa.core.model.errors import LisaError

TOLERANCE = 0.2
"""A target missed by more is a failure; smaller misses may be caused by the machine."""

STEADY = "1,000/s"


class Key(NamedTuple):
    """Identifies a figure: measure, subject (floor, lisa, a peer) and name."""

    measure: str
    subject: str
    name: str


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure with its values in the order of the repeats."""

    key: Key
    unit: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median value."""
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        """The smallest value."""
        return min(self.values)

    @property
    def high(self) -> float:
        """The largest value."""
        return max(self.values)


def quantile(ordered: Sequence[float], fraction: float) -> float:
    """The nearest-rank quantile of values in ascending order."""
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)]


@dataclass
class Results:
    """All figures of a run, in order of their first values.

    missing: reasons for subjects without any measurement (a peer, a server).
    failed: reasons for failed measurements, by measure and subject.
    lateness: all values in milliseconds, by load and subject.
    """

    missing: dict[str, str] = field(default_factory=dict)
    failed: dict[tuple[str, str], str] = field(default_factory=dict)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)
    lateness: dict[tuple[str, str], list[float]] = field(default_factory=dict)
    _units: dict[Key, str] = field(default_factory=dict)
    _values: dict[Key, list[float]] = field(default_factory=dict)

    def add(self, measure: str, subject: str, name: str, value: float, unit: str) -> None:
        """Add the value of one repeat."""
        key = Key(measure, subject, name)
        self._units[key] = unit
        self._values.setdefault(key, []).append(value)

    def add_lateness(
        self, measure: str, subject: str, lateness_us: Sequence[int], label: str = ""
    ) -> None:
        """Add the lateness of one repeat: percentiles, early messages, all values."""
        ordered = sorted(late / 1000 for late in lateness_us)
        tail = f" {label}" if label else ""
        for name, fraction in (
            ("min", 0.0),
            ("p50", 0.5),
            ("p99", 0.99),
            ("p99.9", 0.999),
            ("max", 1.0),
        ):
            self.add(measure, subject, name + tail, quantile(ordered, fraction), "ms")
        self.add(measure, subject, "early" + tail, sum(late < 0 for late in lateness_us), "")
        self.lateness.setdefault((label, subject), []).extend(ordered)

    def figures(self) -> list[Figure]:
        """All figures."""
        return [Figure(key, self._units[key], tuple(all_)) for key, all_ in self._values.items()]

    def values(self, measure: str, subject: str, name: str) -> tuple[float, ...]:
        """The values of a figure; empty if it was not measured."""
        return tuple(self._values.get(Key(measure, subject, name), ()))

    def median(self, measure: str, subject: str, name: str) -> float | None:
        """The median of a figure; None if it was not measured."""
        values = self.values(measure, subject, name)
        return statistics.median(values) if values else None


class Fault(LisaError):
    """A measurement failed; the text is the reason."""


Value = Callable[[Results], float | None]


class Sense(StrEnum):
    """The side of its bound on which a value should be."""

    AT_LEAST = "at least"
    AT_MOST = "at most"


class BoundVerdict(StrEnum):
    """The comparison of a value with its bound."""

    MET = "met"
    CLOSE = "missed by less than 20 %"
    MISSED = "missed"
    UNKNOWN = "not measured"


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on the figure that `value` computes: a ratio, or an amount in `unit`.

    measure: the measure with the underlying figures.
    what, against: the report's words for the figure, and for the figure that it is divided by.
    """

    measure: str
    what: str
    against: str
    sense: Sense
    bound: float
    value: Value
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Judged:
    """A target with its measured value and verdict."""

    target: Target
    value: float | None
    verdict: BoundVerdict


def judge(results: Results, more: Sequence[Target] = ()) -> list[Judged]:
    """The verdicts on `TARGETS` and on `more` targets."""
    judged = []
    for target in (*TARGETS, *more):
        value = target.value(results)
        judged.append(Judged(target, value, _verdict(target, value)))
    return judged


def _verdict(target: Target, value: float | None) -> BoundVerdict:
    if value is None:
        return BoundVerdict.UNKNOWN
    if target.sense is Sense.AT_LEAST:
        met, close = value >= target.bound, value >= target.bound * (1 - TOLERANCE)
    else:
        met, close = value <= target.bound, value <= target.bound * (1 + TOLERANCE)
    return BoundVerdict.MET if met else BoundVerdict.CLOSE if close else BoundVerdict.MISSED


def quotient(over: Sequence[float], under: Sequence[float]) -> float | None:
    """The median of the ratios of all repeats, since a repeat's two values are comparable.

    If the numbers of repeats differ: the ratio of the medians. None if a side has no values.
    """
    if not over or not under:
        return None
    if len(over) == len(under):
        return statistics.median(one / other for one, other in zip(over, under, strict=True))
    return statistics.median(over) / statistics.median(under)


def ratio(measure: str, name: str, under: str = "floor", *, under_name: str | None = None) -> Value:
    """Lisa's figure divided by that of another subject, which may have another name."""
    return lambda results: quotient(
        results.values(measure, "lisa", name), results.values(measure, under, under_name or name)
    )


def within(measure: str, over: str, under: str) -> Value:
    """One of Lisa's figures divided by another of the same measure."""
    return ratio(measure, over, "lisa", under_name=under)


def plain(measure: str, name: str) -> Value:
    """One of Lisa's figures."""
    return lambda results: results.median(measure, "lisa", name)


def _early(results: Results) -> float | None:
    """The number of messages that Lisa delivered early, in all measures."""
    counted = [
        sum(figure.values)
        for figure in results.figures()
        if figure.key.subject == "lisa" and figure.key.name.startswith("early")
    ]
    return sum(counted) if counted else None


_LEAST, _MOST = Sense.AT_LEAST, Sense.AT_MOST


TARGETS: tuple[Target, ...] = (
    Target(
        "bulk_send",
        "send_many, generated ids",
        "MSET + ZADD, 500 a call",
        _LEAST,
        0.5,
        ratio("bulk_send", "rate"),
    ),
    Target(
        "single_send",
        "send, one at a time",
        "PING on the same connection",
        _LEAST,
        0.6,
        ratio("single_send", "rate"),
    ),
    Target(
        "concurrent_send",
        "100 asyncio tasks sending singly",
        "one at a time",
        _LEAST,
        5.0,
        within("concurrent_send", "rate", "one at a time"),
    ),
    Target(
        "drain",
        "drain, one manager, one consumer",
        "what Redis's processor allows the floor's life cycle",
        _LEAST,
        0.6,
        # The rate at which the floor would use a whole core for Redis.
        ratio("drain", "rate", under_name="allowed"),
    ),
    Target(
        "drain",
        "Redis CPU a message, whole life",
        "the floor's, by its processes",
        _MOST,
        1.35,
        ratio("drain", "redis"),
    ),
    Target(
        "bulk_send",
        "Python CPU a message, send_many",
        "",
        _MOST,
        3.0,
        plain("bulk_send", "python"),
        "us",
    ),
    Target(
        "drain", "Python CPU a message, consumer", "", _MOST, 14.0, plain("drain", "consumer"), "us"
    ),
    Target(
        "lateness",
        "lateness at 1,000/s, p50",
        "a bare 2 ms poller",
        _MOST,
        0.6,
        ratio("lateness", f"p50 {STEADY}"),
    ),
    Target(
        "lateness",
        "lateness at 1,000/s, p99",
        "a bare 2 ms poller",
        _MOST,
        1.2,
        ratio("lateness", f"p99 {STEADY}"),
    ),
    Target(
        "lateness",
        "lateness at 1,000/s, p99.9",
        "",
        _MOST,
        10.0,
        plain("lateness", f"p99.9 {STEADY}"),
        "ms",
    ),
    Target("lateness", "early, in all measures", "", _MOST, 0.0, _early, "messages"),
    Target(
        "memory",
        "memory a waiting message, embedded Valkey",
        "",
        _MOST,
        340.0,
        plain("memory", "embedded server"),
        "bytes",
    ),
    Target(
        "memory",
        "memory a waiting message, redis-server",
        "",
        _MOST,
        380.0,
        plain("memory", "redis-server"),
        "bytes",
    ),
)
"""In the order of the report."""
