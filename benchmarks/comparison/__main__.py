"""`python -m benchmarks.comparison`: `lisa bench`, followed by other queues with the same work."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.comparison.environments import find, install
from benchmarks.comparison.measures import measure_peer
from benchmarks.comparison.sizes import PeerSizes
from benchmarks.comparison.targets import TARGETS
from lisa.cli.bench.command import Addition, bench_options, execute
from lisa.cli.bench.fault import Fault
from lisa.cli.bench.run import Run
from lisa.cli.bench.screen import ProgressDisplay

PEERS = Path(__file__).parent.parent / "peers"
BUILD = Path("build") / "bench"
"""The directory of the peers' environments, which are kept between runs."""


@click.command()
@bench_options
@click.option(
    "--peers",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=PEERS,
    help="A directory with one folder per queue. Default: benchmarks/peers.",
)
def compare(*, peers: Path, long_: bool, scale: float, **options: Any) -> None:
    """Measure Lisa and other queues on this machine.

    Installs each queue into build/bench. Exit code 1 if a target is missed by more than 20 %, or a
    measurement of Lisa failed.
    """
    sizes = PeerSizes.of(is_long=long_).scaled(scale)

    def measure(run: Run, measures: Sequence[str], display: ProgressDisplay) -> None:
        for peer in find(peers):
            display.begin(peer.name)
            display.update(f"{peer.name}: installing")
            try:
                measure_peer(run, install(peer, BUILD), measures, sizes)
            except Fault as fault:
                run.results.missing[peer.name] = str(fault)
                display.warn(f"{peer.name}: {fault}")

    sys.exit(execute(long_=long_, scale=scale, addition=Addition(measure, TARGETS), **options))


if __name__ == "__main__":
    compare()
