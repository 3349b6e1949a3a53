"""The torture run itself, short, and its options and faults; `make torture` runs any length."""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.servers import ROOT
from tests.torture.__main__ import RELEASE, is_known, parse, torture
from tests.torture.checker import Verdicts
from tests.torture.faults import KINDS, draw
from tests.torture.ledger import Ledger
from tests.torture.stage import shifted

KNOWN = "after its window closed"
"""A fault of Lisa that is not fixed yet: a message may start although its window is closed."""


def run(out: Path, arguments: str) -> Verdicts:
    """A run's verdicts; `make torture` accuses Lisa of the known fault, too."""
    verdicts = torture(parse([*arguments.split(), "--out", str(out)]), print)
    accusations = [finding for found in verdicts.guilty.values() for finding in found]
    assert not [finding for finding in accusations if KNOWN not in finding.what]
    return verdicts


def run_with_every_fault(out: Path, arguments: str) -> Verdicts:
    verdicts = run(out, arguments)
    report = json.loads((out / "report.json").read_text(encoding="utf-8"))
    options = report["options"]
    assert set(report["faults"]) == set(options["kinds"]), report["skipped"]
    for count in ("confirmed", "handlings: ok"):
        assert verdicts.counts[count] > 0.25 * options["rate"] * options["minutes"] * 60
    return verdicts


@pytest.mark.sample
@pytest.mark.full
def test_twenty_seconds(tmp_path: Path) -> None:
    kinds = "kill-*,server-kill,lose-replies,cut"
    run_with_every_fault(tmp_path, f"--minutes 0.34 --rate 300 --seed 1 --faults {kinds}")


@pytest.mark.full
def test_three_quarters_of_a_minute_of_every_fault(tmp_path: Path) -> None:
    options = "--minutes 0.75 --rate 300 --seed 1 --gateway"
    counts = run_with_every_fault(tmp_path, options).counts
    assert counts["handlings held to account"] > 0
    assert counts["handlings with a window"] > 0
    assert counts["handlings with a key"] > counts["leases held to account"] > 0
    assert counts["ticks"] > 45  # three schedules, two of them with a tick each second


BEFORE_THE_REDESIGN = "cf56ca8"


@pytest.mark.full
@pytest.mark.parametrize("build", [RELEASE, BEFORE_THE_REDESIGN])
def test_a_rolling_restart_from_an_earlier_build(tmp_path: Path, build: str) -> None:
    if not is_known(build):
        pytest.skip(f"no commit {build}: not a complete clone")
    kinds = "roll,kill-consumer,kill-manager,cut"
    options = f"--minutes 0.5 --rate 300 --seed 1 --gateway --earlier {build} --faults {kinds}"
    assert run(tmp_path, options).counts["confirmed"] > 0.25 * 30 * 300
    lines = (tmp_path / "stage.jsonl").read_text(encoding="utf-8").splitlines()
    events = [json.loads(line) for line in lines]
    starts = [(event["role"], event["earlier"]) for event in events if event["event"] == "start"]
    first, last = dict(reversed(starts)), dict(starts)
    assert all(first.values())
    assert not any(last.values())


@pytest.mark.slow
@pytest.mark.parametrize(("persistence", "seed"), [("always", 2), ("everysec", 3), ("snapshot", 4)])
def test_three_minutes(tmp_path: Path, persistence: str, seed: int) -> None:
    run(tmp_path, f"--seed {seed} --gateway --persistence {persistence}")


# Options


def test_a_seed_selects_the_faults() -> None:
    options = parse(["--minutes", "100", "--seed", "3", "--every", "2", "--gateway"])
    plan, kinds = draw(options), options.kinds
    assert plan == draw(options)
    assert plan != draw(options._replace(seed=4))
    drawn = [fault.kind for fault in plan]
    for n in range(2):  # each occurs before any recurs
        assert sorted(drawn[n * len(kinds) : (n + 1) * len(kinds)]) == sorted(kinds)
    for fault, after in pairwise(plan):
        waits_s = fault.seconds if KINDS[fault.kind].alone else 0
        assert after.at_s > fault.at_s + waits_s
    assert {"gateway-1", "puller-1"} <= {fault.target for fault in plan}
    rolls = draw(options._replace(kinds=list(KINDS)))
    assert [fault.kind for fault in rolls].count("roll") == 1
    without = draw(options._replace(gateway=False, kinds=parse([]).kinds))
    assert not [fault for fault in without if "gateway" in fault.target or "pull" in fault.target]


def test_directories(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    with pytest.raises(SystemExit, match="2"):
        parse(["--out", str(tmp_path)])  # only files of a run are deleted
    for name in ("stage.jsonl", "final.json"):
        (tmp_path / name).touch()
    assert parse(["--out", str(tmp_path)]).out == tmp_path
    options = parse(["--check", str(tmp_path)])
    assert (options.out, options.check) == (tmp_path, True)


@pytest.mark.parametrize(
    "wrong", ["--faults earthquake", "--consumers 1", "--check /nowhere", "--earlier /nowhere"]
)
def test_invalid_command_lines_are_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(wrong.split())
    assert capsys.readouterr().err


def test_the_page_says_how_to_run_it(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "tests" / "torture" / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r'^\$ make torture ARGS="(.*)"$', page, re.MULTILINE)
    assert commands
    for command in commands:
        assert parse(command.split()).kinds
    with pytest.raises(SystemExit, match="0"):
        parse(["--help"])
    options = set(re.findall(r"--[a-z]+", capsys.readouterr().out)) - {"--help"}
    assert set(re.findall(r"`(--[a-z]+)`", page)) >= options


def test_a_full_disk_is_not_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = Ledger(tmp_path / "ledger")
    monkeypatch.setattr(os, "write", lambda _file, data: len(data) - 1)
    with pytest.raises(AssertionError, match="only 2 of 3 bytes"):
        ledger.write(["it"])


def test_every_clock_of_a_process_is_off() -> None:
    clocks = "import datetime, time; print(time.time(), datetime.datetime.now().timestamp())"
    times = []
    for shift_s in (-3600, 0, 3600):
        env = {**os.environ, **shifted(shift_s)}
        command = [sys.executable, "-c", clocks]
        said = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        times.append([float(clock) / 60 for clock in said.stdout.split()])
    for before, after in pairwise(times):
        assert [round(b - a) for a, b in zip(before, after, strict=True)] == [60, 60]
