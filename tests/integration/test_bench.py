"""`lisa bench` for real, with small numbers: measures, peers by their protocol, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from lisa.cli.bench import floor, targets
from lisa.cli.bench.command import MEASURES
from lisa.cli.bench.fault import Fault
from lisa.cli.bench.measures import all as measures
from lisa.cli.bench.peer_work import peer_at_work
from lisa.cli.bench.peers import Installed, find, install
from lisa.cli.bench.run import Run
from lisa.cli.bench.server import Server, fresh_server
from lisa.cli.bench.work import drain, lateness
from lisa.cli.main import main
from tests.servers import ROOT, connect

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
    """A folder of peers: one that works, one that cannot be installed, one that lacks a program."""
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
def server() -> Iterator[Server]:
    with fresh_server() as fresh:
        yield fresh


def bench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LISA_")}
    return subprocess.run(
        [sys.executable, "-m", "lisa.cli.main", "bench", *arguments],
        check=False, capture_output=True, text=True, timeout=170, cwd=cwd,
        # A prefix that no role would accept: what is measured has default settings.
        env={**environ, "PYTHONPATH": str(ROOT), "LISA_PREFIX": "{}"},
    )  # fmt: skip


def test_every_measure_runs_and_reports(peers: Path, tmp_path: Path) -> None:
    done = bench(
        "--scale", "0.004", "--repeats", "1", "--peers", str(peers), "--out", "report", "--json",
        cwd=tmp_path,
    )  # fmt: skip
    told: dict[str, Any] = json.loads(done.stdout)
    assert [one for one in told["failed"] if one["of"] == "lisa"] == []
    measured = {one["measure"] for one in told["figures"] if one["subject"] != "fake"}
    assert measured == set(MEASURES)
    early = [one for one in told["figures"] if one["name"].startswith("early")]
    assert early
    assert [one for one in early if any(one["values"])] == []
    assert all(value >= 0 for one in told["figures"] for value in one["values"])
    missed = any(one["verdict"] == "missed" for one in told["targets"])
    assert done.returncode == int(missed), done.stderr
    check_peers(told)
    files = {path.name for path in (tmp_path / "report").iterdir()}
    assert files == {"report.md", "report.json", "throughput.png", "lateness.png", "backlog.png"}


def check_peers(told: dict[str, Any]) -> None:
    """The working peer has figures; what is missing is named with its reason."""
    assert told["versions"]["fake"]["fake"] == "1.0"
    figures = {(one["measure"], one["name"]) for one in told["figures"]
               if one["subject"] == "fake"}  # fmt: skip
    assert {("drain", "rate"), ("drain", "consumer"), ("lateness", "p50 half of capacity")} <= (
        figures
    )
    assert ("drain", "redis") not in figures
    reasons = {one["measure"]: one["why"] for one in told["failed"] if one["of"] == "fake"}
    assert reasons["bulk_send"] == "nothing to see"
    assert "the library says no" in reasons["single_send"]
    assert reasons["concurrent_send"] == "it has no asyncio face"
    assert reasons["memory"] == "its messages do not lie in Redis"
    assert told["missing"]["unarmed"] == "no-such-program-here is not on PATH"
    assert "cannot be installed" in told["missing"]["nowhere"]


def test_the_memory_target_is_met_and_the_exit_code_says_so(tmp_path: Path) -> None:
    done = bench("--quick", "--only", "memory", "--repeats", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "memory a waiting message, embedded Valkey" in done.stdout
    assert "drain" not in done.stdout


def invoke(
    monkeypatch: pytest.MonkeyPatch, measure: Callable[[Run], None], bound: float
) -> tuple[int, str]:
    """Exit code and output of a run that only has the given measure and one target."""
    target = targets.Target("help", "the figure", "", targets.Sense.AT_MOST, bound,
                            targets.plain("help", "time"), "ms")  # fmt: skip
    monkeypatch.setattr(targets, "TARGETS", (target,))
    monkeypatch.setitem(measures.MODULES, "help", measure)
    monkeypatch.setattr("lisa.cli.bench.command._default_settings", lambda: None)
    result = CliRunner().invoke(main, ["bench", "--quick", "--only", "help"])
    return result.exit_code, result.stdout


@pytest.mark.parametrize(
    ("bound", "code", "verdict"),
    [(120.0, 0, "met"), (90.0, 0, "missed by less than 20 %"), (80.0, 1, "missed")],
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, bound: float, code: int, verdict: str) -> None:
    def measure(run: Run) -> None:
        run.results.add("help", "lisa", "time", 100.0, "ms")

    ended, said = invoke(monkeypatch, measure, bound)
    assert ended == code
    assert said.splitlines()[-1].rstrip().endswith(verdict)


def test_a_measure_that_breaks_off_is_told_and_fails_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(run: Run) -> None:
        raise Fault(f"nothing came in {run.sizes.repeats} repeats")

    ended, said = invoke(monkeypatch, measure, 1.0)
    assert ended == 1
    assert "help of lisa was not measured: nothing came in 3 repeats" in said


def test_usage(tmp_path: Path) -> None:
    assert bench("--quick", "--long", cwd=tmp_path).returncode == 2
    assert bench("--only", "nothing", cwd=tmp_path).returncode == 2
    assert bench("--peers", "nowhere", cwd=tmp_path).returncode == 2


def test_the_floor_leaves_tombstones_and_nothing_else(redis_url: str) -> None:
    server = Server(redis_url)
    steps = floor.life(server, 1_200)
    assert list(steps) == ["send", "promote", "read", "settle"]
    assert all(step.redis_us > 0 and step.wall_us > 0 for step in steps.values())
    with connect(redis_url) as client:
        assert left(client) == {"done": 1_200, "ready": 1}
        client.flushall()
        floor.life(server, 1_200, bare=True)
        assert left(client) == {"ready": 1}
        client.flushall()
        assert server.knows("MSETEX")
        assert not server.knows("MSETEXES")
        floor.life(server, 1_200, msetex=True)
        assert left(client) == {"done": 1_200, "ready": 1}


def left(client: redis.Redis) -> dict[str, int]:
    """How many keys of each kind are left; the stream must be empty."""
    found: dict[str, int] = {}
    for key in client.scan_iter(count=1_000):
        kind = "done" if b":done:" in key else key.rpartition(b":")[2].decode()
        found[kind] = found.get(kind, 0) + 1
        if kind == "ready":
            assert client.xlen(key) == 0
    return found


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


def test_a_peer_is_counted_by_its_ledger(fake: Installed, server: Server) -> None:
    with peer_at_work(fake, server, 50, 100.0) as work:
        drained = drain(work, 50, 3.0)
        assert drained.rate > 0
        assert len(drained.lateness_us) == 50
        assert min(drained.lateness_us) >= 0
        late_us = lateness(work, 20, 100.0, 3.0)
        assert min(late_us) >= 0
        due_us = sorted(work.ledger.read()[0])
        assert [due - due_us[0] for due in due_us] == [10_000 * number for number in range(20)]


def test_messages_sent_too_late_are_no_measurement(fake: Installed, server: Server) -> None:
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


def test_a_worker_that_ends_is_told_in_its_last_words(tmp_path: Path, server: Server) -> None:
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
    with pytest.raises(Fault, match="took longer than 2 s"):
        installed.call("versions", timeout_s=2.0)
    child = int((installed.peer.folder / "child").read_text())
    assert ended(child)


def ended(pid: int) -> bool:
    """Whether a process has gone, or is a zombie that init has not yet collected."""
    told = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(pid)], check=False, capture_output=True, text=True
    ).stdout.strip()
    return not told or told.startswith("Z")


def test_an_answer_that_is_no_json_is_a_fault(tmp_path: Path) -> None:
    installed = broken(tmp_path, "print('hello')")
    with pytest.raises(Fault, match="printed no JSON: hello"):
        installed.call("versions", timeout_s=20.0)
