"""Each script's header matches its transition module."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

import pytest

from lisa.core.model.keys import GROUP_KEYS, TOPIC_KEYS, Keys
from lisa.core.transitions import base, loader
from tests.contract.bench import TOPIC, Receipts
from tests.contract.samples import SAMPLES
from tests.rows import Item, enqueue

if TYPE_CHECKING:
    from lisa.core.transitions.base import Transition

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
