"""Messages due at one instant: the rate and the cost of their life cycle."""

from __future__ import annotations

from lisa.cli.bench import floor
from lisa.cli.bench.run import Run
from lisa.cli.bench.server import fresh_server
from lisa.cli.bench.subject import floor_at_work, lisa_at_work
from lisa.cli.bench.work import Drained, drain

NAME = "drain"
tombstone_ms = floor.RETENTION_MS


def head_s(count: int) -> float:
    """Seconds between the start of sending and the due time: enough even on a busy machine."""
    return 1.0 + count * 20e-6


def measure(run: Run) -> None:
    """Measure the cost and limit of the floor's life cycle, and drains of the floor and of Lisa."""
    for _ in run.repeats("draining"):
        _life(run, "floor")
        _life(run, "floor without index and tombstones", bare=True)
        _life(run, "floor with MSETEX", msetex=True)
        _floor(run)
        _lisa(run)


def _life(run: Run, subject: str, *, bare: bool = False, msetex: bool = False) -> None:
    with fresh_server() as server:
        if msetex and not server.knows("MSETEX"):
            return
        steps = floor.life(server, run.sizes.life, bare=bare, msetex=msetex)
    whole_us = sum(steps.values())
    for name, step_us in steps.items():
        run.results.add(NAME, subject, f"redis, {name} alone", step_us, "us")
    run.results.add(NAME, subject, "redis, step by step", whole_us, "us")
    run.results.add(NAME, subject, "allowed", 1e6 / whole_us, "1/s")


def _floor(run: Run) -> None:
    count = run.sizes.drain
    with fresh_server() as server, floor_at_work(server, "--whole") as work:
        add(run, NAME, "floor", drain(work, count, head_s(count)))


def _lisa(run: Run) -> None:
    count = run.sizes.drain
    with fresh_server() as server, lisa_at_work(server) as work:
        memory = server.memory()
        drained = drain(work, count, head_s(count))
        tombstone = max(0.0, (server.memory() - memory) / count)
    add(run, NAME, "lisa", drained)
    run.results.add(NAME, "lisa", "tombstone", tombstone, "bytes")
    at_full_rate = tombstone * drained.rate * tombstone_ms / 1000
    run.results.add(NAME, "lisa", "tombstones at full rate", at_full_rate / 2**20, "MiB")


def add(run: Run, measure: str, subject: str, drained: Drained, *, on_redis: bool = True) -> None:
    """Add the figures of one drain."""
    run.results.add(measure, subject, "rate", drained.rate, "1/s")
    if on_redis:
        run.results.add(measure, subject, "redis", drained.redis_us, "us")
    for part, spent_us in drained.cpu_us.items():
        run.results.add(measure, subject, part, spent_us, "us")
    early = sum(late < 0 for late in drained.lateness_us)
    run.results.add(measure, subject, "early", early, "")
