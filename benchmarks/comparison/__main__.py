"""`python -m benchmarks.comparison`: all measures of Lisa, and other queues."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from benchmarks.bench.__main__ import Addition, bench_options, execute, take
from benchmarks.bench.measures import FULL, MEASURES, Run
from benchmarks.bench.report import ProgressDisplay
from benchmarks.bench.results import Fault
from benchmarks.comparison.environments import find, install
from benchmarks.comparison.lisa_measures import (
    backlog,
    burst,
    busy_topics,
    help_page,
    idle,
    limits,
    side_by_side,
)
from benchmarks.comparison.measures import measure_peer
from benchmarks.comparison.plots import draw
from benchmarks.comparison.sizes import LONG, FurtherSizes, PeerSizes
from benchmarks.comparison.targets import TARGETS

PEERS = Path(__file__).parent.parent / "peers"
BUILD = Path("build") / "bench"
"""The directory of the peers' environments, which are kept between runs."""

FURTHER = {
    module.NAME: module.measure
    for module in (burst, idle, busy_topics, backlog, side_by_side, limits, help_page)
}
"""The measures of Lisa that `benchmarks.bench` does not take, in running order."""


@click.command()
@bench_options((*MEASURES, *FURTHER))
@click.option("--long", "long_", is_flag=True, help="Also with ten million waiting messages.")
@click.option(
    "--peers",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=PEERS,
    help="A directory with one folder per queue. Default: benchmarks/peers.",
)
def compare(*, quick: bool, long_: bool, scale: float, peers: Path, **options: Any) -> None:
    """Measure Lisa and other queues on this machine.

    Installs each queue into build/bench. Exit code 1 if a target is missed by more than 20 %, or a
    measurement of Lisa failed.
    """
    if quick and long_:
        raise click.UsageError("--quick and --long exclude each other")
    mode = "quick" if quick else "long" if long_ else "full"
    further, peer_sizes = FurtherSizes.of(mode).scaled(scale), PeerSizes.of(mode).scaled(scale)

    def measure(run: Run, only: Sequence[str], display: ProgressDisplay) -> None:
        for name, of_lisa in FURTHER.items():
            if not only or name in only:
                take(run, name, partial(of_lisa, sizes=further), display)
        for peer in find(peers):
            display.begin(peer.name)
            display.update(f"{peer.name}: installing")
            try:
                measure_peer(run, install(peer, BUILD), only, peer_sizes)
            except Fault as fault:
                run.results.missing[peer.name] = str(fault)
                display.warn(f"{peer.name}: {fault}")

    addition, full = Addition(measure, TARGETS, draw), LONG if long_ else FULL
    sys.exit(execute(quick=quick, scale=scale, full=full, addition=addition, **options))


if __name__ == "__main__":
    compare()
