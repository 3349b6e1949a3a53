"""Each script's header says what its transition module does, and the other way round."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any

import pytest

from lisa.core import scripts
from lisa.core.keys import GROUP_KEYS, TOPIC_KEYS, Keys
from lisa.core.stream import Entry
from lisa.core.transitions import base
from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.cancel import Cancel
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.expire import Expire
from lisa.core.transitions.extend import Extend
from lisa.core.transitions.forget import Forget
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.mend import Mend
from lisa.core.transitions.open import Open
from lisa.core.transitions.place import Place
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.prune import Prune
from lisa.core.transitions.pull import Pull
from lisa.core.transitions.purge import Purge
from lisa.core.transitions.reclaim import Reclaim
from lisa.core.transitions.release import Release
from lisa.core.transitions.requeue import Requeue
from lisa.core.transitions.reschedule import Reschedule
from lisa.core.transitions.restore import Restore, RestoreItem
from lisa.core.transitions.retry import Failure, Retry
from lisa.core.transitions.trim import Trim
from lisa.core.transitions.undeclare import Undeclare
from tests.rows import Item, enqueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from lisa.core.transitions.base import Transition

IDS = ["m1", "m2", "m3"]
SAMPLES: dict[str, Callable[[int], Transition[Any]]] = {
    "ack": lambda n: Ack("t", "g", [Settlement(m, "1-1", "f", 1, 1) for m in IDS[:n]]),
    "cancel": lambda n: Cancel("t", IDS[:n]),
    "configure": lambda n: Configure("t", dict.fromkeys(IDS[:n], "1")),
    "declare": lambda _: Declare("t", "g"),
    "enqueue": lambda n: enqueue("t", "token", [Item(m, "+0", b"") for m in IDS[:n]]),
    "expire": lambda n: Expire("t", IDS[:n]),
    "extend": lambda n: Extend("t", "g", "c", [(m, "1-1") for m in IDS[:n]]),
    "forget": lambda n: Forget("t", "g", IDS[:n], 1),
    "inspect": lambda n: Inspect("t", IDS[:n]),
    "mend": lambda n: Mend("t", IDS[:n]),
    "open": lambda n: Open("t", "g", [Entry("1-1", m, 1, 1) for m in IDS[:n]]),
    "place": lambda _: Place("t", "open", 1),
    "promote": lambda _: Promote("t"),
    "prune": lambda n: Prune("t", IDS[:n]),
    "pull": lambda _: Pull("t", "g", "c", 1),
    "purge": lambda n: Purge("t", "g", IDS[:n]),
    "reclaim": lambda _: Reclaim("t", "g"),
    "release": lambda n: Release("t", "g", [(m, "1-1") for m in IDS[:n]]),
    "requeue": lambda n: Requeue("t", "g", IDS[:n]),
    "reschedule": lambda n: Reschedule("t", [(m, "1") for m in IDS[:n]]),
    "restore": lambda n: Restore("t", [RestoreItem(m, b"", 1) for m in IDS[:n]]),
    "retry": lambda n: Retry("t", "g", [Failure(m, "1-1", "") for m in IDS[:n]]),
    "trim": lambda _: Trim("t", "g"),
    "undeclare": lambda n: Undeclare("t", "g", IDS[:n]),
}
SCRIPT = pytest.mark.parametrize("name", scripts.names())


def header(name: str) -> dict[str, str]:
    """The parts of a script's header by their first word, each on one line."""
    parts: dict[str, str] = {}
    part = "purpose"
    for line in (scripts.directory() / f"{name}.lua").read_text("utf-8").splitlines():
        if not line.startswith("--"):
            break
        said = line[2:].strip()
        for word in ("Guarantee:", "KEYS", "ARGV", "Returns"):
            if said.startswith(word):
                part, said = word, said.removeprefix(word)
        parts[part] = f"{parts.get(part, '')} {said}".strip()
    return parts


def bare(text: str) -> str:
    """Without what stands in quotes and in parentheses."""
    return re.sub(r"\([^()]*\)", "", re.sub(r"(?<!\w)'[^']*'", "", text))


def argument_counts(text: str) -> tuple[int, int]:
    """How many arguments a header names apart from the ids' own, and how many for each id."""
    fixed = each = 0
    for part in (one.strip() for one in bare(text).split(";")):
        if part.startswith(("n times ", "n each of ")):
            each += len(part.split(","))
        elif part != "none of its own":
            fixed += 1
    return fixed, each


def own_keys(name: str, n: int) -> list[str]:
    return list(SAMPLES[name](n).id_keys(Keys().topic("t")))


def own_arguments(name: str, n: int) -> list[base.Argument]:
    groups = SAMPLES[name](n).fixed_groups
    groups = ("g",) if groups is None else groups
    _, arguments = SAMPLES[name](n).build(Keys().topic("t"), groups, "test@here:1")
    return arguments[4 + len(groups) :]


def test_every_script_has_a_sample_here_and_every_module_a_script() -> None:
    assert sorted(SAMPLES) == scripts.names()
    modules = importlib.resources.files("lisa.core.transitions").iterdir()
    found = {path.name.removesuffix(".py") for path in modules if path.name.endswith(".py")}
    assert found - {"__init__", "base"} == set(scripts.names())


@SCRIPT
def test_the_module_of_that_name_runs_the_script(name: str) -> None:
    module = importlib.import_module(f"lisa.core.transitions.{name}")
    transition = SAMPLES[name](1)
    assert type(transition).__module__ == module.__name__
    assert transition.script == name


@SCRIPT
def test_the_header_is_complete(name: str) -> None:
    parts = header(name)
    assert set(parts) == {"purpose", "Guarantee:", "KEYS", "ARGV", "Returns"}
    assert parts["purpose"].startswith(f"{name}: ")
    assert parts["KEYS"].startswith("the prelude's")
    assert "{'OK'" in parts["Returns"]
    knows_groups = "changed_groups()" in scripts.load(name).source.rpartition("-- Returns")[2]
    assert ("{'GROUPS', ...}" in parts["Returns"]) == knows_groups


@SCRIPT
def test_the_keys_are_as_the_header_says(name: str) -> None:
    said = re.search(r"for each \w+: ([\w, ]+)", header(name)["KEYS"])
    each = said.group(1).replace(" ", "").split(",") if said else []
    group_keys = len(GROUP_KEYS) if "the seven of the group" in header(name)["KEYS"] else 0
    keys = Keys().topic("t")
    if header(name)["KEYS"].endswith("the record of the archives"):
        assert own_keys(name, 1) == [keys.archived]
        return
    for n in (1, 2, 3):
        built = own_keys(name, n)[group_keys:]
        rows = [[getattr(keys, kind)(m) for kind in each] for m in IDS[:n]]
        in_columns = "by columns" in header(name)["KEYS"]
        laid_out = zip(*rows, strict=True) if in_columns else rows
        assert built == [key for part in laid_out for key in part]
    assert own_keys(name, 1)[:group_keys] == list(keys.group("g")[:group_keys])


@SCRIPT
def test_the_arguments_are_as_many_as_the_header_says(name: str) -> None:
    fixed, each = argument_counts(header(name)["ARGV"])
    assert len(own_arguments(name, 1)) == fixed + each
    assert len(own_arguments(name, 3)) == fixed + 3 * each
    has_own_group = SAMPLES[name](1).own_group is not None
    assert header(name)["ARGV"].startswith("own group's number") == has_own_group


def test_of_ids_that_are_new_only_the_first_one_s_tombstone_is_named() -> None:
    keys = Keys().topic("t")
    items = [Item(m, "+0", b"") for m in IDS]
    found = list(enqueue("t", "token", items, are_ids_new=True).id_keys(keys))
    assert found == [*(keys.body(m) for m in IDS), keys.done(IDS[0])]


def test_extras_of_a_send_come_as_numbered_pairs() -> None:
    items = [Item("a", "1", b"", 5), Item("b", "2", b"", None, "0"), Item("c", "3", b"", 7)]
    _, arguments = enqueue("t", "token", items).build(Keys().topic("t"), (), "test@here:1")
    assert arguments[-8:] == [2, 1, 5, 3, 7, 1, 2, "0"]


def test_the_preludes_header_names_the_keys_in_their_order() -> None:
    text = " ".join(
        line[2:].strip()
        for line in (scripts.directory() / "prelude.lua").read_text("utf-8").splitlines()
        if line.startswith("--")
    )
    shared = re.search(r"KEYS 1-(\d+) the topic's: ([\w, ]+) then", re.sub(r" +", " ", text))
    groups = re.search(r"then (\w+) for each group: ([\w, ]+) then", re.sub(r" +", " ", text))
    assert shared is not None
    assert groups is not None
    assert (int(shared[1]), tuple(shared[2].split(", "))) == (len(TOPIC_KEYS), TOPIC_KEYS)
    assert (groups[1], tuple(groups[2].split(", "))) == ("seven", GROUP_KEYS)
    assert len(GROUP_KEYS) == 7
