"""`lisa top` as a program: for other programs, and on a terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from lisa import Producer
from tests.servers import PATIENCE, ROOT, Processes

if TYPE_CHECKING:
    from collections.abc import Callable

PROGRAM = ("-m", "lisa.cli.main")


def send(url: str, topic: str, due_in: timedelta) -> None:
    with Producer(url) as producer:
        producer.send(topic, "x", at=datetime.now(UTC) + due_in)


def test_top_for_programs_runs_until_interrupted(redis_url: str, processes: Processes) -> None:
    send(redis_url, "orders", timedelta(hours=1))
    top = processes.start(*PROGRAM, "--redis", redis_url, "top", "--json", "--interval", "0.1")
    top.wait_for('"topic":"orders"', times=3)
    top.signal(signal.SIGINT)
    assert top.wait() == 0
    documents = [json.loads(line) for line in top.output.splitlines()]
    assert all(one["topics"][0]["waiting"] == 1 for one in documents)


def top_on_a_terminal(url: str, until: Callable[[bytes], bool], *, columns: int) -> bytes:
    """What `lisa top` writes to a terminal of 24 lines until a condition holds, and at its end."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "LISA_REDIS_URL": url, "PYTHONPATH": str(ROOT)}
    environment |= {"TERM": "xterm", "COLUMNS": str(columns), "LINES": "24"}
    program = subprocess.Popen(
        [sys.executable, *PROGRAM, "top", "--interval", "0.1"],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment,
        start_new_session=True,
    )
    os.close(follower)
    try:
        said = b""
        ends = time.monotonic() + PATIENCE.total_seconds()
        while not until(said):
            assert time.monotonic() < ends, said
            said += os.read(leader, 65_536)
        program.send_signal(signal.SIGINT)
        with suppress(OSError):  # EIO: the other end is closed
            while more := os.read(leader, 65_536):
                said += more
        assert program.wait(PATIENCE.total_seconds()) == 0
        assert b"Traceback" not in said
        assert b"\x1b[?1049l" in said, "the terminal is given back as it was"
    finally:
        program.kill()
        program.wait()
        os.close(leader)
    return said


def test_top_on_a_terminal(redis_url: str) -> None:
    send(redis_url, "orders", timedelta(hours=1))
    said = top_on_a_terminal(redis_url, lambda said: said.count(b"orders") >= 3, columns=160)
    assert b"waiting" in said
    assert b"more topics" not in said


def test_top_shows_its_warning_below_more_topics_than_fit(redis_url: str) -> None:
    for n in range(30):
        send(redis_url, f"orders-{n:02}", -timedelta(minutes=5))
    said = top_on_a_terminal(redis_url, lambda said: said.count(b"lisa-manager") >= 2, columns=80)
    screen = said.split(b"lisa-manager")[1].decode()
    assert screen.index("orders-00") < screen.index("more topics") < screen.index("no manager is")
    assert "orders-29" not in screen
