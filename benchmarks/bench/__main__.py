"""`python -m benchmarks.bench`: measures Lisa's throughput and lateness on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from benchmarks.bench.measures import FULL, MEASURES, QUICK, Run, Sizes
from benchmarks.bench.report import BenchReport, ProgressDisplay, show
from benchmarks.bench.results import BoundVerdict, Fault, Results, Target, judge
from benchmarks.bench.server import describe, fresh_server
from lisa.cli.options import together
from lisa.cli.output import print_json


def bench_options(measures: Sequence[str]) -> Callable[[Any], Any]:
    """Options of a command with these measures; `execute` takes them as keyword arguments."""
    return together(
        click.option(
            "--quick", is_flag=True, help="Only the figures for the targets: under two minutes."
        ),
        click.option(
            "--only",
            multiple=True,
            metavar="MEASURE",
            type=click.Choice(measures),
            help=f"Only this measure; may be repeated. One of: {', '.join(measures)}.",
        ),
        click.option(
            "--repeats", type=click.IntRange(min=1), help="How many times to take each figure (3)."
        ),
        click.option(
            "--out",
            metavar="DIR",
            type=click.Path(file_okay=False, path_type=Path),
            help="Write report.md and report.json to this directory.",
        ),
        click.option(
            "--json", "as_json", is_flag=True, help="Print the report as one JSON document."
        ),
        click.option("--scale", type=click.FloatRange(0, min_open=True), default=1.0, hidden=True),
    )


@click.command()
@bench_options(tuple(MEASURES))
def bench(**options: Any) -> None:
    """Measure Lisa's throughput and lateness on this machine, against raw Redis commands.

    Uses embedded servers. Exit code 1 if a target is missed by more than 20 %, or a measurement
    failed.
    """
    sys.exit(execute(**options))


@dataclass(frozen=True, slots=True)
class Addition:
    """The measurements, targets and plots that a checkout adds to a run.

    measure: takes further measurements, `measure(run, only, display)`. targets: their targets.
    draw: draws the plots into a directory, and returns their file names.
    """

    measure: Callable[[Run, Sequence[str], ProgressDisplay], None]
    targets: Sequence[Target]
    draw: Callable[[Results, Path], Sequence[str]]


def execute(
    *,
    quick: bool,
    only: Sequence[str],
    repeats: int | None,
    out: Path | None,
    as_json: bool,
    scale: float,
    full: Sizes = FULL,
    addition: Addition | None = None,
) -> int:
    """Measure, write and print the report; returns the exit code.

    full: the sizes without `quick`.
    """
    sizes = (QUICK if quick else full).scaled(scale)
    if repeats is not None:
        sizes = replace(sizes, repeats=repeats, slow_repeats=repeats)
    clear_settings()
    report = _report(sizes, only, addition)
    if out is not None:
        if addition is not None:
            report = replace(report, plots=addition.draw(report.results, out))
        report.write(out)
    if as_json:
        print_json(report.document())
    else:
        show(report, only)
    missed = any(one.verdict is BoundVerdict.MISSED for one in report.judged)
    failed = any(subject == "lisa" for _, subject in report.results.failed)
    return 1 if missed or failed else 0


def clear_settings() -> None:
    """Remove LISA_* variables, so that every role has default settings."""
    for name in [name for name in os.environ if name.startswith("LISA_")]:
        del os.environ[name]


def _report(sizes: Sizes, only: Sequence[str], addition: Addition | None) -> BenchReport:
    """Take all measures, or those in `only`."""
    machine, results = describe(), Results()
    with fresh_server() as server:
        machine |= server.describe()
    with ProgressDisplay() as display:
        run = Run(sizes, results, display.update)
        for name, measure in MEASURES.items():
            if not only or name in only:
                take(run, name, measure, display)
        if addition is not None:
            addition.measure(run, only, display)
    return BenchReport(
        mode=sizes.mode,
        repeats=sizes.repeats,
        machine=machine,
        judged=judge(results, addition.targets if addition is not None else ()),
        results=results,
    )


def take(run: Run, name: str, measure: Callable[[Run], None], display: ProgressDisplay) -> None:
    """Take one measure of Lisa; a failure is recorded in the results."""
    display.begin(name)
    try:
        measure(run)
    except Fault as fault:
        run.results.failed[name, "lisa"] = str(fault)
        display.warn(f"{name}: {fault}")


if __name__ == "__main__":
    bench()
