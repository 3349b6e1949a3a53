"""The performance targets of the further measures, and those relative to other queues."""

from __future__ import annotations

from benchmarks.bench.results import Results, Sense, Target, Value, plain, quotient, ratio, within
from benchmarks.comparison.lisa_measures import backlog

MANY = "with 1,000 topics"


def _backlog(subject: str) -> Value:
    """The server's time per promoted message: the largest backlog against the smallest."""

    def value(results: Results) -> float | None:
        amounts = backlog.amounts(results)
        if len(amounts) < 2:
            return None
        least, most = (
            results.values(backlog.NAME, subject, backlog.figure(amounts[end])) for end in (0, -1)
        )
        return quotient(most, least)

    return value


def _of_python_peers(results: Results) -> float | None:
    """Lisa's drain rate divided by that of the fastest Python library on Redis."""
    own = results.median("drain", "lisa", "rate")
    rates = [
        one.median
        for one in results.figures()
        if one.key[::2] == ("drain", "rate")
        and results.versions.get(one.key.subject, {}).get("kind") == "python"
    ]
    return own / max(rates) if own and rates and max(rates) else None


TARGETS = (
    Target(
        "burst",
        "lateness of the last of 50,000 due at one instant",
        "N / drain rate",
        Sense.AT_MOST,
        1.3,
        within("burst", "last", "N / drain rate"),
    ),
    Target(
        "idle",
        "manager with 1,000 idle topics",
        "",
        Sense.AT_MOST,
        3.0,
        plain("idle", f"manager {MANY}"),
        "% of a core",
    ),
    Target(
        "idle",
        "busiest Redis command, 1,000 idle topics",
        "",
        Sense.AT_MOST,
        1.0,
        plain("idle", f"busiest command {MANY}"),
        "/s a topic",
    ),
    Target(
        "idle",
        "lateness of a message among 1,000 idle topics",
        "",
        Sense.AT_MOST,
        10.0,
        plain("idle", f"last {MANY}"),
        "ms",
    ),
    Target(
        "backlog",
        "Redis CPU a promoted message, most waiting, embedded Valkey",
        "10,000 waiting",
        Sense.AT_MOST,
        1.3,
        _backlog("lisa"),
    ),
    Target(
        "backlog",
        "Redis CPU a promoted message, most waiting, redis-server",
        "10,000 waiting",
        Sense.AT_MOST,
        1.3,
        _backlog(backlog.ON_DEBIAN),
    ),
    Target("help", "lisa --help", "", Sense.AT_MOST, 300.0, plain("help", "time"), "ms"),
    Target(
        "drain",
        "drain",
        "BullMQ on Node",
        Sense.AT_LEAST,
        2.5,
        ratio("drain", "rate", under="bullmq_node"),
    ),
    Target("drain", "drain", "the fastest peer in Python", Sense.AT_LEAST, 15.0, _of_python_peers),
)
"""A peer's name is the name of its folder."""
