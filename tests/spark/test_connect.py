"""Commands over Spark Connect: with Spark's own server, or refused."""

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest
import redis

from lisa.cli.main import main
from lisa.core.model.keys import Keys
from lisa.pipeline import java
from lisa.pipeline.session import WITHIN
from tests.servers import JVM_PATIENCE, Processes, wait_until


def answers(port: int) -> bool:
    with socket.socket() as asking:
        return asking.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    """A server of Spark Connect on loopback, in a directory of its own."""
    java.use_java()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(port),
        "spark.driver.host": "127.0.0.1",
        "spark.ui.enabled": "false",
    }
    command = [str(Path(pyspark.__file__).parent / "sbin" / "start-connect-server.sh"), "--wait"]
    command += ["--master", "local[2]"]
    command += [word for pair in settings.items() for word in ("--conf", "=".join(pair))]
    folders = {"SPARK_LOG_DIR": str(tmp_path), "SPARK_PID_DIR": str(tmp_path)}
    environment = os.environ | folders | {"SPARK_LOCAL_IP": "127.0.0.1"}
    with (tmp_path / "server.log").open("wb") as log:
        running = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, cwd=tmp_path, start_new_session=True
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
    source.write_text('{"id": "a", "body": "x"}\n{"id": "b", "body": "y"}\n{"id": ""}\n', "utf-8")
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


@pytest.mark.parametrize(
    "command",
    [
        ("archive", "--once", "--to"),
        ("audit", "--archive"),
        ("erase", "--id", "a", "--archive"),
        ("report", "--to", "out", "--archive"),
        ("restore", "--archive"),
        ("retain", "--keep", "1d", "--archive"),
        ("search", "--archive"),
    ],
    ids=lambda words: words[0],
)
def test_commands_with_an_archive_refuse_spark_connect(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without connecting: nothing listens there."""
    words = ("pipeline", *command, str(tmp_path), "--master", "sc://127.0.0.1:1")
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    assert ended.value.code == 2
    assert "cannot be used over Spark Connect" in capsys.readouterr().err
