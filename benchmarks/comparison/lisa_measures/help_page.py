"""The time that `lisa --help` takes."""

from __future__ import annotations

import subprocess
import sys
import time

from benchmarks.bench.measures import Run
from benchmarks.comparison.sizes import FurtherSizes

NAME = "help"
TIMES = 7


def measure(run: Run, sizes: FurtherSizes) -> None:  # noqa: ARG001  as of the other measures
    """Figure: milliseconds of the whole process."""
    run.say("lisa --help")
    for _ in range(TIMES):
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "lisa.cli.main", "--help"], check=True, capture_output=True
        )
        run.results.add(NAME, "lisa", "time", (time.perf_counter() - began) * 1000, "ms")
