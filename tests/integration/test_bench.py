"""Benchmarks in small: `lisa bench`, and the comparison with other queues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.comparison.__main__ import FURTHER, compare
from lisa.cli.bench import targets
from lisa.cli.bench.command import MEASURES
from lisa.cli.bench.fault import Fault
from lisa.cli.bench.run import Run
from lisa.cli.main import main
from tests.servers import ROOT


def run(*module: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LISA_")}
    return subprocess.run(
        [sys.executable, "-m", *module],
        check=False,
        capture_output=True,
        text=True,
        timeout=600,
        cwd=cwd,
        # A prefix that no role accepts: benchmarks use default settings.
        env={**clean, "PYTHONPATH": str(ROOT), "LISA_PREFIX": "{}"},
    )


@pytest.mark.full
def test_every_measure_runs_and_reports(tmp_path: Path) -> None:
    options = ("--scale", "0.004", "--repeats", "1", "--out", "report", "--json")
    done = run("lisa.cli.main", "bench", *options, cwd=tmp_path)
    told: dict[str, Any] = json.loads(done.stdout)
    assert [one for one in told["failed"] if one["of"] == "lisa"] == []
    assert {one["measure"] for one in told["figures"]} == set(MEASURES)
    early = [one for one in told["figures"] if one["name"].startswith("early")]
    assert early
    assert [one for one in early if any(one["values"])] == []
    assert [one for one in told["figures"] if min(one["values"]) < 0] == []
    missed = any(one["verdict"] == "missed" for one in told["targets"])
    assert done.returncode == int(missed), done.stderr
    files = {path.name for path in (tmp_path / "report").iterdir()}
    assert files == {"report.md", "report.json"}


def test_one_measure_and_usage(tmp_path: Path) -> None:
    memory = ("--quick", "--only", "memory", "--repeats", "1")
    done = run("lisa.cli.main", "bench", *memory, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "memory a waiting message, embedded Valkey" in done.stdout
    assert "drain" not in done.stdout
    assert CliRunner().invoke(main, ["bench", "--only", "nothing"]).exit_code == 2
    assert CliRunner().invoke(compare, ["--quick", "--long"]).exit_code == 2


@pytest.mark.parametrize(
    ("bound", "code", "verdict"),
    [
        (120.0, 0, "met"),
        (90.0, 0, "missed by less than 20 %"),
        (80.0, 1, "missed"),
        (None, 1, "memory of lisa was not measured: nothing came in 3 repeats"),
    ],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch, bound: float | None, code: int, verdict: str
) -> None:
    def measure(run: Run) -> None:
        if bound is None:
            raise Fault(f"nothing came in {run.sizes.repeats} repeats")
        run.results.add("memory", "lisa", "x", 100.0, "B")

    plain = targets.plain("memory", "x")
    target = targets.Target("memory", "it", "", targets.Sense.AT_MOST, bound or 1.0, plain, "B")
    monkeypatch.setattr(targets, "TARGETS", (target,))
    monkeypatch.setattr("lisa.cli.bench.measures.memory.measure", measure)
    monkeypatch.setattr("lisa.cli.bench.command._clear_settings", lambda: None)
    result = CliRunner().invoke(main, ["bench", "--quick", "--only", "memory"])
    assert result.exit_code == code
    assert any(line.rstrip().endswith(verdict) for line in result.stdout.splitlines())


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


@pytest.mark.full
def test_the_report_covers_lisa_and_the_peers(tmp_path: Path) -> None:
    """One peer works, one cannot be installed, one lacks a program."""
    peers = tmp_path / "peers"
    peers.mkdir()
    about = 'kind = "python"\nserver = "none"\n[skip]\nbulk_send = "nothing to see"\n'
    for name, requirement, described in (
        ("fake", "", about),
        ("nowhere", "./no-such-package\n", ""),
        ("unarmed", "", 'needs = ["no-such-program-here"]\n'),
    ):
        (peers / name).mkdir()
        (peers / name / "peer.py").write_text(PEER)
        (peers / name / "requirements.txt").write_text(requirement)
        (peers / name / "peer.toml").write_text(described)
    measures = ("drain", "lateness", "bulk_send", "single_send", "concurrent_send", "memory")
    only = [word for measure in (*measures, *FURTHER) for word in ("--only", measure)]
    options = ("--scale", "0.004", "--repeats", "1", "--out", "report", "--json")
    done = run("benchmarks.comparison", "--peers", str(peers), *options, *only, cwd=tmp_path)
    told: dict[str, Any] = json.loads(done.stdout)
    assert [one for one in told["failed"] if one["of"] == "lisa"] == []
    files = {path.name for path in (tmp_path / "report").iterdir()}
    assert files == {"report.md", "report.json", "throughput.png", "lateness.png", "backlog.png"}
    assert set(FURTHER) <= {one["measure"] for one in told["figures"]}
    against = {one["against"]: one["verdict"] for one in told["targets"]}
    assert against["BullMQ on Node"] == "not measured"
    assert told["versions"]["fake"]["fake"] == "1.0"
    figures = {(one["measure"], one["name"]) for one in told["figures"] if one["subject"] == "fake"}
    expected = {("drain", "rate"), ("drain", "consumer"), ("lateness", "p50 half of capacity")}
    assert expected <= figures
    assert ("drain", "redis") not in figures
    late = [one for one in told["figures"] if one["subject"] == "fake" and one["name"] == "early"]
    assert not any(any(one["values"]) for one in late)
    reasons = {one["measure"]: one["why"] for one in told["failed"] if one["of"] == "fake"}
    assert reasons["bulk_send"] == "nothing to see"
    assert "the library says no" in reasons["single_send"]
    assert reasons["concurrent_send"] == "it has no asyncio API"
    assert reasons["memory"] == "its messages are not stored in Redis"
    assert told["missing"]["unarmed"] == "no-such-program-here is not on PATH"
    assert "installation failed" in told["missing"]["nowhere"]
