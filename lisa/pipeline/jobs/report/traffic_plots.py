"""The plots of past traffic and of slow topics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lisa.pipeline.jobs.report.drawing import Drawing, seconds_axis, whole_numbers
from lisa.pipeline.jobs.report.formatting import clipped, count, length
from lisa.pipeline.jobs.report.svg import colour
from lisa.pipeline.jobs.report.tables import Percentiles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINES = ("p50", "p90", "p99", "max")
_LABELS = {"p50": "half (p50)", "p90": "p90", "p99": "p99", "p999": "p99.9", "max": "maximum"}
_DASHES: dict[str, Any] = {"p50": "-", "p90": (0, (5, 1.5)), "p99": "-", "max": (0, (1, 1.5))}
OTHER_OUTCOMES = ("retried", "garbage", "expired", "skipped", "cancelled", "purged", "lost")
MOST_BARS = 8
LEAST_US = 100
"""Lower bound of logarithmic axes in microseconds; smaller values are drawn there."""


class TrafficPlots(Drawing):
    """Throughput, lateness, outcomes, and the slowest topics."""

    def throughput(self, topic: str | None = None) -> str:
        """Messages sent and handled over time."""
        figures, step = self._figures, self._step
        sent, handled = figures.steps("sent", topic), figures.steps("handled", topic)

        def draw(ax: Axes, narrow: bool) -> None:  # noqa: FBT001 - as `Draw` says
            edges = self._edges()
            ax.stairs(handled, edges, fill=True, color=colour("handled"), alpha=0.35)
            ax.stairs(handled, edges, color=colour("handled"), linewidth=1.6, label="handled")
            ax.stairs(
                sent,
                edges,
                color=colour("sent"),
                linewidth=1.6,
                linestyle=(0, (4, 1.5)),
                label="sent",
            )
            self._counts_over_time(ax, narrow)

        return self._plot(
            topic or "Sent and handled",
            draw,
            height=0.78 if topic else 1,
            alt=f"Messages of {topic or 'all topics'} each {step}: {count(sum(sent))} sent, at "
            f"most {count(max(sent, default=0))}; {count(sum(handled))} handled, at most "
            f"{count(max(handled, default=0))}.",
        )

    def other_outcomes(self) -> str:
        """All other outcomes over time, stacked."""
        values = {name: self._figures.steps(name) for name in OTHER_OUTCOMES}
        shown = [name for name in OTHER_OUTCOMES if any(values[name])] or ["retried", "garbage"]

        def draw(ax: Axes, narrow: bool) -> None:  # noqa: FBT001
            below = [0] * len(values[shown[0]])
            for name in shown:
                above = [low + n for low, n in zip(below, values[name], strict=True)]
                ax.stairs(
                    above, self._edges(), baseline=below, fill=True, color=colour(name), label=name
                )
                below = above
            self._counts_over_time(ax, narrow)

        sums = ", ".join(f"{count(sum(values[name]))} {name}" for name in shown)
        return self._plot(
            "Retried and ended otherwise", draw, alt=f"Messages each {self._step}, stacked: {sums}."
        )

    def lateness(self, topic: str | None = None) -> str:
        """Percentiles of lateness over time."""
        figures, span = self._figures, self._figures.span
        steps = range(len(span.edges) - 1 if span else 0)
        key = (("slot",),) if topic is None else (("topic", "slot"), topic)
        found = [figures.lateness.get((*key, step)) for step in steps]
        at = [middle for middle, one in zip(self._middles(), found, strict=True) if one]
        parts = [one for one in found if one]

        def draw(ax: Axes, narrow: bool) -> None:  # noqa: FBT001
            ax.set_yscale("log")
            for name in reversed(LINES):
                values = [max(getattr(one, name), LEAST_US) / 1e6 for one in parts]
                ax.plot(
                    at,
                    values,
                    color=colour(name),
                    label=_LABELS[name],
                    linewidth=1.8,
                    linestyle=_DASHES[name],
                    marker="." if len(at) < 3 else None,
                )
            self._time_axis(ax, narrow)
            seconds_axis(ax.yaxis)
            ax.set_ylabel("lateness")

        whole = figures.late(topic)
        names = (*LINES[:3], "p999", "max")
        said = (
            "no first delivery in this time"
            if whole is None
            else ", ".join(f"{_LABELS[name]} {length(getattr(whole, name))}" for name in names)
        )
        return self._plot(
            topic or f"Lateness, each {self._step}",
            draw,
            height=0.78 if topic else 1,
            alt=f"Lateness of {topic or 'all topics'} each {self._step}; over all: {said}.",
        )

    def distribution(self) -> str:
        """The distribution of the lateness of first deliveries."""
        octaves = self._figures.histogram
        counts: dict[int, int] = {}
        for octave, n in octaves.items():
            least = max(octave, LEAST_US.bit_length() - 1)
            counts[least] = counts.get(least, 0) + n
        octave_range = list(range(min(counts, default=7), max(counts, default=7) + 1))
        whole = self._figures.late()

        def draw(ax: Axes, narrow: bool) -> None:  # noqa: ARG001, FBT001
            ax.set_xscale("log")
            edges = [2**octave / 1e6 for octave in (*octave_range, octave_range[-1] + 1)]
            ax.stairs(
                [counts.get(octave, 0) for octave in octave_range],
                edges,
                fill=True,
                color=colour("bar"),
                label="first deliveries",
            )
            for name in ("p50", "p99"):
                if whole is not None:
                    ax.axvline(
                        max(getattr(whole, name), LEAST_US) / 1e6,
                        color=colour(name),
                        label=f"{_LABELS[name]}: {length(getattr(whole, name))}",
                        linestyle=_DASHES["p90"],
                        linewidth=1.6,
                    )
            seconds_axis(ax.xaxis)
            ax.set_xlabel("lateness, each bar twice as late as the one before")
            ax.set_ylabel("messages")
            whole_numbers(ax.yaxis)

        return self._plot(
            "How late the messages were",
            draw,
            alt="Distribution of lateness: "
            + (
                "nothing was delivered."
                if whole is None
                else f"half of {count(whole.count)} deliveries within {length(whole.p50)}, "
                f"99 % within {length(whole.p99)}."
            ),
        )

    def attempts(self) -> str:
        """Handled messages by number of attempts."""
        sums: dict[int, int] = {}
        for _, attempt, n in self._figures.attempts:
            number = min(attempt, 12)
            sums[number] = sums.get(number, 0) + n
        names = [
            f"{number}" if number < 12 else "12+" for number in range(1, max(sums, default=1) + 1)
        ]
        values = [sums.get(number, 0) for number in range(1, len(names) + 1)]
        total = sum(values) or 1

        def draw(ax: Axes, narrow: bool) -> None:  # noqa: FBT001
            bars = ax.bar(names, values, color=colour("handled"), label="handled", width=0.7)
            shares = [f"{100 * n / total:.3g} %" if n else "" for n in values]
            ax.bar_label(
                bars,
                shares,
                padding=2,
                color=colour("ink"),
                fontsize=9 if narrow and len(names) > 5 else None,
            )
            ax.set_xlabel("attempt that succeeded")
            ax.set_ylabel("messages")
            ax.margins(y=0.12)
            whole_numbers(ax.yaxis)

        said = ", ".join(
            f"{count(n)} at attempt {name}" for name, n in zip(names, values, strict=True) if n
        )
        return self._plot(
            "Attempts until success", draw, alt=f"Messages handled: {said or 'none'}."
        )

    def reasons(self) -> str:
        """Garbage by reason."""
        sums: dict[str, int] = {}
        for _, reason, n in self._figures.reasons:
            sums[reason] = sums.get(reason, 0) + n
        other = sums.pop("", 0)
        ranked = sorted(sums.items(), key=lambda one: -one[1])
        other += sum(n for _, n in ranked[MOST_BARS:])
        bars = ranked[:MOST_BARS] + ([("all others", other)] if other else [])
        return self._bars("Garbage by reason", bars, "messages", "garbage", count)

    def slowest(self) -> str:
        """The topics with the highest lateness."""
        return self._slow("Latest topics", self._figures.lateness, "p99 of lateness", "p99")

    def slowest_handling(self) -> str:
        """The topics with the longest handling times."""
        took = self._figures.handling
        return self._slow("Slowest handling", took, "p99 from delivery to ack", "handled")

    def _slow(
        self, title: str, parts: Mapping[tuple[Any, ...], Percentiles], unit: str, hue: str
    ) -> str:
        values = [(part[1], one.p99) for part, one in parts.items() if part[0] == ("topic",)]
        ranked = sorted(values, key=lambda one: -one[1])[:MOST_BARS]
        return self._bars(title, ranked, unit, hue, length, scale=1e-6)

    def _bars(
        self,
        title: str,
        bars: Sequence[tuple[str, int]],
        unit: str,
        hue: str,
        words: Callable[[int], str],
        *,
        scale: float = 1,
    ) -> str:
        def draw(ax: Axes, narrow: bool) -> None:  # noqa: FBT001
            # By index, not by name: clipped names may be equal.
            drawn = ax.barh(
                range(len(bars)),
                [value * scale for _, value in bars],
                color=colour(hue),
                label=unit,
                height=0.62,
            )
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
                whole_numbers(ax.xaxis)
            else:
                seconds_axis(ax.xaxis)
            ax.locator_params(axis="x", nbins=3 if narrow else 5)

        said = "; ".join(f"{name}: {words(value)}" for name, value in bars)
        return self._plot(
            title,
            draw,
            alt=f"{title}, {unit}: {said or 'none'}.",
            height=max(0.55, min(1.2, 0.34 + 0.1 * len(bars))),
        )
