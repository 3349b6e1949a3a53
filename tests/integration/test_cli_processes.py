"""`lisa` as a program: exit codes, streams, signals, a terminal."""

from __future__ import annotations

import json
import os
import pty
import resource
import signal
import socketserver
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest

from lisa import Producer
from tests.roles import Cast
from tests.servers import PATIENCE, ROOT, Processes, connect, least

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

    def used_s() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert lisa(redis_url, "send", "orders", "x").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    limit_s = WORK.total_seconds()
    assert least(used_s, limit_s) < limit_s


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


@pytest.mark.parametrize("run", ["topics >&-", "topics --json >&-", "send wide - <&-"])
def test_a_stream_may_be_closed(redis_url: str, run: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m lisa.cli.main {run}"],
        check=False,
        capture_output=True,
        text=True,
        env={**os.environ, "LISA_REDIS_URL": redis_url, "PYTHONPATH": str(ROOT)},
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_characters_that_the_output_cannot_show_are_escaped(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lisa(redis_url, "send", "wide", "x", "--id", "a\N{EURO SIGN}", "--delay", "1h")
    monkeypatch.setenv("PYTHONIOENCODING", "latin-1")
    listed = lisa(redis_url, "list", "wide")
    assert (listed.returncode, listed.stderr) == (0, "")
    assert r"a\u20ac" in listed.stdout


def declare(url: str, topic: str, group: str) -> None:
    cast = Cast(url, topic, group).declare()
    cast.store.close()


def on_a_terminal(url: str, *arguments: str, columns: int) -> list[str]:
    """The lines that a command prints on a terminal."""
    leader, follower = pty.openpty()
    environment = {**os.environ, "LISA_REDIS_URL": url, "PYTHONPATH": str(ROOT)}
    environment |= {"TERM": "xterm", "COLUMNS": str(columns), "LINES": "24"}
    program = subprocess.Popen(
        [sys.executable, *PROGRAM, *arguments], stdout=follower, env=environment
    )
    os.close(follower)
    said = b""
    with suppress(OSError):  # EIO: the other end is closed
        while more := os.read(leader, 65_536):
            said += more
    os.close(leader)
    assert program.wait(PATIENCE.total_seconds()) == 0
    return said.decode().splitlines()


@pytest.mark.parametrize(
    "arguments",
    [["topics"], ["top", "--once", "--interval", "0.1"], ["list", "orders"], ["managers"]],
    ids=lambda arguments: arguments[0],
)
def test_tables_fit_80_columns(redis_url: str, arguments: list[str]) -> None:
    with Producer(redis_url) as producer:
        one = producer.send("orders", "x", delay="1h")
        producer.send("orders-of-customers-in-austria", "x", delay="1h")
    for group in ("mail", "invoices", "statistics"):
        declare(redis_url, "orders", group)
    lines = on_a_terminal(redis_url, *arguments, columns=80)
    assert max(map(len, lines)) <= 80
    if arguments[0] in ("topics", "top"):
        assert len(lines) == 5, "one line for each topic"
        assert lines[3].startswith("orders-of-customers-in-austria  ")
    elif arguments[0] == "list":
        assert lines[2].split()[0] == one
    assert len(on_a_terminal(redis_url, *arguments, columns=200)[0]) >= len(lines[0])


def test_a_long_list_is_printed_while_it_is_read(redis_url: str) -> None:
    lines = "\n".join(f"message {n}" for n in range(12_000))
    lisa(redis_url, "send", "orders", "--file", "-", "--delay", "1h", stdin=lines)
    command = [sys.executable, *PROGRAM, "list", "orders", "--limit", "12000"]
    environment = {**os.environ, "LISA_REDIS_URL": redis_url, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as reading:
        assert reading.stdout is not None
        first = [reading.stdout.readline() for _ in range(20)]
        rest = 12_000 - 18
        lisa(redis_url, "garbage", "list", "orders")
        with connect(redis_url) as client:
            client.delete("lisa:{orders}:waiting")
        read = len(reading.stdout.read().splitlines())
    assert first[0].split()[:2] == [b"id", b"due"]
    assert 0 < read < rest, "what was deleted meanwhile had not been read yet"


def test_completion_in_bash() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    for words, expected in {
        "lisa to": {"top", "topic", "topics"},
        "lisa garbage ": {"list", "show", "requeue", "purge"},
        "lisa list orders --state re": {"ready", "retry"},
    }.items():
        script = f"""
            eval "$(_LISA_COMPLETE=bash_source lisa)"
            COMP_WORDS=({words}) COMP_CWORD={words.count(" ")}
            _lisa_completion lisa
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, check=True, env=environment
        )
        assert set(done.stdout.split()) == expected, done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["manager"], "runs on"),
        (["consumer", "shop"], "reading for group g"),
        (["consumer", "shop", "--processes", "2"], "reading for group g"),
        (["gateway", "--port", "0"], "started"),
        (["gateway", "--port", "0", "--workers", "2"], "started"),
    ],
)
def test_ctrl_c_is_a_usual_end_of_a_role(
    arguments: list[str], said: str, redis_url: str, processes: Processes, tmp_path: Path
) -> None:
    (tmp_path / "shop.py").write_text(
        "from lisa import Consumer\n"
        "consumer = Consumer(group='g')\n"
        "consumer.subscribe('orders', print)\n"
    )
    declare(redis_url, "orders", "g")
    role, *rest = arguments
    running = processes.start("-m", f"lisa.cli.{role}", *rest, env={"LISA_REDIS_URL": redis_url})
    running.wait_for(said, times=2 if arguments[-1] == "2" else 1)
    running.signal(signal.SIGINT)
    assert running.wait() == 0
    assert "Traceback" not in running.output


@pytest.mark.parametrize("role", ["manager", "gateway"])
def test_an_unknown_error_of_the_server_is_no_configuration_error(
    role: str, processes: Processes
) -> None:
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


@pytest.mark.parametrize("program", ["main", "manager", "consumer", "gateway"])
def test_a_password_on_the_command_line_causes_a_warning(program: str) -> None:
    def said(url: str) -> list[str]:
        arguments = ["topics"] if program == "main" else []
        done = subprocess.run(
            [
                *(sys.executable, "-m", f"lisa.cli.{program}", *arguments),
                *("--redis", url, "--prefix", "not a prefix"),
            ],
            check=False,
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=PATIENCE.total_seconds(),
        )
        assert done.returncode == 2
        assert "s3cret" not in done.stderr
        return [one for one in done.stderr.splitlines() if one.startswith("warning: ")]

    assert said("redis://127.0.0.1:1/0") == []
    (warning,) = said("redis://:s3cret@127.0.0.1:1/0")
    assert "LISA_REDIS_URL" in warning
