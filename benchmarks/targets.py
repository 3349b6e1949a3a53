"""What measurements are held to, and the table that says whether they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Figures", "Target", "show", "write"]

Figures = dict[str, Any]


class Target(NamedTuple):
    """One line of the table: of which measurement, in words, the figure, what it is to be."""

    of: str
    what: str
    figure: Callable[[Figures], float]
    at_least: float | None = None
    at_most: float | None = None

    def met(self, value: float) -> bool:
        """Whether a value is as it is to be."""
        return (self.at_least is None or value >= self.at_least) and (
            self.at_most is None or value <= self.at_most
        )

    def bound(self) -> str:
        """What it is to be, in words; empty where it is only told."""
        if self.at_least is not None:
            return f"at least {self.at_least:,g}"
        return "" if self.at_most is None else f"at most {self.at_most:,g}"


Row = tuple[str, str, str, str]


def _rows(targets: Sequence[Target], figures: dict[str, Figures]) -> Iterator[Row]:
    for target in targets:
        value = target.figure(figures[target.of])
        shown = f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
        verdict = "met" if target.met(value) else "missed"
        bound = target.bound()
        yield f"{target.of}: {target.what}", shown, bound, verdict if bound else ""


def show(targets: Sequence[Target], figures: dict[str, Figures]) -> bool:
    """Print the table; whether every target was met."""
    rows = list(_rows(targets, figures))
    for row in rows:
        print("{:<78} {:>10}   {:<16} {}".format(*row))
    return all(row[-1] != "missed" for row in rows)


def write(
    out: Path, name: str, head: str, targets: Sequence[Target], figures: dict[str, Figures]
) -> None:
    """Write NAME.json with all figures, and NAME.md with the table below `head`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{name}.json").write_text(json.dumps(figures, indent=2) + "\n", "utf-8")
    lines = ["| " + " | ".join(row) + " |" for row in _rows(targets, figures)]
    table = "\n".join(["| measure | figure | target | |", "|---|---|---|---|", *lines])
    more = f"All figures: [{name}.json]({name}.json)."
    (out / f"{name}.md").write_text(f"{head}\n{more}\n\n{table}\n", "utf-8")
