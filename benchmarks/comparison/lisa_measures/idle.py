"""The cost of an idle manager with one topic and with a thousand topics."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from benchmarks.bench.measures import Run
from benchmarks.bench.server import BenchServer, fresh_server
from benchmarks.bench.work import LisaAtWork, lisa_at_work, now_ms
from benchmarks.comparison.sizes import FurtherSizes

NAME = "idle"
SETTLE_S = 3.0
SAMPLED_BY_S = 5.0  # into a minute
PROBES = 20
SPREAD_MS = 50
INTROSPECTION = {"info", "config|get"}


def measure(run: Run, sizes: FurtherSizes) -> None:
    """Figures: CPU share, commands per second and topic, and lateness of single messages."""
    for _ in run.repeats("idle", slow=True):
        for topics in (1, sizes.topics):
            _with(run, topics, sizes.idle_seconds)


def _with(run: Run, count: int, idle_seconds: float) -> None:
    names = [f"idle-{number:04d}" for number in range(count)]
    tail = f" with {'1 topic' if count == 1 else f'{count:,} topics'}"
    with fresh_server() as server, _idle(server, names) as work:
        time.sleep(SETTLE_S)
        _avoid_sampling(idle_seconds)
        calls, redis_us, began = server.calls(), server.cpu_us(), time.monotonic()
        manager_s = work.cpu_seconds()["manager"]
        time.sleep(idle_seconds)
        seconds = time.monotonic() - began
        manager_s = work.cpu_seconds()["manager"] - manager_s
        redis_us = server.cpu_us() - redis_us
        busiest = _busiest(calls, server.calls())
        run.results.add(NAME, "lisa", "manager" + tail, manager_s / seconds * 100, "% of a core")
        run.results.add(NAME, "lisa", "redis" + tail, redis_us / seconds / 1e4, "% of a core")
        each = busiest / seconds / count
        run.results.add(NAME, "lisa", "busiest command" + tail, each, "1/s a topic")
        late_us = _probe(work)
        run.results.add(NAME, "lisa", "last" + tail, max(late_us) / 1000, "ms")
        run.results.add_lateness(NAME, "lisa", late_us, tail.strip())


def _idle(server: BenchServer, names: list[str]) -> AbstractContextManager[LisaAtWork]:
    return lisa_at_work(server, consumers=0, topics=names[:1], idle=names[1:])


def _avoid_sampling(seconds: float) -> None:
    """Wait if the manager would sample its counters within the next `seconds`.

    The first sampling, early in a minute, writes an entry for each topic.
    """
    into_minute_s = time.time() % 60
    if into_minute_s < SAMPLED_BY_S or into_minute_s + seconds > 60:
        time.sleep((SAMPLED_BY_S - into_minute_s) % 60)


def _busiest(before: dict[str, int], after: dict[str, int]) -> int:
    """The number of calls of the most frequent command."""
    return max(
        (n - before.get(name, 0) for name, n in after.items() if name not in INTROSPECTION),
        default=0,
    )


def _probe(work: LisaAtWork) -> list[int]:
    """Send single messages to one of the topics; returns their lateness in microseconds."""
    work.start_consumers(1)
    work.ledger.mark()
    for _ in range(PROBES):
        work.producer.send(work.topics[0], "x" * 100, at_ms=now_ms() + 2 * SPREAD_MS)
        time.sleep(SPREAD_MS / 1000)
    work.ledger.wait(PROBES, SETTLE_S + PROBES, work.check)
    due, handled = work.ledger.read()
    return [end - start for start, end in zip(due, handled, strict=True)]
