"""A defect put back on purpose: its form in the files beside this one, and how it is applied.

    S1 a delay begins at the millisecond before the send
    tests/contract/test_enqueue.py::test_a_delay_never_ends_early[valkey]
    lua/enqueue.lua
    -return at == 0 and now or now_up + at
    +return now + at

The first line has a number and a description. At least one of the listed tests must fail. Each
patch names a file, then context lines (space), removed lines (-) and added lines (+). White space
does not matter in the lines to be found, and there must be exactly one match.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.servers import ROOT

NUMBERS = [f"L{n}" for n in range(1, 25)] + [f"C{n}" for n in range(1, 16)]
"""The known defects of the original and of camellia's queue: each has at least one mutant."""

ASSERTIONS = ("AssertionError", "Failed")
"""Exceptions that a test raises for a wrong result; `Failed` is pytest's own, as by `raises`."""


@dataclass
class Patch:
    """Lines to find in a file, and their replacement."""

    file: str
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


@dataclass
class Mutant:
    """One defect. `tests` are existing ones, of which at least one must fail.

    says: an expression that finds the expected error if the defect shows as an error, not as a
    failed assertion. No other error counts: a patch that only breaks the syntax catches nothing.
    """

    number: str
    what: str
    tests: list[str] = field(default_factory=list)
    patches: list[Patch] = field(default_factory=list)
    says: str = ""


def parse(text: str) -> Iterator[Mutant]:
    """The mutants of a file. Raises ValueError for a line that is none of its parts."""
    mutant: Mutant | None = None
    for line in text.splitlines():
        start, rest = line[:1], line[1:]
        if not line or start == "#":
            if mutant:
                yield mutant
            mutant = None
        elif mutant is None:
            number, _, what = line.partition(" ")
            mutant = Mutant(number, what)
        elif line.startswith("tests/"):
            mutant.tests.append(line)
        elif line.startswith("says "):
            mutant.says = line.removeprefix("says ")
        elif line.startswith(("lisa/", "lua/")):
            mutant.patches.append(Patch(line))
        elif start in " -+" and mutant.patches:
            patch = mutant.patches[-1]
            patch.old += [rest] if start in " -" else []
            patch.new += [rest] if start in " +" else []
        else:
            raise ValueError(f"{mutant.number}: {line!r} is no part of a mutant")
    if mutant:
        yield mutant


def apply(mutant: Mutant, root: Path = ROOT) -> dict[str, str]:
    """The changed files and their texts. Raises LookupError for a patch not found exactly once."""
    changed: dict[str, str] = {}
    for patch in mutant.patches:
        text = changed.get(patch.file) or (root / patch.file).read_text(encoding="utf-8")
        words = " ".join(patch.old).split()
        pattern = r"(?m)(^ *)?" + r"\s+".join(map(re.escape, words))
        found = list(re.finditer(pattern, text))
        if len(found) != 1:
            raise LookupError(f"{mutant.number}: {len(found)} times in {patch.file}: {patch.old}")
        by = len(found[0][1] or "") - indent(patch.old[0])
        new = "\n".join(" " * (indent(line) + by) + line.lstrip() for line in patch.new)
        changed[patch.file] = text[: found[0].start()] + new + text[found[0].end() :]
    return changed


def indent(line: str) -> int:
    """The number of spaces that a line begins with."""
    return len(line) - len(line.lstrip())


def escape(mutant: Mutant, outcome: dict[str, Any]) -> str | None:
    """Why the mutant was not caught, in words; None if a test caught it."""
    if outcome.get("broken"):
        return f"nothing was shown: {outcome['broken']}"
    if not outcome["failures"]:
        return f"survived {outcome['passed']} tests: {', '.join(mutant.tests)}"
    first = outcome["failures"][0]
    if first["stage"] != "call":
        return f"{first['test']} failed in its {first['stage']}: {first['said']}"
    if mutant.says:
        expected = re.search(mutant.says, first["said"]) is not None
    else:
        expected = first["error"] in ASSERTIONS
    return None if expected else f"{first['test']} failed for another reason: {first['said']}"


MUTANTS = [
    mutant
    for file in sorted((ROOT / "tests" / "mutants").glob("*.diff"))
    for mutant in parse(file.read_text(encoding="utf-8"))
]
