"""Progress of a job whose stderr is not a terminal: one line every five seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVERY_S = 5.0


class ProgressLines:
    """Prints the job's name, its duration, and the finished tasks of its running stages.

    stage: what the job is doing. spark: None while Spark starts. stages: returns the ids of the
    job's own stages; None if no other job uses the session.
    """

    def __init__(self, name: str) -> None:
        self.stage = "starting Spark"
        self.spark: SparkSession | None = None
        self.stages: Callable[[SparkSession], set[int]] | None = None
        self._name, self._began = name, time.monotonic()

    def line(self) -> str:
        """The line to print now."""
        words = [f"{time.monotonic() - self._began:,.0f} s"]
        done, known = self._tasks()
        if known:
            words.append(f"{done:,} of {known:,} tasks")
        if self.stage:
            words.append(self.stage)
        return f"{self._name}: {', '.join(words)}"

    def _tasks(self) -> tuple[int, int]:
        if self.spark is None:
            return 0, 0
        tracker = self.spark.sparkContext.statusTracker()
        active = set(tracker.getActiveStageIds())
        if self.stages is not None:
            active &= self.stages(self.spark)
        stages = map(tracker.getStageInfo, active)
        infos = [one for one in stages if one is not None]
        return sum(one.numCompletedTasks for one in infos), sum(one.numTasks for one in infos)


@contextmanager
def progress_lines(name: str, *, shown: bool) -> Iterator[ProgressLines]:
    """Print the progress of this block, if `shown`, unless stderr is a terminal."""
    lines, ended = ProgressLines(name), threading.Event()

    def run() -> None:
        while not ended.wait(EVERY_S):
            try:
                click.echo(lines.line(), err=True)
            except Exception:  # noqa: BLE001  Spark is stopping, or stderr is closed
                return

    thread = threading.Thread(target=run, daemon=True, name="lisa-progress-lines")
    if shown and not sys.stderr.isatty():
        thread.start()
    try:
        yield lines
    finally:
        ended.set()
        if thread.is_alive():
            thread.join()
