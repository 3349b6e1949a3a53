"""Output of `lisa bench`: progress on stderr, the table of targets on stdout."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Self

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from lisa.cli.bench.report import BenchReport, bound, number
from lisa.cli.bench.results import Results
from lisa.cli.bench.targets import BoundVerdict, Judged
from lisa.cli.output import console

STYLES = {
    BoundVerdict.MET: "green",
    BoundVerdict.CLOSE: "yellow",
    BoundVerdict.MISSED: "bold red",
    BoundVerdict.UNKNOWN: "dim",
}


class ProgressDisplay:
    """Shows progress: a live line on a terminal, otherwise one line per measure."""

    def __init__(self) -> None:
        self._console = console(err=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("starting")
        self._began = time.monotonic()

    def begin(self, measure: str) -> None:
        """Show that a measure begins."""
        self._console.print(f"{time.monotonic() - self._began:6.1f} s  {measure}")

    def update(self, what: str) -> None:
        """Show the current step of a measure."""
        self._progress.update(self._task, description=what)

    def warn(self, what: str) -> None:
        """Show an error that does not end the run."""
        self._console.print(what, style="red")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()
        self._console.print(f"{time.monotonic() - self._began:6.1f} s  done")


def show(report: BenchReport, only: Sequence[str]) -> None:
    """Print the targets of the measures taken; for a single measure, also its figures."""
    out = console()
    if len(only) == 1:
        out.print(_figures(report.results))
    out.print(_targets([one for one in report.judged if not only or one.target.measure in only]))
    for (measure, subject), why in report.results.failed.items():
        out.print(f"{measure} of {subject} was not measured: {why}")
    for name, why in report.results.missing.items():
        out.print(f"{name} is missing: {why}")


def _targets(judged: Sequence[Judged]) -> Table:
    table = Table(title="Targets", title_justify="left", box=None, pad_edge=False)
    for name in ("what", "against", "target", "measured", ""):
        table.add_column(name, justify="right" if name in ("target", "measured") else "left")
    for one in judged:
        target = one.target
        table.add_row(
            target.what,
            target.against,
            bound(one),
            number(one.value),
            str(one.verdict),
            style=STYLES[one.verdict],
        )
    return table


def _figures(results: Results) -> Table:
    table = Table(title="Figures", title_justify="left", box=None, pad_edge=False)
    for name in ("of", "figure"):
        table.add_column(name)
    for name in ("median", "lowest", "highest"):
        table.add_column(name, justify="right")
    table.add_column("unit")
    for figure in results.figures():
        row = (figure.key.subject, figure.key.name)
        spread = (figure.median, figure.low, figure.high)
        table.add_row(*row, *map(number, spread), figure.unit)
    return table
