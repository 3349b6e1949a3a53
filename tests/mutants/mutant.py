"""A defect put back on purpose, and what has to become of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

__all__ = ["Mutant", "Patch", "escape"]

ASSERTIONS = ("AssertionError", "Failed")
"""What a test raises that saw a wrong result; `Failed` is pytest's own, as by `raises`."""


class Patch(NamedTuple):
    """A piece of a file's text that stands there once, and what takes its place."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Mutant:
    """One defect. `tests` are existing ones, of which at least one has to fail.

    says: the failure is no assertion but an error that this expression finds, since the defect
    shows as one. Nothing else counts: a patch that only breaks the syntax catches nothing.
    """

    number: str
    what: str
    patches: Sequence[Patch]
    tests: Sequence[str]
    says: str = ""


def escape(mutant: Mutant, outcome: dict[str, Any]) -> str | None:
    """How the mutant got away, in words; None if a test caught it."""
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
