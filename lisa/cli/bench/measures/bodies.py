"""The server's cost of larger bodies."""

from __future__ import annotations

from lisa.cli.bench.floor import BODY
from lisa.cli.bench.measures.drain import head_s
from lisa.cli.bench.run import Run
from lisa.cli.bench.server import fresh_server
from lisa.cli.bench.subject import lisa_at_work
from lisa.cli.bench.work import drain

NAME = "bodies"
SIZE = 10_000


def measure(run: Run) -> None:
    """Figures: the server's CPU time per message, by size of its body, and per kB of body."""
    count = run.sizes.bodies
    for _ in run.repeats("larger bodies"):
        with fresh_server() as server, lisa_at_work(server) as work:
            small_us = drain(work, count, head_s(count)).redis_us
            work.body = "x" * SIZE
            large_us = drain(work, count, 10 * head_s(count)).redis_us
        run.results.add(NAME, "lisa", f"redis, {len(BODY):,} bytes", small_us, "us")
        run.results.add(NAME, "lisa", f"redis, {SIZE:,} bytes", large_us, "us")
        per_kilobyte = max(0.0, large_us - small_us) * 1000 / (SIZE - len(BODY))
        run.results.add(NAME, "lisa", "redis per kB", per_kilobyte, "us")
