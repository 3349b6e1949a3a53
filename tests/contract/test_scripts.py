"""Rules that hold for all scripts."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import pytest

from lisa.core.model.options import OPTIONS, TopicOptions, encode
from lisa.core.transitions import loader

if TYPE_CHECKING:
    from tests.contract.bench import Bench

SCRIPT = pytest.mark.parametrize("name", [*loader.names(), "prelude"])


def code(name: str) -> str:
    """A script without its comments."""
    path = loader.directory() / f"{name}.lua"
    text = loader.prelude() if name == "prelude" else path.read_text("utf-8")
    return re.sub(r"--[^\n]*", "", text)


@SCRIPT
def test_no_script_searches_for_keys(name: str) -> None:
    assert not re.search(r"'(KEYS|SCAN|HGETALL|SMEMBERS|FLUSH\w*|EVAL\w*)'|cjson", code(name))


@SCRIPT
def test_every_key_is_passed_in_keys(name: str) -> None:
    assert not re.search(r"'(lisa|body|done|waiting|g):", code(name))


@SCRIPT
def test_every_range_has_a_bound(name: str) -> None:
    for call in re.findall(r"'(?:ZRANGEBYSCORE|XRANGE|XREADGROUP)'[^\n]*(?:\n[^\n]*)?", code(name)):
        one_entry = re.search(r"'XRANGE', group.ready, entry, entry\)", call)
        assert one_entry or re.search(r"'(LIMIT|COUNT)'", call), call


@SCRIPT
def test_no_global_is_set(name: str) -> None:
    for line in code(name).splitlines():
        assert not re.match(r"function ", line), line


@pytest.mark.parametrize("name", loader.names())
def test_the_server_knows_a_script_by_its_sha(bench: Bench, name: str) -> None:
    script = loader.load(name)
    assert script.sha == hashlib.sha1(script.source.encode(), usedforsecurity=False).hexdigest()
    assert bench.store.ask("SCRIPT", "LOAD", script.source) == script.sha.encode()


@pytest.mark.parametrize("name", loader.names())
def test_the_defaults_of_a_script_are_the_options_defaults(name: str) -> None:
    defaults = encode({name: one.default for name, one in OPTIONS.items()})
    source = re.sub(r"--[^\n]*", "", loader.load(name).source)
    table = dict(re.findall(r"(\w+) = '([^']*)'", source.partition("\n")[0]))
    assert table == {name: defaults[name] for name in re.findall(r"option\('(\w+)'\)", source)}
    assert "DEFAULT." not in source


def test_a_default_is_written_into_a_script() -> None:
    assert "DEFAULT.max_ready" in (loader.directory() / "promote.lua").read_text("utf-8")
    source = re.sub(r"--[^\n]*", "", loader.load("promote").source)
    assert f"tonumber(settings[2] or '{TopicOptions().max_ready}')" in source
    assert "DEFAULT" not in source, "a table would be made at every call"


def test_a_script_includes_only_the_prelude_functions_it_uses() -> None:
    functions = re.findall(r"^local function (\w+)", code("prelude"), re.MULTILINE)
    used = set()
    for name in loader.names():
        source = re.sub(r"--[^\n]*", "", loader.load(name).source)
        given = {one for one in functions if f"local function {one}(" in source}
        assert given == {one for one in functions if re.search(rf"\b{one}\(", source)}, name
        used |= given
    assert used == set(functions)
    assert "local function add_ready(" not in loader.load("ack").source
