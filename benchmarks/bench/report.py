"""The benchmark's report as JSON and Markdown, its progress and the table of targets."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from benchmarks.bench.results import BoundVerdict, Figure, Judged, Key, Results
from lisa.cli.output import console

RATES = {
    "bulk_send": "bulk send",
    "single_send": "single send",
    "concurrent_send": "concurrent send",
    "drain": "drain",
}
PERCENTILES = ("min", "p50", "p99", "p99.9", "max", "early")

SETUP = """\
One run on one machine; each measurement uses a new server. Each figure is the median of its
repeats ({repeats}, fewer for long measurements), with the spread in brackets; a ratio is the median
of the ratios of the repeats. Bodies have 100 bytes. Handling times are recorded by the handlers.

**The floor** is the same Redis work with raw redis-py commands, variadic and pipelined, 500 per
call, without atomicity, checks or counters. **Lisa** runs with default settings: one manager and
one consumer process, with a handler that only records the time.
"""

STYLES = {
    BoundVerdict.MET: "green",
    BoundVerdict.CLOSE: "yellow",
    BoundVerdict.MISSED: "bold red",
    BoundVerdict.UNKNOWN: "dim",
}


def number(value: float | None) -> str:
    """A figure with three significant digits and all integer digits."""
    if value is None:
        return ""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:,.2f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class BenchReport:
    """The results of a run; `plots` are file names in the report's directory."""

    mode: str
    repeats: int
    machine: dict[str, str]
    judged: Sequence[Judged]
    results: Results
    plots: Sequence[str] = ()

    def document(self) -> dict[str, Any]:
        """The content of report.json."""
        results = self.results
        return {
            "mode": self.mode,
            "repeats": self.repeats,
            "machine": self.machine,
            "targets": [_target(one) for one in self.judged],
            "figures": [_figure(one) for one in results.figures()],
            "versions": results.versions,
            "missing": results.missing,
            "failed": [
                {"measure": measure, "of": subject, "why": why}
                for (measure, subject), why in results.failed.items()
            ],
            "plots": list(self.plots),
        }

    def write(self, folder: Path) -> None:
        """Write report.json and report.md."""
        folder.mkdir(parents=True, exist_ok=True)
        document = msgspec.json.format(msgspec.json.encode(self.document()), indent=1)
        (folder / "report.json").write_bytes(document + b"\n")
        (folder / "report.md").write_text(self.markdown(), encoding="utf-8")

    def markdown(self) -> str:
        """The content of report.md."""
        parts = [
            "# Throughput and lateness",
            SETUP.format(repeats=self.repeats).rstrip(),
            table(("", ""), self.machine.items()),
            "## Targets",
            table(("what", "against", "target", "measured", ""), map(_target_row, self.judged)),
            *self._throughput(),
            *self._lateness(),
            *self._others(),
            *self._plots(),
            "## All figures",
            table(
                ("measure", "of", "figure", "median (lowest to highest)", "unit", "repeats"),
                map(_figure_row, self.results.figures()),
            ),
        ]
        return "\n\n".join(parts) + "\n"

    def _throughput(self) -> Iterable[str]:
        found = {one.key: one for one in self.results.figures() if one.key.name == "rate"}
        subjects = {key.subject: None for key in found if key.measure in RATES}
        rows = [
            (subject, *(spread(found.get(Key(measure, subject, "rate"))) for measure in RATES))
            for subject in subjects
        ]
        if rows:
            yield "## Throughput, messages a second"
            yield table(("", *RATES.values()), rows)

    def _lateness(self) -> Iterable[str]:
        found = {one.key: one for one in self.results.figures() if one.key.measure != "idle"}
        rows: dict[tuple[str, str], dict[str, Figure]] = {}
        for (_, subject, name), figure in found.items():
            kind, _, label = name.partition(" ")
            if kind in PERCENTILES and label:
                rows.setdefault((label, subject), {})[kind] = figure
        if rows:
            yield "## Lateness, milliseconds"
            yield "From the due time to the handler. Early: messages of all repeats."
            yield table(
                ("load", "", *PERCENTILES),
                [
                    (
                        *row,
                        *(spread(figures.get(kind)) for kind in PERCENTILES[:-1]),
                        number(sum(figures["early"].values)),
                    )
                    for row, figures in rows.items()
                ],
            )

    def _others(self) -> Iterable[str]:
        versions = [
            (name, ", ".join(f"{key} {value}" for key, value in found.items() if key != "kind"))
            for name, found in self.results.versions.items()
        ]
        if versions:
            yield "## Versions"
            yield table(("", ""), versions)
        missing = list(self.results.missing.items())
        missing += [(f"{of}: {what}", why) for (what, of), why in self.results.failed.items()]
        if missing:
            yield "## Missing"
            yield table(("what", "why"), missing)

    def _plots(self) -> Iterable[str]:
        if self.plots:
            yield "## Plots"
            yield "\n\n".join(f"![{Path(name).stem}]({name})" for name in self.plots)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table; vertical bars in cells are escaped."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.replace("|", "\\|").split()) for cell in line) + " |"
        for line in lines
    )


def spread(figure: Figure | None) -> str:
    """The median and the spread: `12.3 (11.9 to 14.0)`."""
    if figure is None:
        return ""
    if figure.low == figure.high:
        return number(figure.median)
    return f"{number(figure.median)} ({number(figure.low)} to {number(figure.high)})"


def bound(one: Judged) -> str:
    """The bound of a target: `at most 14 us`."""
    unit = f" {one.target.unit}" if one.target.unit else ""
    return f"{one.target.sense} {one.target.bound:g}{unit}"


def _target_row(one: Judged) -> tuple[str, ...]:
    return one.target.what, one.target.against, bound(one), number(one.value), str(one.verdict)


def _figure_row(one: Figure) -> tuple[str, ...]:
    key = one.key
    return key.measure, key.subject, key.name, spread(one), one.unit, str(len(one.values))


def _target(one: Judged) -> dict[str, Any]:
    return {
        "what": one.target.what,
        "against": one.target.against,
        "sense": str(one.target.sense),
        "bound": one.target.bound,
        "unit": one.target.unit,
        "measured": one.value,
        "verdict": str(one.verdict),
    }


def _figure(one: Figure) -> dict[str, Any]:
    return {
        **one.key._asdict(),
        "unit": one.unit,
        "median": one.median,
        "lowest": one.low,
        "highest": one.high,
        "values": one.values,
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
