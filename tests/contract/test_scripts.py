"""Rules that hold for all scripts."""

from __future__ import annotations

import hashlib
import re
from typing import TYPE_CHECKING

import pytest

from lisa.core import scripts
from lisa.core.options import TopicOptions, encode

if TYPE_CHECKING:
    from tests.contract.bench import Bench

SCRIPT = pytest.mark.parametrize("name", [*scripts.names(), "prelude"])


def code(name: str) -> str:
    """A script without its comments."""
    text = (scripts.directory() / f"{name}.lua").read_text("utf-8")
    return re.sub(r"--[^\n]*", "", text)


@SCRIPT
def test_no_script_looks_for_keys(name: str) -> None:
    assert not re.search(r"'(KEYS|SCAN|HGETALL|SMEMBERS|FLUSH\w*|EVAL\w*)'|cjson", code(name))


@SCRIPT
def test_every_key_comes_through_keys(name: str) -> None:
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


@pytest.mark.parametrize("name", scripts.names())
def test_the_server_knows_a_script_by_its_sha(bench: Bench, name: str) -> None:
    script = scripts.load(name)
    assert script.sha == hashlib.sha1(script.source.encode(), usedforsecurity=False).hexdigest()
    assert bench.store.ask("SCRIPT", "LOAD", script.source) == script.sha.encode()


def test_the_defaults_of_scripts_are_the_options_defaults() -> None:
    options = TopicOptions()
    table = scripts.load("promote").source.partition("\n")[0]
    found = dict(re.findall(r"(\w+) = '([^']*)'", table))
    assert found == encode({name: getattr(options, name) for name in found})
    used = set(re.findall(r"DEFAULT[.](\w+)", "".join(code(name) for name in scripts.names())))
    used |= set(re.findall(r"option\('(\w+)'\)", "".join(code(n) for n in scripts.names())))
    assert used <= set(found)


def test_a_script_is_given_what_it_uses_of_the_prelude_and_nothing_else() -> None:
    functions = re.findall(r"^local function (\w+)", code("prelude"), re.MULTILINE)
    used = set()
    for name in scripts.names():
        source = re.sub(r"--[^\n]*", "", scripts.load(name).source)
        given = {one for one in functions if f"local function {one}(" in source}
        assert given == {one for one in functions if re.search(rf"\b{one}\(", source)}, name
        used |= given
    assert used == set(functions)
    assert "local function add_ready(" not in scripts.load("ack").source
