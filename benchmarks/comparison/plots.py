"""Draws the report's plots."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from benchmarks.bench.report import RATES
from benchmarks.bench.results import Figure, Results, quantile
from benchmarks.comparison.lisa_measures import backlog

mpl.use("Agg")

COLOURS = {"tab:orange": "Lisa", "tab:gray": "floor", "tab:blue": "other queues"}
FRACTIONS = (
    *(number / 100 for number in range(100)),
    0.992,
    0.994,
    0.995,
    0.996,
    0.997,
    0.998,
    0.999,
    0.9995,
    0.9999,
    1.0,
)
"""The fractions at which a distribution is drawn."""

LEAST_MS = 0.05
"""Smaller values are drawn here, because a logarithmic axis has no zero."""


def draw(results: Results, folder: Path) -> list[str]:
    """Draw the plots for which there are figures; returns their file names."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    for name, plot in (("throughput", throughput), ("lateness", lateness), ("backlog", cost)):
        if plot(results, folder / f"{name}.png"):
            drawn.append(f"{name}.png")
    return drawn


def throughput(results: Results, path: Path) -> bool:
    """Draw messages per second as bars, one panel per measure."""
    panels = {
        measure: bars
        for measure in RATES
        if (bars := [one for one in results.figures() if one.key[::2] == (measure, "rate")])
    }
    if not panels:
        return False

    def fill(axes: list[Axes]) -> None:
        for ax, (measure, bars) in zip(axes, panels.items(), strict=True):
            _bars(ax, RATES[measure], bars)

    _save(path, "Throughput: medians, lines show the spread", fill, panels=len(panels))
    return True


def _bars(ax: Axes, title: str, figures: list[Figure]) -> None:
    figures = sorted(figures, key=lambda one: one.median)
    names = [one.key.subject for one in figures]
    medians = [one.median for one in figures]
    bars = ax.barh(names, medians, xerr=_reach(figures), color=[_colour(name) for name in names])
    for colour, label in COLOURS.items():
        ax.bar([0], [0], color=colour, label=label)  # for the legend only
    ax.bar_label(bars, [f"{median:,.0f}" for median in medians], padding=4, fontsize=8)
    ax.margins(x=0.18)
    ax.set_xlim(left=0)
    ax.set_title(title)
    ax.set_xlabel("messages a second")
    ax.legend(loc="lower right", fontsize=8)


def _reach(figures: list[Figure]) -> list[list[float]]:
    """How far the figures spread below and above their medians."""
    return [[one.median - one.low for one in figures], [one.high - one.median for one in figures]]


def _colour(subject: str) -> str:
    return {"lisa": "tab:orange", "floor": "tab:gray"}.get(subject, "tab:blue")


def lateness(results: Results, path: Path) -> bool:
    """Draw the distribution of lateness, one panel per load."""
    panels: dict[str, list[tuple[str, list[float]]]] = {}
    shares = [fraction * 100 for fraction in FRACTIONS]
    for (label, subject), values in results.lateness.items():
        ordered = sorted(values)
        late_ms = [max(quantile(ordered, fraction), LEAST_MS) for fraction in FRACTIONS]
        panels.setdefault(label, []).append((subject, late_ms))
    if not panels:
        return False

    def fill(axes: list[Axes]) -> None:
        for ax, (label, lines) in zip(axes, panels.items(), strict=True):
            for subject, late_ms in lines:
                [line] = ax.plot(late_ms, shares, label=subject, linewidth=1)
                if subject == "lisa":
                    line.set(color=_colour(subject), linewidth=2)
            ax.set_xscale("log")
            ax.set_title(label)
            ax.set_xlabel("lateness, milliseconds")
            ax.set_ylabel("messages handled by then, %")
            ax.grid(visible=True, alpha=0.3)
            ax.legend(fontsize=8)

    _save(path, "Lateness: from the due instant to the handler", fill, panels=len(panels))
    return True


def cost(results: Results, path: Path) -> bool:
    """Draw the cost of promoting a message against the backlog."""
    found = {
        (one.key.subject, one.key.name): one
        for one in results.figures()
        if one.key.measure == backlog.NAME
    }
    amounts = backlog.amounts(results)
    if not amounts:
        return False

    def fill(axes: list[Axes]) -> None:
        [ax] = axes
        for subject, what, label in (
            ("lisa", "redis", "processor of the embedded Valkey"),
            ("lisa", "wall", "by the clock, embedded Valkey"),
            (backlog.ON_DEBIAN, "redis", "processor of redis-server"),
        ):
            if (subject, backlog.figure(amounts[0], what)) not in found:
                continue
            figures = [found[subject, backlog.figure(waiting, what)] for waiting in amounts]
            medians = [one.median for one in figures]
            ax.errorbar(amounts, medians, yerr=_reach(figures), marker="o", capsize=3, label=label)
        ax.set_xscale("log")
        ax.set_ylim(bottom=0)
        ax.set_xlabel("messages waiting")
        ax.set_ylabel("microseconds for a promoted message")
        ax.grid(visible=True, alpha=0.3)
        ax.legend()

    _save(path, "Cost against backlog: medians, lines show the spread", fill, panels=1)
    return True


def _save(path: Path, title: str, fill: Callable[[list[Axes]], None], *, panels: int) -> None:
    figure, grid = plt.subplots(
        panels, 1, figsize=(9, 1 + 4 * panels), squeeze=False, layout="constrained"
    )
    fill([row[0] for row in grid])
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)
