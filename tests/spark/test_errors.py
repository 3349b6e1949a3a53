"""Failures of Spark as one line: the last cause, and what to do.

Those that are cheap happen here. `failures.toml` has others, as Spark 4.3 and delta-rs printed
them, without stack traces.
"""

import gzip
import os
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
from py4j.protocol import Py4JError
from pyspark import SparkContext
from pyspark.errors import PySparkRuntimeError
from pyspark.sql import SparkSession

from lisa.core.model.errors import LisaError
from lisa.pipeline.errors import one_line, unwrapped
from lisa.pipeline.java import start_error, use_java
from lisa.pipeline.session import _versions

PYTHON = "spark.sql.execution.pyspark.python"

Batches = Iterator[pa.RecordBatch]


def failure(work: Callable[[], object]) -> str:
    """What a job says that ends with an error of Spark."""
    with pytest.raises(LisaError) as caught, unwrapped():
        work()
    said = str(caught.value)
    assert "\n" not in said
    return said


def test_workers_that_cannot_run_lisa(spark: SparkSession, tmp_path: Path) -> None:
    job = spark.range(1).mapInArrow(_versions, "version string")
    bare = tmp_path / "python"
    bare.write_text(f"#!/bin/sh\nexec '{Path(sys.executable).resolve()}' -S \"$@\"\n", "utf-8")
    bare.chmod(0o755)
    try:
        spark.conf.set(PYTHON, str(bare))
        said = failure(job.collect)
        assert said.startswith("Spark failed: ModuleNotFoundError: No module named '")
        assert "give executors this Python environment with --environment" in said
        spark.conf.set(PYTHON, "/nowhere/python")
        said = failure(job.collect)
        assert 'Cannot run program "/nowhere/python"' in said
        assert said.endswith("name a Python that all machines have with PYSPARK_PYTHON")
    finally:
        spark.conf.unset(PYTHON)


def test_an_error_in_a_task_and_a_killed_task(spark: SparkSession) -> None:
    def wrong(batches: Batches) -> Batches:
        try:
            yield from map({}.__getitem__, batches)
        except TypeError as error:
            raise KeyError("customer") from error

    def killed(batches: Batches) -> Batches:
        os.kill(os.getpid(), 9)
        yield from batches

    rows = spark.range(0, 1, 1, 1)
    assert (
        failure(rows.mapInArrow(wrong, "id long").collect) == "Spark failed: KeyError: 'customer'"
    )
    said = failure(rows.mapInArrow(killed, "id long").collect)
    assert said.startswith("Spark failed: Python worker exited unexpectedly")
    assert "spark.executor.memoryOverhead" in said


def test_a_truncated_file(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    whole = gzip.compress("".join(map(str, range(50_000))).encode())
    path.write_bytes(whole[: len(whole) // 2])
    said = failure(spark.read.text(str(path)).collect)
    assert f"{path}. Unexpected end of input stream: the file is truncated" in said


def test_java_that_does_not_start() -> None:
    use_java()
    for memory, words in (("lots", "Invalid maximum heap size: -Xmxlots"), ("900000g", "space")):
        said = start_error({"spark.driver.memory": memory})
        assert words in said
        assert said.endswith(
            "check the settings spark.driver.memory and spark.driver.extraJavaOptions"
        )
        assert "\n" not in said


class Thrown:
    """An exception of the JVM and its causes."""

    def __init__(self, *texts: str) -> None:
        self._texts = texts

    def toString(self) -> str:  # noqa: N802  Java's
        return self._texts[0]

    def getCause(self) -> "Thrown | None":  # noqa: N802
        return Thrown(*self._texts[1:]) if self._texts[1:] else None


def of_java(*texts: str) -> Exception:
    error: Any = Py4JError("An error occurred while calling o64.collectToPython.")
    error.java_exception = Thrown(*texts)
    return cast("Exception", error)


RECORDED = tomllib.loads((Path(__file__).parent / "failures.toml").read_text("utf-8"))


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_failures(name: str) -> None:
    recorded = RECORDED[name]
    if recorded["from"] == "jvm":
        error = of_java(*recorded["texts"])
    else:
        error = {"python": PySparkRuntimeError, "files": OSError}[recorded["from"]](
            *recorded["texts"]
        )
    said = failure(lambda: raise_again(error))
    assert recorded["cause"] in said
    assert recorded["cure"] in said.partition(recorded["cause"])[2]


def raise_again(error: Exception) -> None:
    raise error


def test_a_jvm_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = SimpleNamespace(proc=SimpleNamespace(poll=lambda: 137))
    monkeypatch.setattr(SparkContext, "_gateway", ended)
    said = one_line(Py4JError("Answer from Java side is empty"))
    assert said.startswith("Spark's JVM has ended with exit code 137: raise spark.driver.memory")


def test_a_reader_of_the_output_that_has_ended_is_no_failure_of_the_job() -> None:
    with pytest.raises(BrokenPipeError), unwrapped():
        raise BrokenPipeError
