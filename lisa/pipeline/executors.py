"""Checks a cluster before a job starts: its master answers, and its executors can run Lisa.

Without these checks, Spark waits forever for executors, and reports a missing Python package as
pages of tracebacks.
"""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from lisa import __version__
from lisa.core.model.clock import duration_ms, human, parse_duration
from lisa.core.model.errors import ConfigError, ServerUnavailable
from lisa.pipeline.errors import one_line
from lisa.pipeline.session import is_remote

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

WITHIN = "spark.lisa.executorsWithin"
"""Setting: how long to wait for the first executor, as in 2m."""

STANDALONE, OTHER = timedelta(seconds=20), timedelta(minutes=2)
"""Defaults of `WITHIN`. YARN and Kubernetes start containers first, which takes longer."""

CONNECT_S = 5.0
_TAG = "lisa-executors"
_HOW_TO_SHIP = (
    "give them this Python environment with --environment, or install it at the same path on "
    "all machines and name it with PYSPARK_PYTHON (how-to/pipeline.md, On a cluster)"
)


def check_master(master: str) -> None:
    """Raises ServerUnavailable unless a standalone cluster or a Spark Connect server answers.

    Spark itself would report this after a minute. Other kinds of masters are not checked.
    """
    kind, _, rest = master.partition("://")
    if kind not in ("spark", "sc"):
        return
    addresses = rest.split(",") if kind == "spark" else [_with_port(rest.partition("/")[0])]
    reasons = []
    for address in addresses:
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), CONNECT_S).close()
        except ValueError:
            raise ConfigError(f"--master {master}: {address!r} is not HOST:PORT") from None
        except OSError as error:
            reasons.append(f"{address} {error.strerror or error}")
        else:
            return
    raise ServerUnavailable(f"Spark's master {master} does not answer: {'; '.join(reasons)}")


def _with_port(address: str) -> str:
    """The address of a Spark Connect server, whose usual port is 15002."""
    return address if re.search(r":\d+$", address) else f"{address}:15002"


def check_executors(spark: SparkSession) -> None:
    """Run one task that imports Lisa, unless it would run in this Python environment.

    Raises ServerUnavailable if the cluster grants no executor in time, and ConfigError if the
    executor's Python cannot run Lisa or has another version of it.
    """
    master = spark.conf.get("spark.master", "local") or "local"
    if is_remote(spark):
        master = "Spark Connect"
    elif master.startswith("local"):
        return
    given = spark.conf.get(WITHIN, None)
    standard = STANDALONE if master.startswith("spark://") else OTHER
    within = parse_duration(given) if given else standard
    outcome: list[Any] = []
    task = threading.Thread(target=_run, args=(spark, outcome), daemon=True, name="lisa-executors")
    task.start()
    task.join(within.total_seconds())
    if not outcome:
        spark.interruptTag(_TAG)
        spark.stop()
        raise ServerUnavailable(
            f"{master} granted no executor within {human(duration_ms(within))}: check that it has "
            "workers with free cores and memory, and that they can connect to this machine "
            f"(spark.driver.host). To wait longer: --spark-conf {WITHIN}=5m"
        )
    (found,) = outcome
    if isinstance(found, Exception):
        spark.stop()
        reason = one_line(found)
        raise ConfigError(f"executors of {master} cannot run Lisa ({reason}): {_HOW_TO_SHIP}")
    if found != __version__:
        spark.stop()
        raise ConfigError(
            f"executors of {master} have Lisa {found}, this machine has {__version__}: "
            f"{_HOW_TO_SHIP}"
        )


def _run(spark: SparkSession, outcome: list[Any]) -> None:
    try:
        spark.addTag(_TAG)
        rows: Sequence[Any] = spark.range(1).mapInArrow(_versions, "version string").collect()
        outcome.append(rows[0].version)
    except Exception as error:  # noqa: BLE001  raised again by the thread that waits
        outcome.append(error)


def _versions(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Run by an executor: its version of Lisa."""
    import pyarrow as pa

    for _ in batches:
        yield pa.RecordBatch.from_pydict({"version": [__version__]})
