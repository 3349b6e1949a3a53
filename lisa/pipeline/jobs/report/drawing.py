"""Draws plots in two sizes, for wide screens and paper, and for phones; and their axes."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lisa.core.model.extras import requires
from lisa.pipeline.jobs.report import svg
from lisa.pipeline.jobs.report.figures import Figures
from lisa.pipeline.jobs.report.formatting import count, length
from lisa.pipeline.jobs.report.svg import Sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Draw = Callable[["Axes", bool], None]
"""Draws into axes; the flag selects the narrow size."""

SIZES = {"wide": (540, 290, 12), "narrow": (350, 280, 10.5)}
"""Width and height of the two sizes in pixels, and of their font."""


class Drawing:
    """Draws plots of a report's figures, with the page's shared style sheet.

    Raises MissingExtra if matplotlib is not installed.
    """

    def __init__(self, figures: Figures, sheet: Sheet) -> None:
        with requires("pipeline"):
            import matplotlib as mpl
        mpl.use("svg")
        self._figures = figures
        self._sheet = sheet

    def _plot(self, title: str, draw: Draw, *, alt: str, height: float = 1) -> str:
        drawn = "\n".join(self._draw(title, draw, alt, size, height) for size in SIZES)
        return f'<figure class="plot">{drawn}</figure>'

    def _draw(self, title: str, draw: Draw, alt: str, size: str, height: float) -> str:
        import matplotlib as mpl
        from matplotlib.figure import Figure

        width_px, height_px, font_px = SIZES[size]
        settings: Any = svg.settings(self._sheet.next_salt(), font_px)
        with mpl.rc_context(settings):
            # 72 dpi: one unit of the drawing is one pixel.
            figure = Figure(
                figsize=(width_px / 72, height * height_px / 72),
                dpi=72,
                layout="constrained",
            )
            axes = figure.add_subplot()
            axes.set_title(title)
            draw(axes, size == "narrow")
            figure.legend(
                loc="outside lower left",
                ncols=2 if size == "narrow" else 4,
                columnspacing=1.2,
                labelspacing=0.3,
                borderpad=0.2,
            )
            return self._sheet.embed(figure, alt, size)

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
        whole_numbers(ax.yaxis)

    def _time_axis(self, ax: Axes, narrow: bool) -> None:  # noqa: FBT001
        from matplotlib import dates

        dates_any: Any = dates  # its type annotations are incomplete

        zone: Any = self._figures.zone
        ax.xaxis_date(zone)
        # With three ticks or more, no interval has at most five for 125 to 175 minutes.
        ticks = {"minticks": 2, "maxticks": 5} if narrow else {"minticks": 3, "maxticks": 9}
        locator = dates_any.AutoDateLocator(tz=zone, **ticks)
        ax.xaxis.set_major_locator(locator)
        # The date that matplotlib would print next to the axis is in the page's header.
        ax.xaxis.set_major_formatter(
            dates_any.ConciseDateFormatter(
                locator,
                tz=zone,
                show_offset=False,
                formats=["%Y", "%b", "%d %b", "%H:%M", "%H:%M", "%S"],
                zero_formats=["", "%Y", "%d %b", "%d %b", "%H:%M", "%H:%M"],
            )
        )
        ax.set_xlim(self._edges()[0], self._edges()[-1])
        ax.set_xlabel(f"time, {zone}")


def whole_numbers(axis: Any) -> None:
    """Ticks at whole numbers, in short form."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
    axis.set_major_formatter(FuncFormatter(lambda value, _: count(round(value), short=True)))


def seconds_axis(axis: Any) -> None:
    """Ticks as durations, for values in seconds."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = sorted(axis.get_view_interval())
    if axis.get_scale() == "log":
        few = high / max(low, 1e-6) < 500
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: length(round(value * 1e6))))
    axis.set_minor_formatter(NullFormatter())
