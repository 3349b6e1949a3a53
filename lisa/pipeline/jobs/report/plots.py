"""The plots of a report, drawn by matplotlib in two sizes: for screens and paper, and for phones.

There are three kinds: steps, lines of percentiles, and bars. plots.mplstyle describes their look.
"""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lisa.core.model.extras import requires
from lisa.pipeline.jobs.report import figures as counting
from lisa.pipeline.jobs.report.figures import Crossing, Figures, Part, Percentiles
from lisa.pipeline.jobs.report.formatting import clipped, count, human_us, share

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_BARS = 8

MOST_ATTEMPTS = 12
"""The last bar counts this many attempts and more."""

LEAST_US = 100
"""Lower bound of logarithmic axes in microseconds; smaller values are drawn there."""

FAR = 3
"""A capacity above this multiple of the data is only shown in the legend."""

# fmt: off
_COLOURS = {
    "sent": "#0072b2", "handled": "#009e73", "retried": "#e69f00", "garbage": "#d0500a",
    "expired": "#b65c94", "skipped": "#7a4fb0", "cancelled": "#8b949c", "purged": "#6f5a14",
    "lost": "#111111", "p50": "#5b9fd0", "p90": "#2f7fb8", "p99": "#0b4f80", "max": "#d0500a",
    "due": "#6ea9d2", "backlog": "#d0500a", "capacity": "#1c2126", "late": "#bad3e5",
}
# fmt: on
_DASHED: Any = (0, (5, 1.5))

_DATES = {
    "formats": ["%Y", "%b", "%d %b", "%H:%M", "%H:%M", "%S"],
    "zero_formats": ["", "%Y", "%d %b", "%d %b", "%H:%M", "%H:%M"],
    "show_offset": False,  # the page's header has the whole date
}
"""Options of matplotlib's ConciseDateFormatter: formats of years, months, days, hours, minutes."""


_PERCENTILES: Mapping[str, tuple[str, Any]] = {
    "max": ("maximum", (0, (1, 1.5))),
    "p99": ("p99", "-"),
    "p90": ("p90", _DASHED),
    "p50": ("half (p50)", "-"),
}
"""Percentile -> its label, and its line style; drawn in this order."""

_UNITS = {
    "minute": (counting.MINUTES, 1 / 60, "best hour / 60"),
    "hour": (counting.HOURS, 1, "best hour"),
    "day": (counting.DAYS, 24, "24 best hours"),
}
"""Unit of the forecast -> number of its steps, their hours, and a step's capacity in words."""

Ticks = Callable[[Any], None]
"""Sets the ticks of an axis."""

Draw = Callable[["Axes"], None]

Bar = tuple[str, int, str]
"""A name, a value, and the value in words."""

Series = Mapping[str, tuple[Sequence[int], Mapping[str, Any]]]
"""Label -> the values of each step, and options of `Axes.stairs`."""

SIZES = (("wide", 540, 290, 12), ("narrow", 350, 280, 10.5))
"""The class of the <svg> element, and the pixels of width, height and font."""


class Plot(NamedTuple):
    """said: the numbers for screen readers. height: as a factor of the size's height."""

    title: str
    said: str
    draw: Draw
    height: float = 1


# The plots.


def throughput(figures: Figures, topic: str | None = None) -> Plot:
    """Messages sent and handled over time."""
    green, blue = _COLOURS["handled"], _COLOURS["sent"]
    area = {"fill": True, "facecolor": f"{green}59", "edgecolor": green, "linewidth": 1.7}
    series: Series = {
        "handled": (figures.steps("handled", topic), area),
        "sent": (figures.steps("sent", topic), {"color": blue, "linestyle": _DASHED}),
    }
    return _of(topic, _over_time(figures, "Sent and handled", series))


def _of(topic: str | None, plot: Plot) -> Plot:
    """A plot of one topic has its name and is lower."""
    return plot._replace(title=topic, height=0.78) if topic else plot


def other_outcomes(figures: Figures) -> Plot:
    """All outcomes but handled over time."""
    names = [name for name in counting.COUNTED[2:] if figures.count(name)]
    shown = names or ("retried", "garbage")
    series: Series = {name: (figures.steps(name), _area(name)) for name in shown}
    return _over_time(figures, "Retried and ended otherwise", series, is_stacked=True)


def lateness(figures: Figures, topic: str | None = None) -> Plot:
    """Percentiles of lateness over time."""
    steps = [
        (start + (end - start) / 2, late)
        for start, end in pairwise(_edges(figures))
        if (late := figures.late(topic, "slot", int(start.timestamp())))
    ]

    def draw(ax: Axes) -> None:
        middles: Any = [middle for middle, _ in steps]
        for name, (label, style) in _PERCENTILES.items():
            values = [max(getattr(late, name), LEAST_US) for _, late in steps]
            look: Any = {"color": _COLOURS[name], "linestyle": style, "label": label}
            ax.plot(middles, values, marker="." if len(steps) < 3 else None, **look)
        ax.set(yscale="log", ylabel="lateness")
        _time_axis(figures, ax)
        _durations(ax.yaxis)

    said = f"over all: {_said(figures.late(topic), *_PERCENTILES)}"
    return _of(topic, Plot(f"Lateness, each {figures.span.step}", said, draw))


def distribution(figures: Figures) -> Plot:
    """The distribution of the lateness of first deliveries."""
    sums: Counter[int] = Counter()
    for octave, n in figures.octaves.items():
        sums[max(octave, LEAST_US.bit_length() - 1)] += n
    octaves = range(min(sums, default=7), max(sums, default=7) + 1)
    late = figures.late()

    def finish(ax: Axes) -> None:
        ax.set(xscale="log", xlabel="lateness, each bar twice as late as the one before")
        for name in ("p50", "p99") if late else ():
            at, label = max(getattr(late, name), LEAST_US), _said(late, name)
            ax.axvline(at, color=_COLOURS[name], label=label, linestyle=_DASHED)
        _durations(ax.xaxis)

    series: Series = {"first deliveries": ([sums[octave] for octave in octaves], _area("late"))}
    edges, said = [2**octave for octave in (*octaves, octaves[-1] + 1)], _said(late, "p50", "p99")
    return _steps("How late the messages were", "messages", edges, series, finish, said=said)


def attempts(figures: Figures) -> Plot:
    """Handled messages by number of attempts."""
    sums: Counter[int] = Counter()
    for _, attempt, n in figures.attempts:
        sums[min(attempt, MOST_ATTEMPTS)] += n
    bars: list[Bar] = []
    for number in range(1, max(sums, default=0) + 1):
        n, more = sums[number], "+" * (number == MOST_ATTEMPTS)
        bars.append((f"{number}{more}", n, f"{count(n)}, {share(n, sums.total())}"))
    title, unit = "Attempts until success", "messages by attempt that succeeded"
    return _bars(title, unit, "handled", bars, _whole_numbers)


def reasons(figures: Figures) -> Plot:
    """Garbage by reason."""
    found = figures.garbage_by_reason(MOST_BARS)
    bars = [(reason or "all others", n, count(n)) for reason, n in found.items()]
    return _bars("Garbage by reason", "messages", "garbage", bars, _whole_numbers)


def slowest(title: str, parts: Mapping[Part, Percentiles], unit: str, hue: str) -> Plot:
    """The topics with the highest p99."""
    ranked = list(counting.by_topic(parts).items())[:MOST_BARS]
    bars = [(topic, late.p99, human_us(late.p99)) for topic, late in ranked]
    return _bars(title, unit, hue, bars, _durations)


def due(figures: Figures, unit: str) -> Plot:
    """Messages due in the next minutes, hours or days, and the capacity of all topics."""
    steps, hours, _ = _UNITS[unit]
    sums: Counter[int] = Counter()
    for number, n in (figures.due.minutes if unit == "minute" else figures.due.hours).items():
        sums[number // max(int(hours), 1)] += n
    series: Series = {f"due each {unit}": ([sums[step] for step in range(steps)], _area("due"))}
    best_hour = sum(best for best, _, _ in figures.capacities.values())
    return _ahead(figures, f"Due each {unit}", unit, best_hour, series)


def crossing(figures: Figures, found: Crossing) -> Plot:
    """The next hours of one topic: messages due, backlog and capacity."""
    demand = figures.demands[found.topic]
    drained = found.hour + 24 if found.drained is None else found.drained
    steps = min(max(24, round(drained * 1.25)), counting.DAYS * 24)
    waiting = counting.backlog(demand, found.capacity, steps)
    series: Series = {
        "due each hour": ([demand.hours.get(hour, 0) for hour in range(steps)], _area("due")),
        "backlog at its end": (waiting, {"color": _COLOURS["backlog"]}),
    }
    title = f"{found.topic}: due, backlog, capacity"
    return _ahead(figures, title, "hour", found.capacity, series)


def _ahead(figures: Figures, title: str, unit: str, best_hour: int, series: Series) -> Plot:
    """Messages in each step from now on, and the capacity."""
    _, hours, words = _UNITS[unit]
    capacity, now = best_hour * hours, figures.now
    said = f"capacity ({words}): {count(round(capacity))}"
    [(due, _), *others] = series.values()

    def finish(ax: Axes) -> None:
        # Drawn to scale, a high capacity would flatten the data.
        if capacity > FAR * max(1, *(max(values) for values, _ in series.values())):
            ax.plot([], [], " ", label=f"{said}, far above")
        elif capacity:
            ax.axhline(capacity, color=_COLOURS["capacity"], label=said, linestyle=_DASHED)
        ax.set_xlabel(f"{unit}s from {now.astimezone(figures.zone):%d %b, %H:%M}" if now else "")

    label = "messages" if others else f"messages {'an' if unit == 'hour' else 'a'} {unit}"
    return _steps(title, label, range(len(due) + 1), series, finish, said=said)


def _area(hue: str) -> Mapping[str, Any]:
    return {"fill": True, "color": _COLOURS[hue]}


# The kinds of plots.


def _over_time(figures: Figures, title: str, series: Series, **options: Any) -> Plot:
    unit, finish = f"messages each {figures.span.step}", partial(_time_axis, figures)
    return _steps(title, unit, _edges(figures), series, finish, **options)


def _steps(
    title: str,
    unit: str,
    edges: Sequence[Any],
    series: Series,
    finish: Draw,
    *,
    said: str = "",
    is_stacked: bool = False,
) -> Plot:
    """Numbers of messages between the edges of an axis, which `finish` describes."""

    def draw(ax: Axes) -> None:
        below: list[int] = [0] * (len(edges) - 1)
        for label, (values, look) in series.items():
            above = [low + n for low, n in zip(below, values, strict=True)]
            ax.stairs(above, edges, baseline=below if is_stacked else 0, label=label, **look)
            below = above if is_stacked else below
        finish(ax)
        ax.set_ylabel(unit)
        ax.set_ylim(bottom=0)
        _whole_numbers(ax.yaxis)

    sums = (
        f"{label}: {count(sum(values))}, at most {count(max(values, default=0))}"
        for label, (values, _) in series.items()
    )
    return Plot(title, "; ".join([unit, *sums, *filter(None, [said])]), draw)


def _bars(title: str, unit: str, hue: str, bars: Sequence[Bar], ticks: Ticks) -> Plot:
    """Horizontal bars."""

    def draw(ax: Axes) -> None:
        # By index, not by name: clipped names may be equal.
        places, values = range(len(bars)), [value for _, value, _ in bars]
        drawn = ax.barh(places, values, color=_COLOURS[hue], height=0.62)
        ax.bar_label(drawn, [words for _, _, words in bars], padding=4)
        ax.set_yticks(places, [clipped(name, _room(ax, 17)) for name, _, _ in bars])
        ax.tick_params(axis="y", labelcolor=_COLOURS["capacity"])
        ax.invert_yaxis()
        ax.set_xlabel(unit)
        ax.margins(x=0.2)
        ax.grid(visible=False, axis="y")
        ax.grid(visible=True, axis="x")
        ticks(ax.xaxis)
        ax.locator_params(axis="x", nbins=_room(ax, 100))

    said = "; ".join(f"{name}: {words}" for name, _, words in bars) or "none"
    return Plot(title, f"{unit}: {said}", draw, max(0.55, min(1.2, 0.34 + 0.1 * len(bars))))


def _said(late: Percentiles | None, *names: str) -> str:
    found = (f"{_PERCENTILES[name][0]}: {human_us(getattr(late, name))}" for name in names)
    return ", ".join(found) if late else "no first delivery"


# Axes.


def _edges(figures: Figures) -> list[datetime]:
    """The edges of the time axis's steps, in UTC: local times repeat when the clock is set back."""
    return [datetime.fromtimestamp(edge, UTC) for edge in figures.span.edges]


def _room(ax: Axes, pixels: int) -> int:
    """How many times this width fits into a plot."""
    return int(ax.figure.bbox.width // pixels)


def _time_axis(figures: Figures, ax: Axes) -> None:
    from matplotlib import dates

    untyped: Any = dates  # its type annotations are incomplete
    # With three ticks or more, no interval has at most five for 125 to 175 minutes.
    locator = untyped.AutoDateLocator(tz=figures.zone, minticks=2, maxticks=_room(ax, 60))
    ax.xaxis.set_major_locator(locator)
    ax.xaxis.set_major_formatter(untyped.ConciseDateFormatter(locator, figures.zone, **_DATES))
    first, *_, last = _edges(figures)
    ax.set(xlabel=f"time, {figures.zone}", xlim=(first, last))


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
    axis.set_major_formatter(EngFormatter(sep=""))


def _durations(axis: Any) -> None:
    """Ticks for values in microseconds."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    if axis.get_scale() == "log":
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 500 * low else (1,)))
    axis.set_major_formatter(lambda micros, _: human_us(round(micros)))
    axis.set_minor_formatter(NullFormatter())


def to_html(plot: Plot) -> str:
    """A plot in both sizes. Raises MissingExtra if matplotlib is not installed."""
    with requires("pipeline"):
        from matplotlib import style
        from matplotlib.figure import Figure
    drawings = []
    for name, width, base, font in SIZES:
        raw, height = io.StringIO(), round(base * plot.height)
        look: Any = [Path(__file__).with_suffix(".mplstyle"), {"font.size": font}]
        with style.context(look):
            figure = Figure(figsize=(width / 72, height / 72))
            axes = figure.add_subplot(title=plot.title)
            plot.draw(axes)
            if axes.get_legend_handles_labels()[1]:
                figure.legend(loc="outside lower left", ncols=_room(axes, 130))
            figure.savefig(raw, format="svg")
        # Groups have the same ids in each drawing, and nothing refers to them.
        content = re.sub(r'<g id="[^"]*"', "<g", raw.getvalue().partition("</defs>")[2])
        drawings.append(
            f'<svg class="{name}" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="{escape(f"{plot.title}; {plot.said}.")}">{content}'
        )
    return f'<figure class="plot">{"".join(drawings)}</figure>'
