"""The plots of messages that will fall due."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lisa.pipeline.jobs.report.drawing import Draw, Drawing, whole_numbers
from lisa.pipeline.jobs.report.forecast import DAYS, HOURS, MINUTES, Crossing
from lisa.pipeline.jobs.report.formatting import count
from lisa.pipeline.jobs.report.svg import colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAR = 3
"""A capacity above this multiple of the data is only shown in the legend."""


class ForecastPlots(Drawing):
    """Messages due, backlog and capacity."""

    def due(self, unit: str) -> str:
        """Messages due in the next minutes, hours or days, and the capacity of all topics."""
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
            f"Due each {unit}",
            self._ahead(list(sums.values()), unit, capacity),
            alt=f"Messages that fall due in each of the next {steps} {unit}s: "
            f"{count(sum(sums.values()))}, at most {count(max(sums.values()))} in one {unit}; "
            f"the best pace of all topics together is {count(round(capacity))}.",
        )

    def crossing(self, found: Crossing) -> str:
        """The next hours of one topic: messages due, backlog and capacity."""
        demand = self._figures.demands[found.topic]
        drained = found.hour + 24 if found.drained is None else found.drained
        steps = min(max(24, round(drained * 1.25)), DAYS * 24)
        due = [demand.hours.get(hour, 0) for hour in range(steps)]
        left, waiting = demand.overdue, []
        for n in due:
            left = max(left + n - found.capacity, 0)
            waiting.append(left)
        title = f"{found.topic}: due, backlog, capacity"
        return self._plot(
            title,
            self._ahead(due, "hour", found.capacity, waiting),
            alt=f"{found.topic}: at most {count(max(due))} fall due in one hour, it handled at "
            f"most {count(found.capacity)}; the backlog reaches {count(found.peak)}.",
        )

    def _ahead(
        self, due: Sequence[int], unit: str, capacity: float, waiting: Sequence[int] = ()
    ) -> Draw:
        def draw(ax: Axes, narrow: bool) -> None:  # noqa: ARG001, FBT001
            edges = range(len(due) + 1)
            ax.stairs(due, edges, fill=True, color=colour("due"), label=f"due each {unit}")
            if waiting:
                ax.stairs(
                    waiting,
                    edges,
                    color=colour("waiting"),
                    linewidth=1.8,
                    label="backlog at its end",
                )
            most = max(*due, *waiting, 1)
            pace = {"minute": "best hour / 60", "hour": "best hour", "day": "24 best hours"}[unit]
            said = f"capacity ({pace}): {count(round(capacity), short=True)}"
            above = capacity > FAR * most
            if capacity:
                # Drawn to scale, a high capacity would flatten the data.
                ax.axhline(
                    0 if above else capacity,
                    color=colour("capacity"),
                    linewidth=1.6,
                    linestyle=(0, (5, 2)),
                    visible=not above,
                    label=f"{said}, far above" if above else said,
                )
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
            whole_numbers(ax.yaxis)

        return draw
