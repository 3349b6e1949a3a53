"""The lateness of messages that fall due at a constant rate."""

from __future__ import annotations

from lisa.cli.bench.measures.drain import NAME as DRAIN
from lisa.cli.bench.measures.drain import head_s
from lisa.cli.bench.run import Run
from lisa.cli.bench.server import fresh_server
from lisa.cli.bench.subject import floor_at_work, lisa_at_work
from lisa.cli.bench.work import drain, paced

NAME = "lateness"
RATE = 1_000.0
STEADY = "1,000/s"
HALF = "half of capacity"


def measure(run: Run) -> None:
    """Figures: percentiles at 1,000/s, against a 2 ms poller, and at half of capacity."""
    count = max(20, int(RATE * run.sizes.paced_seconds))
    for _ in run.repeats("lateness at 1,000/s"):
        with fresh_server() as server, floor_at_work(server) as bare:
            late = paced(bare, count, RATE, head_s(count)).lateness_us
            run.results.add_lateness(NAME, "floor", late, STEADY)
        with fresh_server() as server, lisa_at_work(server) as lisa:
            late = paced(lisa, count, RATE, head_s(count)).lateness_us
            run.results.add_lateness(NAME, "lisa", late, STEADY)
    _at_half(run)


def _at_half(run: Run) -> None:
    for _ in run.repeats("lateness at half of capacity", slow=True):
        with fresh_server() as server, lisa_at_work(server) as work:
            capacity = run.results.median(DRAIN, "lisa", "rate")
            if capacity is None:
                count = run.sizes.drain
                capacity = drain(work, count, head_s(count)).rate
            rate = capacity / 2
            count = max(20, int(rate * run.sizes.paced_seconds / 2))
            late = paced(work, count, rate, head_s(count)).lateness_us
        run.results.add(NAME, "lisa", "rate at half of capacity", rate, "1/s")
        run.results.add_lateness(NAME, "lisa", late, HALF)
