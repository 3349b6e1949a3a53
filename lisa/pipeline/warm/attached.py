"""A command's process: takes over the client's surroundings, and connects to the server's JVM."""

from __future__ import annotations

import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lisa.pipeline.warm.keeper import tag_of
from lisa.pipeline.warm.protocol import CommandRequest, GatewayOpened

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

POOLS = 64
"""Number of Spark's pools; commands in different pools get equal shares of the cores."""


@dataclass(frozen=True, slots=True)
class Attached:
    """The gateway of this process to the server's JVM."""

    opened: GatewayOpened

    def session(self) -> SparkSession:
        """A session of this command alone, with the data source `lisa` registered.

        The caller must not stop it, because that would stop the session of all commands.
        """
        from lisa.pipeline.source import register

        spark = self._new_session()
        # Replaces Spark's handler, which cancels the jobs of all commands.
        signal.signal(signal.SIGINT, _interrupt)
        for name, value in self.opened.differing.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)
        context = spark.sparkContext
        context.addJobTag(tag_of(self.opened.number))
        # Spark never removes a pool.
        context.setLocalProperty("spark.scheduler.pool", tag_of(self.opened.number % POOLS))
        register(spark)
        return spark

    def _new_session(self) -> SparkSession:
        from pyspark import SparkConf, SparkContext
        from pyspark.java_gateway import launch_gateway
        from pyspark.sql import SparkSession

        for name in ("PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON"):
            os.environ.setdefault(name, sys.executable)
        os.environ["PYSPARK_GATEWAY_PORT"] = str(self.opened.port)
        os.environ["PYSPARK_GATEWAY_SECRET"] = self.opened.secret
        try:
            gateway: Any = launch_gateway()  # type: ignore[no-untyped-call]
        finally:
            del os.environ["PYSPARK_GATEWAY_PORT"], os.environ["PYSPARK_GATEWAY_SECRET"]
        SparkContext._ensure_initialized(gateway=gateway)  # noqa: SLF001  as under spark-submit
        sessions = SparkSession._get_j_spark_session_class(gateway.jvm)  # noqa: SLF001
        kept = sessions.getDefaultSession().get()
        jsc = gateway.jvm.JavaSparkContext.fromSparkContext(kept.sparkContext())
        context = SparkContext(jsc=jsc, gateway=gateway, conf=SparkConf(_jconf=jsc.getConf()))
        # The first session that Python makes becomes the JVM's default; the kept one is already.
        SparkSession(context, kept)
        spark = SparkSession(context, kept.newSession())
        SparkSession._instantiatedSession = SparkSession._activeSession = spark  # noqa: SLF001
        sessions.setActiveSession(spark._jsparkSession)  # noqa: SLF001
        return spark

    def stages(self, spark: SparkSession) -> set[int]:
        """The stages of this command's jobs, without those of other commands."""
        context = spark.sparkContext
        jsc: Any = context._jsc  # noqa: SLF001  Python's tracker does not know tags
        jobs = jsc.sc().statusTracker().getJobIdsForTag(tag_of(self.opened.number))
        infos = map(context.statusTracker().getJobInfo, jobs)
        return {stage for info in infos if info is not None for stage in info.stageIds}


def _interrupt(*_: object) -> None:
    """End the command by Ctrl-C; the keeper cancels its jobs afterwards."""
    from pyspark import SparkContext

    logging.disable()  # py4j would log the interrupted call with its stack
    # The reply to the interrupted call must not be read as the reply to a later one.
    gateway: Any = SparkContext._gateway  # noqa: SLF001
    gateway._gateway_client.thread_connection = threading.local()  # noqa: SLF001
    raise KeyboardInterrupt


class _State:
    attached: Attached | None = None


def attached() -> Attached | None:
    """The gateway of this process; None if it is not a command of a server."""
    return _State.attached


def become(request: CommandRequest, files: Sequence[int], gateway: Attached) -> None:
    """Make this forked process the requested command: its streams, directory, and environment."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.setpgid(0, 0)  # Ctrl-C at the server's terminal is for the server
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.chdir(request.folder)
    os.umask(request.umask)
    os.environb.clear()
    os.environb.update(dict(request.environment))
    _open_streams(request.streams)
    sys.argv = ["lisa", *map(os.fsdecode, request.words)]
    _State.attached = gateway


def _open_streams(streams: Sequence[tuple[str, str]]) -> None:
    for number, (name, (encoding, errors)) in enumerate(
        zip(("stdin", "stdout", "stderr"), streams, strict=True)
    ):
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        buffer = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        opened = io.TextIOWrapper(
            buffer,
            encoding,
            errors,
            line_buffering=number == 2 or os.isatty(number),  # as Python does
        )
        setattr(sys, name, opened)
        setattr(sys, f"__{name}__", opened)
