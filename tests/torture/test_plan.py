"""The same seed gives the same plan."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest

from tests.servers import ROOT
from tests.torture.options import Options, parse
from tests.torture.plan import KINDS, Cast, choose, draw

if TYPE_CHECKING:
    from pathlib import Path

CAST = Options(gateway=True).cast
OPTIONS = [
    "--minutes",
    "--seed",
    "--persistence",
    "--faults",
    "--every",
    "--rate",
    "--managers",
    "--consumers",
    "--producers",
    "--gateway",
    "--restore",
    "--earlier",
    "--program",
    "--out",
    "--check",
]


def test_the_same_seed_gives_the_same_plan_and_another_one_another() -> None:
    kinds = list(KINDS)
    assert draw(1, 600, 2, CAST, kinds) == draw(1, 600, 2, CAST, kinds)
    assert draw(1, 600, 2, CAST, kinds) != draw(2, 600, 2, CAST, kinds)


def test_every_kind_occurs_before_any_recurs() -> None:
    kinds = [kind for kind in KINDS if kind != "roll"]
    drawn = [fault.kind for fault in draw(3, 6_000, 2, CAST, kinds)]
    assert len(drawn) > 2 * len(kinds)
    assert sorted(drawn[: len(kinds)]) == sorted(kinds)
    assert sorted(drawn[len(kinds) : 2 * len(kinds)]) == sorted(kinds)


def test_an_earlier_build_is_rolled_away_once() -> None:
    drawn = [fault.kind for fault in draw(3, 6_000, 2, CAST, list(KINDS))]
    assert drawn.count("roll") == 1
    assert draw(3, 6_000, 2, CAST, ["roll"])[0].kind == "roll"


def test_the_next_fault_waits_until_the_server_is_back() -> None:
    faults = draw(4, 6_000, 2, CAST, list(KINDS))
    for fault, after in pairwise(faults):
        assert after.at_s > fault.at_s
        if KINDS[fault.kind].alone:
            assert after.at_s > fault.at_s + fault.seconds


def test_targets_are_roles_that_run() -> None:
    small = Cast(["manager-1", "manager-2"], ["consumer-1"], ["producer-1"])
    kinds = choose("all", earlier=False, gateway=False)
    for fault in draw(5, 6_000, 2, small, kinds):
        assert "gateway" not in fault.target
        assert "puller" not in fault.target


def test_kinds_are_chosen_by_pattern() -> None:
    assert choose("none", earlier=True, gateway=True) == []
    assert choose("cut,kill-*", earlier=False, gateway=False) == [
        "cut",
        "kill-manager",
        "kill-consumer",
        "kill-producer",
    ]
    with pytest.raises(ValueError, match="no fault is called 'earthquake'"):
        choose("earthquake", earlier=False, gateway=False)


def test_a_short_run_has_every_kind_once() -> None:
    options = parse(["--minutes", "0.75", "--seed", "1", "--gateway"])
    plan = draw(options.seed, options.seconds, options.every_s, options.cast, options.kinds)
    assert {fault.kind for fault in plan} == set(options.kinds)
    assert 2 <= options.managers <= 4


def test_only_files_of_a_run_are_deleted(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").touch()
    with pytest.raises(SystemExit, match="2"):
        parse(["--out", str(tmp_path)])
    (tmp_path / "stage.jsonl").touch()  # from a run: it is replaced
    assert parse(["--out", str(tmp_path)]).out == tmp_path


def test_an_earlier_run_is_judged_again(tmp_path: Path) -> None:
    (tmp_path / "final.json").touch()
    options = parse(["--check", str(tmp_path)])
    assert options.check
    assert options.out == tmp_path


@pytest.mark.parametrize(
    "wrong",
    [
        ["--faults", "earthquake"],
        ["--consumers", "1"],
        ["--check", "/nowhere"],
        ["--earlier", "/nowhere"],
    ],
)
def test_invalid_command_lines_are_refused(
    wrong: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        parse(wrong)
    assert capsys.readouterr().err


def test_the_page_says_how_to_run_it() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    commands = re.findall(r'^\$ make torture ARGS="(.*)"$', page, re.MULTILINE)
    assert commands
    for command in commands:
        assert parse(command.split()).kinds
    assert {f"--{name}" for name in re.findall(r"`--([a-z]+)`", page)} >= set(OPTIONS)
