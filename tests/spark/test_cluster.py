"""Jobs on a standalone cluster whose workers have addresses of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pyspark
import pytest

from lisa.core.model.errors import ConfigError, ServerUnavailable
from lisa.core.model.keys import Keys
from lisa.pipeline.executors import WITHIN, check_master
from lisa.pipeline.java import use_java
from lisa.pipeline.session import settings_for
from tests.servers import JVM_PATIENCE, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import redis

    from tests.servers import Processes

ROOT = Path(__file__).parent.parent.parent
DRIVER, WORKERS = "127.0.0.4", {"127.0.0.2": 2, "127.0.0.3": 1}
"""Addresses, and the cores of each worker: three in all."""

PROGRAM = """
import sys
from lisa.pipeline import schedule, spark_session
from lisa.pipeline.session import parallelism

master, environment, url = sys.argv[1:]
settings = {"spark.executor.memory": "512m", "spark.lisa.executorsWithin": "4m"}
spark = spark_session(app="t", master=master, settings=settings, environment=environment)
print("parallelism", parallelism(spark))
rows = spark.range(0, 3000, 1, 6).selectExpr("id", "'x' AS body", "3600000 AS delay")
done = schedule(rows, url=url, topic="orders")
print("accepted", done.accepted)
spark.stop()
"""


def test_only_local_masters_use_loopback_settings() -> None:
    assert settings_for("local[2]")["spark.driver.host"] == "127.0.0.1"
    for master in ("spark://a:7077", "yarn", "k8s://https://a:6443"):
        assert not {"spark.driver.host", "spark.driver.bindAddress"} & settings_for(master).keys()
        assert "spark.sql.shuffle.partitions" not in settings_for(master)


def test_an_environment_is_for_executors_only() -> None:
    made = settings_for("yarn", {"spark.archives": "a.zip"}, "env.tar.gz")
    assert made["spark.archives"] == "a.zip,env.tar.gz#environment"
    assert made["spark.sql.execution.pyspark.python"] == "./environment/bin/python"
    with pytest.raises(ConfigError, match="needs a cluster"):
        settings_for("local[2]", None, "env.tar.gz")


def test_a_master_that_does_not_answer_is_reported_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ServerUnavailable, match=f"127.0.0.1:{port}"):
        check_master(f"spark://127.0.0.1:{port}")
    with pytest.raises(ConfigError, match="HOST:PORT"):
        check_master("spark://127.0.0.1:port")


def test_settings_of_the_example_configurations_exist_in_spark() -> None:
    """A mistyped setting has no effect and no error."""
    used = {
        line.split()[0]
        for file in (ROOT / "configs" / "spark").iterdir()
        for line in file.read_text("utf-8").splitlines()
        if line and not line.startswith("#")
    }
    jars = Path(pyspark.__file__).parent / "jars"
    text = bytearray()
    for kind in ("core", "yarn", "kubernetes", "sql-api", "catalyst", "common-utils"):
        for jar in jars.glob(f"spark-{kind}_*.jar"):
            with zipfile.ZipFile(jar) as opened:
                text += b"".join(
                    opened.read(name) for name in opened.namelist() if name.endswith(".class")
                )
    # The rest of these names is the user's: a variable, or a setting of Hadoop.
    open_ended = (
        *("spark.executorEnv.", "spark.yarn.appMasterEnv.", "spark.hadoop."),
        "spark.kubernetes.authenticate.driver",
        *("spark.kubernetes.driver.secretKeyRef.", "spark.kubernetes.driverEnv."),
    )
    unknown = []
    for name in sorted(used - {WITHIN}):
        fixed = next((start for start in open_ended if name.startswith(start)), name)
        if fixed != "spark.hadoop." and fixed.encode() not in text:
            unknown.append(name)
    assert used
    assert not unknown


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Starts a daemon of Spark on an address; returns the file of its log."""
    use_java()
    running: list[subprocess.Popen[bytes]] = []
    spark_class = Path(pyspark.__file__).parent / "bin" / "spark-class"

    def start(name: str, address: str, *arguments: str) -> Path:
        log = tmp_path / f"{name}-{address}.log"
        environment = {"SPARK_LOCAL_IP": address, "SPARK_DAEMON_MEMORY": "256m"}
        with log.open("wb") as out:
            command = [
                str(spark_class),
                f"org.apache.spark.deploy.{name.lower()}.{name}",
                *("--host", address, "--webui-port", "0", *arguments),
            ]
            running.append(
                subprocess.Popen(
                    command, env=os.environ | environment, stdout=out, stderr=out, cwd=tmp_path
                )
            )
        return log

    yield start
    for one in reversed(running):
        one.terminate()
    for one in running:
        one.wait(60)


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An archive with a `bin/python` that records the address of the worker that ran it."""
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\necho "$SPARK_LOCAL_IP" >> {tmp_path}/used\nexec {sys.executable} "$@"\n',
        "utf-8",
    )
    python.chmod(0o755)
    archive = tmp_path / "lisa.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(python, "bin/python")
    return archive


def test_two_workers_send_rows_with_the_shipped_environment(  # noqa: PLR0917  its fixtures
    daemon: Callable[..., Path],
    environment: Path,
    processes: Processes,
    redis_url: str,
    client: redis.Redis,
    tmp_path: Path,
) -> None:
    """Before the workers start, a job ends with an error instead of waiting for them."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    master = f"spark://127.0.0.1:{port}"
    log = daemon("Master", "127.0.0.1", "--port", str(port))
    wait_until(lambda: "New state: ALIVE" in log.read_text("utf-8"), timeout=JVM_PATIENCE)
    at_driver = {"SPARK_LOCAL_IP": DRIVER}
    source = tmp_path / "rows.csv"
    source.write_text("id,n\na,1\n", "utf-8")
    words = ("pipeline", "schedule", str(source), "--topic", "orders", "--redis", redis_url)
    within = ("--spark-conf", "spark.lisa.executorsWithin=2s")
    run = processes.start("-m", "lisa.cli.main", *words, "--master", master, *within, env=at_driver)
    assert run.wait(timeout=JVM_PATIENCE) == 3, run.output
    assert f"{master} granted no executor within 2s" in run.output

    for address, cores in WORKERS.items():
        daemon("Worker", address, "--cores", str(cores), "--memory", "1g", master)
    wait_until(
        lambda: log.read_text("utf-8").count("Registering worker") == len(WORKERS),
        timeout=JVM_PATIENCE,
    )
    run = processes.start("-c", PROGRAM, master, str(environment), redis_url, env=at_driver)
    assert run.wait(timeout=JVM_PATIENCE) == 0, run.output
    assert "parallelism 3" in run.output
    assert "accepted 3000" in run.output
    assert client.zcard(Keys().topic("orders").waiting) == 3000
    assert set((tmp_path / "used").read_text("utf-8").split()) == WORKERS.keys()
