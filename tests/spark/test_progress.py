"""Progress lines of jobs whose stderr is not a terminal."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from pyspark import TaskContext

from lisa.cli.pipeline import progress
from lisa.cli.pipeline.progress import progress_lines
from tests.servers import JVM_PATIENCE, wait_until
from tests.spark.worlds import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import pyarrow as pa
    import pytest
    from click.testing import Result
    from pyspark.sql import SparkSession


def test_lines_show_the_stage_and_finished_tasks(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.05)
    gate, deadline, seen = tmp_path / "gate", JVM_PATIENCE.total_seconds(), [""]

    def wait(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context, began = TaskContext.get(), time.monotonic()
        is_second = context is not None and context.partitionId() == 1
        for batch in batches:
            while is_second and not gate.exists() and time.monotonic() - began < deadline:
                time.sleep(0.02)
            yield batch

    def shows(text: str) -> bool:
        seen[0] += capsys.readouterr().err
        return text in seen[0]

    rows = spark.range(0, 2, 1, 2).mapInArrow(wait, "id long")
    with progress_lines("lisa pipeline x", shown=True) as lines:
        wait_until(lambda: shows("lisa pipeline x: 0 s, starting Spark\n"))
        lines.spark, lines.stage = spark, ""
        job = threading.Thread(target=rows.collect, daemon=True)
        job.start()
        try:
            wait_until(lambda: shows("s, 1 of 2 tasks\n"), timeout=JVM_PATIENCE)
        finally:
            gate.touch()
            job.join(deadline)
    assert not job.is_alive()
    count = threading.active_count()
    with progress_lines("lisa pipeline x", shown=False):
        assert threading.active_count() == count


def test_the_lines_are_on_stderr_and_not_in_json(
    pipeline: Callable[..., Result], redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "EVERY_S", 0.01)
    words = ("search", "--redis", redis_url, *SMALL)
    told = pipeline(*words)
    assert told.exit_code == 1, told.output  # nothing found
    assert told.stderr.startswith("lisa pipeline search: 0 s")
    assert "lisa pipeline search" not in told.stdout
    assert pipeline(*words, "--json").stderr == ""
