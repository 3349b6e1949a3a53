"""`lisa` as a program: exit codes, streams, signals, a terminal."""

import json
import os
import pty
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import redis

from lisa import Producer
from tests.consumers import Bench
from tests.programs import python, run
from tests.servers import PATIENCE, ROOT, Processes

full = pytest.mark.full
PROGRAM = (sys.executable, "-m", "lisa.cli.main")


def environment(url: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if "LISA_" not in name}
    return clean | {"LISA_REDIS_URL": url, "PYTHONPATH": str(ROOT)}


def lisa(url: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return run(*PROGRAM, *arguments, check=False, **{"env": environment(url), **options})


def test_exit_codes_and_streams(redis_url: str) -> None:
    sent = lisa(redis_url, "send", "orders", "-", "--delay", "1h", input='{"order": 42}')
    assert (sent.returncode, sent.stderr) == (0, "")
    one = sent.stdout.strip()
    found = json.loads(lisa(redis_url, "get", "orders", one, "--json").stdout)
    assert found["body"] == {"order": 42}
    again = lisa(redis_url, "cancel", "orders", "nope")
    assert (again.returncode, again.stdout) == (1, "nope  unknown\n")
    wrong = lisa(redis_url, "send", "orders", "x", "--delay", "-1")
    assert (wrong.returncode, wrong.stdout, wrong.stderr.count("\n")) == (2, "", 1)
    away = lisa("redis://127.0.0.1:1", "topics")
    assert (away.returncode, away.stdout, away.stderr.count("\n")) == (3, "", 1)
    refused = lisa("redis://:wrong@" + redis_url.split("//")[1], "topics")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    doctor = lisa(redis_url, "doctor", "--json")
    assert (doctor.returncode, json.loads(doctor.stdout)["ok"]) == (0, True)


def test_a_reader_may_close_the_pipe_early(redis_url: str, producer: Producer) -> None:
    producer.send_many("orders", range(5_000), delay="1h")
    command = f"'{sys.executable}' -m lisa.cli.main list orders --limit 5000 | head -3"
    done = run("bash", "-o", "pipefail", "-c", command, env=environment(redis_url))
    assert done.stdout.count("\n") == 3
    assert "Error" not in done.stderr
    assert done.stderr.count("\n") <= 1, "at most the cursor of what follows"


def test_a_stream_may_be_closed_or_lack_characters(redis_url: str, producer: Producer) -> None:
    for command in ("topics --json >&-", "send wide - <&-"):
        line = f"'{sys.executable}' -m lisa.cli.main {command}"
        assert run("bash", "-c", line, env=environment(redis_url)).stderr == ""
    producer.send("wide", "x", id="a\N{EURO SIGN}", delay="1h")
    latin = environment(redis_url) | {"PYTHONIOENCODING": "latin-1"}
    listed = lisa(redis_url, "list", "wide", env=latin)
    assert (listed.returncode, listed.stderr) == (0, "")
    assert r"a\u20ac" in listed.stdout


def on_a_terminal(url: str, *arguments: str, until: Callable[[bytes], bool] | None = None) -> str:
    """What a command prints on a terminal of 24 lines and 80 columns.

    It is interrupted when the condition holds for what it has printed.
    """
    leader, follower = pty.openpty()
    env = environment(url) | {"TERM": "xterm", "COLUMNS": "80", "LINES": "24"}
    program = subprocess.Popen(
        [*PROGRAM, *arguments],
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=env,
        start_new_session=True,
    )
    os.close(follower)
    said, ends = b"", time.monotonic() + PATIENCE.total_seconds()
    try:
        with suppress(OSError):  # EIO: the other end is closed
            while more := os.read(leader, 65_536):
                assert time.monotonic() < ends, said
                said += more
                if until is not None and until(said):
                    program.send_signal(signal.SIGINT)
                    until = None
        assert program.wait(PATIENCE.total_seconds()) == 0, said
        assert b"Traceback" not in said
    finally:
        program.kill()
        program.wait()
        os.close(leader)
    return said.decode()


def test_tables_fit_80_columns(redis_url: str, producer: Producer, bench: Bench) -> None:
    one = producer.send("orders", "x", delay="1h")
    producer.send("orders-of-customers-in-austria", "x", delay="1h")
    for group in ("mail", "invoices", "statistics"):
        bench.declare("orders", group)
    for arguments in (["topics"], ["top", "--once", "--interval", "0.1"], ["list", "orders"]):
        lines = on_a_terminal(redis_url, *arguments).splitlines()
        assert max(map(len, lines)) <= 80
        if arguments[0] == "list":
            assert lines[2].split()[0] == one
        else:
            assert lines[4] == "", "one line for each topic"
            assert lines[3].startswith("orders-of-customers-in-austria  ")


def test_top_for_programs_runs_until_interrupted(
    redis_url: str, producer: Producer, processes: Processes
) -> None:
    producer.send("orders", 1, delay="1h")
    top = processes.start(*PROGRAM[1:], "--redis", redis_url, "top", "--json", "--interval", "0.1")
    top.wait_for('"topic":"orders"', times=3)
    top.signal(signal.SIGINT)
    assert top.wait() == 0
    documents = [json.loads(line) for line in top.output.splitlines()]
    assert all(one["topics"][0]["waiting"] == 1 for one in documents)


def test_top_on_a_terminal(redis_url: str, producer: Producer) -> None:
    """Its warning stands below more topics than fit; at the end the terminal is as it was."""
    for n in range(30):
        producer.send(f"orders-{n:02}", "x", at=datetime.now(UTC) - timedelta(minutes=5))
    top = ("top", "--interval", "0.1")
    said = on_a_terminal(redis_url, *top, until=lambda said: said.count(b"lisa-manager") >= 2)
    screen = said.split("lisa-manager")[1]
    assert screen.index("orders-00") < screen.index("more topics") < screen.index("no manager is")
    assert "orders-29" not in screen
    assert "\x1b[?1049l" in said


def test_a_long_list_is_printed_while_it_is_read(
    redis_url: str, producer: Producer, client: redis.Redis
) -> None:
    producer.send_many("orders", range(12_000), delay="1h")
    command = [*PROGRAM, "list", "orders", "--limit", "12000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(redis_url)) as reading:
        assert reading.stdout is not None
        first = [reading.stdout.readline() for _ in range(20)]
        client.delete("lisa:{orders}:waiting")
        read = len(reading.stdout.read().splitlines())
    assert first[0].split()[:2] == [b"id", b"due"]
    assert 0 < read < 12_000 - 18, "what was deleted meanwhile had not been read yet"


def test_completion_in_bash(redis_url: str) -> None:
    bash = environment(redis_url)
    bash["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{bash['PATH']}"
    for words, expected in {
        "lisa garbage ": {"list", "show", "requeue", "purge"},
        "lisa list orders --state re": {"ready", "retry"},
    }.items():
        script = f"""
            eval "$(_LISA_COMPLETE=bash_source lisa)"
            COMP_WORDS=({words}) COMP_CWORD={words.count(" ")}
            _lisa_completion lisa
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        done = run("bash", "-c", script, env=bash)
        assert set(done.stdout.split()) == expected, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["manager"], "runs on"),
        (["consumer", "shop", "--processes", "2"], "reading for group g"),
        (["gateway", "--port", "0"], "started"),
        pytest.param(["consumer", "shop"], "reading for group g", marks=full),
        pytest.param(["gateway", "--port", "0", "--workers", "2"], "started", marks=full),
    ],
)
def test_ctrl_c_is_a_usual_end_of_a_role(
    arguments: list[str], said: str, bench: Bench, processes: Processes, tmp_path: Path
) -> None:
    consumer = "from lisa import Consumer\nconsumer = Consumer(group='g')\n"
    (tmp_path / "shop.py").write_text(f"{consumer}consumer.subscribe('orders', print)\n")
    bench.declare("orders", "g")
    role, *rest = arguments
    running = processes.start("-m", f"lisa.cli.{role}", *rest, env={"LISA_REDIS_URL": bench.url})
    running.wait_for(said, times=2 if arguments[-1] == "2" else 1)
    running.signal(signal.SIGINT)
    assert running.wait() == 0
    assert "Traceback" not in running.output


@pytest.mark.parametrize("role", ["manager", "gateway"])
def test_an_unknown_server_error_is_no_configuration_error(role: str, processes: Processes) -> None:
    """A proxy words an outage in its own way. With exit code 2 systemd would not try again."""

    class Refusal(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with suppress(OSError):
                while head := self.rfile.readline():
                    for _ in range(int(head[1:])):
                        self.rfile.read(int(self.rfile.readline()[1:]) + 2)
                    self.wfile.write(b"-ERR upstream failure\r\n")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Refusal) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        url = f"redis://127.0.0.1:{proxy.server_address[1]}/0"
        options = ["--port", "0"] if role == "gateway" else []
        process = processes.start("-m", f"lisa.cli.{role}", "--redis", url, *options)
        assert process.wait() == 1
        process.end()
        proxy.shutdown()
    assert "answered with an error: upstream failure" in process.output


def test_an_interrupted_command_leaves_one_line(processes: Processes) -> None:
    """Ctrl-C ends the wait for a server that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        waiting = processes.start(*PROGRAM[1:], "--redis", url, "topics")
        silent.settimeout(PATIENCE.total_seconds())
        connection, _ = silent.accept()
        with connection:
            waiting.signal(signal.SIGINT)
            assert waiting.wait() == 1
        assert waiting.output.strip() == "lisa: aborted"


@pytest.mark.parametrize(
    "program",
    ["main", "consumer", *(pytest.param(one, marks=full) for one in ("manager", "gateway"))],
)
def test_a_password_on_the_command_line_causes_a_warning(program: str) -> None:
    def said(url: str) -> list[str]:
        command = ["-m", f"lisa.cli.{program}", *(["topics"] if program == "main" else [])]
        options = ("--redis", url, "--prefix", "not a prefix")
        done = python(*command, *options, check=False, env=environment(""))
        assert done.returncode == 2
        assert "s3cret" not in done.stderr
        return [one for one in done.stderr.splitlines() if one.startswith("warning: ")]

    (warning,) = said("redis://:s3cret@127.0.0.1:1/0")
    assert "LISA_REDIS_URL" in warning
    if program == "main":
        assert said("redis://127.0.0.1:1/0") == []
