"""Every demo runs as described in its README."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from lisa import Manager
from tests.gateways import Gateway
from tests.servers import Processes

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
