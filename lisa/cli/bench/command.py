"""`lisa bench`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from lisa.cli.bench.fault import Fault
from lisa.cli.bench.sizes import FULL, LONG, QUICK, Sizes

if TYPE_CHECKING:
    from lisa.cli.bench.report import Report
    from lisa.cli.bench.run import Run
    from lisa.cli.bench.screen import Teller

__all__ = ["bench"]

MEASURES = (
    "bulk_send", "single_send", "concurrent_send", "drain", "lateness", "burst", "memory", "idle",
    "backlog", "side_by_side", "help",
)  # fmt: skip
"""The modules of `measures` in the order in which they run, named here so that --help is quick."""

BUILD = Path("build") / "bench"
"""Where peers' environments are kept between runs."""


@click.command()
@click.option("--quick", is_flag=True, help="Under two minutes: what the table of targets needs.")
@click.option("--long", "long_", is_flag=True, help="Also with ten million messages waiting.")
@click.option(
    "--peers",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Measure other queues too: a folder each, as benchmarks/peers has them.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="MEASURE",
    type=click.Choice(MEASURES),
    help=f"Only this measure; may be repeated. One of: {', '.join(MEASURES)}.",
)
@click.option("--repeats", type=click.IntRange(min=1), help="How often each figure is taken (3).")
@click.option(
    "--out",
    metavar="DIR",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write report.md, report.json and plots there.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON document.")
@click.option("--scale", type=click.FloatRange(min=0, min_open=True), default=1.0, hidden=True)
def bench(
    *, quick: bool, long_: bool, peers: Path | None, only: tuple[str, ...], repeats: int | None,
    out: Path | None, as_json: bool, scale: float,
) -> None:  # fmt: skip
    """Measure how fast and how punctual Lisa is on this machine.

    On embedded servers, and against raw commands that do the same. Exit code 1 if a target is
    missed by more than 20 %, or a measure could not be taken.
    """
    from lisa.cli.bench import screen
    from lisa.cli.bench.targets import Verdict
    from lisa.cli.output import print_json

    if quick and long_:
        raise click.UsageError("--quick and --long contradict each other")
    sizes = _sizes(QUICK if quick else LONG if long_ else FULL, repeats, scale)
    _default_settings()
    chosen = [name for name in MEASURES if not only or name in only]
    report = _report(sizes, chosen, peers, out)
    if as_json:
        print_json(report.document())
    else:
        screen.show(report, chosen)
    missed = any(one.verdict is Verdict.MISSED for one in report.judged)
    failed = any(subject == "lisa" for _, subject in report.results.failed)
    sys.exit(1 if missed or failed else 0)


def _sizes(mode: Sizes, repeats: int | None, scale: float) -> Sizes:
    sizes = mode.scaled(scale) if scale != 1.0 else mode
    if repeats is not None:
        sizes = replace(sizes, repeats=repeats, slow_repeats=repeats)
    return sizes


def _default_settings() -> None:
    """What is measured has default settings, whatever the caller's environment says."""
    for name in [name for name in os.environ if name.startswith("LISA_")]:
        del os.environ[name]


def _report(sizes: Sizes, chosen: Sequence[str], peers: Path | None, out: Path | None) -> Report:
    """Measure everything; write the report where one is wanted."""
    from lisa.cli.bench.machine import describe
    from lisa.cli.bench.report import Report
    from lisa.cli.bench.results import Results
    from lisa.cli.bench.run import Run
    from lisa.cli.bench.screen import Teller
    from lisa.cli.bench.server import fresh_server
    from lisa.cli.bench.targets import judge

    machine, results = describe(), Results()
    with fresh_server() as server:
        machine |= server.describe()
    with Teller() as teller:
        run = Run(sizes, results, teller.say)
        _measure(run, chosen, teller)
        if peers is not None:
            _measure_peers(run, chosen, peers, teller)
    report = Report(
        mode=sizes.mode, repeats=sizes.repeats, machine=machine, judged=judge(results),
        results=results,
    )  # fmt: skip
    return _written(report, out) if out is not None else report


def _measure(run: Run, chosen: Sequence[str], teller: Teller) -> None:
    from lisa.cli.bench.measures.all import MODULES

    for name in chosen:
        teller.begin(name)
        try:
            MODULES[name](run)
        except Fault as fault:
            run.results.failed[name, "lisa"] = str(fault)
            teller.complain(f"{name}: {fault}")


def _measure_peers(run: Run, chosen: Sequence[str], folder: Path, teller: Teller) -> None:
    from lisa.cli.bench import peers
    from lisa.cli.bench.measures.peers import measure_peer

    for peer in peers.find(folder):
        teller.begin(peer.name)
        teller.say(f"{peer.name}: installing")
        try:
            measure_peer(run, peers.install(peer, BUILD), chosen)
        except Fault as fault:
            run.results.missing[peer.name] = str(fault)
            teller.complain(f"{peer.name}: {fault}")


def _written(report: Report, out: Path) -> Report:
    from lisa.cli.bench.plots import draw

    try:
        report = replace(report, plots=draw(report.results, out))
    except Fault as fault:
        report = replace(report, no_plots=str(fault))
    report.write(out)
    return report
