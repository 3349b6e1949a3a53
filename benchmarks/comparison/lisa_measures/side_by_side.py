"""Several managers and consumers on one topic."""

from __future__ import annotations

from benchmarks.comparison.sizes import FurtherSizes
from lisa.cli.bench.measures.drain import add, head_s
from lisa.cli.bench.run import Run
from lisa.cli.bench.server import fresh_server
from lisa.cli.bench.subject import lisa_at_work
from lisa.cli.bench.work import drain

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
            add(run, NAME, f"{number} of each", drained)
