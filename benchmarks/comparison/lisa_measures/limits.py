"""A limited rate: when its messages start, what Redis spends on them, and a limit never reached."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

from benchmarks.bench.measures import Run, head_s
from benchmarks.bench.server import fresh_server
from benchmarks.bench.work import TOPIC, AtWork, drain, lisa_at_work, now_ms, store_on
from benchmarks.comparison.sizes import FurtherSizes
from lisa.admin.topics import set_options
from lisa.core.model.keys import Keys

NAME = "limits"
LIMIT = 100
NEVER_REACHED = 1_000_000
"""Messages per second."""

HOUR_MS = 3_600_000

Start = Callable[[int, int], AbstractContextManager[AtWork]]
"""Starts workers with a limit of messages per second, 0 for none, for a number of messages."""


def measure(run: Run, sizes: FurtherSizes) -> None:
    """Figures: see `take_limits`."""
    for _ in run.repeats("limits", slow=True):
        take_limits(run, "lisa", _lisa, sizes.limited, head_s)


def take_limits(
    run: Run, name: str, start: Start, count: int, head: Callable[[int], float]
) -> None:
    """Add the figures of a limit of 100 a second for messages that are due at one instant.

    How far the starts are from those of an even rate, the most starts within any second, and the
    server's time per message, each without and with a further message that is due in an hour; and
    the drain rates without a limit and with one that is never reached. Raises Fault.

    head: seconds from the start of sending so many messages until they are due.
    """
    for tail in ("", ", and one due in an hour"):
        with start(LIMIT, count) as work:
            if tail:
                work.send(1, now_ms() + HOUR_MS)
            drained = drain(work, count, head(count))
        starts = sorted(drained.lateness_us)
        behind = [at / 1e3 - i * 1e3 / LIMIT for i, at in enumerate(starts)]
        second = max(bisect_left(starts, at + 1_000_000) - i for i, at in enumerate(starts))
        run.results.add(NAME, name, f"most ahead of the rate{tail}", max(0, -min(behind)), "ms")
        run.results.add(NAME, name, f"most behind the rate{tail}", max(0, *behind), "ms")
        run.results.add(NAME, name, f"most starts within a second{tail}", second, "")
        run.results.add(NAME, name, f"redis{tail}", drained.redis_us, "us")
    rates = []
    for limit in (0, NEVER_REACHED):
        with start(limit, 10 * count) as work:
            rates.append(drain(work, 10 * count, head(10 * count)).rate)
    run.results.add(NAME, name, "rate without limit", rates[0], "1/s")
    run.results.add(NAME, name, "rate with a limit never reached", rates[1], "1/s")


@contextmanager
def _lisa(limit: int, _count: int) -> Iterator[AtWork]:
    with fresh_server() as server, lisa_at_work(server) as work:
        waiting = server.client.zrange(Keys().topic(TOPIC).waiting, 0, -1)
        work.producer.cancel_many(TOPIC, [one.decode() for one in waiting])
        work.slowest = min(work.slowest, limit or work.slowest)
        if limit:
            with closing(store_on(server)) as store:
                store.drive(set_options(store, TOPIC, {"rate": f"{limit}/s"}))
        yield work
