"""Fifty thousand messages due at one instant: the lateness of the last one."""

from __future__ import annotations

from benchmarks.comparison.sizes import FurtherSizes
from lisa.cli.bench.measures.drain import NAME as DRAIN
from lisa.cli.bench.measures.drain import head_s
from lisa.cli.bench.run import Run
from lisa.cli.bench.server import fresh_server
from lisa.cli.bench.subject import lisa_at_work
from lisa.cli.bench.work import drain

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
