"""Puts the Lua scripts together, from package data or a checkout's `lua/` folder.

A script is one source, and a topic pays only for what it uses of it. Blocks such as `if USES.ttl
then` are left out for topics and calls without this feature. Of the prelude, and of a script's own
functions, only those are kept that the rest of the script calls.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lisa.core.model import options
from lisa.core.model.options import OPTIONS, encode

PRELUDE = "prelude"
_CONSTANTS = (
    "BEGUN",
    "BYTES_PER_CALL",
    "CARRIED_BYTES",
    "CARRIED_ENTRIES",
    "HANDLER_SUFFIX",
    "MIN_LATE_MS",
    "PLACE_BYTES",
    "RAMP_LATE_MS",
    "SUSPECT_REASON",
)
"""Constants of `core.model.options` that scripts may name."""
_PARTS = ("call", "topic", "keyed", "lanes", "late", "group", "gate", "settle", "fail")
"""The prelude's files, in order: a file uses only functions of files before it."""

Features = frozenset[str]
NONE: Features = frozenset()

_FEATURE = re.compile(r"\bUSES\.(\w+)")
_BLOCK = re.compile(r"( *)if ((?:not )?USES\.\w+(?: (?:and|or) (?:not )?USES\.\w+)*) then")
_names_by_sha: dict[str, str] = {}


class Script(NamedTuple):
    """One script: its source with the prelude, and the SHA-1 by which the server knows it.

    features: those whose code it has.
    """

    name: str
    source: str
    sha: str
    features: Features


class _Paragraph(NamedTuple):
    """A paragraph of code: the names that it defines, and all words of its code."""

    text: str
    names: frozenset[str]
    words: frozenset[str]
    is_function: bool


def directory() -> Path:
    """The folder of the scripts. A checkout's `lua/` takes precedence, so that edits apply."""
    package = Path(__file__).resolve().parent.parent.parent
    for folder in (package.parent / "lua", package / "lua"):
        if (folder / PRELUDE).is_dir():
            return folder
    raise FileNotFoundError(f"no Lua scripts beside {package}: the installation is incomplete")


@cache
def _sources() -> dict[str, str]:
    """The files of all scripts by name, read at once.

    A process that runs on while its package is upgraded must not mix scripts of two versions.
    """
    return {path.stem: path.read_text("utf-8") for path in directory().glob("*.lua")}


def names() -> list[str]:
    """The names of all scripts."""
    return sorted(_sources())


@cache
def prelude() -> str:
    """The code that scripts share."""
    folder = directory() / PRELUDE
    return "\n\n".join((folder / f"{part}.lua").read_text("utf-8").strip() for part in _PARTS)


@cache
def features_of(name: str) -> Features:
    """The features for which a script has code of its own."""
    return frozenset(_FEATURE.findall(_without_comments(prelude() + _sources()[name])))


@cache
def load(name: str, features: Features = NONE) -> Script:
    """One script for EVALSHA and SCRIPT LOAD, with the code of the given features."""
    known = features_of(name)
    if not features <= known:
        return load(name, features & known)
    code = _with_features(_sources()[name], features)
    shared = _paragraphs(_with_features(prelude(), features))
    source = _with_constants("\n\n".join(_needed(shared, _paragraphs(code))))
    sha = hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
    _names_by_sha[sha] = name
    return Script(name, source, sha, features)


def name_of(sha: str) -> str | None:
    """The name of a script that this process has loaded."""
    return _names_by_sha.get(sha)


def _with_features(code: str, features: Features) -> str:
    """The code with the blocks of the given features, and without those of others."""
    lines = _resolved(code.split("\n"), features)
    return _FEATURE.sub(lambda found: str(found[1] in features).lower(), "\n".join(lines))


def _resolved(lines: Sequence[str], features: Features) -> list[str]:
    kept: list[str] = []
    at = 0
    while at < len(lines):
        block = _BLOCK.fullmatch(lines[at])
        if block is None:
            kept.append(lines[at])
            at += 1
            continue
        indent, condition = block.groups()
        end = lines.index(f"{indent}end", at)
        other = f"{indent}else"
        middle = lines.index(other, at, end) if other in lines[at:end] else end
        applies = _applies(condition, features)
        inner = _resolved(lines[at + 1 : middle] if applies else lines[middle + 1 : end], features)
        if inner:
            kept += [f"{indent}do", *inner, f"{indent}end"]
        at = end + 1
    return kept


def _applies(condition: str, features: Features) -> bool:
    terms = re.split(" (?:and|or) ", condition)
    each = [(term.split(".")[1] in features) != term.startswith("not ") for term in terms]
    return any(each) if " or " in condition else all(each)


def _needed(shared: Sequence[_Paragraph], own: Sequence[_Paragraph]) -> list[str]:
    """The prelude's first paragraph, the script, and the functions on which these depend.

    A script creates its functions at every call, and creating every one would cost more than a
    small call. Paragraphs depend only on earlier ones.
    """
    kept: list[str] = []
    words: frozenset[str] = frozenset()
    for paragraph in reversed([*shared[1:], *own]):
        is_optional = paragraph.is_function if paragraph in own else True
        if not is_optional or not words.isdisjoint(paragraph.names):
            kept.insert(0, paragraph.text)
            words |= paragraph.words
    return [shared[0].text, *kept]


@cache  # for the prelude, which every script begins with
def _paragraphs(code: str) -> list[_Paragraph]:
    defined = re.compile(r"^local (?:function )?(\w+)", re.MULTILINE)
    found = []
    for text in re.split(r"\n\n(?=\S)", code):
        bare = _without_comments(text).strip()
        is_function = bare.startswith("local function ")
        found.append(_Paragraph(text, frozenset(defined.findall(text)), _words(text), is_function))
    return found


def _words(lua: str) -> frozenset[str]:
    """The words of the code; those in strings name commands and fields."""
    return frozenset(re.findall(r"\w+", re.sub(r"'[^'\n]*'", "''", _without_comments(lua))))


def _without_comments(lua: str) -> str:
    return re.sub(r"--[^\n]*", "", lua)


def _with_constants(code: str) -> str:
    """The code, with the defaults of options and the other constants that it names."""
    defaults = encode({name: option.default for name, option in OPTIONS.items()})
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
