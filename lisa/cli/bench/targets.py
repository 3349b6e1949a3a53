"""The performance targets: ratios within one run on two cores, the server included."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from lisa.cli.bench.results import Results

TOLERANCE = 0.2
"""A target missed by more is a failure; smaller misses may be caused by the machine."""

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
STEADY = "1,000/s"

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
