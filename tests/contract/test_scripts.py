"""Rules that hold for all scripts; each script's header matches its transition module."""

from __future__ import annotations

import hashlib
import importlib
import re
from typing import Any

import pytest

from lisa.core.model.keys import GROUP_KEYS, TOPIC_KEYS, Keys
from lisa.core.model.options import OPTIONS, TopicOptions, encode
from lisa.core.transitions import base, loader
from lisa.core.transitions.base import Transition
from tests.contract.bench import TOPIC, Bench, Receipts
from tests.contract.samples import SAMPLES
from tests.rows import Item, enqueue

SCRIPT_OR_PRELUDE = pytest.mark.parametrize("name", [*loader.names(), "prelude"])


def code(name: str) -> str:
    """A script without its comments."""
    path = loader.directory() / f"{name}.lua"
    text = loader.prelude() if name == "prelude" else path.read_text("utf-8")
    return re.sub(r"--[^\n]*", "", text)


@SCRIPT_OR_PRELUDE
def test_no_script_searches_for_keys(name: str) -> None:
    assert not re.search(r"'(KEYS|SCAN|HGETALL|SMEMBERS|FLUSH\w*|EVAL\w*)'|cjson", code(name))


@SCRIPT_OR_PRELUDE
def test_every_key_is_passed_in_keys(name: str) -> None:
    assert not re.search(r"'(lisa|body|done|waiting|g):", code(name))


@SCRIPT_OR_PRELUDE
def test_every_range_has_a_bound(name: str) -> None:
    for call in re.findall(r"'(?:ZRANGEBYSCORE|XRANGE|XREADGROUP)'[^\n]*(?:\n[^\n]*)?", code(name)):
        one_entry = re.search(r"'XRANGE', group.ready, entry, entry\)", call)
        assert one_entry or re.search(r"'(LIMIT|COUNT)'", call), call


@SCRIPT_OR_PRELUDE
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


IDS = ["m1", "m2", "m3"]


class NoServer(Receipts):
    """Receipts for calls that are built and never sent."""

    def entry(self, message_id: str, group: str = "lisa") -> str:
        return "1-1"

    def clock(self) -> int:
        return 0


def sample(name: str, n: int) -> Transition[Any]:
    """The script's sample call for `n` ids."""
    return SAMPLES[name].make(NoServer(), IDS[:n])


SCRIPT = pytest.mark.parametrize("name", loader.names())


def header(name: str) -> dict[str, str]:
    """The parts of a script's header by their first word, each on one line."""
    parts: dict[str, str] = {}
    part = "purpose"
    for line in (loader.directory() / f"{name}.lua").read_text("utf-8").splitlines():
        if not line.startswith("--"):
            break
        said = line[2:].strip()
        for word in ("Guarantee:", "KEYS", "ARGV", "Returns"):
            if said.startswith(word):
                part, said = word, said.removeprefix(word)
        parts[part] = f"{parts.get(part, '')} {said}".strip()
    return parts


def bare(text: str) -> str:
    """The text without quotes and parentheses."""
    return re.sub(r"\([^()]*\)", "", re.sub(r"(?<!\w)'[^']*'", "", text))


def argument_counts(text: str) -> tuple[int, int]:
    """The number of arguments in a header: fixed ones, and ones per id."""
    fixed = each = 0
    for part in (one.strip() for one in bare(text).split(";")):
        if part.startswith(("n times ", "n each of ")):
            each += len(part.split(","))
        elif part != "none of its own":
            fixed += 1
    return fixed, each


def own_keys(name: str, n: int) -> list[str]:
    return list(sample(name, n).id_keys(Keys().topic(TOPIC)))


def own_arguments(name: str, n: int) -> list[base.Argument]:
    groups = sample(name, n).fixed_groups
    groups = ("lisa",) if groups is None else groups
    _, arguments = sample(name, n).build(Keys().topic(TOPIC), groups, "test@here:1")
    return arguments[4 + len(groups) :]


def test_every_module_has_a_script() -> None:
    modules = importlib.resources.files("lisa.core.transitions").iterdir()
    found = {path.name.removesuffix(".py") for path in modules if path.name.endswith(".py")}
    assert found - {"__init__", "base", "loader"} == set(loader.names())


@SCRIPT
def test_the_module_of_that_name_runs_the_script(name: str) -> None:
    module = importlib.import_module(f"lisa.core.transitions.{name}")
    transition = sample(name, 1)
    assert type(transition).__module__ == module.__name__
    assert transition.script == name


@SCRIPT
def test_the_header_is_complete(name: str) -> None:
    parts = header(name)
    assert set(parts) == {"purpose", "Guarantee:", "KEYS", "ARGV", "Returns"}
    assert parts["purpose"].startswith(f"{name}: ")
    assert parts["KEYS"].startswith("the prelude's")
    assert "{'OK'" in parts["Returns"]
    knows_groups = "changed_groups()" in loader.load(name).source.rpartition("-- Returns")[2]
    assert ("{'GROUPS', ...}" in parts["Returns"]) == knows_groups


@SCRIPT
def test_the_keys_match_the_header(name: str) -> None:
    said = re.search(r"for each \w+: ([\w, ]+)", header(name)["KEYS"])
    each = said.group(1).replace(" ", "").split(",") if said else []
    group_keys = len(GROUP_KEYS) if "the seven of the group" in header(name)["KEYS"] else 0
    keys = Keys().topic(TOPIC)
    further = {
        "absorb": [keys.history, "lisa:{t}:m"],
        "clear": [keys.history, keys.archived, keys.confirm],
        "prune": [keys.archived],
        "schedule": [keys.schedules, keys.ticks, *keys.bodies_and_tombstones(["m1", "x"])],
    }
    if name in further:
        assert own_keys(name, 1) == further[name]
        return
    for n in (1, 2, 3):
        built = own_keys(name, n)[group_keys:]
        rows = [[getattr(keys, kind)(m) for kind in each] for m in IDS[:n]]
        in_columns = "by columns" in header(name)["KEYS"]
        laid_out = zip(*rows, strict=True) if in_columns else rows
        assert built == [key for part in laid_out for key in part]
    assert own_keys(name, 1)[:group_keys] == list(keys.group("lisa")[:group_keys])


@SCRIPT
def test_the_header_says_whether_a_call_has_a_record(name: str) -> None:
    assert ("the call's record" in header(name)["KEYS"]) == bool(sample(name, 1).call_id)


@SCRIPT
def test_the_number_of_arguments_matches_the_header(name: str) -> None:
    fixed, each = argument_counts(header(name)["ARGV"])
    assert len(own_arguments(name, 1)) == fixed + each
    assert len(own_arguments(name, 3)) == fixed + 3 * each
    has_own_group = sample(name, 1).own_group is not None
    assert header(name)["ARGV"].startswith("own group's number") == has_own_group


def test_new_ids_pass_only_the_first_tombstone_key() -> None:
    keys = Keys().topic(TOPIC)
    items = [Item(m, "+0", b"") for m in IDS]
    found = list(enqueue(TOPIC, "token", items, are_ids_new=True).id_keys(keys))
    assert found == [*(keys.body(m) for m in IDS), keys.done(IDS[0])]


def test_ttls_and_policies_are_passed_as_numbered_pairs() -> None:
    items = [Item("a", "1", b"", 5), Item("b", "2", b"", None, "0"), Item("c", "3", b"", 7)]
    _, arguments = enqueue(TOPIC, "token", items).build(Keys().topic(TOPIC), (), "test@here:1")
    assert arguments[-9:] == [2, 1, 5, 3, 7, 1, 2, "0", ""]


def test_the_preludes_header_names_the_keys_in_their_order() -> None:
    text = " ".join(
        line[2:].strip() for line in loader.prelude().splitlines() if line.startswith("--")
    )
    shared = re.search(r"KEYS 1-(\d+) the topic's: ([\w, ]+) then", re.sub(r" +", " ", text))
    groups = re.search(r"then (\w+) for each group: ([\w, ]+) then", re.sub(r" +", " ", text))
    assert shared is not None
    assert groups is not None
    assert (int(shared[1]), tuple(shared[2].split(", "))) == (len(TOPIC_KEYS), TOPIC_KEYS)
    assert (groups[1], tuple(groups[2].split(", "))) == ("seven", GROUP_KEYS)
    assert len(GROUP_KEYS) == 7
