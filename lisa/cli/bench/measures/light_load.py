"""The cost and lateness of evenly spread messages, at rates far below capacity."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from lisa.cli.bench.measures.drain import head_s
from lisa.cli.bench.run import Run
from lisa.cli.bench.server import BenchServer, fresh_server
from lisa.cli.bench.subject import FloorAtWork, LisaAtWork, floor_at_work, lisa_at_work
from lisa.cli.bench.work import paced

NAME = "light_load"


def measure(run: Run) -> None:
    """Figures: CPU time per message of Redis and of the workers, and lateness, by rate.

    The floor has neither index nor tombstones here, and polls every 2 ms.
    """
    for rate in run.sizes.light_rates:
        for _ in run.repeats(f"{rate:,} messages a second", slow=True):
            _measure(run, rate, "floor", floor_at_work)
            _measure(run, rate, "lisa", lisa_at_work)


def _measure(
    run: Run,
    rate: int,
    subject: str,
    start: Callable[[BenchServer], AbstractContextManager[FloorAtWork | LisaAtWork]],
) -> None:
    count = max(20, int(rate * run.sizes.paced_seconds))
    with fresh_server() as server, start(server) as work:
        steady = paced(work, count, rate, head_s(count))
    label = figure(rate)
    run.results.add(NAME, subject, f"redis {label}", steady.redis_us, "us")
    run.results.add(NAME, subject, f"workers {label}", sum(steady.cpu_us.values()), "us")
    for part, spent_us in steady.cpu_us.items():
        run.results.add(NAME, subject, f"{part} {label}", spent_us, "us")
    run.results.add_lateness(NAME, subject, steady.lateness_us, label)


def figure(rate: int) -> str:
    """The last part of a figure's name."""
    return f"at {rate:,}/s"
