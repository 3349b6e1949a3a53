"""All mutants, as the files beside this one describe them."""

from __future__ import annotations

import tomllib
from pathlib import Path

from tests.mutants.mutant import Mutant, Patch

NUMBERS = [f"L{n}" for n in range(1, 25)] + [f"C{n}" for n in range(1, 16)]
"""The known defects of the original and of camellia's queue: each has at least one mutant."""


def _read(name: str) -> list[Mutant]:
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return [
        Mutant(patches=[Patch(**patch) for patch in one.pop("patch")], **one)
        for one in tomllib.loads(text)["mutant"]
    ]


_FILES = (
    "original.toml",
    "camellia.toml",
    "sceptic.toml",
    "recurring.toml",
    "late.toml",
    "windows.toml",
)
MUTANTS = [mutant for file in _FILES for mutant in _read(file)]
