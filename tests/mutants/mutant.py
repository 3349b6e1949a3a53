"""A defect put back on purpose: its form in the files beside this one, and how it is applied.

    S1 a delay begins at the millisecond before the send
    tests/contract/test_enqueue.py::test_a_delay_never_ends_early[valkey]
    lua/enqueue.lua
    -return at == 0 and now or now_up + at
    +return now + at

The first line has a number and a description. At least one of the listed tests must fail. Each
patch names a file, then context lines (space), removed lines (-) and added lines (+). Patches are
matched by token, so layout, comments and trailing commas are ignored. If the named file has no
match, all files are searched. There must be exactly one match.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from tests.servers import ROOT

NUMBERS = [f"L{n}" for n in range(1, 25)] + [f"C{n}" for n in range(1, 16)]
"""The known defects of the original and of camellia's queue: each has at least one mutant."""

ASSERTIONS = ("AssertionError", "Failed")
"""Exceptions that a test raises for a wrong result; `Failed` is pytest's own, as by `raises`."""

STRING = r"""(?:\b[rRbBfFuU]{1,2})?(?:\"{3}[\s\S]*?\"{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')"""
TOKENS = {
    ".py": re.compile(rf"{STRING}|(?P<comment>#[^\n]*)|\w+|\S"),
    ".lua": re.compile(rf"{STRING}|(?P<comment>--[^\n]*)|\w+|\S"),
}


class Token(NamedTuple):
    """A token and its place in the text."""

    text: str
    start: int
    end: int


@dataclass
class Patch:
    """Lines to find, and their replacement; `file` is where they were last."""

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


@cache
def tokens(text: str, suffix: str) -> list[Token]:
    """The tokens of a text in Python or Lua, without comments and trailing commas."""
    found = [
        Token(match[0], *match.span())
        for match in TOKENS[suffix].finditer(text)
        if not match["comment"]
    ]
    return [
        token
        for token, after in zip_longest(found, found[1:])
        if token.text != "," or (after and after.text not in {")", "]", "}"})
    ]


def spans(text: str, lines: list[str], suffix: str) -> list[tuple[int, int]]:
    """Where the tokens of some lines occur in a text: positions of characters."""
    wanted = [token.text for token in tokens("\n".join(lines), suffix)]
    there = tokens(text, suffix)
    first = [index for index, token in enumerate(there) if token.text == wanted[0]]
    return [
        (there[index].start, there[index + len(wanted) - 1].end)
        for index in first
        if [token.text for token in there[index : index + len(wanted)]] == wanted
    ]


def replaced(text: str, span: tuple[int, int], patch: Patch) -> str:
    """The text with the new lines in the place of the old ones, indented as these are."""
    start, end = span
    line = text[text.rfind("\n", 0, start) + 1 : start]
    shift = indent(f"{line}x") - indent(patch.old[0])
    moved = [" " * (indent(new) + shift) + new.lstrip() if new else "" for new in patch.new or [""]]
    if line.strip():
        moved[0] = moved[0].lstrip()
    else:
        start -= len(line)
    return text[:start] + "\n".join(moved) + text[end:]


def indent(line: str) -> int:
    """The number of spaces that a line begins with."""
    return len(line) - len(line.lstrip())


def apply(mutant: Mutant, root: Path = ROOT) -> dict[str, str]:
    """The changed files and their texts. Raises LookupError for a patch not found exactly once."""
    changed: dict[str, str] = {}
    for patch in mutant.patches:
        name, text, span = _place(patch, root, changed, mutant.number)
        changed[name] = replaced(text, span, patch)
    return changed


def _place(
    patch: Patch, root: Path, changed: dict[str, str], number: str
) -> tuple[str, str, tuple[int, int]]:
    suffix = patch.file[patch.file.rindex(".") :]
    for names in ([patch.file], _sources(root, suffix)):
        texts = {
            name: changed.get(name) or (root / name).read_text(encoding="utf-8")
            for name in names
            if (root / name).exists()
        }
        found = [
            (name, text, span)
            for name, text in texts.items()
            for span in spans(text, patch.old, suffix)
        ]
        if found:
            break
    if len(found) != 1:
        places = ", ".join(name for name, *_ in found) or "no file"
        raise LookupError(f"{number}: found in {places}, not exactly once: {patch.old}")
    return found[0]


def _sources(root: Path, suffix: str) -> Iterable[str]:
    folder = {".py": "lisa", ".lua": "lua"}[suffix]
    return [str(path.relative_to(root)) for path in sorted((root / folder).rglob(f"*{suffix}"))]


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
