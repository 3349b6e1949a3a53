"""How fast and how punctual: one manager, one consumer process, an embedded server."""

import os
import sys
import time
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from lisa import Outgoing, Producer
from lisa.embedded import EmbeddedServer, RoleProcess

BODY = b"x" * 100
MANY = 100_000
RATE = 200
SECONDS = 20
HEAD_START = timedelta(seconds=1.5)


class Result(NamedTuple):
    """When the last was handled (epoch seconds), and how late each was, in order."""

    ended: float
    lateness_us: list[int]


def measure(expected: int, messages: Iterable[Outgoing]) -> tuple[float, Result]:
    """Send the messages and wait until all are handled; when sending began, and the result."""
    with EmbeddedServer() as server, TemporaryDirectory() as folder:
        result = Path(folder) / "result"
        env = {
            "LISA_REDIS_URL": server.url,
            "LISA_PACE_RESULT": str(result),
            "LISA_PACE_EXPECTED": str(expected),
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path]),
        }
        quiet = ("--log-level", "warning")
        with (
            RoleProcess("lisa.cli.manager", *quiet, env=env),
            RoleProcess("lisa.cli.consumer", *quiet, "pace_handlers", env=env),
            Producer(server.url) as producer,
        ):
            time.sleep(HEAD_START.total_seconds())
            began = time.time()
            producer.send_many("pace", messages)
            while not result.exists():
                time.sleep(0.05)
        ended, *late = result.read_text().splitlines()
        return began, Result(float(ended), sorted(map(int, late)))


def evenly() -> Iterable[Outgoing]:
    """A light load, due one by one."""
    start_ms = int((time.time() + HEAD_START.total_seconds()) * 1000)
    for number in range(RATE * SECONDS):
        yield Outgoing(BODY, at_ms=start_ms + number * 1000 // RATE)


def main() -> int:
    """Measure, print, judge."""
    at_once = (Outgoing(BODY, delay=timedelta(milliseconds=500)) for _ in range(MANY))
    began, burst = measure(MANY, at_once)
    _, light = measure(RATE * SECONDS, evenly())
    p50, p99 = (light.lateness_us[int(len(light.lateness_us) * part)] for part in (0.5, 0.99))
    early = sum(late < 0 for late in (*burst.lateness_us, *light.lateness_us))
    rows = [
        (f"{MANY:,} sent, promoted, handled", burst.ended - began, 10.0, "s"),
        (f"lateness p50 at {RATE}/s", p50 / 1000, 2.0, "ms"),
        (f"lateness p99 at {RATE}/s", p99 / 1000, 20.0, "ms"),
        ("early", early, 0, ""),
    ]
    for name, value, bound, unit in rows:
        said = "ok" if value <= bound else "MISSED"
        print(f"{name:34} {value:8.2f} {unit:2} (at most {bound:g}) {said}")
    return int(any(value > bound for _, value, bound, _ in rows))


if __name__ == "__main__":
    sys.exit(main())
