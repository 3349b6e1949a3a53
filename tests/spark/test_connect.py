"""Commands over Spark Connect: with Spark's own server, or refused."""

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pyspark
import pytest
import redis

from lisa.cli.main import main
from lisa.core.model.keys import Keys
from lisa.pipeline import java
from lisa.pipeline.session import WITHIN
from tests.servers import JVM_PATIENCE, Processes, wait_until
from tests.spark.jobs import KEYS, Jobs


def answers(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="module")
def remote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of Spark Connect on loopback, in a directory of its own."""
    java.use_java()
    folder = tmp_path_factory.mktemp("connect")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "1",  # as in the suite's session, which does not adapt it
    }
    command = [str(Path(pyspark.__file__).parent / "sbin" / "start-connect-server.sh"), "--wait"]
    command += ["--master", "local[2]"]
    command += [word for pair in settings.items() for word in ("--conf", "=".join(pair))]
    folders = {"SPARK_LOG_DIR": str(folder), "SPARK_PID_DIR": str(folder)}
    environment = os.environ | folders | {"SPARK_LOCAL_IP": "127.0.0.1"}
    with (folder / "server.log").open("wb") as log:
        running = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, cwd=folder, start_new_session=True
        )
    try:
        wait_until(lambda: answers(port), timeout=JVM_PATIENCE)
        yield f"sc://127.0.0.1:{port}"
    finally:
        os.killpg(running.pid, signal.SIGTERM)  # the script, and the JVM that it started
        running.wait()


def test_rows_are_sent_and_found_over_spark_connect(
    remote: str, processes: Processes, redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    source = tmp_path / "orders.jsonl"
    lines = (
        '{"id": "a", "body": "x", "headers": {"n": 1}}',
        '{"id": "b", "body": "y"}',
        '{"id": ""}',
    )
    source.write_text("\n".join(lines), "utf-8")
    words = ("-m", "lisa.cli.main", "pipeline")
    server = ("--redis", redis_url, "--json", "--spark-conf", f"{WITHIN}=10m")
    files = ("--report", str(tmp_path / "counts.json"), "--refused", str(tmp_path / "refused"))
    sent = processes.start(
        *(*words, "schedule", str(source), "--topic", "orders", "--delay", "1h", *files, *server),
        env={"SPARK_REMOTE": remote},
    )
    assert sent.wait(timeout=JVM_PATIENCE) == 1, sent.output
    assert '"accepted":2' in sent.output
    assert '"accepted": 2' in (tmp_path / "counts.json").read_text("utf-8")
    assert list((tmp_path / "refused").iterdir())
    assert client.zcard(Keys().topic("orders").waiting) == 2
    found = processes.start(*words, "search", "--id", "a", "--master", remote, *server)
    assert found.wait(timeout=JVM_PATIENCE) == 0, found.output
    assert '"state":"waiting"' in found.output


EACH_JOB = """
import json, sys
from click.testing import CliRunner
from lisa.cli.main import main

for line in sys.stdin:
    done = CliRunner().invoke(main, ["pipeline", *json.loads(line)])
    print(json.dumps([done.exit_code, done.stdout or done.output]), flush=True)
"""


def test_jobs_use_an_archive_over_spark_connect(remote: str, jobs: Jobs) -> None:
    """In a process that has no JVM."""
    world, out = jobs.world(), jobs.folder
    world.send(["a", "b", "c"], delay=timedelta(hours=1))
    world.cancel(["a", "b"])
    jobs.archive()
    world.send(["later"], delay=timedelta(hours=1))
    jobs.client.zrem(KEYS.waiting, "c")
    jobs.client.delete(KEYS.body("c"))
    server, found = ("--redis", jobs.url, "--json"), ("--archive", jobs.where)
    places = {job: str(out / job) for job in ("search", "report", "restore", "audit")}
    commands: dict[tuple[str, ...], str] = {
        ("search", *found, "--state", "cancelled", "--out", places["search"], *server): '"id":"b"',
        ("report", *found, "--to", places["report"], "--json"): '"accepted":3',
        ("restore", *found, "--report", places["restore"], *server): '"restored":1',
        ("audit", *found, "--out", places["audit"], *server): '"sent":3',
        ("erase", *found, "--id", "a", *server): '"messages":1',
        ("retain", *found, "--keep", "1ms", "--json"): '"messages":1',
    }
    given = "".join(json.dumps(words) + "\n" for words in commands)
    done = subprocess.run(
        [sys.executable, "-c", EACH_JOB],
        env=os.environ | {"SPARK_REMOTE": remote},
        input=given,
        capture_output=True,
        check=True,
        text=True,
        timeout=JVM_PATIENCE.total_seconds(),
    )
    for (words, wanted), line in zip(commands.items(), done.stdout.splitlines(), strict=True):
        code, said = json.loads(line)
        assert (code, wanted in said) == (0, True), (words, said)
    assert all(list(Path(place).rglob("*.parquet")) for place in places.values())
    assert [row.id for row in jobs.opened().messages().collect()] == ["c"]


@pytest.mark.parametrize(
    "command",
    [("archive", "--once", "--to", "a"), ("restore", "--archive", "jdbc:postgresql://h/d")],
    ids=lambda words: words[0],
)
def test_what_needs_a_jvm_refuses_spark_connect(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without connecting: nothing listens there."""
    with pytest.raises(SystemExit) as ended:
        main(["pipeline", *command, "--master", "sc://127.0.0.1:1"])
    assert ended.value.code == 2
    assert "cannot be used over Spark Connect" in capsys.readouterr().err
