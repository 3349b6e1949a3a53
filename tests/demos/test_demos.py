"""Every demo runs as described in its README."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from lisa import Manager
from tests.gateways import Gateway, new_topic
from tests.servers import Processes, wait_until

if TYPE_CHECKING:
    from typing import Self

ROOT = Path(__file__).parent.parent.parent
DEMOS = ROOT / "demos"


def run(*command: str, url: str = "") -> str:
    env = {**os.environ, "LISA_REDIS_URL": url} if url else dict(os.environ)
    done = subprocess.run(
        [sys.executable, *command],
        check=True,
        capture_output=True,
        text=True,
        env=env,
        cwd=ROOT,
        timeout=60,
    )
    return done.stdout


def test_every_demo_has_a_readme_and_is_listed() -> None:
    listed = set(re.findall(r"\]\((\w+)/\)", (DEMOS / "README.md").read_text()))
    folders = {path.name for path in DEMOS.iterdir() if path.is_dir()}
    assert listed == folders
    assert all((DEMOS / name / "README.md").is_file() for name in folders)


def test_manager_producer_and_consumer(redis_url: str, processes: Processes) -> None:
    env = {"LISA_REDIS_URL": redis_url}
    manager = str(DEMOS / "manager" / "manager.yml")
    processes.start("-m", "lisa.cli.manager", "--config", manager, env=env)
    consumer = processes.start(
        "-m",
        "lisa.cli.consumer",
        "--config",
        "consumer.yml",
        "handlers",
        env=env,
        cwd=DEMOS / "consumer",
    )
    produce = str(DEMOS / "producer" / "produce.py")
    run(produce, "hello", url=redis_url)
    run(produce, "later", "--delay", "1", url=redis_url)
    consumer.wait_for("mystream: 'hello'")
    consumer.wait_for("mystream: 'later'")


def test_producer_and_manager_in_one_process(redis_url: str) -> None:
    said = run(str(DEMOS / "producer_and_manager" / "main.py"), url=redis_url)
    assert [line.split()[1] for line in said.splitlines()] == ["ready"] * 3


def test_order_timeout() -> None:
    said = run(str(DEMOS / "order_timeout" / "main.py"))
    cancelled = re.findall(r"order (\d): not paid", said)
    assert sorted(cancelled) == ["1", "3", "5"]
    assert cancelled[-1] == "5"
    assert "order 2: paid, time-out cancelled" in said
    assert "garbage: {'ordr': 6}" in said


def test_lisa_demo_counts_what_the_handlers_saw() -> None:
    figures = json.loads(
        run("-m", "lisa.cli.main", "demo", "--messages", "2000", "--seconds", "2", "--json")
    )
    assert figures["sent"] == 2000
    assert figures["early"] == figures["lost"] == figures["handled_after_cancel"] == 0
    assert figures["handled"] + figures["cancelled"] + figures["garbage"] == 2000
    assert min(figures[name] for name in ("cancelled", "rescheduled", "retried", "garbage")) > 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_a_tour_of_the_http_api(redis_url: str) -> None:
    with Manager(redis_url), Gateway(redis_url) as gateway:
        said = subprocess.run(
            [str(DEMOS / "http" / "tour.sh"), gateway.url],
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        ).stdout
    assert re.findall(r"\((\d+)\)", said) == [
        "201",
        "200",
        "200",
        "200",
        "200",
        "200",
        "200",
        "200",
        "200",
        "201",
        "200",
        "400",
        "200",
    ]
    outcomes = re.findall(r'"outcome":"(\w+)"', said)
    assert outcomes == [
        "accepted",
        "duplicate",
        "rescheduled",
        "retrying",
        "acked",
        "accepted",
        "cancelled",
    ]
    assert "delay_ms: not a duration" in said
    assert '"acked":1' in said


class Node:
    """demos/javascript/main.mjs on one topic."""

    def __init__(self, url: str, topic: str, **env: str) -> None:
        self.process = subprocess.Popen(
            ["node", str(DEMOS / "javascript" / "main.mjs"), topic],
            env={**os.environ, "LISA_URL": url, **env},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self.lines: list[str] = []
        self._watchdog = threading.Timer(60, self.process.kill)

    def __enter__(self) -> Self:
        self._watchdog.start()
        self.wait_for("waiting for orders")
        return self

    def wait_for(self, text: str) -> None:
        assert self.process.stdout is not None
        while not any(text in line for line in self.lines):
            line = self.process.stdout.readline()
            assert line, self.lines
            self.lines.append(line.rstrip())

    def stop(self) -> list[str]:
        """Send SIGTERM; return the output."""
        self.process.send_signal(signal.SIGTERM)
        rest, _ = self.process.communicate(timeout=30)
        assert self.process.returncode == 0, rest
        return [*self.lines, *rest.splitlines()]

    def __exit__(self, *_: object) -> None:
        self._watchdog.cancel()
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_a_consumer_in_javascript(redis_url: str) -> None:
    topic = new_topic("orders")
    path = f"/v1/topics/{topic}"
    with (
        Manager(redis_url),
        Gateway(redis_url) as gateway,
        Node(gateway.url, topic, CONCURRENCY="2", GRACE_MS="1000") as node,
    ):

        def send(**body: int) -> str:
            sent: str = gateway.client.post(f"{path}/messages", json={"body": body}).json()["id"]
            return sent

        def state(message_id: str) -> str:
            found: str = gateway.client.get(f"{path}/messages/{message_id}").json()["state"]
            return found

        first, fails = send(order=1), send(order=2, fails=1)
        node.wait_for("order 1: not paid, cancelled")
        node.wait_for(f"order 2: not paid, cancelled (message {fails}, attempt 2)")
        wait_until(lambda: state(first) == state(fails) == "acked")

        quick, endless = send(order=3, takes_ms=500), send(order=4, takes_ms=60_000)
        for order in (3, 4):
            node.wait_for(f"order {order}: is it paid?")
        lines = node.stop()
        assert any("order 3: not paid" in line for line in lines)
        assert lines[-1] == "stopped"
        assert state(quick) == "acked"
        # A message still running after the grace time was released without counting an attempt.
        found = gateway.client.get(f"{path}/messages/{endless}").json()
        assert (found["state"], found["attempts"]) == ("ready", 0)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_javascript_consumer_stops_in_time_while_all_its_places_are_taken(
    redis_url: str,
) -> None:
    topic = new_topic("orders")
    path = f"/v1/topics/{topic}/messages"
    with (
        Manager(redis_url),
        Gateway(redis_url) as gateway,
        Node(gateway.url, topic, CONCURRENCY="1", GRACE_MS="500") as node,
    ):
        body = {"order": 1, "takes_ms": 60_000}
        sent = gateway.client.post(path, json={"body": body}).json()["id"]
        node.wait_for("order 1: is it paid?")
        assert node.stop()[-1] == "stopped"
        found = gateway.client.get(f"{path}/{sent}").json()
        assert (found["state"], found["attempts"]) == ("ready", 0)


@pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
def test_the_javascript_consumer_survives_a_gateway_outage(redis_url: str) -> None:
    topic = new_topic("orders")
    path = f"/v1/topics/{topic}/messages"
    with Manager(redis_url), Gateway(redis_url) as gateway, Node(gateway.url, topic) as node:
        gateway.client.post(path, json={"body": {"order": 1}})
        node.wait_for("order 1: not paid")
        gateway.stop()
        node.wait_for("pull: ")
        with Gateway(redis_url, "--port", gateway.url.rpartition(":")[2]) as another:
            another.client.post(path, json={"body": {"order": 2}})
            node.wait_for("order 2: not paid")
            assert node.stop()[-1] == "stopped"
