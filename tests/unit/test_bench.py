"""The benchmark's bookkeeping: figures, ledgers, targets, processor time, the report."""

from __future__ import annotations

import json
import pkgutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.comparison import lisa_measures
from benchmarks.comparison import targets as comparison
from benchmarks.comparison.__main__ import FURTHER
from benchmarks.comparison.lisa_measures import backlog
from benchmarks.comparison.plots import draw
from benchmarks.comparison.sizes import FurtherSizes
from lisa.cli.bench import measures, targets
from lisa.cli.bench.fault import Fault
from lisa.cli.bench.ledger import RECORD, Ledger, Writer
from lisa.cli.bench.machine import describe
from lisa.cli.bench.processes import cpu_seconds, descendants, tree_cpu_seconds
from lisa.cli.bench.report import BenchReport, number, table
from lisa.cli.bench.results import Results, quantile
from lisa.cli.bench.sizes import QUICK
from lisa.cli.bench.targets import BoundVerdict, Sense, Target, judge, quotient


def filled() -> Results:
    """A run's results: a floor, Lisa and one peer, three repeats."""
    results = Results()
    for repeat in range(3):
        pace = 1.0 + repeat / 10
        results.add("bulk_send", "floor", "rate", 200_000 * pace, "1/s")
        results.add("bulk_send", "lisa", "rate", 150_000 * pace, "1/s")
        results.add("bulk_send", "lisa", "python", 2.5 / pace, "us")
        results.add("drain", "floor", "allowed", 60_000 * pace, "1/s")
        results.add("drain", "lisa", "rate", 42_000 * pace, "1/s")
        results.add("drain", "slow|queue", "rate", 2_000 * pace, "1/s")
        for waiting, spent_us in ((10_000, 4.0), (1_000_000, 5.0)):
            results.add("backlog", "lisa", backlog.figure(waiting), spent_us * pace, "us")
            results.add("backlog", "lisa", backlog.figure(waiting, "wall"), spent_us * 2, "us")
        for subject, late_us in (("floor", 20_000), ("lisa", 10_000)):
            lateness_us = [late_us + number for number in range(1_000)]
            results.add_lateness("lateness", subject, lateness_us, "1,000/s")
    results.versions["slow|queue"] = {"kind": "python", "slow": "1.2.3"}
    results.missing["absent"] = "npm is not on PATH"
    results.failed["concurrent_send", "slow|queue"] = "it has no asyncio API"
    return results


@pytest.mark.parametrize(
    ("fraction", "expected"), [(0.0, 1), (0.5, 50), (0.99, 99), (0.999, 100), (1.0, 100)]
)
def test_a_quantile_is_a_value_that_was_measured(fraction: float, expected: int) -> None:
    assert quantile(list(range(1, 101)), fraction) == expected


def test_a_figure_has_a_median_and_a_spread() -> None:
    results = Results()
    for value in (5.0, 1.0, 3.0):
        results.add("drain", "lisa", "rate", value, "1/s")
    [figure] = results.figures()
    assert (figure.low, figure.median, figure.high) == (1.0, 3.0, 5.0)
    assert figure.values == (5.0, 1.0, 3.0)


def test_lateness_counts_messages_early_by_a_microsecond() -> None:
    results = Results()
    results.add_lateness("lateness", "lisa", [-1, 0, 1, 2_000], "1,000/s")
    assert results.median("lateness", "lisa", "early 1,000/s") == 1
    assert results.median("lateness", "lisa", "max 1,000/s") == 2.0
    assert [one.verdict for one in judge(results) if one.target.what.startswith("early")] == [
        BoundVerdict.MISSED
    ]


def test_a_ratio_is_the_median_of_each_repeats_own() -> None:
    # The machine was half as fast in the second repeat: the ratio is unaffected.
    assert quotient([80.0, 40.0, 90.0], [100.0, 50.0, 100.0]) == 0.8
    assert quotient([80.0, 40.0], [100.0, 50.0, 110.0]) == 0.6
    assert quotient([], [1.0]) is None


@pytest.mark.parametrize(
    ("sense", "bound", "value", "verdict"),
    [
        (Sense.AT_LEAST, 0.5, 0.5, BoundVerdict.MET),
        (Sense.AT_LEAST, 0.5, 0.499, BoundVerdict.CLOSE),
        (Sense.AT_LEAST, 0.5, 0.399, BoundVerdict.MISSED),
        (Sense.AT_MOST, 10.0, 10.0, BoundVerdict.MET),
        (Sense.AT_MOST, 10.0, 11.9, BoundVerdict.CLOSE),
        (Sense.AT_MOST, 10.0, 12.1, BoundVerdict.MISSED),
        (Sense.AT_MOST, 0.0, 0.0, BoundVerdict.MET),
        (Sense.AT_MOST, 0.0, 1.0, BoundVerdict.MISSED),
        (Sense.AT_MOST, 1.0, None, BoundVerdict.UNKNOWN),
    ],
)
def test_verdicts(
    monkeypatch: pytest.MonkeyPatch,
    sense: Sense,
    bound: float,
    value: float | None,
    verdict: BoundVerdict,
) -> None:
    target = Target("m", "what", "against", sense, bound, lambda _: value)
    monkeypatch.setattr(targets, "TARGETS", (target,))
    [judged] = judge(Results())
    assert judged.verdict is verdict


def test_the_table_is_filled_from_what_was_measured() -> None:
    found = {one.target.what: one for one in judge(filled())}
    assert found["send_many, generated ids"].value == pytest.approx(0.75)
    assert found["drain, one manager, one consumer"].value == pytest.approx(0.7)
    assert found["Python CPU a message, send_many"].verdict is BoundVerdict.MET
    assert found["lateness at 1,000/s, p50"].value == pytest.approx(10.499 / 20.499, rel=1e-3)
    assert found["early, in all measures"].value == 0
    judged = judge(filled(), comparison.TARGETS)
    found = {one.target.what: one for one in judged}
    assert found[
        "Redis CPU a promoted message, most waiting, embedded Valkey"
    ].value == pytest.approx(1.25)
    assert found["lisa --help"].verdict is BoundVerdict.UNKNOWN
    drains = {one.target.against: one for one in judged if one.target.what == "drain"}
    assert drains["the fastest peer in Python"].value == pytest.approx(21.0)
    assert drains["BullMQ on Node"].verdict is BoundVerdict.UNKNOWN


def test_every_target_belongs_to_a_measure_and_every_measure_is_named() -> None:
    from lisa.cli.bench.command import MEASURES

    modules = {one.name for one in pkgutil.iter_modules(measures.__path__)}
    assert modules == set(MEASURES)
    assert {target.measure for target in targets.TARGETS} <= set(MEASURES)
    assert len(list(pkgutil.iter_modules(lisa_measures.__path__))) == len(FURTHER)
    assert {target.measure for target in comparison.TARGETS} <= {*MEASURES, *FURTHER}


def test_scaled_sizes_leave_the_mode_as_it_is() -> None:
    tiny = QUICK.scaled(0.01)
    assert (tiny.drain, tiny.single, tiny.repeats) == (300, 20, QUICK.repeats)
    assert max(FurtherSizes.of("long").waiting) == 10_000_000
    assert max(FurtherSizes.of("full").scaled(0.01).waiting) == 10_000


def test_a_ledger_is_read_as_it_grows(tmp_path: Path) -> None:
    first, second = Writer(tmp_path / "1.ledger"), Writer(tmp_path / "2.ledger")
    first.note(RECORD.pack(1_000, 1_500))
    ledger = Ledger(tmp_path)
    ledger.wait(1, 5.0, lambda: None)
    ledger.mark()
    assert ledger.count() == 0
    first.note(RECORD.pack(2_000, 2_001))
    second.note(RECORD.pack(3_000, 2_999))
    first.close()
    second.close()
    assert ledger.count() == 2
    due, handled = ledger.read()
    assert sorted(zip(due, handled, strict=True)) == [(2_000, 2_001), (3_000, 2_999)]
    assert ledger.writers() == 2


def test_a_record_is_two_little_endian_integers_and_half_a_one_does_not_count(
    tmp_path: Path,
) -> None:
    whole = struct.pack("<q", 5) + struct.pack("<q", 2**40)
    (tmp_path / "9-1.ledger").write_bytes(whole + whole[:7])
    ledger = Ledger(tmp_path)
    assert ledger.count() == 1
    assert [list(column) for column in ledger.read()] == [[5], [2**40]]


def test_waiting_for_records_has_an_end_and_looks_after_the_workers(tmp_path: Path) -> None:
    with pytest.raises(Fault, match="0 of 3 messages"):
        Ledger(tmp_path).wait(3, 0.05, lambda: None)

    def dead() -> None:
        raise Fault("the consumer ended with 1")

    with pytest.raises(Fault, match="ended with 1"):
        Ledger(tmp_path).wait(3, 60.0, dead)


def test_processor_time_is_that_of_a_process_and_its_children() -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    nested = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {busy!r}])"
    with subprocess.Popen(
        [sys.executable, "-c", nested], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert len(descendants(process.pid)) == 2
        assert 0.3 <= tree_cpu_seconds(process.pid) < 0.3 + 2.0
        assert cpu_seconds(process.pid) < tree_cpu_seconds(process.pid)
        process.communicate(b"\n")
    assert cpu_seconds(process.pid) == 0.0


def test_our_own_processor_time_is_what_python_says() -> None:
    import os

    assert cpu_seconds(os.getpid()) == pytest.approx(time.process_time(), abs=0.05)


def report() -> BenchReport:
    results = filled()
    return BenchReport(
        mode="full",
        repeats=3,
        machine={"processor": "Z80", "persistence": "none"},
        judged=judge(results),
        results=results,
    )


def test_the_report_says_machine_versions_spread_and_what_is_missing(tmp_path: Path) -> None:
    report().write(tmp_path)
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "| processor | Z80 |" in page
    assert "| persistence | none |" in page
    assert "| lisa | 165,000 (150,000 to 180,000) |" in page
    assert "| slow\\|queue | slow 1.2.3 |" in page
    assert "| absent | npm is not on PATH |" in page
    assert "| slow\\|queue: concurrent_send | it has no asyncio API |" in page
    assert "| 1,000/s | lisa | 10.0 |" in page


def test_the_json_report_is_complete(tmp_path: Path) -> None:
    report().write(tmp_path)
    told = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    assert told["machine"]["processor"] == "Z80"
    rate = next(
        one
        for one in told["figures"]
        if (one["measure"], one["subject"], one["name"]) == ("drain", "lisa", "rate")
    )
    assert rate["values"] == pytest.approx([42_000, 46_200, 50_400])
    assert rate["median"] == pytest.approx(46_200)
    assert told["missing"] == {"absent": "npm is not on PATH"}
    assert len(told["targets"]) == len(targets.TARGETS)


def test_tables_keep_their_columns_whatever_a_cell_holds() -> None:
    assert table(("a", "b"), [("x|y", "two\nlines")]).splitlines()[-1] == "| x\\|y | two lines |"


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, ""), (0.0, "0"), (0.4567, "0.46"), (12.34, "12.3"), (123_456.7, "123,457")],
)
def test_figures_have_three_digits(value: float | None, shown: str) -> None:
    assert number(value) == shown


def test_plots_are_drawn(tmp_path: Path) -> None:
    assert draw(filled(), tmp_path) == ["throughput.png", "lateness.png", "backlog.png"]
    for path in tmp_path.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.stat().st_size > 5_000


def test_nothing_is_drawn_without_results(tmp_path: Path) -> None:
    assert draw(Results(), tmp_path) == []


def test_the_machine_is_described() -> None:
    told = describe()
    assert int(told["cores"]) >= 1
    assert told["processor"]
    assert told["redis"][0].isdigit()
