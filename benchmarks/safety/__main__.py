"""How long scripts block a full server: `python -m benchmarks.safety [--quick] [--out DIR]`.

One server is filled with ten million waiting messages and 300,000 in flight, for which it needs
some 4 GiB, and every script that moves messages is called at its largest batch, again and again,
while another client pings. First the embedded Valkey, then redis-server where it is installed.
`--quick` fills a hundredth of that. Exit code 1 if a target is missed.

A machine that does other work stalls any process now and then. So of each call it is also told for
how long the server's thread had a core (Linux says so), and the same is measured of a script that
does nothing but count.
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
from benchmarks.safety.watch import BOUND_MS, Observer, Stopwatch, quantile, summary
from lisa.core import scripts
from lisa.embedded import EmbeddedServer

WAITING, IN_FLIGHT, ROUNDS = 10_000_000, 300_000, 200
QUICKER = 100
FLOOR_CALLS = 2_000
FLOOR_MS = 2.5
Figures = dict[str, Any]


def floor(watch: Stopwatch) -> None:
    """What the machine does to calls that have nothing to do with Lisa."""
    loops = 10_000
    while min(watch.idle("(calibration)", loops) for _ in range(5)) < FLOOR_MS:
        loops = loops * 5 // 4
    del watch.calls["(calibration)"]
    for _ in range(FLOOR_CALLS):
        watch.idle("(counting)", loops)
        watch.ping("(PING)")


def seen(values: list[float]) -> dict[str, float]:
    """What the other client saw."""
    return {
        "pings": len(values), "median_ms": round(quantile(values, 0.5), 3),
        "p99_9_ms": round(quantile(values, 0.999), 3), "max_ms": round(max(values), 3),
    }  # fmt: skip


def measure(binary: Path | None, waiting: int, in_flight: int, rounds: int) -> Figures:
    """Fill one server, and time everything on it."""
    settings = ("--slowlog-log-slower-than", str(int(BOUND_MS * 1000)), "--slowlog-max-len", "4096",
                "--latency-monitor-threshold", str(int(BOUND_MS)))  # fmt: skip
    with EmbeddedServer(binary=binary, extra=settings) as server:
        seconds = fill(server.url, waiting, in_flight)
        store = open_store(server.url)
        memory = _field(store.ask("INFO", "memory"), "used_memory")
        for name in scripts.names():
            store.ask("SCRIPT", "LOAD", scripts.load(name).source)
        watch = Stopwatch(store, server.pid)
        with Observer(server.url) as undisturbed:
            floor(watch)
        store.ask("SLOWLOG", "RESET")
        store.ask("LATENCY", "RESET")
        with Observer(server.url) as disturbed:
            for number in range(rounds):
                _run_round(watch, Round(number, waiting))
        events = [[one[0].decode(), one[3]] for one in store.ask("LATENCY", "LATEST")]
        figures = {
            "server": _version(store.ask("INFO", "server")), "waiting": waiting,
            "in_flight": in_flight, "rounds": rounds, "fill_s": round(seconds),
            "memory_gib": round(int(memory) / 2**30, 2), "load": round(os.getloadavg()[0], 1),
            "scripts": {name: summary(calls) for name, calls in sorted(watch.calls.items())},
            "slowlog": store.ask("SLOWLOG", "LEN"), "latency_events_ms": dict(events),
            "pings_while_counting": seen(undisturbed.seen_ms),
            "pings_while_moving": seen(disturbed.seen_ms),
        }  # fmt: skip
        store.close()
        return figures


def _run_round(watch: Stopwatch, one: Round) -> None:
    calls = one.calls()
    transition = next(calls)
    while True:
        try:
            transition = calls.send(watch.run(transition))
        except StopIteration:
            return


def _field(info: bytes, name: str) -> str:
    lines = dict(line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
    return lines.get(name, "")


def _version(info: bytes) -> str:
    valkey = _field(info, "valkey_version")
    return f"Valkey {valkey}" if valkey else f"Redis {_field(info, 'redis_version')}"


def verdict(figures: Figures) -> dict[str, float]:
    """The scripts that took too long by themselves, and for how long."""
    return {
        name: one["core_max_ms"] for name, one in figures["scripts"].items()
        if one["core_over"] and not name.startswith("(")
    }  # fmt: skip


HEAD = """# How long a script blocks a full server

By `make bench-safety`, on a machine whose cores other processes share. The aim: no call of a script
at its largest batch takes {bound:g} ms. *took* is the server's own time of a call, in ms; *core* is
for how long its thread had a core meanwhile, by the system's scheduler, the reading of the request
included. What *took* has beyond that, other processes have had. `(counting)` is a script that does
nothing but count for {floor:g} ms, on the same server: the machine's own part in such figures.
All figures: [safety.json](safety.json).
"""
COLUMNS = ("calls", "took, least", "median", "p99.9", "max", f"over {BOUND_MS:g}",
           "core, least", "median", "p99.9", "max", f"over {BOUND_MS:g}")  # fmt: skip
FIGURES = ("least_ms", "median_ms", "p99_9_ms", "max_ms", "over")
KEYS = ("calls", *[f"{name}_{what}" for name in ("took", "core") for what in FIGURES])


def page(runs: list[Figures]) -> str:
    """The report."""
    parts = [HEAD.format(bound=BOUND_MS, floor=FLOOR_MS)]
    for one in runs:
        parts += [
            f"## {one['server']}\n",
            "{waiting:,} waiting, {in_flight:,} in flight, {memory_gib} GiB; filled in {fill_s} s; "
            "{rounds} rounds; load average {load}.\n".format(**one),
            "| script | " + " | ".join(COLUMNS) + " |",
            "|---" * (len(COLUMNS) + 1) + "|",
            *[f"| {name} | " + " | ".join(f"{row[key]:,}" for key in KEYS) + " |"
              for name, row in one["scripts"].items()],
            _seen("\nAnother client's PING meanwhile", one["pings_while_moving"]),
            _seen("While the server only counted", one["pings_while_counting"]),
            f"Slow log: {one['slowlog']} entries over {BOUND_MS:g} ms.",
            f"Latency monitor, longest in ms: {one['latency_events_ms'] or 'none'}.\n",
            f"**{_said(one)}**\n",
        ]  # fmt: skip
    return "\n".join(parts)


def _seen(when: str, pings: dict[str, float]) -> str:
    return when + ": median {median_ms} ms, p99.9 {p99_9_ms}, max {max_ms}.".format(**pings)


def _said(figures: Figures) -> str:
    late = verdict(figures)
    if not late:
        return f"No script took {BOUND_MS:g} ms by itself."
    return f"{BOUND_MS:g} ms or more by itself: " + ", ".join(
        f"{name} {ms} ms" for name, ms in late.items()
    )


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
