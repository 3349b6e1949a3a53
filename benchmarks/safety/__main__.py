"""How long scripts block a full server: `python -m benchmarks.safety [--quick] [--out DIR]`.

One server is filled with ten million waiting messages and 300,000 in flight, for which it needs
some 4 GiB, and every script that moves messages is called at its largest batch, again and again,
while another client pings. First the embedded Valkey, then redis-server where it is installed.
`--quick` fills a hundredth of that. Exit code 1 if a target is missed.

A machine that others share stalls any process now and then, or runs it at half its speed for a
while, where a virtual one can't even tell. So after each call a script is timed that does nothing
but count, half as long as a call may take: no script may take longer than it as a rule, nor pass
the bound more often, nor, at the speed that counting says the machine can have, pass it at all, but
for a call in ten thousand.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.safety.calls import Round
from benchmarks.safety.fill import fill, open_store
from benchmarks.safety.watch import BOUND_MS, COUNTING, Observer, Stopwatch, quantile, summary
from lisa.core import scripts
from lisa.embedded import EmbeddedServer

WAITING, IN_FLIGHT, ROUNDS = 10_000_000, 300_000, 200
QUICKER = 100
STALLS = 0.0001
"""So many calls may have been stalled by the machine."""

Figures = dict[str, Any]


def loops_that_take(ms: float, watch: Stopwatch) -> int:
    """How far a script counts in so long a time, at this machine's best."""
    loops = 10_000
    while min(watch.count(loops) for _ in range(20)) < ms:
        loops = loops * 21 // 20
    watch.forget()
    return loops


def seen(values: list[float]) -> dict[str, float]:
    """What the other client saw."""
    return {
        "pings": len(values), "median_ms": round(quantile(values, 0.5), 3),
        "p99_9_ms": round(quantile(values, 0.999), 3), "max_ms": round(max(values), 3),
    }  # fmt: skip


def measure(binary: Path | None, waiting: int, in_flight: int, rounds: int) -> Figures:
    """Fill one server, and time everything on it."""
    settings = ("--latency-monitor-threshold", str(int(BOUND_MS)))
    with EmbeddedServer(binary=binary, extra=settings) as server:
        seconds = fill(server.url, waiting, in_flight)
        store = open_store(server.url)
        memory = _field(store.ask("INFO", "memory"), "used_memory")
        for name in scripts.names():
            store.ask("SCRIPT", "LOAD", scripts.load(name).source)
        watch = Stopwatch(store, server.pid)
        loops = loops_that_take(BOUND_MS / 2, watch)
        store.ask("LATENCY", "RESET")
        with Observer(server.url) as observer:
            for number in range(rounds):
                _run_round(watch, Round(number, waiting), loops)
        events = [[one[0].decode(), one[3]] for one in store.ask("LATENCY", "LATEST")]
        figures = {
            "server": _version(store.ask("INFO", "server")), "waiting": waiting,
            "in_flight": in_flight, "rounds": rounds, "fill_s": round(seconds),
            "memory_gib": round(int(memory) / 2**30, 2), "load": round(os.getloadavg()[0], 1),
            "scripts": {name: summary(calls, watch.counted_ms)
                        for name, calls in sorted(watch.calls.items())},
            "latency_events_ms": dict(events), "pings": seen(observer.seen_ms),
        }  # fmt: skip
        store.close()
        return figures


def _run_round(watch: Stopwatch, one: Round, loops: int) -> None:
    calls = one.calls()
    transition = next(calls)
    while True:
        reply = watch.run(transition)
        watch.count(loops)
        try:
            transition = calls.send(reply)
        except StopIteration:
            return


def _field(info: bytes, name: str) -> str:
    lines = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
    return lines.get(name, "")


def _version(info: bytes) -> str:
    valkey = _field(info, "valkey_version")
    return f"Valkey {valkey}" if valkey else f"Redis {_field(info, 'redis_version')}"


def verdict(figures: Figures) -> list[str]:
    """The scripts that took longer than counting did, or passed the bound.

    One call alone tells nothing: the machine may have stalled.
    """
    scripts = figures["scripts"]
    counted = scripts[COUNTING]
    return [
        name for name, one in scripts.items()
        if one["median_ms"] > counted["median_ms"]
        or (one["over_percent"] > counted["over_percent"] and one["over"] > 1)
        or (name != COUNTING and one["fast_over"] > max(1, one["calls"] * STALLS))
    ]  # fmt: skip


HEAD = """# How long a script blocks a full server

By `make bench-safety`, on a machine whose cores others share. The aim: no call of a script at its
largest batch takes {bound:g} ms. Figures are the server's own milliseconds of a call while its
thread had a core, by the system's scheduler; *with waits* is the longest with what other processes
took meanwhile. `(counting)` is a script that does nothing but count, for {half:g} ms where nothing
disturbs it, called after each of the others: whatever it takes beyond that is the machine's doing.
*At full speed* are the same calls, each divided by how much slower than its best counting was just
before and just after.
All figures: [safety.json](safety.json).
"""
COLUMNS = ("calls", "least", "median", "p99", "max", "with waits", f"{BOUND_MS:g} ms or more",
           "at full speed: median", "p99.9", "max", f"{BOUND_MS:g} ms or more")  # fmt: skip
KEYS = ("calls", "least_ms", "median_ms", "p99_ms", "max_ms", "took_max_ms")
FAST = ("fast_median_ms", "fast_p99_9_ms", "fast_max_ms", "fast_over")


def page(runs: list[Figures]) -> str:
    """The report."""
    parts = [HEAD.format(bound=BOUND_MS, half=BOUND_MS / 2)]
    for one in runs:
        parts += [
            f"## {one['server']}\n",
            "{waiting:,} waiting, {in_flight:,} in flight, {memory_gib} GiB; filled in {fill_s} s; "
            "{rounds} rounds; load average {load}.\n".format(**one),
            "| script | " + " | ".join(COLUMNS) + " |",
            "|---" * (len(COLUMNS) + 1) + "|",
            *[f"| {name} | " + " | ".join(f"{row[key]:,}" for key in KEYS)
              + f" | {row['over_percent']:.2f} % | "
              + " | ".join(str(row[key]) for key in FAST) + " |"
              for name, row in one["scripts"].items()],
            "\nAnother client's PING meanwhile: median {median_ms} ms, p99.9 {p99_9_ms}, "
            "max {max_ms}.".format(**one["pings"]),
            f"The server's latency monitor, longest in ms: {one['latency_events_ms'] or 'none'}.\n",
            f"**{_said(one)}**\n",
        ]  # fmt: skip
    return "\n".join(parts)


def _said(figures: Figures) -> str:
    late = verdict(figures)
    if not late:
        return f"No script takes {BOUND_MS:g} ms by itself, nor did more often than counting."
    return "Too slow: " + ", ".join(late)


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--waiting", type=int, default=WAITING)
    parser.add_argument("--in-flight", type=int, default=IN_FLIGHT)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    part = QUICKER if asked.quick else 1
    rounds = max(1, asked.rounds // (10 if asked.quick else 1))
    found = shutil.which("redis-server")
    runs = []
    for binary in [None, *([Path(found)] if found else [])]:
        began = time.monotonic()
        runs.append(measure(binary, asked.waiting // part, asked.in_flight // part, rounds))
        print(f"{runs[-1]['server']}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    print(page(runs))
    if asked.out:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "safety.json").write_text(json.dumps(runs, indent=2) + "\n", "utf-8")
        (asked.out / "safety.md").write_text(page(runs), "utf-8")
    return int(any(map(verdict, runs)))


if __name__ == "__main__":
    sys.exit(main())
