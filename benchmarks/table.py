"""The table of a benchmark: figures, their bounds, and verdicts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Figures = dict[str, Any]


class Row(NamedTuple):
    """A row of the table: a figure of the measurement `of`, and optional bounds."""

    of: str
    what: str
    figure: Callable[[Figures], float]
    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        """Whether a value is within the bounds."""
        return (self.at_least is None or value >= self.at_least) and (
            self.at_most is None or value <= self.at_most
        )

    def bound(self) -> str:
        """The bound as text; empty without a bound."""
        if self.at_least is not None:
            return f"at least {self.at_least:,g}"
        return "" if self.at_most is None else f"at most {self.at_most:,g}"


Cells = tuple[str, str, str, str]


def _cells(rows: Sequence[Row], figures: dict[str, Figures]) -> Iterator[Cells]:
    for row in rows:
        value = row.figure(figures[row.of])
        shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        verdict = "met" if row.met(value) else "missed"
        bound = row.bound()
        yield f"{row.of}: {row.what}", shown, bound, verdict if bound else ""


def show(rows: Sequence[Row], figures: dict[str, Figures]) -> bool:
    """Print the table; returns whether every target was met."""
    lines = list(_cells(rows, figures))
    for line in lines:
        print("{:<78} {:>10}   {:<16} {}".format(*line))
    return all(line[-1] != "missed" for line in lines)


def write(
    out: Path, name: str, head: str, rows: Sequence[Row], figures: dict[str, Figures]
) -> None:
    """Write all figures to NAME.json, and `head` and the table to NAME.md."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    lines = ["| " + " | ".join(line) + " |" for line in _cells(rows, figures)]
    table = "\n".join(["| measure | figure | target | |", "|---|---|---|---|", *lines])
    more = f"All figures: [{name}.json]({name}.json)."
    (out / f"{name}.md").write_text(f"{head}\n{more}\n\n{table}\n", "utf-8")
