"""Each known defect, put back by a few changed lines, is caught by an existing test.

`make mutants` prints the table alone; `pytest tests/mutants -k L3` runs a single one.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.mutants.mutant import Mutant, Patch, escape, misfits
from tests.mutants.runner import CONTROL, Runner, collected
from tests.mutants.table import MUTANTS, NUMBERS
from tests.servers import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

QUICK = ["tests/contract/test_trim.py::test_it_never_trims_by_length[fake]"]
NO_CATCH = [
    (Mutant("rotten", "", [Patch("lua/trim.lua", "no such text", "")], QUICK), "has 0 times"),
    (Mutant("idle", "", [Patch("lua/trim.lua", "-- trim: ", "-- ")], QUICK), "survived"),
    (
        Mutant("broken", "", [Patch("lua/trim.lua", "foreign = {}", "foreign = {")], QUICK),
        "for another reason: .*error loading code",
    ),
]


@pytest.fixture(scope="module")
def runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    """Runs the mutants that this session selects."""
    specs = [getattr(item, "callspec", None) for item in request.session.items]
    asked = [spec.params["mutant"] for spec in specs if spec and "mutant" in spec.params]
    with Runner(asked or MUTANTS) as running:
        yield running


def test_every_number_has_a_mutant() -> None:
    numbers = [mutant.number for mutant in MUTANTS]
    assert len(set(numbers)) == len(numbers)
    assert {re.sub("[a-z]$", "", number) for number in numbers} >= set(NUMBERS)


def test_every_patch_finds_its_text_once() -> None:
    assert not [said for mutant in MUTANTS for said in misfits(mutant, ROOT)]
    (said,) = misfits(NO_CATCH[0][0], ROOT)
    assert said == "rotten: lua/trim.lua has 0 times, not once: 'no such text'"


@pytest.mark.full
def test_every_named_test_exists() -> None:
    named = [(mutant.number, test) for mutant in MUTANTS for test in mutant.tests]
    there = collected(sorted({test.partition("::")[0] for _, test in named}))
    assert not [f"{number}: {test}" for number, test in named if test not in there]


@pytest.mark.full
def test_without_a_defect_all_the_tests_pass(runner: Runner) -> None:
    outcome = runner.outcome(CONTROL)
    assert not outcome.get("broken"), outcome["broken"]
    assert not outcome["failures"]
    assert outcome["passed"]


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.number)
def test_it_is_caught(
    mutant: Mutant, runner: Runner, record_property: Callable[[str, object], None]
) -> None:
    outcome = runner.outcome(mutant.number)
    complaint = escape(mutant, outcome)
    assert complaint is None, f"{mutant.number}, {mutant.what}: {complaint}"
    record_property("mutant", [mutant.number, mutant.what, outcome["failures"][0]["test"]])


@pytest.mark.full
@pytest.mark.parametrize(("mutant", "said"), NO_CATCH, ids=lambda one: getattr(one, "number", ""))
def test_an_inconclusive_run_is_no_catch(mutant: Mutant, said: str, runner: Runner) -> None:
    complaint = escape(mutant, runner.outcome(mutant.number))
    assert complaint is not None
    assert re.search(said, complaint)
