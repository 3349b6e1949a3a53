"""A defect put back on purpose, and its expected result."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ASSERTIONS = ("AssertionError", "Failed")
"""Exceptions that a test raises for a wrong result; `Failed` is pytest's own, as by `raises`."""


class Patch(NamedTuple):
    """Text that occurs exactly once in a file, and its replacement."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """One defect. `tests` are existing ones, of which at least one must fail.

    says: an expression that finds the expected error if the defect shows as an error, not as a
    failed assertion. No other error counts: a patch that only breaks the syntax catches nothing.
    """

    number: str
    what: str
    patches: Sequence[Patch]
    tests: Sequence[str]
    says: str = ""


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


def misfits(mutant: Mutant, root: Path) -> list[str]:
    """The patches whose text does not occur exactly once in the current file, in words."""
    texts: dict[str, str] = {}
    found = []
    for file, old, new in mutant.patches:
        text = texts.get(file) or (root / file).read_text(encoding="utf-8")
        if text.count(old) != 1:
            found.append(f"{mutant.number}: {file} has {text.count(old)} times, not once: {old!r}")
        texts[file] = text.replace(old, new)
    return found
