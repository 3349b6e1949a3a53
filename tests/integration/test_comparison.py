"""The comparison with other queues, in small: the protocol of peers, and the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.comparison.__main__ import FURTHER, compare
from benchmarks.comparison.environments import Installed, find, install
from benchmarks.comparison.workers import peer_at_work
from lisa.cli.bench.fault import Fault
from lisa.cli.bench.server import BenchServer, fresh_server
from lisa.cli.bench.work import drain, paced
from tests.servers import ROOT, wait_until

PEER = """\
import argparse, json, os, pathlib, signal, struct, sys, time

assert pathlib.Path.cwd() == pathlib.Path(__file__).parent
parser = argparse.ArgumentParser()
parser.add_argument("command")
parser.add_argument("--count", type=int)
parser.add_argument("--due-ms", type=int)
parser.add_argument("--start-ms", type=int)
parser.add_argument("--rate", type=float)
parser.add_argument("--tasks", type=int)
asked = parser.parse_args()
# Its queue is a folder beside the environment: one file a call, a due time in ms a line.
queue = pathlib.Path(os.environ["BENCH_ENVIRONMENT"]) / "queue"
queue.mkdir(exist_ok=True)

def send(dues):
    began = time.perf_counter()
    part = queue / f"{time.time_ns()}.part"
    part.write_text("".join(f"{due}\\n" for due in dues))
    part.rename(part.with_suffix(".due"))
    print("a line of the library's own")
    print(json.dumps({"sent": len(dues), "seconds": time.perf_counter() - began}))

def work():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    for old in queue.iterdir():
        old.unlink()
    ledger = pathlib.Path(os.environ["BENCH_LEDGER"]) / f"{os.getpid()}-0.ledger"
    dues = []
    print("ready", flush=True)
    with ledger.open("ab", buffering=0) as file:
        while True:
            for path in queue.glob("*.due"):
                dues += map(int, path.read_text().split())
                path.unlink()
            now = time.time_ns() // 1000
            for due in [due for due in dues if due * 1000 <= now]:
                dues.remove(due)
                # By its word faster than any real one: how much it is given must have a bound.
                file.write(struct.pack("<qq", due * 1000, due * 1000 + 1))
            time.sleep(0.001)

if asked.command == "versions":
    print(json.dumps({"fake": "1.0", "python": sys.version.split()[0]}))
elif asked.command == "work":
    work()
elif asked.command == "send-concurrent":
    sys.exit(3)
elif asked.command == "send-single":
    sys.exit("the library says no")
elif asked.command == "send-paced":
    send([asked.start_ms + int(i * 1000 / asked.rate) for i in range(asked.count)])
else:
    send([asked.due_ms] * asked.count)
"""


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of peers: one works, one cannot be installed, one lacks a program."""
    folder = tmp_path_factory.mktemp("peers")
    for name, requirement in (("fake", ""), ("nowhere", "./no-such-package\n")):
        (folder / name).mkdir()
        (folder / name / "peer.py").write_text(PEER)
        (folder / name / "requirements.txt").write_text(requirement)
    (folder / "fake" / "peer.toml").write_text(
        'kind = "python"\nserver = "none"\n[skip]\nbulk_send = "nothing to see"\n'
    )
    (folder / "unarmed").mkdir()
    (folder / "unarmed" / "peer.py").write_text("")
    (folder / "unarmed" / "peer.toml").write_text('needs = ["no-such-program-here"]\n')
    (folder / "notes").mkdir()
    return folder


@pytest.fixture(scope="module")
def fake(peers: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return install(find(peers)[0], tmp_path_factory.mktemp("build"))


@pytest.fixture
def server() -> Iterator[BenchServer]:
    with fresh_server() as fresh:
        yield fresh


@pytest.mark.full
def test_the_report_covers_lisa_and_the_peers(peers: Path, tmp_path: Path) -> None:
    arguments = ("--scale", "0.004", "--repeats", "1", "--only", "drain", "--only", "lateness")
    others = ("bulk_send", "single_send", "concurrent_send", "memory", *FURTHER)
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.comparison", "--peers", str(peers), *arguments]
        + [word for measure in others for word in ("--only", measure)]
        + ["--out", "report", "--json"],
        check=False,
        capture_output=True,
        text=True,
        timeout=170,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    told: dict[str, Any] = json.loads(done.stdout)
    assert [one for one in told["failed"] if one["of"] == "lisa"] == []
    files = {path.name for path in (tmp_path / "report").iterdir()}
    assert files == {"report.md", "report.json", "throughput.png", "lateness.png", "backlog.png"}
    assert set(FURTHER) <= {one["measure"] for one in told["figures"]}
    against = {one["against"]: one["verdict"] for one in told["targets"]}
    assert against["BullMQ on Node"] == "not measured"
    check_peers(told)


def test_quick_and_long_exclude_each_other() -> None:
    result = CliRunner().invoke(compare, ["--quick", "--long"])
    assert result.exit_code == 2


def check_peers(told: dict[str, Any]) -> None:
    """The working peer has figures; the report names missing figures with a reason."""
    assert told["versions"]["fake"]["fake"] == "1.0"
    figures = {(one["measure"], one["name"]) for one in told["figures"] if one["subject"] == "fake"}
    assert {("drain", "rate"), ("drain", "consumer"), ("lateness", "p50 half of capacity")} <= (
        figures
    )
    assert ("drain", "redis") not in figures
    reasons = {one["measure"]: one["why"] for one in told["failed"] if one["of"] == "fake"}
    assert reasons["bulk_send"] == "nothing to see"
    assert "the library says no" in reasons["single_send"]
    assert reasons["concurrent_send"] == "it has no asyncio API"
    assert reasons["memory"] == "its messages are not stored in Redis"
    assert told["missing"]["unarmed"] == "no-such-program-here is not on PATH"
    assert "installation failed" in told["missing"]["nowhere"]


def test_an_environment_is_kept_until_its_requirements_change(tmp_path: Path) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    (folder / "peer.py").write_text("print('{}')")
    (folder / "requirements.txt").write_text("")
    [peer] = find(tmp_path)
    trace = install(peer, tmp_path / "build").environment / "trace"
    trace.touch()
    install(peer, tmp_path / "build")
    assert trace.exists()
    (folder / "requirements.txt").write_text("# other\n")
    install(peer, tmp_path / "build")
    assert not trace.exists()


def test_a_peers_messages_are_counted_from_its_ledger(fake: Installed, server: BenchServer) -> None:
    with peer_at_work(fake, server, 50, 100.0) as work:
        drained = drain(work, 50, 3.0)
        assert drained.rate > 0
        assert len(drained.lateness_us) == 50
        assert min(drained.lateness_us) >= 0
        late_us = paced(work, 20, 100.0, 3.0).lateness_us
        assert min(late_us) >= 0
        due_us = sorted(work.ledger.read()[0])
        assert [due - due_us[0] for due in due_us] == [10_000 * number for number in range(20)]


def test_sending_after_the_due_time_is_an_error(fake: Installed, server: BenchServer) -> None:
    with (
        peer_at_work(fake, server, 10, 100.0) as work,
        pytest.raises(Fault, match="longer than the head start"),
    ):
        drain(work, 10, 0.0)


def broken(folder: Path, program: str) -> Installed:
    (folder / "peer").mkdir()
    (folder / "peer" / "peer.py").write_text(textwrap.dedent(program))
    (folder / "peer" / "requirements.txt").write_text("")
    [peer] = find(folder)
    return install(peer, folder / "build")


def test_a_worker_that_exits_is_reported_with_its_last_line(
    tmp_path: Path, server: BenchServer
) -> None:
    installed = broken(tmp_path, "raise SystemExit('no settings for this')")
    with (
        pytest.raises(Fault, match="no settings for this"),
        peer_at_work(installed, server, 1, 1.0),
    ):
        pass


def test_a_command_has_a_time_limit_and_leaves_nothing_behind(tmp_path: Path) -> None:
    installed = broken(
        tmp_path,
        """
        import pathlib, subprocess, sys, time
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        pathlib.Path("child").write_text(str(child.pid))
        time.sleep(60)
        """,
    )
    child = installed.peer.folder / "child"
    while not child.exists():  # on a busy machine, it may take longer until it has started
        with pytest.raises(Fault, match="took longer than 2 s"):
            installed.call("versions", timeout_s=2.0)
    wait_until(lambda: ended(int(child.read_text())))


def ended(pid: int) -> bool:
    """True if a process has ended, or is a zombie that init has not yet reaped."""
    told = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], check=False, capture_output=True, text=True
    ).stdout.strip()
    return not told or told.startswith("Z")


def test_output_that_is_not_json_is_an_error(tmp_path: Path) -> None:
    installed = broken(tmp_path, "print('hello')")
    with pytest.raises(Fault, match="printed no JSON: hello"):
        installed.call("versions", timeout_s=20.0)
