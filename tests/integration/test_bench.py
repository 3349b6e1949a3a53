"""`lisa bench` with small numbers: measures, targets, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from click.testing import CliRunner

from lisa.cli.bench import floor, targets
from lisa.cli.bench.command import MEASURES
from lisa.cli.bench.fault import Fault
from lisa.cli.bench.run import Run
from lisa.cli.bench.server import BenchServer
from lisa.cli.main import main
from tests.servers import ROOT, connect


def bench(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("LISA_")}
    return subprocess.run(
        [sys.executable, "-m", "lisa.cli.main", "bench", *arguments],
        check=False,
        capture_output=True,
        text=True,
        timeout=170,
        cwd=cwd,
        # A prefix that no role accepts: benchmarks use default settings.
        env={**environ, "PYTHONPATH": str(ROOT), "LISA_PREFIX": "{}"},
    )


@pytest.mark.full
def test_every_measure_runs_and_reports(tmp_path: Path) -> None:
    done = bench(
        "--scale",
        "0.004",
        "--repeats",
        "1",
        "--out",
        "report",
        "--json",
        cwd=tmp_path,
    )
    told: dict[str, Any] = json.loads(done.stdout)
    assert [one for one in told["failed"] if one["of"] == "lisa"] == []
    measured = {one["measure"] for one in told["figures"]}
    assert measured == set(MEASURES)
    early = [one for one in told["figures"] if one["name"].startswith("early")]
    assert early
    assert [one for one in early if any(one["values"])] == []
    assert [one for one in told["figures"] if min(one["values"]) < 0] == []
    missed = any(one["verdict"] == "missed" for one in told["targets"])
    assert done.returncode == int(missed), done.stderr
    files = {path.name for path in (tmp_path / "report").iterdir()}
    assert files == {"report.md", "report.json"}


def test_the_memory_target_is_met_and_the_exit_code_says_so(tmp_path: Path) -> None:
    done = bench("--quick", "--only", "memory", "--repeats", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "memory a waiting message, embedded Valkey" in done.stdout
    assert "drain" not in done.stdout


def invoke(
    monkeypatch: pytest.MonkeyPatch, measure: Callable[[Run], None], bound: float
) -> tuple[int, str]:
    """Exit code and output of a run with only the given measure and one target."""
    target = targets.Target(
        "memory", "the figure", "", targets.Sense.AT_MOST, bound, targets.plain("memory", "x"), "B"
    )
    monkeypatch.setattr(targets, "TARGETS", (target,))
    monkeypatch.setattr("lisa.cli.bench.measures.memory.measure", measure)
    monkeypatch.setattr("lisa.cli.bench.command._clear_settings", lambda: None)
    result = CliRunner().invoke(main, ["bench", "--quick", "--only", "memory"])
    return result.exit_code, result.stdout


@pytest.mark.parametrize(
    ("bound", "code", "verdict"),
    [(120.0, 0, "met"), (90.0, 0, "missed by less than 20 %"), (80.0, 1, "missed")],
)
def test_exit_codes(monkeypatch: pytest.MonkeyPatch, bound: float, code: int, verdict: str) -> None:
    def measure(run: Run) -> None:
        run.results.add("memory", "lisa", "x", 100.0, "B")

    ended, said = invoke(monkeypatch, measure, bound)
    assert ended == code
    assert said.splitlines()[-1].rstrip().endswith(verdict)


def test_a_failed_measure_is_reported_and_fails_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(run: Run) -> None:
        raise Fault(f"nothing came in {run.sizes.repeats} repeats")

    ended, said = invoke(monkeypatch, measure, 1.0)
    assert ended == 1
    assert "memory of lisa was not measured: nothing came in 3 repeats" in said


def test_usage(tmp_path: Path) -> None:
    assert bench("--only", "nothing", cwd=tmp_path).returncode == 2


def test_the_floor_leaves_tombstones_and_nothing_else(redis_url: str) -> None:
    server = BenchServer(redis_url)
    steps = floor.life(server, 1_200)
    assert list(steps) == ["send", "promote", "read", "settle"]
    assert all(redis_us > 0 for redis_us in steps.values())
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
    """The number of remaining keys of each kind; the stream must be empty."""
    found: dict[str, int] = {}
    for key in client.scan_iter(count=1_000):
        if b":reply:" in key:
            continue
        kind = "done" if b":done:" in key else key.rpartition(b":")[2].decode()
        found[kind] = found.get(kind, 0) + 1
        if kind == "ready":
            assert client.xlen(key) == 0
    return found
