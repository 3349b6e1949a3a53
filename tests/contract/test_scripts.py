"""Rules that hold for all scripts; each script's header matches its transition module."""

import hashlib
import importlib
import pkgutil
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lisa.core.model.keys import GROUP_KEYS, LANE_KEYS, TOPIC_KEYS, Keys
from lisa.core.model.options import OPTIONS, TopicOptions, encode
from lisa.core.transitions import base, loader
from lisa.core.transitions.base import Transition
from tests.contract.bench import TOPIC, Bench, Receipts
from tests.contract.samples import SAMPLES
from tests.rows import Item, enqueue

SCRIPT = pytest.mark.parametrize("name", loader.names())


def code(name: str) -> str:
    """A file of a script, or the prelude, without its comments."""
    path = loader.directory() / f"{name}.lua"
    return uncommented(loader.prelude() if name == "prelude" else path.read_text("utf-8"))


def composed(name: str, features: loader.Features = loader.NONE) -> str:
    """A script as the server gets it, without its comments."""
    return uncommented(loader.load(name, features).source)


def variants() -> Iterator[tuple[str, str]]:
    """The scripts' names and code: plain, with each feature alone, and with all features."""
    for name in loader.names():
        features = loader.features_of(name)
        for some in {loader.NONE, features, *map(frozenset, zip(features))}:
            yield name, composed(name, some)


def uncommented(source: str) -> str:
    return re.sub(r"--[^\n]*", "", source)


@pytest.mark.parametrize("name", [*loader.names(), "prelude"])
def test_a_script_reads_only_the_keys_given_to_it_and_bounded_ranges(name: str) -> None:
    text = code(name)
    assert not re.search(r"'(KEYS|SCAN|HGETALL|SMEMBERS|FLUSH\w*|EVAL\w*)'|cjson", text)
    assert not re.search(r"'(lisa|body|done|waiting|g):", text), "a key is not passed in KEYS"
    for call in re.findall(r"'(?:ZRANGEBYSCORE|XRANGE|XREADGROUP)'[^\n]*(?:\n[^\n]*)?", text):
        one_entry = re.search(r"'XRANGE', group.ready, entry, entry\)", call)
        assert one_entry or re.search(r"'(LIMIT|COUNT)'", call), call
    assert not re.search(r"^function ", text, re.MULTILINE), "a global is set"


@SCRIPT
def test_the_server_knows_a_script_by_its_sha(bench: Bench, name: str) -> None:
    script = loader.load(name)
    assert script.sha == hashlib.sha1(script.source.encode(), usedforsecurity=False).hexdigest()
    assert bench.store.ask("SCRIPT", "LOAD", script.source) == script.sha.encode()


@SCRIPT
def test_the_defaults_of_a_script_are_the_options_defaults(name: str) -> None:
    defaults = encode({name: one.default for name, one in OPTIONS.items()})
    source = composed(name)
    table = dict(re.findall(r"(\w+) = '([^']*)'", source.partition("\n")[0]))
    assert table == {name: defaults[name] for name in re.findall(r"option\('(\w+)'\)", source)}
    assert "DEFAULT." not in source


def test_a_default_is_written_into_a_script() -> None:
    """A table of defaults would be made at every call."""
    assert "DEFAULT.max_ready" in code("promote")
    assert f"tonumber(settings[2] or '{TopicOptions().max_ready}')" in composed("promote")
    assert "DEFAULT" not in composed("promote")


def test_a_script_includes_only_the_prelude_functions_it_uses() -> None:
    functions = re.findall(r"^local function (\w+)", code("prelude"), re.MULTILINE)
    used = set()
    for name, source in variants():
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


def header(name: str) -> dict[str, str]:
    """The parts of a script's header by their first word, each on one line."""
    parts: dict[str, str] = {}
    part = "purpose"
    for line in (loader.directory() / f"{name}.lua").read_text("utf-8").splitlines():
        if not line.startswith("--"):
            break
        said = line[2:].strip()
        for word in ("Guarantee:", "Features:", "KEYS", "ARGV", "Returns"):
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


def test_code_for_features_is_left_out_of_other_scripts() -> None:
    for name, source in variants():
        assert "USES" not in source, name
        asked = set(re.findall(r"\{'FEATURES', '(\w+)'\}", source))
        assert asked <= loader.features_of(name), "else the store calls again for ever"
    assert "journal(" not in composed("promote")
    assert "journal(events)" in composed("promote", frozenset({"journal"}))
    with pytest.raises(ValueError, match="is not in list"):
        loader._resolved(["if USES.ttl then", "  x()"], loader.NONE)


def test_every_script_has_one_transition() -> None:
    modules = pkgutil.iter_modules([str(Path(base.__file__).parent)])
    found = Counter(
        vars(kind)["script"]
        for module in modules
        for kind in vars(importlib.import_module(f"lisa.core.transitions.{module.name}")).values()
        if isinstance(kind, type) and "script" in vars(kind)
        if kind.__module__.endswith(f".{module.name}")
    )
    assert found == Counter(loader.names())


@SCRIPT
def test_a_script_is_what_its_header_and_its_module_say(name: str) -> None:
    call, parts = sample(name, 1), header(name)
    assert call.script == name
    assert set(parts) - {"Features:"} == {"purpose", "Guarantee:", "KEYS", "ARGV", "Returns"}
    assert parts["purpose"].startswith(f"{name}: ")
    assert parts["KEYS"].startswith("the prelude's")
    assert ("the call's record" in parts["KEYS"]) == bool(call.call_id)
    fixed, each = argument_counts(parts["ARGV"])
    assert [len(own_arguments(name, n)) for n in (1, 3)] == [fixed + each, fixed + 3 * each]
    assert parts["ARGV"].startswith("own group's number") == isinstance(call, base.OfGroup)
    assert "{'OK'" in parts["Returns"]
    knows_groups = re.search(r"changed_(groups|topic)\(\)", code(name)) is not None
    assert ("{'GROUPS', ...}" in parts["Returns"]) == knows_groups
    named = re.findall(r"[a-z_]+", bare(parts.get("Features:", "")))
    assert sorted(named) == sorted(loader.features_of(name) - {base.LANES})
    # The caller knows by itself whether ids have keys.
    assert ("{'FEATURES', ...}" in parts["Returns"]) == bool({*named} - base.KEYED)


@SCRIPT
def test_the_keys_match_the_header(name: str) -> None:
    said = re.search(r"for each \w+: ([\w, ]+)", header(name)["KEYS"])
    each = said.group(1).replace(" ", "").split(",") if said else []
    own = header(name)["KEYS"]
    group_keys = len(GROUP_KEYS + LANE_KEYS) if "the twelve of the group" in own else 0
    keys = Keys().topic(TOPIC)
    further = {
        "absorb": [keys.history, "lisa:{t}:m"],
        "clear": [keys.consumers, keys.history, keys.archived, keys.confirm, keys.throttled],
        "coalesce": [keys.throttled, *keys.bodies_and_tombstones(["m1\x1f~1", "m1\x1f~2"])],
        "limit": [keys.limits],
        "forget": [keys.consumers],
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
    of_group = [*keys.group("lisa"), *keys.lanes("lisa")]
    assert own_keys(name, 1)[:group_keys] == of_group[:group_keys]


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
    lines = (line for line in loader.prelude().splitlines() if line.startswith("--"))
    text = " ".join(" ".join(line[2:] for line in lines).split())
    found = re.search(
        r"KEYS 1-(\d+) the topic's: ([\w, ]+) then (\w+) for each group: ([\w, ]+) then", text
    )
    assert found
    assert (int(found[1]), tuple(found[2].split(", "))) == (len(TOPIC_KEYS), TOPIC_KEYS)
    assert (found[3], tuple(found[4].split(", "))) == ("seven", GROUP_KEYS)
    assert len(GROUP_KEYS) == 7
