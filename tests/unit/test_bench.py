"""The benchmark's bookkeeping: figures, ledgers, targets, processor time, the report."""

import json
import pkgutil
from pathlib import Path
from unittest.mock import Mock

import pytest

from benchmarks.bench.measures import MEASURES, QUICK
from benchmarks.bench.report import BenchReport, number
from benchmarks.bench.results import (
    TARGETS,
    BoundVerdict,
    Results,
    Sense,
    Target,
    judge,
    quantile,
    quotient,
)
from benchmarks.bench.server import describe
from benchmarks.comparison import lisa_measures
from benchmarks.comparison import targets as comparison
from benchmarks.comparison.__main__ import FURTHER
from benchmarks.comparison.lisa_measures import backlog
from benchmarks.comparison.plots import draw


def filled() -> Results:
    """A run's results: a floor, Lisa and one peer, three repeats."""
    results = Results()
    for pace in (1.0, 1.1, 1.2):
        for measure, subject, name, value, unit in (
            ("bulk_send", "floor", "rate", 200_000 * pace, "1/s"),
            ("bulk_send", "lisa", "rate", 150_000 * pace, "1/s"),
            ("bulk_send", "lisa", "python", 2.5 / pace, "us"),
            ("drain", "floor", "allowed", 60_000 * pace, "1/s"),
            ("drain", "lisa", "rate", 42_000 * pace, "1/s"),
            ("drain", "slow|queue", "rate", 2_000 * pace, "1/s"),
            ("backlog", "lisa", backlog.figure(10_000), 4.0 * pace, "us"),
            ("backlog", "lisa", backlog.figure(10_000, "wall"), 8.0, "us"),
            ("backlog", "lisa", backlog.figure(1_000_000), 5.0 * pace, "us"),
            ("backlog", "lisa", backlog.figure(1_000_000, "wall"), 10.0, "us"),
        ):
            results.add(measure, subject, name, value, unit)
        for subject, late_us in (("floor", 20_000), ("lisa", 10_000)):
            lateness_us = list(range(late_us, late_us + 1_000))
            results.add_lateness("lateness", subject, lateness_us, "1,000/s")
    results.versions["slow|queue"] = {"kind": "python", "slow": "1.2.3"}
    results.missing["absent"] = "npm is not on PATH"
    results.failed["concurrent_send", "slow|queue"] = "it has no asyncio API"
    return results


def test_every_target_belongs_to_a_measure_and_every_measure_is_named() -> None:
    assert {target.measure for target in TARGETS} <= set(MEASURES)
    assert len(list(pkgutil.iter_modules(lisa_measures.__path__))) == len(FURTHER)
    assert {target.measure for target in comparison.TARGETS} <= {*MEASURES, *FURTHER}


def test_figures_quantiles_and_ratios() -> None:
    values = list(range(1, 101))
    assert [quantile(values, one) for one in (0.0, 0.5, 0.99, 0.999)] == [1, 50, 99, 100]
    results = Results()
    for value in (5.0, 1.0, 3.0):
        results.add("drain", "lisa", "rate", value, "1/s")
    [figure] = results.figures()
    assert (figure.low, figure.median, figure.high) == (1.0, 3.0, 5.0)
    results.add_lateness("lateness", "lisa", [-1, 0, 1, 2_000], "1,000/s")
    assert results.median("lateness", "lisa", "early 1,000/s") == 1, "by a microsecond"
    [early] = [one for one in judge(results) if one.target.what.startswith("early")]
    assert early.verdict is BoundVerdict.MISSED
    # The machine was half as fast in the second repeat: the ratio is unaffected.
    assert quotient([80.0, 40.0, 90.0], [100.0, 50.0, 100.0]) == 0.8
    assert quotient([], [1.0]) is None
    tiny = QUICK.scaled(0.01)
    assert (tiny.drain, tiny.single, tiny.repeats) == (300, 20, QUICK.repeats)


def test_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    least, most = Sense.AT_LEAST, Sense.AT_MOST
    cases: tuple[tuple[Sense, float, float | None, BoundVerdict], ...] = (
        (least, 0.5, 0.5, BoundVerdict.MET),
        (least, 0.5, 0.499, BoundVerdict.CLOSE),
        (least, 0.5, 0.399, BoundVerdict.MISSED),
        (most, 10.0, 10.0, BoundVerdict.MET),
        (most, 10.0, 11.9, BoundVerdict.CLOSE),
        (most, 0.0, 1.0, BoundVerdict.MISSED),
        (most, 1.0, None, BoundVerdict.UNKNOWN),
    )
    made = [Target("m", "what", "", one, bound, Mock(return_value=v)) for one, bound, v, _ in cases]
    monkeypatch.setattr("benchmarks.bench.results.TARGETS", tuple(made))
    assert [one.verdict for one in judge(Results())] == [verdict for *_, verdict in cases]


def test_the_report_says_machine_versions_spread_and_what_is_missing(tmp_path: Path) -> None:
    assert {"processor", "cores", "redis"} <= describe().keys()
    results, machine = filled(), {"processor": "Z80", "persistence": "none"}
    judged = judge(results)
    report = BenchReport(mode="full", repeats=3, machine=machine, judged=judged, results=results)
    report.write(tmp_path)
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    lines = (
        "| processor | Z80 |",
        "| lisa | 165,000 (150,000 to 180,000) |",
        "| slow\\|queue | slow 1.2.3 |",
        "| absent | npm is not on PATH |",
        "| slow\\|queue: concurrent_send | it has no asyncio API |",
        "| 1,000/s | lisa | 10.0 |",
    )
    assert [line for line in lines if line not in page] == []
    told = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert told["machine"]["processor"] == "Z80"
    wanted = {"measure": "drain", "subject": "lisa", "name": "rate"}
    [rate] = [one for one in told["figures"] if wanted.items() <= one.items()]
    assert rate["values"] == pytest.approx([42_000, 46_200, 50_400])
    assert rate["median"] == pytest.approx(46_200)
    assert told["missing"] == {"absent": "npm is not on PATH"}
    assert len(told["targets"]) == len(TARGETS)
    assert [number(one) for one in (None, 0.4567, 123_456.7)] == ["", "0.46", "123,457"]
    assert draw(results, tmp_path) == ["throughput.png", "lateness.png", "backlog.png"]
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
    assert draw(Results(), tmp_path) == []
