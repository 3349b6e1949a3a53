"""Several managers and consumers on one topic."""

from __future__ import annotations

from benchmarks.bench.measures import Run, add_drained, head_s
from benchmarks.bench.server import fresh_server
from benchmarks.bench.work import drain, lisa_at_work
from benchmarks.comparison.sizes import FurtherSizes

NAME = "side_by_side"


def measure(run: Run, sizes: FurtherSizes) -> None:
    """Figures: as `drain`, for each number of managers and consumers."""
    for number in sizes.side_by_side:
        for _ in run.repeats(f"{number} managers and consumers"):
            with (
                fresh_server() as server,
                lisa_at_work(server, managers=number, consumers=number) as work,
            ):
                drained = drain(work, run.sizes.drain, head_s(run.sizes.drain))
            add_drained(run, NAME, f"{number} of each", drained)
