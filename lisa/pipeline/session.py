"""The Spark session of Lisa's jobs: the caller's, spark-submit's, a Spark Connect server's, or new.

Spark Connect runs all jobs but `archive`, whose batches are written by the process that runs the
query, and restores from a database, whose driver runs in the JVM of a session in this process.
"""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lisa import __version__
from lisa.core.model.clock import duration_ms, human, parse_duration
from lisa.core.model.errors import ConfigError, ServerUnavailable
from lisa.pipeline.errors import HOW_TO_SHIP, cause_of, one_line, unwrapped
from lisa.pipeline.java import start_error, use_java
from lisa.pipeline.paths import without_password

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark import StorageLevel
    from pyspark.sql import DataFrame, SparkSession

_JAVA_OPTIONS = (
    f"-Dlog4j2.configurationFile={(Path(__file__).parent / 'log4j2.properties').as_uri()}"
)

SETTINGS = {
    "spark.driver.memory": "1g",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.driver.extraJavaOptions": f"-XX:+UseSerialGC {_JAVA_OPTIONS}",
    # The same name for an object everywhere: Hadoop only knows s3a, other programs only s3.
    "spark.hadoop.fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem",
}
"""Default settings of a new session."""

LOCAL_SETTINGS = {
    **SETTINGS,
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:+UseSerialGC -Djava.net.preferIPv4Stack=true "
    f"{_JAVA_OPTIONS}",
}
"""Default settings of a new session on one machine, which listens only on loopback."""

ENVIRONMENT = "environment"
"""The directory into which executors unpack the Python environment."""


WITHIN = "spark.lisa.executorsWithin"
"""Setting: how long to wait for the first executor, as in 2m."""

STANDALONE, OTHER = timedelta(seconds=20), timedelta(minutes=2)
"""Defaults of `WITHIN`. YARN and Kubernetes start containers first, which takes longer."""

CONNECT_S = 5.0

_TAG = "lisa-executors"

_CHANGING = threading.RLock()

_HOW_TO_START = (
    "start the server with a PYSPARK_PYTHON of the same version, which has this version of Lisa "
    "(how-to/pipeline-cluster.md)"
)


def is_local(master: str) -> bool:
    """Whether a Spark master is this machine: local, local[4], local-cluster[...]."""
    return master.startswith("local")


def settings_for(
    master: str, settings: Mapping[str, str] | None = None, environment: str | None = None
) -> dict[str, str]:
    """The settings of a new session: the defaults for this master, then the given ones.

    environment: path or URL of an archive with `bin/python`, which executors unpack and use. Raises
    ConfigError if the master is local, because its tasks use the present environment.
    """
    made = {**(LOCAL_SETTINGS if is_local(master) else SETTINGS), **(settings or {})}
    if environment is not None:
        if is_local(master):
            raise ConfigError(
                f"an environment for executors needs a cluster; tasks of --master {master} use the "
                "Python that runs this command"
            )
        others = f"{made['spark.archives']}," if made.get("spark.archives") else ""
        made["spark.archives"] = f"{others}{environment}#{ENVIRONMENT}"
        # Only for executors: the driver plans reads and writes with its own Python.
        made["spark.sql.execution.pyspark.python"] = f"./{ENVIRONMENT}/bin/python"
    return made


def chosen_master(master: str | None) -> str | None:
    """The given master, else that of the variable SPARK_REMOTE, else this machine.

    None under spark-submit, which has chosen one.
    """
    if "PYSPARK_GATEWAY_PORT" in os.environ:
        return None
    return master or os.environ.get("SPARK_REMOTE") or "local[*]"


def is_connect(master: str | None) -> bool:
    """Whether a master is a server of Spark Connect: sc://HOST:PORT."""
    return master is not None and master.startswith("sc://")


def is_remote(spark: SparkSession) -> bool:
    """Whether a session belongs to Spark Connect."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def jvm_of(spark: SparkSession) -> Any:
    """The JVM of a session. Raises ConfigError for Spark Connect, which has none."""
    refuse_connect(is_remote(spark), "an archive in a database")
    return spark._jvm  # noqa: SLF001  the only way to the transactions and locks of a JDBC driver


def refuse_connect(is_remote: bool, what: str) -> None:  # noqa: FBT001
    """Raises ConfigError if a session belongs to Spark Connect, which cannot be used for `what`."""
    if is_remote:
        raise ConfigError(
            f"{what} cannot be used over Spark Connect: it needs Spark in this process. Give "
            "another --master, such as local[*]"
        )


@contextmanager
def changed(spark: SparkSession, settings: Mapping[str, str]) -> Iterator[None]:
    """Change settings of a session for the calls of this block.

    Only for calls that read them at once: Spark plans a DataFrame when its rows are needed.
    """
    with _CHANGING:
        before = {name: spark.conf.get(name, None) for name in settings}
        try:
            for name, value in settings.items():
                spark.conf.set(name, value)
            yield
        finally:
            for name, earlier in before.items():
                if earlier is None:
                    spark.conf.unset(name)
                else:
                    spark.conf.set(name, earlier)


def persisted(rows: DataFrame, level: StorageLevel | None = None) -> DataFrame:
    """Persist rows: they are computed once. `unpersist` them.

    Spark fits the number of tasks of a shuffle to its bytes, but of persisted rows only with
    this setting: a fold of a few events would have 200 tasks for each shuffle.
    """
    fitting = {"spark.sql.optimizer.canChangeCachedPlanOutputPartitioning": "true"}
    with changed(rows.sparkSession, fitting):
        return rows.persist() if level is None else rows.persist(level)


def observation(rows: DataFrame) -> Any:
    """A new observation for `rows.observe`; Spark Connect has a class of its own."""
    if is_remote(rows.sparkSession):
        from pyspark.sql.connect.observation import Observation as ConnectObservation

        return ConnectObservation()
    from pyspark.sql import Observation

    return Observation()


def parallelism(spark: SparkSession) -> int:
    """How many tasks the cluster runs at the same time, 2 or more; runs a small job.

    This is Spark's `spark.default.parallelism`: the cores of all executors, unless it is set.
    """
    from pyspark.sql import functions as sf

    tasks = spark.range(1 << 16).select(sf.spark_partition_id().alias("task"))
    row = tasks.agg(sf.max("task")).first()
    return max(2, 1 if row is None else int(row[0]) + 1)


@unwrapped()
def spark_session(
    *,
    app: str = "lisa",
    master: str | None = None,
    settings: Mapping[str, str] | None = None,
    environment: str | None = None,
) -> SparkSession:
    """The running Spark session or a new one, with the data source `lisa` registered.

    Under spark-submit, `master` is ignored, and the given configuration is kept; so is that of a
    running session in a notebook.

    master: see `chosen_master`; sc://HOST:PORT is a server of Spark Connect, which runs with
        settings of its own. environment: see `settings_for`.

    Raises ConfigError if Java is missing or does not start, or if executors of a cluster cannot run
    Lisa; ServerUnavailable if a cluster's master does not answer, or grants no executor (see
    `lisa.pipeline.session`); LisaError if Spark does not start.
    """
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    from lisa.pipeline.source import register

    is_running, builder = has_session(), SparkSession.builder
    chosen = dict(settings or {}) if is_running else {"spark.app.name": app, **(settings or {})}
    master = None if is_running else chosen_master(master)
    if is_connect(master) and environment is not None:
        raise ConfigError("an environment for executors is chosen where Spark Connect is started")
    if master is not None:
        _prepare(master)
        if is_connect(master):
            builder = builder.remote(master)
        else:
            chosen = settings_for(master, chosen, environment)
            builder = builder.master(master)
    for name, value in chosen.items():
        builder = builder.config(name, value)
    try:
        spark = builder.getOrCreate()
    except PySparkRuntimeError as error:
        if error.getCondition() != "JAVA_GATEWAY_EXITED":
            raise
        raise ConfigError(f"Java does not start: {start_error(chosen)}") from error
    if not is_running:
        check_executors(spark)
    register(spark)
    return spark


def has_session() -> bool:
    """Whether this process has a Spark session, which jobs use and leave as it is."""
    from pyspark.errors import PySparkRuntimeError
    from pyspark.sql import SparkSession

    try:
        SparkSession.active()  # on other threads, the default one
    except PySparkRuntimeError:
        return False
    return True


def _prepare(master: str) -> None:
    """Set the environment for a new session, and check that its master answers."""
    check_master(master)
    if is_connect(master):
        return
    os.environ.pop("SPARK_REMOTE", None)  # otherwise Spark prefers it
    use_java()
    if is_local(master):
        # Bind Spark's web page and ports to this machine only.
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


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
    shown = without_password(master)  # the parameters of Spark Connect may contain a token
    raise ServerUnavailable(f"Spark's master {shown} does not answer: {'; '.join(reasons)}")


def _with_port(address: str) -> str:
    """The address of a Spark Connect server, whose usual port is 15002."""
    return address if re.search(r":\d+$", address) else f"{address}:15002"


def check_executors(spark: SparkSession) -> None:
    """Run one task that imports Lisa, unless it would run in this Python environment.

    Raises ServerUnavailable if the cluster grants no executor in time, and ConfigError if the
    executor's Python cannot run Lisa or has another version of it.
    """
    master, how = spark.conf.get("spark.master", "local") or "local", HOW_TO_SHIP
    if is_remote(spark):
        master, how = "Spark Connect", _HOW_TO_START
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
        what = f"{cause_of(found)}: {how}" if is_remote(spark) else one_line(found)
        raise ConfigError(f"executors of {master} cannot run Lisa: {what}")
    if found != __version__:
        spark.stop()
        raise ConfigError(
            f"executors of {master} have Lisa {found}, this machine has {__version__}: {how}"
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
