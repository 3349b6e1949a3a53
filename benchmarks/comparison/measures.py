"""Takes Lisa's measures of a peer, if they apply to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from benchmarks.bench.measures import (
    BULK_SEND,
    CONCURRENT_SEND,
    DRAIN,
    EMBEDDED,
    HALF,
    LATENESS,
    MEMORY,
    SINGLE_SEND,
    STEADY_RATE,
    TASKS,
    Run,
    add_drained,
)
from benchmarks.bench.results import STEADY, Fault
from benchmarks.bench.server import fresh_server
from benchmarks.bench.work import Drained
from benchmarks.bench.work import drain as drain_once
from benchmarks.bench.work import paced as paced_once
from benchmarks.comparison.environments import Installed
from benchmarks.comparison.lisa_measures import limits
from benchmarks.comparison.sizes import PeerSizes
from benchmarks.comparison.workers import PeerAtWork, Senders, peer_at_work

PROBE = 500
SLOWEST = 50.0
HOUR_MS = 3_600_000


def measure_peer(run: Run, installed: Installed, only: Sequence[str], sizes: PeerSizes) -> None:
    """Add the peer's figures to the results, and a reason for each measure that it lacks."""
    name = installed.peer.name
    versions = installed.call("versions", timeout_s=60)
    run.results.versions[name] = {
        # Targets compare with Python libraries on Redis, not with other servers.
        "kind": installed.peer.kind if installed.peer.server == "redis" else "server",
        **{key: str(value) for key, value in versions.items()},
    }
    measuring = _Measuring(run, installed, sizes)
    steps: dict[str, Callable[[], None]] = {
        BULK_SEND: measuring.bulk,
        SINGLE_SEND: measuring.single,
        CONCURRENT_SEND: measuring.concurrent,
        MEMORY: measuring.memory,
        DRAIN: measuring.drain,
        LATENESS: measuring.lateness,
        limits.NAME: measuring.limits,
    }
    for measure, step in steps.items():
        if only and measure not in only:
            continue
        if reason := installed.peer.skip.get(measure):
            run.results.failed[measure, name] = reason
            continue
        try:
            step()
        except Fault as fault:
            run.results.failed[measure, name] = str(fault)


class _Measuring:
    def __init__(self, run: Run, installed: Installed, sizes: PeerSizes) -> None:
        self._run = run
        self._sizes = sizes
        self._installed = installed
        self._name = installed.peer.name
        self._on_redis = installed.peer.server == "redis"
        self._rates: dict[str, float] = {}

    def bulk(self) -> None:
        self._send("send", BULK_SEND)

    def single(self) -> None:
        self._send("send-single", SINGLE_SEND)

    def concurrent(self) -> None:
        tasks = ("--tasks", str(TASKS))
        self._send("send-concurrent", CONCURRENT_SEND, *tasks)

    def _send(self, command: str, measure: str, *arguments: str) -> None:
        for _ in self._run.repeats(f"{self._name}: {command}", most=self._sizes.repeats):
            with fresh_server() as server:
                senders = Senders(self._installed, server, SLOWEST)
                due = ("--due-ms", str(time.time_ns() // 1_000_000 + HOUR_MS), *arguments)
                probe_s = senders.seconds(command, self._most(PROBE), *due)
                if probe_s is None:
                    raise Fault("it has no asyncio API")
                count = self._count(PROBE / probe_s)
                seconds = senders.seconds(command, count, *due) or probe_s
            self._add(measure, "rate", count / seconds, "1/s")
            self._rates[command] = count / seconds

    def memory(self) -> None:
        if not self._on_redis:
            raise Fault("its messages are not stored in Redis")
        for _ in self._run.repeats(f"{self._name}: memory", most=self._sizes.repeats):
            with fresh_server() as server:
                senders = Senders(self._installed, server, SLOWEST)
                due = ("--due-ms", str(time.time_ns() // 1_000_000 + HOUR_MS))
                senders.seconds("send", self._most(PROBE), *due)
                time.sleep(0.2)
                before, count = server.memory(), self._count(self._send_rate())
                senders.seconds("send", count, *due)
                time.sleep(0.2)
                each = (server.memory() - before) / count
            self._add(MEMORY, EMBEDDED, each, "bytes")

    def drain(self) -> None:
        # Twice: for a queue that polls once a second, few messages do not show its rate.
        rate = self._drain(self._most(PROBE), SLOWEST).rate
        rate = max(rate, self._drain(self._count(rate), rate / 4).rate)
        for _ in self._run.repeats(f"{self._name}: drain", most=self._sizes.repeats):
            drained = self._drain(self._count(rate), rate / 4)
            add_drained(self._run, DRAIN, self._name, drained, on_redis=self._on_redis)

    def _drain(self, count: int, slowest: float) -> Drained:
        with (
            fresh_server() as server,
            peer_at_work(self._installed, server, count, slowest) as work,
        ):
            drained = drain_once(work, count, self._head_s(count))
        self._rates["send"] = count / drained.send_s
        return drained

    def lateness(self) -> None:
        capacity = self._run.results.median(DRAIN, self._name, "rate")
        if capacity is None:
            capacity = self._drain(self._most(PROBE), SLOWEST).rate
        self._paced(capacity / 2, HALF)
        self._add(LATENESS, f"rate at {HALF}", capacity / 2, "1/s")
        if capacity < STEADY_RATE:
            raise Fault(f"1,000/s exceeds its capacity ({capacity:,.0f}/s)")
        self._paced(STEADY_RATE, STEADY)

    def _paced(self, rate: float, label: str) -> None:
        count = self._most(max(20, int(rate * self._sizes.seconds)))
        for _ in self._run.repeats(f"{self._name}: lateness at {label}", most=self._sizes.repeats):
            with (
                fresh_server() as server,
                peer_at_work(self._installed, server, count, rate) as work,
            ):
                # A queue with delays in whole seconds must send such messages at their rate.
                head_s = self._head_s(count) + count / rate
                late_us = paced_once(work, count, rate, head_s).lateness_us
            self._run.results.add_lateness(LATENESS, self._name, late_us, label)

    def limits(self) -> None:
        if not self._installed.peer.limits:
            raise Fault("its program does not limit the rate")
        self._drain(self._most(PROBE), SLOWEST)  # for the time that sending takes
        count = self._most(self._sizes.limited)
        for _ in self._run.repeats(f"{self._name}: limits", most=self._sizes.repeats):
            limits.take_limits(self._run, self._name, self._limited, count, self._head_s)

    @contextmanager
    def _limited(self, limit: int, count: int) -> Iterator[PeerAtWork]:
        installed = replace(self._installed, limit=limit)
        with (
            fresh_server() as server,
            peer_at_work(installed, server, count, SLOWEST) as work,
        ):
            yield work

    def _add(self, measure: str, what: str, value: float, unit: str) -> None:
        self._run.results.add(measure, self._name, what, value, unit)

    def _send_rate(self) -> float:
        """Messages sent per second, measured or assumed."""
        return self._rates.get("send", SLOWEST * 4)

    def _head_s(self, count: int) -> float:
        return self._sizes.start_seconds + 2 * count / self._send_rate()

    def _count(self, rate: float) -> int:
        """Enough messages to keep the peer busy for some seconds."""
        return self._most(max(PROBE, int(rate * self._sizes.seconds)))

    def _most(self, count: int) -> int:
        return min(count, self._sizes.most)
