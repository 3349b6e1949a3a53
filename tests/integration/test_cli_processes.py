"""`lisa` as a program: exit codes, streams, signals, a terminal."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import subprocess
import sys
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from tests.servers import PATIENCE, ROOT, Processes

PROGRAM = ("-m", "lisa.cli.main")
WORK = timedelta(seconds=1)  # allowance for a command beyond its work


def lisa(
    url: str, *arguments: str, stdin: str = "", timeout: timedelta = PATIENCE
) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if "LISA_" not in name}
    environment |= {"LISA_REDIS_URL": url, "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *PROGRAM, *arguments],
        check=False,
        input=stdin,
        capture_output=True,
        text=True,
        env=environment,
        timeout=timeout.total_seconds(),
    )


def test_exit_codes_and_streams(redis_url: str) -> None:
    sent = lisa(redis_url, "send", "orders", "-", "--delay", "1h", stdin='{"order": 42}')
    assert (sent.returncode, sent.stderr) == (0, "")
    one = sent.stdout.strip()
    assert json.loads(lisa(redis_url, "get", "orders", one, "--json").stdout)["body"] == {
        "order": 42
    }
    gone = lisa(redis_url, "cancel", "orders", one)
    assert (gone.returncode, gone.stdout) == (0, f"{one}  cancelled\n")
    again = lisa(redis_url, "cancel", "orders", "nope")
    assert (again.returncode, again.stdout) == (1, "nope  unknown\n")
    wrong = lisa(redis_url, "send", "orders", "x", "--delay", "-1")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    away = lisa("redis://127.0.0.1:1", "topics")
    assert (away.returncode, away.stdout, away.stderr.count("\n")) == (3, "", 1)
    refused = lisa("redis://:wrong@" + redis_url.split("//")[1], "topics")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    doctor = lisa(redis_url, "doctor", "--json")
    assert doctor.returncode == 1
    assert json.loads(doctor.stdout)["ok"] is False


def test_a_command_takes_under_a_second(redis_url: str) -> None:
    """Measured in CPU time, which does not depend on the machine's load."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert lisa(redis_url, "send", "orders", "x").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used < WORK.total_seconds()


def test_a_reader_may_close_the_pipe_early(redis_url: str) -> None:
    lines = "\n".join(f"message {n}" for n in range(5_000))
    sent = lisa(redis_url, "send", "orders", "--file", "-", "--delay", "1h", stdin=lines)
    assert "5000" in sent.stdout
    command = f"{sys.executable} -m lisa.cli.main list orders --limit 5000 | head -3"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "LISA_REDIS_URL": redis_url, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout.count("\n") == 3
    assert "Error" not in done.stderr
    assert done.stderr.count("\n") <= 1, "at most the cursor of what follows"
    assert done.returncode == 0


def test_top_for_programs_runs_until_interrupted(redis_url: str, processes: Processes) -> None:
    lisa(redis_url, "send", "orders", "x", "--delay", "1h")
    top = processes.start(*PROGRAM, "--redis", redis_url, "top", "--json", "--interval", "0.1")
    top.wait_for('"topic":"orders"', times=3)
    top.signal(signal.SIGINT)
    assert top.wait() == 0
    documents = [json.loads(line) for line in top.output.splitlines()]
    assert all(one["topics"][0]["waiting"] == 1 for one in documents)


def test_top_on_a_terminal(redis_url: str) -> None:
    lisa(redis_url, "send", "orders", "x", "--delay", "1h")
    leader, follower = pty.openpty()
    environment = {**os.environ, "LISA_REDIS_URL": redis_url, "PYTHONPATH": str(ROOT)}
    environment |= {"TERM": "xterm", "COLUMNS": "160", "LINES": "24"}
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
        while said.count(b"orders") < 3 and time.monotonic() < ends:
            said += os.read(leader, 65_536)
        assert said.count(b"orders") >= 3
        assert b"waiting" in said
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


def test_an_interrupted_command_leaves_one_line(redis_url: str, processes: Processes) -> None:
    """Ctrl-C ends the wait for a server that never answers."""
    import socket

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        waiting = processes.start(*PROGRAM, "--redis", url, "topics")
        silent.settimeout(PATIENCE.total_seconds())
        connection, _ = silent.accept()
        waiting.signal(signal.SIGINT)
        assert waiting.wait() == 1
        assert waiting.output.strip() == "lisa: aborted"
        connection.close()


@pytest.mark.parametrize("path", ["bodies", "missing"])
def test_a_file_of_messages(path: str, redis_url: str, tmp_path: Path) -> None:
    (tmp_path / "bodies").write_text("1\n2\n", encoding="utf-8")
    sent = lisa(redis_url, "send", "orders", "--file", str(tmp_path / path), "--json")
    if path == "missing":
        assert (sent.returncode, sent.stderr.count("\n")) == (2, 1)
    else:
        assert json.loads(sent.stdout)["accepted"] == 2
