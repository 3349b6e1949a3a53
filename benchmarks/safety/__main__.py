"""How long scripts block a full server: `python -m benchmarks.safety [--quick] [--out DIR]`.

Fills a server with ten million waiting messages and 300,000 in flight (about 4 GiB), and calls
every script that moves messages repeatedly at its largest batch while another client pings. Runs on
the embedded Valkey, and on redis-server if it is installed. `--quick` uses a hundredth of the
messages. Calls that read or write bodies are measured with bodies of 20 kB, 100 kB and 1 MB;
`--waiting 0` measures only those. Exit code 1 if a target is missed.

On shared machines, processes stall or slow down at times. Therefore a script that only counts runs
after each call, for half of the time that a call may take. The median of a script must not exceed
the median of counting, a script must not exceed the bound more often than counting does, and after
correction for the machine's speed only one call in ten thousand may exceed the bound.
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

from benchmarks.safety.bodies import SIZES, Bodies, prepare
from benchmarks.safety.calls import Round
from benchmarks.safety.fill import fill, open_store
from benchmarks.safety.watch import BOUND_MS, COUNTING, Observer, Stopwatch, quantile, summary
from lisa.core.transitions import loader
from lisa.embedded import EmbeddedServer

WAITING, IN_FLIGHT, ROUNDS = 10_000_000, 300_000, 200
BODY_ROUNDS = 10
QUICKER = 100
STALLS = 0.0001
"""The fraction of calls that the machine may have stalled."""

Figures = dict[str, Any]


def loops_that_take(ms: float, watch: Stopwatch) -> int:
    """The number of loops that take `ms` at this machine's best speed."""
    loops = 10_000
    while min(watch.count(loops) for _ in range(20)) < ms:
        loops = loops * 21 // 20
    watch.forget()
    return loops


def seen(values: list[float]) -> dict[str, float]:
    """The summary of another client's ping times."""
    return {
        "pings": len(values),
        "median_ms": round(quantile(values, 0.5), 3),
        "p99_9_ms": round(quantile(values, 0.999), 3),
        "max_ms": round(max(values), 3),
    }


def measure(binary: Path | None, waiting: int, in_flight: int, rounds: int) -> Figures:
    """Fill a server and measure all scripts on it."""
    settings = ("--latency-monitor-threshold", str(int(BOUND_MS)))
    with EmbeddedServer(binary=binary, extra=settings) as server:
        seconds = fill(server.url, waiting, in_flight)
        store = open_store(server.url)
        prepare(store)
        memory = _field(store.ask("INFO", "memory"), "used_memory")
        for name in loader.names():
            store.ask("SCRIPT", "LOAD", loader.load(name).source)
        watch = Stopwatch(store, server.pid)
        loops = loops_that_take(BOUND_MS / 2, watch)
        store.ask("LATENCY", "RESET")
        with Observer(server.url) as observer:
            for number in range(rounds):
                if waiting:
                    _run_round(watch, Round(number, waiting), loops)
                if number < BODY_ROUNDS:
                    for about, size in SIZES.items():
                        _run_round(watch, Bodies(number, size), loops, f", {about}")
        events = [[one[0].decode(), one[3]] for one in store.ask("LATENCY", "LATEST")]
        figures = {
            "server": _version(store.ask("INFO", "server")),
            "waiting": waiting,
            "in_flight": in_flight,
            "rounds": rounds,
            "fill_s": round(seconds),
            "memory_gib": round(int(memory) / 2**30, 2),
            "load": round(os.getloadavg()[0], 1),
            "scripts": {
                name: summary(calls, watch.counted_ms)
                for name, calls in sorted(watch.calls.items())
            },
            "latency_events_ms": dict(events),
            "pings": seen(observer.seen_ms),
        }
        store.close()
        return figures


def _run_round(watch: Stopwatch, one: Round | Bodies, loops: int, about: str = "") -> None:
    calls = one.calls()
    transition = next(calls)
    while True:
        reply = watch.run(transition, about)
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
    """The scripts that were slower than counting or exceeded the bound.

    A single slow call is ignored, because the machine may have stalled. Calls with large bodies
    must only keep the bound, because one call may contain a single body.
    """
    loader = figures["scripts"]
    counted = loader[COUNTING]
    return [
        name
        for name, one in loader.items()
        if (one["median_ms"] > counted["median_ms"] and not name.endswith(tuple(SIZES)))
        or (one["over_percent"] > counted["over_percent"] and one["over"] > 1)
        or (name != COUNTING and one["fast_over"] > max(1, one["calls"] * STALLS))
    ]


HEAD = """# How long a script blocks a full server

Written by `make bench-safety` on a machine with shared cores. Target: no script call at its largest
batch takes {bound:g} ms. Figures are milliseconds of CPU time of the server's thread per call;
*with waits* is the longest wall time. `(counting)` is a script that only counts, for {half:g} ms on
an idle machine, and runs after each call: longer times are caused by the machine. *At full speed*
are the same calls, corrected by the slowdown of the counting before and after each call.
All figures: [safety.json](safety.json).
"""
COLUMNS = (
    "calls",
    "least",
    "median",
    "p99",
    "max",
    "with waits",
    f"{BOUND_MS:g} ms or more",
    "at full speed: median",
    "p99.9",
    "max",
    f"{BOUND_MS:g} ms or more",
)
KEYS = ("calls", "least_ms", "median_ms", "p99_ms", "max_ms", "took_max_ms")
FAST = ("fast_median_ms", "fast_p99_9_ms", "fast_max_ms", "fast_over")


def page(runs: list[Figures]) -> str:
    """The report in Markdown."""
    parts = [HEAD.format(bound=BOUND_MS, half=BOUND_MS / 2)]
    for one in runs:
        parts += [
            f"## {one['server']}\n",
            "{waiting:,} waiting, {in_flight:,} in flight, {memory_gib} GiB; filled in {fill_s} s; "
            "{rounds} rounds; load average {load}.\n".format(**one),
            "| script | " + " | ".join(COLUMNS) + " |",
            "|---" * (len(COLUMNS) + 1) + "|",
            *[
                f"| {name} | "
                + " | ".join(f"{row[key]:,}" for key in KEYS)
                + f" | {row['over_percent']:.2f} % | "
                + " | ".join(str(row[key]) for key in FAST)
                + " |"
                for name, row in one["scripts"].items()
            ],
            "\nAnother client's PING meanwhile: median {median_ms} ms, p99.9 {p99_9_ms}, "
            "max {max_ms}.".format(**one["pings"]),
            f"The server's latency monitor, longest in ms: {one['latency_events_ms'] or 'none'}.\n",
            f"**{_conclusion(one)}**\n",
        ]
    return "\n".join(parts)


def _conclusion(figures: Figures) -> str:
    late = verdict(figures)
    if not late:
        return f"No script exceeds {BOUND_MS:g} ms more often than counting does."
    return "Too slow: " + ", ".join(late)


def main() -> int:
    """Run all measurements, print and write the report."""
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
