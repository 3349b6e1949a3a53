"""The plots of a report, drawn by matplotlib in two sizes: for screens and paper, and for phones.

Plots are drawn in placeholder colours, which are replaced by the page's CSS variables, so that one
drawing works in light mode, dark mode and print. Text stays text, for search and print.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from itertools import count as counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from lisa.core.model.extras import requires
from lisa.pipeline.jobs.report.counts import COUNTED, Percentiles, by_p99
from lisa.pipeline.jobs.report.figures import DAYS, HOURS, MINUTES, Crossing, Figures, backlog
from lisa.pipeline.jobs.report.formatting import clipped, count, length

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BIGGEST_TOPICS = 8
"""Number of topics with their own plots."""

WARNED = 4
"""Number of crossings with their own plot and notice."""

MOST_BARS = 8
LEAST_US = 100
"""Lower bound of logarithmic axes in microseconds; smaller values are drawn there."""

FAR = 3
"""A capacity above this multiple of the data is only shown in the legend."""

OTHER_OUTCOMES = ("retried", "garbage", "expired", "skipped", "cancelled", "purged", "lost")
_LABELS = {"p50": "half (p50)", "p90": "p90", "p99": "p99", "p999": "p99.9", "max": "maximum"}
_DASHED: Any = (0, (5, 1.5))
_LINES: Mapping[str, Any] = {"max": (0, (1, 1.5)), "p99": "-", "p90": _DASHED, "p50": "-"}
"""Percentile -> its line style; drawn in this order."""


class PlotSize(NamedTuple):
    """The pixels of a plot and of its font; `name` is the class of its <svg> element."""

    name: str
    width: int
    height: int
    font: float

    @property
    def is_narrow(self) -> bool:
        """Whether it is for a phone."""
        return self.name == "narrow"


SIZES = (PlotSize("wide", 540, 290, 12), PlotSize("narrow", 350, 280, 10.5))


class Plot(NamedTuple):
    """alt: the text for screen readers. height: as a factor of the size's height."""

    title: str
    alt: str
    draw: Callable[[Axes, PlotSize], None]
    height: float = 1


def draw_plots(figures: Figures) -> dict[str, Any]:
    """The plots of each section of the page as HTML; those of topics by topic.

    Raises MissingExtra if matplotlib is not installed.
    """
    with requires("pipeline"):
        import matplotlib as mpl
    mpl.use("svg")
    numbers = counter()

    def drawn(*plots: Plot) -> list[str]:
        return [_html(plot, next(numbers)) for plot in plots]

    forecast = drawn(
        *(_due(figures, unit) for unit in ("minute", "hour", "day")),
        *(_crossing(figures, crossing) for crossing in figures.crossings[:WARNED]),
    )
    if figures.span is None:  # no events, only messages to come
        return {"forecast": forecast}
    late, took = figures.lateness, figures.handling
    return {
        "throughput": drawn(_throughput(figures), _other_outcomes(figures)),
        "lateness": drawn(_lateness(figures), _distribution(figures)),
        "outcome": drawn(_attempts(figures), _reasons(figures)),
        "slowest": drawn(
            _slowest("Latest topics", late, "p99 of lateness", "p99"),
            _slowest("Slowest handling", took, "p99 from delivery to ack", "handled"),
        ),
        "forecast": forecast,
        "topics": {
            topic: drawn(
                _throughput(figures, topic),
                *([] if figures.late(topic) is None else [_lateness(figures, topic)]),
            )
            for topic in list(figures.totals())[:BIGGEST_TOPICS]
        },
    }


# Past traffic.


def _throughput(figures: Figures, topic: str | None = None) -> Plot:
    sent, handled = figures.steps("sent", topic), figures.steps("handled", topic)

    def draw(ax: Axes, size: PlotSize) -> None:
        edges, green = _edges(figures), colour("handled")
        ax.stairs(handled, edges, fill=True, color=green, alpha=0.35)
        ax.stairs(handled, edges, color=green, linewidth=1.6, label="handled")
        ax.stairs(sent, edges, color=colour("sent"), linewidth=1.6, ls=_DASHED, label="sent")
        _counts_over_time(ax, size, figures)

    said = (
        f"{count(sum(n))} {name}, at most {count(max(n, default=0))}"
        for n, name in ((sent, "sent"), (handled, "handled"))
    )
    alt = f"Messages of {topic or 'all topics'} each {figures.step}: {'; '.join(said)}."
    return Plot(topic or "Sent and handled", alt, draw, 0.78 if topic else 1)


def _other_outcomes(figures: Figures) -> Plot:
    """All outcomes but handled over time, stacked."""
    values = {name: figures.steps(name) for name in OTHER_OUTCOMES}
    shown = [name for name in OTHER_OUTCOMES if any(values[name])] or ["retried", "garbage"]

    def draw(ax: Axes, size: PlotSize) -> None:
        below = [0] * len(values[shown[0]])
        for name in shown:
            above = [low + n for low, n in zip(below, values[name], strict=True)]
            edges, hue = _edges(figures), colour(name)
            ax.stairs(above, edges, baseline=below, fill=True, color=hue, label=name)
            below = above
        _counts_over_time(ax, size, figures)

    sums = ", ".join(f"{count(sum(values[name]))} {name}" for name in shown)
    alt = f"Messages each {figures.step}, stacked: {sums}."
    return Plot("Retried and ended otherwise", alt, draw)


def _lateness(figures: Figures, topic: str | None = None) -> Plot:
    """Percentiles of lateness over time."""
    key = (("slot",),) if topic is None else (("topic", "slot"), topic)
    middles = [(start + end) / 2 for start, end in pairwise(_edges(figures))]
    found = ((at, figures.lateness.get((*key, step))) for step, at in enumerate(middles))
    known = [(at, one) for at, one in found if one is not None]

    def draw(ax: Axes, size: PlotSize) -> None:
        ax.set_yscale("log")
        for name, style in _LINES.items():
            ax.plot(
                [at for at, _ in known],
                [max(getattr(one, name), LEAST_US) / 1e6 for _, one in known],
                color=colour(name),
                label=_LABELS[name],
                linewidth=1.8,
                linestyle=style,
                marker="." if len(known) < 3 else None,
            )
        _time_axis(ax, size, figures)
        _seconds(ax.yaxis)
        ax.set_ylabel("lateness")

    whole = figures.late(topic)
    said = (
        "no first delivery in this time"
        if whole is None
        else ", ".join(f"{label} {length(getattr(whole, name))}" for name, label in _LABELS.items())
    )
    alt = f"Lateness of {topic or 'all topics'} each {figures.step}; over all: {said}."
    return Plot(topic or f"Lateness, each {figures.step}", alt, draw, 0.78 if topic else 1)


def _distribution(figures: Figures) -> Plot:
    """The distribution of the lateness of first deliveries."""
    counts: dict[int, int] = {}
    for octave, n in figures.histogram.items():
        least = max(octave, LEAST_US.bit_length() - 1)
        counts[least] = counts.get(least, 0) + n
    octaves = range(min(counts, default=7), max(counts, default=7) + 1)
    whole = figures.late()

    def draw(ax: Axes, size: PlotSize) -> None:  # noqa: ARG001
        ax.set_xscale("log")
        values = [counts.get(octave, 0) for octave in octaves]
        edges = [2**octave / 1e6 for octave in (*octaves, octaves[-1] + 1)]
        ax.stairs(values, edges, fill=True, color=colour("bar"), label="first deliveries")
        for name in ("p50", "p99") if whole is not None else ():
            value = getattr(whole, name)
            label, at = f"{_LABELS[name]}: {length(value)}", max(value, LEAST_US) / 1e6
            ax.axvline(at, color=colour(name), label=label, linestyle=_DASHED, linewidth=1.6)
        _seconds(ax.xaxis)
        ax.set_xlabel("lateness, each bar twice as late as the one before")
        ax.set_ylabel("messages")
        _whole_numbers(ax.yaxis)

    said = "nothing was delivered"
    if whole is not None:
        said = f"half of {count(whole.count)} deliveries within {length(whole.p50)}, "
        said += f"99 % within {length(whole.p99)}"
    return Plot("How late the messages were", f"Distribution of lateness: {said}.", draw)


def _attempts(figures: Figures) -> Plot:
    """Handled messages by number of attempts."""
    sums: dict[int, int] = {}
    for _, attempt, n in figures.attempts:
        number = min(attempt, 12)
        sums[number] = sums.get(number, 0) + n
    names = [f"{n}" if n < 12 else "12+" for n in range(1, max(sums, default=1) + 1)]
    values = [sums.get(number, 0) for number in range(1, len(names) + 1)]

    def draw(ax: Axes, size: PlotSize) -> None:
        bars = ax.bar(names, values, color=colour("handled"), label="handled", width=0.7)
        shares = [f"{100 * n / sum(values):.3g} %" if n else "" for n in values]
        font = 9 if size.is_narrow and len(names) > 5 else None
        ax.bar_label(bars, shares, padding=2, color=colour("ink"), fontsize=font)
        ax.set_xlabel("attempt that succeeded")
        ax.set_ylabel("messages")
        ax.margins(y=0.12)
        _whole_numbers(ax.yaxis)

    found = (f"{count(n)} at attempt {name}" for name, n in zip(names, values, strict=True) if n)
    said = ", ".join(found) or "none"
    return Plot("Attempts until success", f"Messages handled: {said}.", draw)


def _reasons(figures: Figures) -> Plot:
    """Garbage by reason."""
    found = figures.garbage_by_reason(MOST_BARS)
    bars = [(reason or "all others", n) for reason, n in found.items()]
    return _bars("Garbage by reason", bars, "messages", "garbage", count)


def _slowest(title: str, parts: Mapping[tuple[Any, ...], Percentiles], unit: str, hue: str) -> Plot:
    """The topics with the highest p99."""
    ranked = [(topic, one.p99) for topic, one in by_p99(parts)[:MOST_BARS]]
    return _bars(title, ranked, unit, hue, length, scale=1e-6)


def _bars(
    title: str,
    bars: Sequence[tuple[str, int]],
    unit: str,
    hue: str,
    words: Callable[[int], str],
    *,
    scale: float = 1,
) -> Plot:
    def draw(ax: Axes, size: PlotSize) -> None:
        # By index, not by name: clipped names may be equal.
        places, values = range(len(bars)), [value * scale for _, value in bars]
        drawn = ax.barh(places, values, color=colour(hue), label=unit, height=0.62)
        ax.bar_label(drawn, [words(value) for _, value in bars], padding=4, color=colour("ink"))
        ax.set_yticks(places, [clipped(name, 18 if size.is_narrow else 34) for name, _ in bars])
        ax.tick_params(axis="y", labelcolor=colour("ink"))
        ax.invert_yaxis()
        ax.set_xlabel(unit)
        ax.margins(x=0.2)
        ax.grid(visible=False, axis="y")
        ax.grid(visible=True, axis="x")
        (_whole_numbers if scale == 1 else _seconds)(ax.xaxis)
        ax.locator_params(axis="x", nbins=3 if size.is_narrow else 5)

    said = "; ".join(f"{name}: {words(value)}" for name, value in bars) or "none"
    height = max(0.55, min(1.2, 0.34 + 0.1 * len(bars)))
    return Plot(title, f"{title}, {unit}: {said}.", draw, height)


# Messages to come.


def _due(figures: Figures, unit: str) -> Plot:
    """Messages due in the next minutes, hours or days, and the capacity of all topics."""
    steps, per_hour = {"minute": (MINUTES, 1 / 60), "hour": (HOURS, 1), "day": (DAYS, 24)}[unit]
    sums = [0] * steps
    for demand in figures.demands.values():
        parts = {"minute": demand.minutes, "hour": demand.hours, "day": demand.days()}[unit]
        for step, n in parts.items():
            if step < steps:
                sums[step] += n
    capacity = sum(best for best, _, _ in figures.capacities.values()) * per_hour
    alt = (
        f"Messages that fall due in each of the next {steps} {unit}s: {count(sum(sums))}, at most "
        f"{count(max(sums))} in one {unit}; the best pace of all topics together is "
        f"{count(round(capacity))}."
    )
    return Plot(f"Due each {unit}", alt, _ahead(figures, sums, unit, capacity))


def _crossing(figures: Figures, found: Crossing) -> Plot:
    """The next hours of one topic: messages due, backlog and capacity."""
    demand = figures.demands[found.topic]
    drained = found.hour + 24 if found.drained is None else found.drained
    steps = min(max(24, round(drained * 1.25)), DAYS * 24)
    due = [demand.hours.get(hour, 0) for hour in range(steps)]
    alt = (
        f"{found.topic}: at most {count(max(due))} fall due in one hour, it handled at most "
        f"{count(found.capacity)}; the backlog reaches {count(found.peak)}."
    )
    waiting = backlog(demand, found.capacity, steps)
    draw = _ahead(figures, due, "hour", found.capacity, waiting)
    return Plot(f"{found.topic}: due, backlog, capacity", alt, draw)


def _ahead(
    figures: Figures, due: Sequence[int], unit: str, capacity: float, waiting: Sequence[int] = ()
) -> Callable[[Axes, PlotSize], None]:
    most = max(*due, *waiting, 1)
    # Drawn to scale, a high capacity would flatten the data.
    is_above = capacity > FAR * most
    pace = {"minute": "best hour / 60", "hour": "best hour", "day": "24 best hours"}[unit]
    said = f"capacity ({pace}): {count(round(capacity), short=True)}"

    def draw(ax: Axes, size: PlotSize) -> None:  # noqa: ARG001
        edges = range(len(due) + 1)
        ax.stairs(due, edges, fill=True, color=colour("due"), label=f"due each {unit}")
        if waiting:
            hue, label = colour("waiting"), "backlog at its end"
            ax.stairs(waiting, edges, color=hue, linewidth=1.8, label=label)
        if capacity:
            ax.axhline(
                0 if is_above else capacity,
                color=colour("capacity"),
                linewidth=1.6,
                linestyle=(0, (5, 2)),
                visible=not is_above,
                label=f"{said}, far above" if is_above else said,
            )
        now = figures.now
        ax.set_xlabel(
            f"{unit}s"
            if now is None
            else f"{unit}s from {now.astimezone(figures.zone):%d %b, %H:%M}"
        )
        article = "an" if unit == "hour" else "a"
        ax.set_ylabel("messages" if waiting else f"messages {article} {unit}")
        ax.set_xlim(0, len(due))
        ax.set_ylim(0, 1.08 * (most if is_above else max(most, capacity)))
        _whole_numbers(ax.yaxis)

    return draw


# Axes.


def _edges(figures: Figures) -> list[float]:
    """The edges of the time axis's steps in matplotlib's days."""
    from matplotlib import dates

    number_of: Any = dates.date2num
    edges = figures.span.edges if figures.span else (0, 3_600)
    return [float(number_of(datetime.fromtimestamp(edge, UTC))) for edge in edges]


def _counts_over_time(ax: Axes, size: PlotSize, figures: Figures) -> None:
    _time_axis(ax, size, figures)
    ax.set_ylabel(f"messages each {figures.step}")
    ax.set_ylim(bottom=0)
    _whole_numbers(ax.yaxis)


def _time_axis(ax: Axes, size: PlotSize, figures: Figures) -> None:
    from matplotlib import dates

    untyped: Any = dates  # its type annotations are incomplete
    zone: Any = figures.zone
    ax.xaxis_date(zone)
    # With three ticks or more, no interval has at most five for 125 to 175 minutes.
    least, most = (2, 5) if size.is_narrow else (3, 9)
    locator = untyped.AutoDateLocator(tz=zone, minticks=least, maxticks=most)
    ax.xaxis.set_major_locator(locator)
    # The date that matplotlib would print next to the axis is in the page's header.
    ax.xaxis.set_major_formatter(
        untyped.ConciseDateFormatter(
            locator,
            tz=zone,
            show_offset=False,
            formats=["%Y", "%b", "%d %b", "%H:%M", "%H:%M", "%S"],
            zero_formats=["", "%Y", "%d %b", "%d %b", "%H:%M", "%H:%M"],
        )
    )
    edges = _edges(figures)
    ax.set_xlim(edges[0], edges[-1])
    ax.set_xlabel(f"time, {zone}")


def _whole_numbers(axis: Any) -> None:
    """Ticks at whole numbers, in short form."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda value, _: count(round(value), short=True)))


def _seconds(axis: Any) -> None:
    """Ticks as durations, for values in seconds."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    if axis.get_scale() == "log":
        is_short = high / max(low, 1e-6) < 500
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if is_short else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: length(round(value * 1e6))))
    axis.set_minor_formatter(NullFormatter())


# From matplotlib to HTML.

_COLOURS = (
    *("ink", "muted", "grid", *COUNTED, "p50", "p90", "p99", "max"),
    *("due", "waiting", "capacity", "bar"),
)
"""The page's CSS variables that plots use; each has a light and a dark value."""

_MARKS = {name: f"#0102{number + 16:02x}" for number, name in enumerate(_COLOURS)}
_NAMES = {mark: name for name, mark in _MARKS.items()}


def colour(name: str) -> str:
    """The placeholder colour of a CSS variable. Raises KeyError for an unknown name."""
    return _MARKS[name]


def _html(plot: Plot, number: int) -> str:
    """A plot in both sizes. number: differs for each plot of the page."""
    drawn = "\n".join(_svg(plot, size, f"{number}-{size.name}") for size in SIZES)
    return f'<figure class="plot">{drawn}</figure>'


def _svg(plot: Plot, size: PlotSize, salt: str) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    raw, width, height = io.StringIO(), size.width, round(size.height * plot.height)
    with mpl.rc_context(_settings(size.font, salt)):
        # 72 dpi: one unit of the drawing is one pixel.
        figure = Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")
        axes = figure.add_subplot()
        axes.set_title(plot.title)
        plot.draw(axes, size)
        figure.legend(
            loc="outside lower left",
            ncols=2 if size.is_narrow else 4,
            columnspacing=1.2,
            labelspacing=0.3,
            borderpad=0.2,
        )
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(raw, format="svg", metadata=nothing, transparent=True)
    content = raw.getvalue().partition('<g id="figure_1">')[2]
    return (
        f'<svg class="{size.name}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(plot.alt)}"><g>{re.sub("<[^>]+>", _adopted, content)}'
    )


def _settings(font: float, salt: str) -> Any:
    """Matplotlib's settings for one drawing; the salt makes its ids unique within the page."""
    return {
        "svg.fonttype": "none",
        "svg.hashsalt": salt,
        "text.parse_math": False,  # labels are data: a dollar sign does not start a formula
        "font.size": font,
        "axes.titlesize": font + 1.5,
        "font.family": "DejaVu Sans",  # ships with matplotlib; wider than browser fonts
        "axes.unicode_minus": False,
        "text.color": colour("ink"),
        **dict.fromkeys(("axes.labelcolor", "axes.edgecolor"), colour("muted")),
        **dict.fromkeys(("xtick.color", "ytick.color"), colour("muted")),
        "grid.color": colour("grid"),
        "grid.linewidth": 0.8,
        **{f"axes.spines.{side}": False for side in ("top", "right", "left")},
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "xtick.major.size": 3,
        **dict.fromkeys(("ytick.major.size", "ytick.minor.size", "xtick.minor.size"), 0),
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.titlepad": 10,
        "legend.frameon": False,
        "legend.handlelength": 1.6,
    }


def _adopted(tag: re.Match[str]) -> str:
    """A tag of a drawing for the page: the page's colours and fonts, short numbers, no group ids.

    Matplotlib escapes < and > in text, so that no label is taken for a tag.
    """
    found = re.sub(r"#0102[0-9a-f]{2}", lambda mark: f"var(--{_NAMES[mark[0]]})", tag[0])
    found = re.sub(r"font-family: [^;\"]*;?", "", found)
    found = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.1f}", found)
    found = re.sub(r"^<g id=\"[^\"]*\"", "<g", found)  # only ids of paths are referenced
    return found.replace("xlink:href", "href").replace("\n", " ")
