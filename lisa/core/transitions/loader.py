"""Loads the Lua scripts by name, from package data or a checkout's `lua/` folder."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lisa.core.model import options
from lisa.core.model.options import OPTIONS, encode

PRELUDE = "prelude"
USUAL = "usual"
"""The folder with the usual cases of frequent scripts, in few commands and with few functions.

A usual case either returns the script's reply, or changes nothing and lets the script run.
"""
_CONSTANTS = (
    "BEGUN",
    "BYTES_PER_CALL",
    "BYTES_IN_ENTRY",
    "BODIES_IN_ENTRIES",
    "HANDLER_SUFFIX",
    "MIN_LATE_MS",
    "RAMP_LATE_MS",
    "SUSPECT_REASON",
)
"""Constants of `core.model.options` that scripts may name."""
_PARTS = ("call", "topic", "late", "group", "settle", "fail")
"""The prelude's files, in order: a file uses only functions of files before it."""


class Script(NamedTuple):
    """One script: its source with the prelude, and the SHA-1 by which the server knows it."""

    name: str
    source: str
    sha: str


class _Paragraph(NamedTuple):
    """A paragraph of the prelude: the names that it defines, and all words of its code."""

    text: str
    names: frozenset[str]
    words: frozenset[str]


def directory() -> Path:
    """The folder of the scripts. A checkout's `lua/` takes precedence, so that edits apply."""
    package = Path(__file__).resolve().parent.parent.parent
    for folder in (package.parent / "lua", package / "lua"):
        if (folder / PRELUDE).is_dir():
            return folder
    raise FileNotFoundError(f"no Lua scripts beside {package}: the installation is incomplete")


def names() -> list[str]:
    """The names of all scripts."""
    return sorted(path.stem for path in directory().glob("*.lua"))


def prelude() -> str:
    """The code that scripts share."""
    folder = directory() / PRELUDE
    return "\n\n".join((folder / f"{part}.lua").read_text("utf-8").strip() for part in _PARTS)


@cache
def load(name: str) -> Script:
    """Load one script for EVALSHA and SCRIPT LOAD."""
    return compose(name)


def compose(name: str, *, with_usual: bool = True) -> Script:
    """Put one script together, with or without its usual case, which changes no result."""
    folder = directory()
    own, usual = (folder / f"{name}.lua").read_text("utf-8"), ""
    if with_usual and (folder / USUAL / f"{name}.lua").exists():
        usual = (folder / USUAL / f"{name}.lua").read_text("utf-8").strip()
    first = _used_by(usual)
    rest = [paragraph for paragraph in _used_by(own) if paragraph not in first]
    code = "\n\n".join([*first, usual, *rest, own])
    source = _with_constants(code)
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def _used_by(script: str) -> list[str]:
    """The prelude's first paragraph, and the paragraphs that the script depends on.

    A script creates its functions at every call, and creating every one would cost more than a
    small call. Paragraphs depend only on earlier ones.
    """
    first, *others = _paragraphs(prelude())
    kept: list[str] = []
    words = _words(script)
    for paragraph in reversed(others):
        if not words.isdisjoint(paragraph.names):
            kept.insert(0, paragraph.text)
            words |= paragraph.words
    return [first.text, *kept]


@cache  # for the text of all scripts, which every process puts together at its start
def _paragraphs(prelude: str) -> list[_Paragraph]:
    texts = re.split(r"\n\n(?=\S)", prelude)
    defined = re.compile(r"^local (?:function )?(\w+)", re.MULTILINE)
    return [_Paragraph(one, frozenset(defined.findall(one)), _words(one)) for one in texts]


def _words(lua: str) -> frozenset[str]:
    """The words of the code; those in strings name commands and fields."""
    return frozenset(re.findall(r"\w+", re.sub(r"'[^'\n]*'", "''", _without_comments(lua))))


def _without_comments(lua: str) -> str:
    return re.sub(r"--[^\n]*", "", lua)


def _with_constants(code: str) -> str:
    """The code, with the defaults of options and the other constants that it names."""
    defaults = encode({name: one.default for name, one in OPTIONS.items()})
    code = re.sub(r"\bDEFAULT\.(\w+)", lambda found: f"'{defaults[found[1]]}'", code)
    read, words = _without_comments(code), _words(code)
    constants = {name: repr(getattr(options, name)) for name in _CONSTANTS if name in words}
    if "DEFAULT" in words:
        named = sorted(set(re.findall(r"\boption\('(\w+)", read)))
        table = ", ".join(f"{name} = '{defaults[name]}'" for name in named)
        constants["DEFAULT"] = f"{{{table}}}"
    if not constants:
        return code
    return f"local {', '.join(constants)} = {', '.join(constants.values())}\n{code}"
