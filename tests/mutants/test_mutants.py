"""Each known defect, put back by a few changed lines, is caught by an existing test.

`make mutants` prints which test catches which; `pytest tests/mutants -m "" -k L3` runs one.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.mutant import MUTANTS, NUMBERS, apply, escape, parse
from tests.mutants.runner import CONTROL, Runner

QUICK = "tests/contract/test_upkeep.py::test_it_never_trims_by_length[fake]"
NO_CATCH = {
    "rotten": ("no such text", "", "found in no file"),
    "idle": ("foreign = {}", "foreign = {} -- none", "survived"),
    "broken": ("foreign = {}", "foreign = {", "another reason: .*error loading code"),
}


def samples() -> Iterator[Any]:
    """All mutants; the first of each script is a sample for continuous integration."""
    scripts = set()
    for mutant in MUTANTS:
        script = mutant.patches[0].file
        is_first = script.startswith("lua/") and script not in scripts
        scripts.add(script)
        yield pytest.param(mutant, id=mutant.number, marks=[pytest.mark.sample] if is_first else [])


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
    for mutant in MUTANTS:
        apply(mutant)


@pytest.mark.parametrize(
    ("text", "patched"),
    [
        ("def f():\n    a(1,  # why\n      2)\n    b()\n", "def f():\n    c(3)\n    b()\n"),
        ("x = [\n    a(\n        1,\n        2,\n    )\n]\n", "x = [\n    c(3)\n]\n"),
        ("if x:\n        a(1, 2)\n", "if x:\n        c(3)\n"),
    ],
    ids=["comments", "line breaks", "indentation"],
)
def test_a_patch_is_found_by_its_tokens(text: str, patched: str, tmp_path: Path) -> None:
    (mutant,) = parse("X1 wrong\ntests/x.py\nlisa/former.py\n-a(1, 2)\n+c(3)\n")
    (tmp_path / "lisa" / "new").mkdir(parents=True)
    (tmp_path / "lisa" / "new" / "place.py").write_text(text)
    assert apply(mutant, tmp_path) == {"lisa/new/place.py": patched}
    (tmp_path / "lisa" / "copy.py").write_text(text)
    with pytest.raises(LookupError, match=r"X1: found in lisa/copy.py, lisa/new/place.py, not"):
        apply(mutant, tmp_path)
    (tmp_path / "lisa" / "former.py").write_text("a(1, 2)")
    assert apply(mutant, tmp_path) == {"lisa/former.py": "c(3)"}


def test_context_stays_and_several_patches_of_a_file_add_up(tmp_path: Path) -> None:
    (tmp_path / "lua").mkdir()
    (tmp_path / "lua" / "a.lua").write_text("if x then\n  f(1) -- one\n  f(1)\n  g()\nend\n")
    text = "X1 wrong\ntests/x.py\nsays Error\nlua/a.lua\n f(1)\n g()\n+h()\nlua/a.lua\n-if x then\n"
    (mutant,) = parse(text)
    expected = {"lua/a.lua": "\n  f(1) -- one\n  f(1)\n  g()\n  h()\nend\n"}
    assert (mutant.says, apply(mutant, tmp_path)) == ("Error", expected)
    with pytest.raises(ValueError, match="X1: 'what' is no part of a mutant"):
        list(parse("X1 wrong\nwhat\n"))


@pytest.mark.full
@pytest.mark.sample
def test_without_a_defect_all_the_tests_pass(runner: Runner) -> None:
    """They exist, too: pytest runs nothing if it does not find one of them."""
    outcome = runner.outcome(CONTROL)
    assert not outcome.get("broken"), outcome["broken"]
    assert not outcome["failures"]
    assert outcome["passed"]


@pytest.mark.full
@pytest.mark.parametrize("mutant", list(samples()))
def test_it_is_caught(mutant: Any, runner: Runner) -> None:
    complaint = escape(mutant, runner.outcome(mutant.number))
    assert complaint is None, f"{mutant.number}, {mutant.what}: {complaint}"


@pytest.mark.full
@pytest.mark.parametrize(
    ("mutant", "expected"),
    [
        pytest.param(next(parse(f"{name}\n{QUICK}\nlua/trim.lua\n-{old}\n+{new}")), said, id=name)
        for name, (old, new, said) in NO_CATCH.items()
    ],
)
def test_an_inconclusive_run_is_no_catch(mutant: Any, expected: str, runner: Runner) -> None:
    complaint = escape(mutant, runner.outcome(mutant.number))
    assert complaint is not None
    assert re.search(expected, complaint)
