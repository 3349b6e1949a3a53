"""The gateway's compatible APIs, called by Java programs with the usual HTTP clients of Java.

`OkHttpCamellia` uses OkHttp and fastjson, as camellia's SDK does.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest

from lisa import Manager
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from tests.gateway.camellia_client import shorten_ack_timeout
from tests.gateways import Gateway, new_topic
from tests.servers import JVM_PATIENCE

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

CAMELLIA = "lisa.CamelliaScenarios"
SPRING = "lisa.SpringScenarios"


@pytest.fixture(scope="module")
def class_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("java"))


@pytest.fixture(scope="module")
def redis_url(valkey_server: EmbeddedServer) -> Iterator[str]:
    """URL of the embedded Valkey, with a manager running."""
    with Manager(valkey_server.url):
        yield valkey_server.url


@pytest.fixture(scope="module")
def gateway(redis_url: str) -> Iterator[Gateway]:
    with Gateway(redis_url) as running:
        yield running


def test_the_calls_of_a_camellia_producer(class_path: str, gateway: Gateway) -> None:
    found = run(class_path, CAMELLIA, "calls", gateway.url, new_topic())
    sent: dict[str, Any] = found["sent"]
    assert (sent["id"], sent["text"], sent["status"]) == ("mine", "文本 &=+%", 1)
    assert (sent["maxRetry"], sent["retry"]) == (0, 0)
    assert sent["expireTime"] - sent["triggerTime"] == 5_000
    assert 59_000 < found["dueIn"] < 120_000
    assert found["sentAgain"] == found["got"] == sent
    assert found["deleted"] == [True, False]
    assert found["statusOfDeleted"] == 7
    assert found["unknown"] is None
    assert found["plain"]["id"]
    assert found["plain"]["maxRetry"] == 10
    assert "400" in found["emptyText"]
    assert "400" in found["badTopic"]


@pytest.mark.sample
def test_camellia_listeners_handle_all_and_retry_what_failed(
    class_path: str, gateway: Gateway
) -> None:
    found = run(class_path, CAMELLIA, "listeners", gateway.url, new_topic())
    attempts = [[1, 2], [1, 2, 3], [1]]
    assert found["seen"] == {str(i): attempts[i % 3] for i in range(30)}


def test_camellia_clients_outlive_a_restart_of_the_gateway(class_path: str, redis_url: str) -> None:
    topic, port = new_topic(), str(free_port())
    shorten_ack_timeout(redis_url, topic)
    with Gateway(redis_url, "--port", port) as first:
        arguments = ("restart", first.url, topic)
        with Program(class_path, CAMELLIA, *arguments) as program:
            assert program.result()["handled"] >= 10
            first.process.kill()
            first.process.wait(30)
            with Gateway(redis_url, "--port", port):
                program.go_on()
                found = program.result()
    assert found["failures"] > 0
    assert found["sent"] == [f"message-{i}" for i in range(150)]
    assert set(found["seen"]) == set(found["sent"])


def test_rest_template_calls_mykit(class_path: str, gateway: Gateway) -> None:
    topic = new_topic()
    found = run(class_path, SPRING, "mykit", gateway.url, topic)
    job = found["job"]
    message_id = found["pushed"]["data"]
    assert message_id.startswith(f"{topic}:order-42:")
    got = found["got"]["data"]
    assert (got["id"], got["body"], got["bizKey"]) == (message_id, '{"单": 1}', "order-42")
    assert (got["createTime"], got["ttl"], got["status"]) == (job["createTime"], 7, 2)
    assert json.loads(found["pushedAsText"])["success"] is True
    for name in ("pushed", "got", "finished", "deleted"):
        assert (found[name]["success"], found[name]["code"]) == (True, 200), name
    assert found["unknown"]["success"] is False


def test_rest_template_calls_delay_queue(class_path: str, gateway: Gateway) -> None:
    topic = new_topic()
    found = run(class_path, SPRING, "delay-queue", gateway.url, topic)
    assert {name: one["code"] for name, one in found.items()} == dict.fromkeys(found, 0), found
    for pushed, popped, text in (
        ("pushed", "popped", "文本 &=+%"),
        ("pushedParts", "poppedParts", "多 parts"),
    ):
        job = found[popped]["data"]
        assert (job["id"], job["topic"], job["message"]) == (found[pushed]["id"], topic, text)
        assert job["ttrTime"] == 30
    assert found["poppedNothing"]["data"] is None


PROJECT = Path(__file__).parent / "java"
JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto")

_UNREACHABLE = re.compile(
    r"Could not (?:resolve|transfer)|Could not find artifact|could not be resolved"
    r"|Unknown host|PluginResolutionException"
)


def build(directory: Path, *options: str) -> str:
    """Compile the programs into a directory; returns their class path.

    Skips the test if a tool is missing or an artefact is neither on this machine nor obtainable.
    """
    for tool in ("mvn", "javac", "java"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not on PATH (Debian: apt-get install maven default-jdk)")
    done = subprocess.run(
        ["mvn", "-B", "-q", *options, f"-Dbuild.to={directory}", "compile"],
        cwd=PROJECT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=JVM_PATIENCE.total_seconds(),
    )
    if done.returncode and _UNREACHABLE.search(done.stdout):
        reason = next(line for line in done.stdout.splitlines() if _UNREACHABLE.search(line))
        pytest.skip(f"Maven Central does not provide what the Java programs need: {reason[:300]}")
    assert done.returncode == 0, done.stdout
    libraries = (directory / "classpath").read_text(encoding="utf-8").strip()
    return f"{directory / 'classes'}:{libraries}"


class Program:
    """A running Java program that prints lines of JSON; leaving the context ends the program."""

    def __init__(self, class_path: str, main: str, *arguments: str) -> None:
        self._errors = tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  closed on exit
        self._popen = subprocess.Popen(
            ["java", *JVM, "-cp", class_path, main, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            encoding="utf-8",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._popen.poll() is None:
            self._popen.kill()
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout, self._errors):
            assert pipe is not None
            pipe.close()

    def result(self) -> Any:
        """The next line of JSON. The program itself has time limits."""
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        if not line:
            self._errors.seek(0)
            pytest.fail(f"the program ended without a result: {self._errors.read()[-3_000:]}")
        return json.loads(line)

    def go_on(self) -> None:
        """Tell a program that waits for a line that it may go on."""
        assert self._popen.stdin is not None
        self._popen.stdin.write("\n")
        self._popen.stdin.flush()


def run(class_path: str, main: str, *arguments: str) -> Any:
    """Run a program that prints one result."""
    with Program(class_path, main, *arguments) as program:
        return program.result()
