"""The report's plots, each drawn twice: for a wide screen or paper, and for a phone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lisa.core.errors import ConfigError
from lisa.pipeline.jobs.report import svg
from lisa.pipeline.jobs.report.figures import Figures
from lisa.pipeline.jobs.report.forecast import DAYS, HOURS, MINUTES, Crossing
from lisa.pipeline.jobs.report.svg import Sheet, colour
from lisa.pipeline.jobs.report.words import clipped, count, length

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LINES", "Plots"]

Draw = Callable[["Axes", bool], None]
"""Draws into axes; the flag says that there is little room."""

WIDE, NARROW = (540, 290), (350, 280)
"""Pixels of the two drawings."""

LINES = ("p50", "p90", "p99", "max")
_LABELS = {"p50": "half (p50)", "p90": "p90", "p99": "p99", "p999": "p99.9", "max": "maximum"}
_DASHES: dict[str, Any] = {"p50": "-", "p90": (0, (5, 1.5)), "p99": "-", "max": (0, (1, 1.5))}
TROUBLES = ("retried", "garbage", "expired", "cancelled", "purged", "lost")
FAR = 3
"""A capacity so many times what falls due is told, not drawn."""

LEAST_US = 100
"""A logarithmic axis has no zero: what is sooner is drawn there."""


@dataclass(frozen=True, slots=True)
class _Size:
    kind: str
    pixels: tuple[int, int]
    font: float


class Plots:
    """Draws the plots of one page, all into one style sheet. Raises ConfigError: no matplotlib."""

    def __init__(self, figures: Figures, sheet: Sheet) -> None:
        try:
            import matplotlib as mpl
        except ImportError:
            raise ConfigError(
                "the report's plots need matplotlib: pip install 'lisa-delay-queue[pipeline]'"
            ) from None
        mpl.use("svg")
        self._figures = figures
        self._sheet = sheet
        self._drawn = 0

    # -- what happened ---------------------------------------------------------------------

    def throughput(self, topic: str | None = None) -> str:
        """Sent and handled, by time."""
        figures, step = self._figures, self._step
        sent, handled = figures.steps("sent", topic), figures.steps("handled", topic)

        def draw(ax: Axes, narrow: bool) -> None:  # noqa: FBT001 - as `Draw` says
            edges = self._edges()
            ax.stairs(handled, edges, fill=True, color=colour("handled"), alpha=0.35)
            ax.stairs(handled, edges, color=colour("handled"), linewidth=1.6, label="handled")
            ax.stairs(sent, edges, color=colour("sent"), linewidth=1.6, linestyle=(0, (4, 1.5)),
                      label="sent")  # fmt: skip
            self._counts_over_time(ax, narrow)

        return self._plot(
            topic or "Sent and handled", draw, height=0.78 if topic else 1,
            alt=f"Messages of {topic or 'all topics'} by {step}: {count(sum(sent))} sent, most in "
            f"one {step} {count(max(sent, default=0))}; {count(sum(handled))} handled, at most "
            f"{count(max(handled, default=0))}.",
        )  # fmt: skip

    def troubles(self) -> str:
        """Everything else that happened, stacked, by time."""
        values = {name: self._figures.steps(name) for name in TROUBLES}
        shown = [name for name in TROUBLES if any(values[name])] or ["retried", "garbage"]

        def draw(ax: Axes, narrow: bool) -> None:  # noqa: FBT001
            below = [0] * len(values[shown[0]])
            for name in shown:
                above = [low + n for low, n in zip(below, values[name], strict=True)]
                ax.stairs(above, self._edges(), baseline=below, fill=True, color=colour(name),
                          label=name)  # fmt: skip
                below = above
            self._counts_over_time(ax, narrow)

        sums = ", ".join(f"{count(sum(values[name]))} {name}" for name in shown)
        return self._plot("Retried and ended otherwise", draw,
                          alt=f"Messages each {self._step}, stacked: {sums}.")  # fmt: skip

    def lateness(self, topic: str | None = None) -> str:
        """Percentiles of lateness, by time."""
        figures, span = self._figures, self._figures.span
        steps = range(len(span.edges) - 1 if span else 0)
        place = (("slot",),) if topic is None else (("topic", "slot"), topic)
        found = [figures.lateness.get((*place, step)) for step in steps]
        at = [middle for middle, one in zip(self._middles(), found, strict=True) if one]
        parts = [one for one in found if one]

        def draw(ax: Axes, narrow: bool) -> None:  # noqa: FBT001
            ax.set_yscale("log")
            for name in reversed(LINES):
                values = [max(getattr(one, name), LEAST_US) / 1e6 for one in parts]
                ax.plot(at, values, color=colour(name), label=_LABELS[name], linewidth=1.8,
                        linestyle=_DASHES[name], marker="." if len(at) < 3 else None)  # fmt: skip
            self._time_axis(ax, narrow)
            _seconds_axis(ax.yaxis)
            ax.set_ylabel("lateness")

        whole = figures.late(topic)
        names = (*LINES[:3], "p999", "max")
        said = "no first hand-over in this time" if whole is None else ", ".join(
            f"{_LABELS[name]} {length(getattr(whole, name))}" for name in names
        )  # fmt: skip
        return self._plot(
            topic or f"Lateness, by {self._step}", draw, height=0.78 if topic else 1,
            alt=f"Lateness of {topic or 'all topics'} by {self._step}; over all: {said}.",
        )  # fmt: skip

    def distribution(self) -> str:
        """How many first hand-overs were how late."""
        octaves = self._figures.histogram
        counts: dict[int, int] = {}
        for octave, n in octaves.items():
            least = max(octave, LEAST_US.bit_length() - 1)
            counts[least] = counts.get(least, 0) + n
        places = list(range(min(counts, default=7), max(counts, default=7) + 1))
        whole = self._figures.late()

        def draw(ax: Axes, narrow: bool) -> None:  # noqa: ARG001, FBT001
            ax.set_xscale("log")
            edges = [2**place / 1e6 for place in (*places, places[-1] + 1)]
            ax.stairs([counts.get(place, 0) for place in places], edges, fill=True,
                      color=colour("bar"), label="first hand-overs")  # fmt: skip
            for name in ("p50", "p99"):
                if whole is not None:
                    ax.axvline(max(getattr(whole, name), LEAST_US) / 1e6, color=colour(name),
                               label=f"{_LABELS[name]}: {length(getattr(whole, name))}",
                               linestyle=_DASHES["p90"], linewidth=1.6)  # fmt: skip
            _seconds_axis(ax.xaxis)
            ax.set_xlabel("lateness, each bar twice as late as the one before")
            ax.set_ylabel("messages")
            _whole_numbers(ax.yaxis)

        return self._plot(
            "How late the messages were", draw,
            alt="Distribution of lateness: " + (
                "nothing was handed over." if whole is None else
                f"half of {count(whole.count)} hand-overs within {length(whole.p50)}, "
                f"99 % within {length(whole.p99)}."
            ),
        )  # fmt: skip

    def attempts(self) -> str:
        """How many attempts the messages took that were handled in the end."""
        sums: dict[int, int] = {}
        for _, attempt, n in self._figures.attempts:
            place = min(attempt, 12)
            sums[place] = sums.get(place, 0) + n
        names = [
            f"{place}" if place < 12 else "12+" for place in range(1, max(sums, default=1) + 1)
        ]
        values = [sums.get(place, 0) for place in range(1, len(names) + 1)]
        total = sum(values) or 1

        def draw(ax: Axes, narrow: bool) -> None:  # noqa: FBT001
            bars = ax.bar(names, values, color=colour("handled"), label="handled", width=0.7)
            shares = [f"{100 * n / total:.3g} %" if n else "" for n in values]
            ax.bar_label(bars, shares, padding=2, color=colour("ink"),
                         fontsize=9 if narrow and len(names) > 5 else None)  # fmt: skip
            ax.set_xlabel("attempt that succeeded")
            ax.set_ylabel("messages")
            ax.margins(y=0.12)
            _whole_numbers(ax.yaxis)

        said = ", ".join(f"{count(n)} at attempt {name}" for name, n in
                         zip(names, values, strict=True) if n)  # fmt: skip
        return self._plot(
            "Attempts until success", draw, alt=f"Messages handled: {said or 'none'}."
        )

    def reasons(self, most: int = 8) -> str:
        """Garbage by reason."""
        sums: dict[str, int] = {}
        for _, reason, n in self._figures.reasons:
            sums[reason] = sums.get(reason, 0) + n
        other = sums.pop("", 0)
        ranked = sorted(sums.items(), key=lambda one: -one[1])
        other += sum(n for _, n in ranked[most:])
        bars = ranked[:most] + ([("all others", other)] if other else [])
        return self._bars("Garbage by reason", bars, "messages", "garbage", count)

    # -- who is slow -----------------------------------------------------------------------

    def slowest(self, most: int = 8) -> str:
        """The topics whose messages come latest."""
        late = {part[1]: one.p99 for part, one in self._figures.lateness.items()
                if part[0] == ("topic",)}  # fmt: skip
        return self._slow("Latest topics", late, "p99 of lateness", "p99", most)

    def slowest_handling(self, most: int = 8) -> str:
        """The topics whose messages take the longest to be handled."""
        took = {part[1]: one.p99 for part, one in self._figures.handling.items()
                if part[0] == ("topic",)}  # fmt: skip
        return self._slow("Slowest handling", took, "p99 from hand-over to ack", "handled", most)

    def _slow(self, title: str, values: dict[str, int], unit: str, hue: str, most: int) -> str:
        ranked = sorted(values.items(), key=lambda one: -one[1])[:most]
        return self._bars(title, ranked, unit, hue, length, scale=1e-6)

    def _bars(
        self, title: str, bars: Sequence[tuple[str, int]], unit: str, hue: str,
        words: Callable[[int], str], *, scale: float = 1,
    ) -> str:  # fmt: skip
        def draw(ax: Axes, narrow: bool) -> None:  # noqa: FBT001
            # By place, not by name: two names may look alike once they are clipped.
            drawn = ax.barh(range(len(bars)), [value * scale for _, value in bars],
                            color=colour(hue), label=unit, height=0.62)  # fmt: skip
            ax.bar_label(drawn, [words(value) for _, value in bars], padding=4, color=colour("ink"))
            names = [clipped(name, 18 if narrow else 34) for name, _ in bars]
            ax.set_yticks(range(len(bars)), names)
            ax.tick_params(axis="y", labelcolor=colour("ink"))
            ax.invert_yaxis()
            ax.set_xlabel(unit)
            ax.margins(x=0.2)
            ax.grid(visible=False, axis="y")
            ax.grid(visible=True, axis="x")
            if scale == 1:
                _whole_numbers(ax.xaxis)
            else:
                _seconds_axis(ax.xaxis)
            ax.locator_params(axis="x", nbins=3 if narrow else 5)

        said = "; ".join(f"{name}: {words(value)}" for name, value in bars)
        return self._plot(title, draw, alt=f"{title}, {unit}: {said or 'none'}.",
                          height=max(0.55, min(1.2, 0.34 + 0.1 * len(bars))))  # fmt: skip

    # -- what is to come -------------------------------------------------------------------

    def due(self, unit: str) -> str:
        """What falls due in the next minutes, hours or days, and the capacity of all topics."""
        figures = self._figures
        steps, per_hour = {"minute": (MINUTES, 1 / 60), "hour": (HOURS, 1), "day": (DAYS, 24)}[unit]
        sums = dict.fromkeys(range(steps), 0)
        for demand in figures.demands.values():
            parts = {"minute": demand.minutes, "hour": demand.hours, "day": demand.days()}[unit]
            for step, n in parts.items():
                if step in sums:
                    sums[step] += n
        capacity = sum(best for best, _, _ in figures.capacities.values()) * per_hour
        return self._plot(
            f"Due each {unit}", self._ahead(list(sums.values()), unit, capacity),
            alt=f"Messages that fall due in each of the next {steps} {unit}s: "
            f"{count(sum(sums.values()))}, at most {count(max(sums.values()))} in one {unit}; "
            f"the best pace of all topics together is {count(round(capacity))}.",
        )  # fmt: skip

    def crossing(self, found: Crossing) -> str:
        """One topic's next hours: what falls due, what waits, and what it can do."""
        demand = self._figures.demands[found.topic]
        drained = found.hour + 24 if found.drained is None else found.drained
        steps = min(max(24, round(drained * 1.25)), DAYS * 24)
        due = [demand.hours.get(hour, 0) for hour in range(steps)]
        left, waiting = demand.overdue, []
        for n in due:
            left = max(left + n - found.capacity, 0)
            waiting.append(left)
        title = f"{found.topic}: due, left over, capacity"
        return self._plot(
            title, self._ahead(due, "hour", found.capacity, waiting),
            alt=f"{found.topic}: at most {count(max(due))} fall due in one hour, it handled at "
            f"most {count(found.capacity)}; up to {count(found.peak)} are left over.",
        )  # fmt: skip

    def _ahead(
        self, due: Sequence[int], unit: str, capacity: float, waiting: Sequence[int] = ()
    ) -> Draw:
        def draw(ax: Axes, narrow: bool) -> None:  # noqa: ARG001, FBT001
            edges = range(len(due) + 1)
            ax.stairs(due, edges, fill=True, color=colour("due"), label=f"due each {unit}")
            if waiting:
                ax.stairs(waiting, edges, color=colour("waiting"), linewidth=1.8,
                          label="left over at its end")  # fmt: skip
            most = max(*due, *waiting, 1)
            pace = {"minute": "best hour / 60", "hour": "best hour", "day": "24 best hours"}[unit]
            said = f"capacity ({pace}): {count(round(capacity), short=True)}"
            above = capacity > FAR * most
            if capacity:
                # Drawn to scale it would leave a flat line of what there is to see.
                ax.axhline(0 if above else capacity, color=colour("capacity"), linewidth=1.6,
                           linestyle=(0, (5, 2)), visible=not above,
                           label=f"{said}, far above" if above else said)  # fmt: skip
            now = self._figures.now
            since = (
                "" if now is None else f" from {now.astimezone(self._figures.zone):%d %b, %H:%M}"
            )
            ax.set_xlabel(f"{unit}s{since}")
            ax.set_ylabel(
                f"messages {'an' if unit == 'hour' else 'a'} {unit}" if not waiting else "messages"
            )
            ax.set_xlim(0, len(due))
            ax.set_ylim(0, 1.08 * (most if above else max(most, capacity)))
            _whole_numbers(ax.yaxis)

        return draw

    # -- what they share -------------------------------------------------------------------

    def _plot(self, title: str, draw: Draw, *, alt: str, height: float = 1) -> str:
        sizes = (_Size("wide", WIDE, 12), _Size("narrow", NARROW, 10.5))
        drawn = "\n".join(self._draw(title, draw, alt, size, height) for size in sizes)
        return f'<figure class="plot">{drawn}</figure>'

    def _draw(self, title: str, draw: Draw, alt: str, size: _Size, height: float) -> str:
        import matplotlib as mpl
        from matplotlib.figure import Figure

        self._drawn += 1
        settings: Any = svg.settings(f"plot{self._drawn}", size.font)
        with mpl.rc_context(settings):
            # 72 to the inch: one unit of the drawing is one pixel.
            figure = Figure(figsize=(size.pixels[0] / 72, height * size.pixels[1] / 72), dpi=72,
                            layout="constrained")  # fmt: skip
            axes = figure.add_subplot()
            axes.set_title(title)
            draw(axes, size.kind == "narrow")
            figure.legend(loc="outside lower left", ncols=2 if size.kind == "narrow" else 4,
                          columnspacing=1.2, labelspacing=0.3, borderpad=0.2)  # fmt: skip
            return self._sheet.embed(figure, alt, size.kind)

    @property
    def _step(self) -> str:
        return self._figures.span.step if self._figures.span else "hour"

    def _edges(self) -> list[float]:
        from matplotlib import dates

        dates_any: Any = dates

        edges = self._figures.span.edges if self._figures.span else (0, 3_600)
        return [float(dates_any.date2num(datetime.fromtimestamp(edge, UTC))) for edge in edges]

    def _middles(self) -> list[float]:
        edges = self._edges()
        return [(a + b) / 2 for a, b in pairwise(edges)]

    def _counts_over_time(self, ax: Axes, narrow: bool) -> None:  # noqa: FBT001
        self._time_axis(ax, narrow)
        ax.set_ylabel(f"messages each {self._step}")
        ax.set_ylim(bottom=0)
        _whole_numbers(ax.yaxis)

    def _time_axis(self, ax: Axes, narrow: bool) -> None:  # noqa: FBT001
        from matplotlib import dates

        dates_any: Any = dates  # its classes carry half their annotations

        zone: Any = self._figures.zone
        ax.xaxis_date(zone)
        locator = dates_any.AutoDateLocator(tz=zone, minticks=3, maxticks=5 if narrow else 9)
        ax.xaxis.set_major_locator(locator)
        # The offset that stands beside the axis is said once, in the page's head.
        ax.xaxis.set_major_formatter(dates_any.ConciseDateFormatter(
            locator, tz=zone, show_offset=False,
            formats=["%Y", "%b", "%d %b", "%H:%M", "%H:%M", "%S"],
            zero_formats=["", "%Y", "%d %b", "%d %b", "%H:%M", "%H:%M"],
        ))  # fmt: skip
        ax.set_xlim(self._edges()[0], self._edges()[-1])
        ax.set_xlabel(f"time, {zone}")


def _whole_numbers(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda value, _: count(round(value), short=True)))


def _seconds_axis(axis: Any) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    if axis.get_scale() == "log":
        few = high / max(low, 1e-6) < 500
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: length(round(value * 1e6))))
    axis.set_minor_formatter(NullFormatter())
