"""Removals and repairs of groups with concurrent sweeps, resharding and new declarations."""

import json
from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner

from lisa.admin import groups
from lisa.admin.fsck import CheckReport, check
from lisa.admin.limits import set_limits
from lisa.cli.main import main
from lisa.core.model.errors import RemovalUnfinished
from lisa.core.model.lanes import KeyLimits
from lisa.core.store import group_removal, limits
from lisa.core.store.reshard import spread
from lisa.core.transitions import loader
from lisa.core.transitions.groups import Declare, Undeclare
from lisa.core.transitions.topic import Configure
from tests.shards import ORDERS, SENT, Halting, Split

ONLY_AUDIT, BOTH = {("audit",)}, {("audit", "lisa")}


@pytest.fixture
def split(split_in_two_groups: Split) -> Split:
    return split_in_two_groups


def test_a_removal_takes_the_shards_that_were_made_as_it_began(split: Split) -> None:
    removing = Halting(group_removal.remove(split.store, ORDERS, "lisa"), split)
    removing.halt_at("HEXISTS")
    split.into(3)
    removing.finish()
    split.step()
    assert split.declared() == ONLY_AUDIT
    assert split.check().findings == []


def test_a_removal_removes_the_limits_that_keys_have_in_the_group(split: Split) -> None:
    split.into(3)
    for group in ("lisa", "audit", None):
        for key in ("a", "lisa"):
            limited = set_limits(split.store, ORDERS, key, KeyLimits(weight=2), group)
            assert split.drive(limited)
    assert len(split.drive(limits.read(split.store, ORDERS, of_group="lisa"))) == 2
    split.drive(group_removal.remove(split.store, ORDERS, "lisa"))
    split.drive(spread(split.store, ORDERS))
    fields = ("a", "lisa", "audit\x1fa", "audit\x1flisa")
    for shard in split.layout.active(ORDERS):
        assert split.drive(limits.read(split.store, shard)) == dict.fromkeys(fields, "weight=2")


def test_a_group_declared_again_before_a_shard_is_reached_keeps_its_messages(split: Split) -> None:
    split.into(2)
    removing = Halting(group_removal.remove(split.store, ORDERS, "lisa"), split)
    removing.halt_at("EVALSHA", "lisa", split.layout.current(ORDERS)[1])
    assert split.add_group()  # another operator
    split.send_all()
    removing.finish()
    split.sweep()
    split.store.call(Configure("orders", {"removing:lisa": "1700000000000"}))
    split.sweep()  # nor does a mark beside a declared group remove anything
    assert split.declared() == BOTH
    assert (split.owed(), split.marks()) == (SENT, [])


def test_a_removal_reports_that_its_group_was_declared_again(split: Split) -> None:
    split.into(5)
    split.send_all()
    removing = Halting(groups.remove(split.store, "orders", "lisa"), split)
    removing.halt_at("EVALSHA", "lisa", split.layout.current(ORDERS)[-1])
    split.store.call(Declare("orders", "lisa"))  # a consumer, say
    with pytest.raises(RemovalUnfinished, match="'lisa' of topic 'orders' was declared again"):
        removing.finish()
    split.drive(spread(split.store, ORDERS))
    assert (split.declared(), split.marks()) == (BOTH, [])


def test_a_declaration_on_a_shard_after_its_removal_is_withdrawn(split: Split) -> None:
    """Its reply was lost; or its process ended, and fsck finds what it left."""
    split.into(2)
    first = split.layout.current(ORDERS)[0]
    for again in (True, False):
        spreading = Halting(spread(split.store, ORDERS), split)
        spreading.halt_at("HGETALL", split.keys(first).options)
        assert split.drive(group_removal.remove(split.store, ORDERS, "lisa")) == 0
        spreading.halt_at("EVALSHA", "lisa", first)
        for command in spreading.step.commands:
            split.ask(*command)
        if again:
            spreading.finish()
            assert split.declared() == ONLY_AUDIT
            split.add_group()
    assert split.declared() != ONLY_AUDIT
    split.send_all()
    (found,) = split.check().findings
    assert found.kind == "stray-group"
    assert found.what.startswith("declared in orders~0of2, orders~1of2; remove it")
    assert split.check(repair=True).ok
    assert split.declared() == ONLY_AUDIT
    assert split.check().findings == []


def test_a_topic_without_any_group_is_not_mended_by_taking_those_of_its_shards(
    split: Split,
) -> None:
    split.into(2)
    split.send_all()
    split.ask("DEL", split.keys().groups)
    report = split.check(repair=True)
    assert report.kinds["stray-group"] == 2
    assert not report.ok
    assert split.owed() == SENT


# Repairs


class Repair(Halting):
    """A repair that can be halted before its script calls for the group."""

    def __init__(self, split: Split) -> None:
        self._reports: list[CheckReport] = []
        note = self._reports.append
        flow = check(split.store, ["orders"], repair=True, progress=lambda _, report: note(report))
        super().__init__(flow, split)

    def halt_before(self, script: str, shard: str = "orders") -> None:
        self.halt_at("EVALSHA", loader.load(script).sha, "lisa", shard)

    def found(self) -> list[str]:
        """The kinds of all findings, once the repair is finished."""
        self.finish()
        return [found.kind for found in self._reports[-1].findings]


def lose_declaration(split: Split) -> None:
    split.ask("HDEL", split.keys().groups, "lisa")


def lose_stream(split: Split) -> None:
    split.ask("DEL", split.keys().group("lisa").ready)


@pytest.mark.parametrize("is_cut_short", [False, True])
@pytest.mark.parametrize("lose", [lose_stream, lose_declaration])
def test_a_group_that_is_removed_before_its_repair_stays_removed(
    split: Split, lose: Callable[[Split], None], *, is_cut_short: bool
) -> None:
    split.send_all()
    lose(split)
    repair = Repair(split)
    repair.halt_before("declare")
    if is_cut_short:
        split.store.call(Undeclare("orders", "lisa"))
    else:
        split.drive(groups.remove(split.store, "orders", "lisa"))
    assert repair.found() == []
    assert split.declared() == ONLY_AUDIT
    assert split.owed() == (SENT if is_cut_short else 0)
    assert bool(split.ask("EXISTS", *split.keys().group("lisa"))) == is_cut_short


@pytest.mark.parametrize("owed", [0, SENT])
def test_a_group_declared_again_is_not_removed_as_a_leftover(split: Split, owed: int) -> None:
    lose_declaration(split)
    repair = Repair(split)
    repair.halt_before("undeclare")
    split.add_group()
    if owed:
        split.send_all()
    assert repair.found() == []
    assert (split.declared(), split.owed(), split.marks()) == (BOTH, owed, [])


@pytest.mark.parametrize("moment", ["before it asks", "after it asked"])
def test_a_stray_group_declared_again_keeps_its_messages(split: Split, moment: str) -> None:
    split.into(3)
    split.send_all()
    lose_stream(split)
    lose_declaration(split)
    repair = Repair(split)
    if moment == "before it asks":
        repair.halt_at("HEXISTS", split.keys().groups, "lisa")
    else:
        repair.halt_before("undeclare", split.layout.current(ORDERS)[0])
    split.add_group()
    assert repair.found() == []
    assert (split.declared(), split.owed()) == (BOTH, SENT)


@pytest.fixture
def weak(split: Split) -> Iterator[Split]:
    """A user with all rights to read, but none to create a group."""
    split.ask("ACL", "SETUSER", "weak", "on", ">pw", "~*", "&*", "+@all", "-xgroup")
    weak = Split(split.url.replace("//", "//weak:pw@"))
    yield weak
    split.ask("ACL", "DELUSER", "weak")


@pytest.mark.parametrize(
    ("lose", "kind", "said"),
    [
        (lose_stream, "no-stream", "not repaired: "),
        (lose_declaration, "undeclared-group", "declare it again, or remove it; not repaired: "),
    ],
)
def test_a_refused_repair_is_reported_and_the_others_are_made(
    split: Split, weak: Split, lose: Callable[[Split], None], kind: str, said: str
) -> None:
    split.send_all()
    lose(split)
    split.ask("HSET", split.keys().policy, "gone", "0")
    report = weak.check(repair=True)
    refused, made = [one for one in report.findings if one.kind in {kind, "no-body"}]
    assert (refused.kind, refused.group, refused.repaired) == (kind, "lisa", False)
    assert said in refused.what
    assert "xgroup" in refused.what
    assert (made.kind, made.id, made.repaired) == ("no-body", "gone", True)
    assert (report.total, report.ok) == (report.repaired + 1, False)
    shown = CliRunner().invoke(main, ["fsck", "--repair", "--redis", weak.url, "orders"])
    assert shown.exit_code == 1
    assert "1 inconsistent, 0 repaired, 1 left\n" in shown.stdout
    shown = CliRunner().invoke(main, ["fsck", "--repair", "--redis", weak.url, "--json"])
    assert shown.exit_code == 1
    (finding,) = json.loads(shown.stdout)["findings"]
    assert said in finding["what"]
    assert split.check(repair=True).ok
