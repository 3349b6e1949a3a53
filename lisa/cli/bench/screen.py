"""What `lisa bench` shows: progress on stderr, the table of targets on stdout."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from lisa.cli.bench.report import Report, bound, number
from lisa.cli.bench.results import Results
from lisa.cli.bench.targets import Judged, Verdict
from lisa.cli.output import console

__all__ = ["Teller", "show"]

STYLES = {
    Verdict.MET: "green", Verdict.CLOSE: "yellow", Verdict.MISSED: "bold red",
    Verdict.UNKNOWN: "dim",
}  # fmt: skip


class Teller:
    """Progress for people: a live line on a terminal, a line a measure elsewhere."""

    def __init__(self) -> None:
        self._console = console(err=True)
        self._progress = Progress(
            SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(),
            console=self._console, transient=True, disable=not self._console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("starting")
        self._began = time.monotonic()

    def begin(self, measure: str) -> None:
        """A measure begins."""
        self._console.print(f"{time.monotonic() - self._began:6.1f} s  {measure}")

    def say(self, what: str) -> None:
        """What is being done within it."""
        self._progress.update(self._task, description=what)

    def complain(self, what: str) -> None:
        """Something went wrong that does not end the run."""
        self._console.print(what, style="red")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()
        self._console.print(f"{time.monotonic() - self._began:6.1f} s  done")


def show(report: Report, chosen: Sequence[str]) -> None:
    """Print the targets that were looked at; of a part of a run, also its figures."""
    out = console()
    if len(chosen) == 1:
        out.print(_figures(report.results))
    out.print(_targets([one for one in report.judged if one.target.measure in chosen]))
    for (measure, subject), why in report.results.failed.items():
        out.print(f"{measure} of {subject} was not measured: {why}")
    for name, why in report.results.missing.items():
        out.print(f"{name} is missing: {why}")


def _targets(judged: Sequence[Judged]) -> Table:
    table = Table(title="Targets", title_justify="left", box=None, pad_edge=False)
    for name, side in (("what", "left"), ("against", "left"), ("target", "right"),
                       ("measured", "right"), ("", "left")):  # fmt: skip
        table.add_column(name, justify="right" if side == "right" else "left")
    for one in judged:
        target = one.target
        table.add_row(
            target.what, target.against, bound(one), number(one.value), str(one.verdict),
            style=STYLES[one.verdict],
        )  # fmt: skip
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
