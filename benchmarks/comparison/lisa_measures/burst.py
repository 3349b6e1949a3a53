"""Fifty thousand messages due at one instant: the lateness of the last one."""

from __future__ import annotations

from benchmarks.bench.measures import DRAIN, Run, head_s
from benchmarks.bench.server import fresh_server
from benchmarks.bench.work import drain, lisa_at_work
from benchmarks.comparison.sizes import FurtherSizes

NAME = "burst"


def measure(run: Run, sizes: FurtherSizes) -> None:
    """Figures: lateness of the last message, and N divided by the rate of an earlier drain."""
    count = sizes.burst
    for number in run.repeats("a burst", slow=True):
        rates = run.results.values(DRAIN, "lisa", "rate")
        with fresh_server() as server, lisa_at_work(server) as work:
            rate = rates[number] if number < len(rates) else drain(work, count, head_s(count)).rate
            late_us = drain(work, count, head_s(count)).lateness_us
        run.results.add(NAME, "lisa", "last", max(late_us) / 1000, "ms")
        run.results.add(NAME, "lisa", "N / drain rate", count / rate * 1000, "ms")
        run.results.add_lateness(NAME, "lisa", late_us, f"{count:,} due at one instant")
