"""`lisa bench`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.bench.fault import Fault
from lisa.cli.bench.sizes import FULL, LONG, QUICK, Sizes
from lisa.cli.options import together

if TYPE_CHECKING:
    from lisa.cli.bench.report import BenchReport
    from lisa.cli.bench.run import Run
    from lisa.cli.bench.screen import ProgressDisplay
    from lisa.cli.bench.targets import Target

MEASURES = (
    "bulk_send",
    "single_send",
    "concurrent_send",
    "drain",
    "bodies",
    "light_load",
    "lateness",
    "burst",
    "memory",
    "idle",
    "backlog",
    "side_by_side",
    "help",
)
"""The modules of `measures` in running order: some use the figures of `drain`."""


bench_options = together(
    click.option(
        "--quick", is_flag=True, help="Only the figures for the targets: under two minutes."
    ),
    click.option("--long", "long_", is_flag=True, help="Also with ten million waiting messages."),
    click.option(
        "--only",
        multiple=True,
        metavar="MEASURE",
        type=click.Choice(MEASURES),
        help=f"Only this measure; may be repeated. One of: {', '.join(MEASURES)}.",
    ),
    click.option(
        "--repeats", type=click.IntRange(min=1), help="How often to take each figure (3)."
    ),
    click.option(
        "--out",
        metavar="DIR",
        type=click.Path(file_okay=False, path_type=Path),
        help="Write report.md, report.json and plots to this directory.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON document."),
    click.option("--scale", type=click.FloatRange(0, min_open=True), default=1.0, hidden=True),
)
"""The options of `lisa bench`: the keyword arguments of `execute`."""


@click.command()
@bench_options
def bench(**options: Any) -> None:
    """Measure Lisa's throughput and lateness on this machine, against raw Redis commands.

    Uses embedded servers. Exit code 1 if a target is missed by more than 20 %, or a measurement
    failed.
    """
    sys.exit(execute(**options))


@dataclass(frozen=True, slots=True)
class Addition:
    """Further measurements of a run: `measure(run, measures, display)`, and their targets."""

    measure: Callable[[Run, Sequence[str], ProgressDisplay], None]
    targets: Sequence[Target] = ()


def execute(
    *,
    quick: bool,
    long_: bool,
    only: tuple[str, ...],
    repeats: int | None,
    out: Path | None,
    as_json: bool,
    scale: float,
    addition: Addition | None = None,
) -> int:
    """Measure, write and print the report; returns the exit code."""
    from lisa.cli.bench import screen
    from lisa.cli.bench.targets import BoundVerdict
    from lisa.cli.output import print_json

    if quick and long_:
        raise click.UsageError("--quick and --long exclude each other")
    sizes = _sizes(QUICK if quick else LONG if long_ else FULL, repeats, scale)
    _default_settings()
    chosen = [name for name in MEASURES if not only or name in only]
    report = _report(sizes, chosen, out, addition)
    if as_json:
        print_json(report.document())
    else:
        screen.show(report, chosen)
    missed = any(one.verdict is BoundVerdict.MISSED for one in report.judged)
    failed = any(subject == "lisa" for _, subject in report.results.failed)
    return 1 if missed or failed else 0


def _sizes(mode: Sizes, repeats: int | None, scale: float) -> Sizes:
    sizes = mode.scaled(scale) if scale != 1.0 else mode
    if repeats is not None:
        sizes = replace(sizes, repeats=repeats, slow_repeats=repeats)
    return sizes


def _default_settings() -> None:
    """Remove LISA_* variables, so that every role has default settings."""
    for name in [name for name in os.environ if name.startswith("LISA_")]:
        del os.environ[name]


def _report(
    sizes: Sizes, chosen: Sequence[str], out: Path | None, addition: Addition | None
) -> BenchReport:
    """Measure everything; write the report if `out` is given."""
    from lisa.cli.bench.machine import describe
    from lisa.cli.bench.report import BenchReport
    from lisa.cli.bench.results import Results
    from lisa.cli.bench.run import Run
    from lisa.cli.bench.screen import ProgressDisplay
    from lisa.cli.bench.server import fresh_server
    from lisa.cli.bench.targets import judge

    machine, results = describe(), Results()
    with fresh_server() as server:
        machine |= server.describe()
    with ProgressDisplay() as display:
        run = Run(sizes, results, display.update)
        _measure(run, chosen, display)
        if addition is not None:
            addition.measure(run, chosen, display)
    report = BenchReport(
        mode=sizes.mode,
        repeats=sizes.repeats,
        machine=machine,
        judged=judge(results, addition.targets if addition is not None else ()),
        results=results,
    )
    return _written(report, out) if out is not None else report


def _measure(run: Run, chosen: Sequence[str], display: ProgressDisplay) -> None:
    for name in chosen:
        module = import_module(f"lisa.cli.bench.measures.{name}")
        display.begin(name)
        try:
            module.measure(run)
        except Fault as fault:
            run.results.failed[name, "lisa"] = str(fault)
            display.warn(f"{name}: {fault}")


def _written(report: BenchReport, out: Path) -> BenchReport:
    from lisa.cli.bench.plots import draw

    try:
        report = replace(report, plots=draw(report.results, out))
    except Fault as fault:
        report = replace(report, no_plots=str(fault))
    report.write(out)
    return report
