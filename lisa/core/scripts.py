"""The Lua scripts, loaded by name: package data in a wheel, `lua/` in a checkout."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from lisa.core.options import TopicOptions, encode

__all__ = ["Script", "directory", "load", "names"]

PRELUDE = "prelude"
_USED_BY_SCRIPTS = (
    "ack_timeout", "retry_delays", "max_ready", "retention", "dedupe_for", "journal_max",
    "max_body_bytes",
)  # fmt: skip


class Script(NamedTuple):
    """One script's source, prelude included, and the name that the server knows it by."""

    name: str
    source: str
    sha: str


def directory() -> Path:
    """Where the scripts lie. A checkout's own come first, so that an edit is seen."""
    package = Path(__file__).resolve().parent.parent
    for place in (package.parent / "lua", package / "lua"):
        if (place / f"{PRELUDE}.lua").is_file():
            return place
    raise FileNotFoundError(f"no Lua scripts beside {package}: the installation is incomplete")


def names() -> list[str]:
    """The names of all scripts, the prelude left out."""
    return sorted(path.stem for path in directory().glob("*.lua") if path.stem != PRELUDE)


@cache
def load(name: str) -> Script:
    """One script, ready for EVALSHA and SCRIPT LOAD."""
    lua = directory()
    own = (lua / f"{name}.lua").read_text("utf-8")
    prelude = _used_by(own, (lua / f"{PRELUDE}.lua").read_text("utf-8"))
    source = f"{_defaults()}\n{prelude}\n{own}"
    return Script(name, source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())


def _used_by(script: str, prelude: str) -> str:
    """The prelude's first paragraph, and those of which the script uses something.

    A script makes its functions anew at each call: all of them would cost more than a small call
    does. Paragraphs use only what stands above them.
    """
    first, *others = re.split(r"\n\n(?=\S)", prelude)
    kept: list[str] = []
    code = _without_comments(script)
    for paragraph in reversed(others):
        names = re.findall(r"^local (?:function )?(\w+)", paragraph, re.MULTILINE)
        if any(re.search(rf"\b{name}\b", code) for name in names):
            kept.insert(0, paragraph)
            code += _without_comments(paragraph)
    return "\n\n".join([first, *kept])


def _without_comments(lua: str) -> str:
    return re.sub(r"--[^\n]*", "", lua)


def _defaults() -> str:
    """The options' defaults as a Lua table, so that they are written down once, in Python."""
    options = TopicOptions()
    values = encode({name: getattr(options, name) for name in _USED_BY_SCRIPTS})
    return "local DEFAULT = {" + ", ".join(f"{k} = '{v}'" for k, v in values.items()) + "}"
