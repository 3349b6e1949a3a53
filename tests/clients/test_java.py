"""The gateway's compatible APIs, called with the usual HTTP clients of Java.

Camellia's API is called with OkHttp and fastjson, as camellia's SDK does, and the others with
Spring's RestTemplate.
"""

import json
import re
import shutil
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from lisa import Manager
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from tests.clients.conformance import ProcessRunner, StepFailed
from tests.gateway.camellia_client import Queue, shorten_ack_timeout
from tests.gateways import Gateway, new_topic
from tests.servers import JVM_PATIENCE, flush, wait_until

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]

PROJECT = Path(__file__).parent / "java"
CLASS_PATH_PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1"
JVM = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto")

_UNREACHABLE = re.compile(
    r"Could not (?:resolve|transfer)|Could not find artifact|could not be resolved"
    r"|Unknown host|PluginResolutionException"
)


def build(directory: Path) -> str:
    """Compile the program into a directory; returns its class path.

    Skips the test if a tool is missing or an artefact is neither on this machine nor obtainable.
    """
    for tool in ("mvn", "javac", "java"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not on PATH (Debian: apt-get install maven default-jdk)")
    options = [f"-Dbuild.to={directory}", f"-Dmdep.outputFile={directory / 'classpath'}"]
    done = subprocess.run(
        ["mvn", "-B", "-q", *options, "compile", f"{CLASS_PATH_PLUGIN}:build-classpath"],
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
        pytest.skip(f"Maven Central does not provide what the Java program needs: {reason[:300]}")
    assert done.returncode == 0, done.stdout
    libraries = (directory / "classpath").read_text(encoding="utf-8").strip()
    return f"{directory / 'classes'}:{libraries}"


Call = Callable[..., Any]


@pytest.fixture(scope="module")
def call(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Call]:
    """Makes a call with the Java program: its kind, the URL, and the fields of the request."""
    class_path = build(tmp_path_factory.mktemp("java"))
    runner = ProcessRunner(["java", *JVM, "-cp", class_path, "lisa.Calls"])

    def perform(kind: str, url: str, **fields: object) -> Any:
        return runner.perform(kind, url, fields).result(JVM_PATIENCE.total_seconds())

    try:
        yield perform
    finally:
        runner.kill()


@pytest.fixture(scope="module")
def redis_url(valkey_server: EmbeddedServer) -> Iterator[str]:
    """URL of the embedded Valkey, emptied once for this file, with a manager running."""
    with Manager(flush(valkey_server.url)):
        yield valkey_server.url


@pytest.fixture(scope="module")
def gateway(redis_url: str) -> Iterator[Gateway]:
    with Gateway(redis_url) as running:
        yield running


class OkHttp:
    """The HTTP client of a `Queue`: the Java program makes its calls."""

    def __init__(self, call: Call, url: str) -> None:
        self._call, self._url = call, url

    def post(self, path: str, data: Mapping[str, object]) -> httpx.Response:
        found = self._call("camellia", self._url + path, **data)
        return httpx.Response(200, json=found)


def queue_of(call: Call, url: str, topic: str) -> Queue:
    return Queue(cast(httpx.Client, OkHttp(call, url)), topic)


def test_the_calls_of_a_camellia_producer(call: Call, gateway: Gateway) -> None:
    queue = queue_of(call, gateway.url, new_topic())
    before = time.time_ns() // 1_000_000
    sent = queue.send("文本 &=+%", 60_000, msgId="mine", ttlMillis=5_000, maxRetry=0)
    assert (sent["msgId"], sent["msg"], sent["status"]) == ("mine", "文本 &=+%", 1)
    assert (sent["maxRetry"], sent["retry"]) == (0, 0)
    assert sent["expireTime"] - sent["triggerTime"] == 5_000
    assert 59_000 < sent["triggerTime"] - before < 120_000
    assert queue.send("other", 1, msgId="mine") == queue.get("mine") == sent
    assert [queue.delete("mine"), queue.delete("mine"), queue.status("mine")] == [200, 404, 7]
    assert queue.get("absent") is None
    assert queue.send("plain", maxRetry=-1)["maxRetry"] == 10
    assert queue.post("sendMsg", msg="", delayMillis=0)["code"] == 400
    named = queue_of(call, gateway.url, "a|b")
    assert named.post("sendMsg", msg="x", delayMillis=0)["code"] == 400


def is_sent(queue: Queue, message_id: str) -> bool:
    try:
        queue.send(message_id, 50, msgId=message_id)
    except StepFailed:
        return False
    return True


@pytest.mark.sample
def test_camellia_clients_outlive_a_restart_of_the_gateway(call: Call, redis_url: str) -> None:
    """Listeners nack every third message once. Sends are repeated until they succeed."""
    topic, port = new_topic(), str(free_port())
    shorten_ack_timeout(redis_url, topic)
    seen: dict[str, list[int]] = defaultdict(list)
    ids = [f"message-{number}" for number in range(150)]
    failures, ended = [0], threading.Event()
    queue = queue_of(call, f"http://127.0.0.1:{port}", topic)

    def listen(poll_ms: int) -> None:
        while not ended.is_set():
            try:
                options = {"ackTimeoutMillis": 2_000, "batch": 2}
                for found in queue.poll(poll_ms, **options) if poll_ms else queue.pull(**options):
                    seen[found["msg"]].append(found["retry"])
                    is_refused = int(found["msg"][8:]) % 3 == 0 and found["retry"] == 1
                    queue.settle(found["msgId"], ack=not is_refused)
            except StepFailed:
                failures[0] += 1

    def send() -> None:
        for message_id in ids:
            wait_until(partial(is_sent, queue, message_id))

    listeners = [threading.Thread(target=listen, args=(ms,)) for ms in (2_000, 2_000, 0)]
    threads = [*listeners, threading.Thread(target=send)]
    with Gateway(redis_url, "--port", port) as first:
        for thread in threads:
            thread.start()
        wait_until(lambda: len(seen) >= 10)
        first.process.kill()
        first.process.wait(30)
    wait_until(lambda: failures[0] > 0)
    with Gateway(redis_url, "--port", port) as second:
        checked = Queue(second.client, topic)
        wait_until(lambda: all(checked.status(message_id) == 4 for message_id in ids))
        ended.set()
        for thread in threads:
            thread.join()
    assert seen.keys() == set(ids)
    assert all(max(seen[message_id]) >= 2 for message_id in ids[::3])


def test_rest_template_calls_mykit(call: Call, gateway: Gateway) -> None:
    topic, url = new_topic(), f"{gateway.url}/mykit"
    job = {"topic": topic, "bizKey": "order-42", "delay": 100, "ttl": 7, "body": '{"单": 1}'}
    job |= {"createTime": time.time_ns() // 1_000_000, "status": 0}
    pushed = call("json", f"{url}/push", **job)
    message_id = pushed["data"]
    assert message_id.startswith(f"{topic}:order-42:")
    got = call("get", f"{url}/get/{{topic}}?timeout={{ms}}", topic=topic, ms=10_000)
    expected = {name: job[name] for name in ("body", "bizKey", "createTime", "ttl")}
    assert got["data"].items() >= (expected | {"id": message_id, "status": 2}).items()
    finished = call("get", f"{url}/finish?jobId={{id}}", id=message_id)
    job["delay"] = 60_000
    assert json.loads(call("json as text", f"{url}/push", **job))["success"] is True
    second = call("json", f"{url}/push", **job)
    deleted = call("get", f"{url}/delete?jobId={{id}}", id=second["data"])
    for answer in (pushed, got, finished, second, deleted):
        assert (answer["success"], answer["code"]) == (True, 200), answer
    assert call("get", f"{url}/delete?jobId={{id}}", id="nothing:1")["success"] is False


def test_rest_template_calls_delay_queue(call: Call, gateway: Gateway) -> None:
    topic, url = new_topic(), f"{gateway.url}/delay-queue"
    now_ms = time.time_ns() // 1_000_000
    form = {"topic": topic, "delayTime": "2020-01-31 10:00:00", "ttrTime": "30"}
    form["message"] = "文本 &=+%"
    parts = {"topic": topic, "delayTime": now_ms, "ttrTime": 30, "message": "多 parts"}
    for content in (form, parts):
        pushed = call("form", f"{url}/push", **content)
        jobs: list[dict[str, Any]] = []

        def is_popped(jobs: list[dict[str, Any]] = jobs) -> bool:
            answer = call("get", f"{url}/pop/{{topic}}", topic=topic)
            assert answer["code"] == 0, answer
            jobs += filter(None, [answer["data"]])
            return bool(jobs)

        wait_until(is_popped)
        (job,) = jobs
        assert (job["id"], job["topic"], job["ttrTime"]) == (pushed["id"], topic, 30)
        assert job["message"] == content["message"]
        assert call("form", f"{url}/finish", id=job["id"])["code"] == 0
    later = call("declared form", f"{url}/push", **form | {"delayTime": str(now_ms + 600_000)})
    assert call("get", f"{url}/pop/{{topic}}", topic=topic)["data"] is None
    assert call("nothing", f"{url}/delete?id={{id}}", id=later["id"])["code"] == 0
