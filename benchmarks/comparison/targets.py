"""The performance targets relative to other queues."""

from __future__ import annotations

from lisa.cli.bench.results import Results
from lisa.cli.bench.targets import Sense, Target, ratio


def _of_python_peers(results: Results) -> float | None:
    """Lisa's drain rate divided by that of the fastest Python library on Redis."""
    own = results.median("drain", "lisa", "rate")
    rates = [
        results.median("drain", subject, "rate") or 0.0
        for subject in results.subjects("drain", "rate")
        if results.versions.get(subject, {}).get("kind") == "python"
    ]
    return own / max(rates) if own and rates and max(rates) else None


TARGETS = (
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
