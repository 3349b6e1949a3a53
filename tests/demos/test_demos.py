"""Every demo runs as its README says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from tests.servers import Processes

ROOT = Path(__file__).parent.parent.parent
DEMOS = ROOT / "demos"


def run(*command: str, url: str = "") -> str:
    env = {**os.environ, "LISA_REDIS_URL": url} if url else dict(os.environ)
    done = subprocess.run(
        [sys.executable, *command],
        check=True, capture_output=True, text=True, env=env, cwd=ROOT, timeout=60,
    )  # fmt: skip
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
        "-m", "lisa.cli.consumer", "--config", "consumer.yml", "handlers",
        env=env, cwd=DEMOS / "consumer",
    )  # fmt: skip
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
