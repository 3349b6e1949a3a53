"""Benchmarks in small: of Lisa alone, and the comparison with other queues."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks.bench.__main__ import bench
from benchmarks.bench.measures import MEASURES, Run
from benchmarks.bench.results import Fault, Sense, Target, plain
from benchmarks.comparison.__main__ import FURTHER, compare
from tests.programs import python
from tests.servers import ROOT


def run(*module: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # A prefix that no role accepts: benchmarks use default settings.
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LISA_")}
    env = clean | {"PYTHONPATH": str(ROOT), "LISA_PREFIX": "{}"}
    return python("-m", *module, check=False, cwd=cwd, env=env)


@pytest.mark.full
def test_every_measure_or_one_runs_and_reports(tmp_path: Path) -> None:
    options = ("--scale", "0.004", "--repeats", "1", "--out", "report", "--json")
    done = run("benchmarks.bench", *options, cwd=tmp_path)
    told: dict[str, Any] = json.loads(done.stdout)
    assert [one for one in told["failed"] if one["of"] == "lisa"] == []
    assert {one["measure"] for one in told["figures"]} == set(MEASURES)
    assert min(min(one["values"]) for one in told["figures"]) >= 0
    early = [one["values"] for one in told["figures"] if one["name"].startswith("early")]
    assert early
    assert not any(map(any, early))
    missed = any(one["verdict"] == "missed" for one in told["targets"])
    assert done.returncode == int(missed), done.stderr
    assert {path.name for path in (tmp_path / "report").iterdir()} == {"report.md", "report.json"}
    memory = ("--quick", "--only", "memory", "--repeats", "1")
    done = run("benchmarks.bench", *memory, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "memory a waiting message, embedded Valkey" in done.stdout
    assert "drain" not in done.stdout
    assert CliRunner().invoke(bench, ["--only", "nothing"]).exit_code == 2
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

    value = plain("memory", "x")
    target = Target("memory", "it", "", Sense.AT_MOST, bound or 1.0, value, "B")
    monkeypatch.setattr("benchmarks.bench.results.TARGETS", (target,))
    monkeypatch.setitem(MEASURES, "memory", measure)
    monkeypatch.setattr("benchmarks.bench.__main__.clear_settings", lambda: None)
    result = CliRunner().invoke(bench, ["--quick", "--only", "memory"])
    assert result.exit_code == code
    assert any(line.rstrip().endswith(verdict) for line in result.stdout.splitlines())


@pytest.mark.full
def test_the_comparison_covers_lisa_and_says_why_a_peer_is_missing(tmp_path: Path) -> None:
    peers = tmp_path / "peers"
    for name, requirement, described in (
        ("nowhere", "./no-such-package\n", ""),
        ("unarmed", "", 'needs = ["no-such-program-here"]\n'),
    ):
        (peers / name).mkdir(parents=True)
        (peers / name / "peer.py").write_text("")
        (peers / name / "requirements.txt").write_text(requirement)
        (peers / name / "peer.toml").write_text(described)
    only = [word for measure in ("drain", "lateness", *FURTHER) for word in ("--only", measure)]
    options = ("--scale", "0.004", "--repeats", "1", "--out", "report", "--json")
    done = run("benchmarks.comparison", "--peers", str(peers), *options, *only, cwd=tmp_path)
    told: dict[str, Any] = json.loads(done.stdout)
    assert [one for one in told["failed"] if one["of"] == "lisa"] == []
    files = {path.name for path in (tmp_path / "report").iterdir()}
    assert files == {"report.md", "report.json", "throughput.png", "lateness.png", "backlog.png"}
    assert set(FURTHER) <= {one["measure"] for one in told["figures"]}
    against = {one["against"]: one["verdict"] for one in told["targets"]}
    assert against["BullMQ on Node"] == "not measured"
    assert told["missing"]["unarmed"] == "no-such-program-here is not on PATH"
    assert "installation failed" in told["missing"]["nowhere"]


@pytest.mark.full
def test_the_benchmark_of_coalescing_sends_in_small(tmp_path: Path) -> None:
    options = ("--sends", "2000", "--keys", "20", "--rate", "1000")
    done = run("benchmarks.coalesce", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(" met") == 5
