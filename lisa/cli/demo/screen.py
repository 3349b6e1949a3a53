"""The demo's result table and lateness histogram."""

from __future__ import annotations

from bisect import bisect_left

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

BOUNDS_MS = (0.5, 1, 2, 3, 5, 10, 20, 50, 100, 1_000)
BAR = 40

LABELS = {
    "sent": "sent",
    "handled": "handled",
    "cancelled": "cancelled in time",
    "rescheduled": "rescheduled",
    "retried": "retries",
    "garbage": "garbage",
    "lateness_p50_ms": "lateness p50",
    "lateness_p99_ms": "lateness p99",
    "lateness_max_ms": "lateness max",
    "early": "early",
    "lost": "lost",
    "handled_twice": "handled twice",
    "handled_after_cancel": "handled after cancel",
}
MUST_BE_ZERO = ("early", "lost", "handled_after_cancel")


def show_result(figures: dict[str, int | float], lateness_us: list[int]) -> None:
    """Print the results and the histogram of `lateness_us`, in microseconds."""
    Console().print(Group(_table(figures), "", _histogram(lateness_us)))


def _table(figures: dict[str, int | float]) -> RenderableType:
    table = Table(title="Recorded by the handlers", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, label in LABELS.items():
        value = figures[name]
        shown = f"{value:,.2f} ms" if name.endswith("_ms") else f"{value:,}"
        style = "" if name not in MUST_BE_ZERO else "green" if value == 0 else "bold red"
        table.add_row(label, Text(shown, style=style))
    return table


def _histogram(lateness_us: list[int]) -> RenderableType:
    counts = [0] * (len(BOUNDS_MS) + 1)
    for late in lateness_us:
        counts[bisect_left(BOUNDS_MS, late / 1000)] += 1
    most = max(counts) or 1
    last = max((i for i, count in enumerate(counts) if count), default=0)
    chart = Table.grid(padding=(0, 1))
    chart.add_column(justify="right")
    chart.add_column()
    chart.add_column(justify="right")
    for i, count in enumerate(counts[: last + 1]):
        label = f"<= {BOUNDS_MS[i]:g} ms" if i < len(BOUNDS_MS) else f"> {BOUNDS_MS[-1]:g} ms"
        bar = "█" * round(BAR * count / most) or ("▏" if count else "")
        chart.add_row(label, Text(bar, style="cyan"), f"{count:,}")
    return Group("Lateness of first deliveries", chart)
