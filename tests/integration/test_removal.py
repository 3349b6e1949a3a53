"""Removals and repairs of groups with concurrent sweeps, resharding and new declarations."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import pytest
from click.testing import CliRunner

from lisa.admin import groups
from lisa.admin.fsck import CheckReport, check
from lisa.cli.main import main
from lisa.core.model.errors import RemovalUnfinished
from lisa.core.redis.flow import Command
from lisa.core.store import group_removal
from lisa.core.store.reshard import spread
from lisa.core.transitions import loader
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.undeclare import Undeclare
from lisa.manager.expirer import Expirer
from lisa.manager.sharder import Sharder
from lisa.manager.signal_queue import SignalQueue
from lisa.manager.sweeper import Sweeper
from tests.shards import ORDERS, SENT, Halting, Split


@pytest.fixture
def split(split_in_two_groups: Split) -> Split:
    return split_in_two_groups


def declared(split: Split) -> dict[str, tuple[str, ...]]:
    store = split.store
    return {one: store.drive(store.groups(one)) for one in split.layout.counted(ORDERS)}


def are_all(split: Split, *names: str) -> bool:
    return set(declared(split).values()) == {names}


def add_anew(split: Split) -> None:
    """Declare the group again, as another operator would, and send messages."""
    assert split.store.drive(groups.add(split.store, "orders", "lisa")) is True
    split.send_all()


def marks(split: Split) -> list[str]:
    return [
        one
        for one in split.layout.counted(ORDERS)
        if split.store.ask("HEXISTS", split.keys(one).options, "removing:lisa")
    ]


def sweep(split: Split) -> None:
    """Sweep at a later time, when all marks are old."""
    store = split.store
    for shard in marks(split):
        store.call(Configure(shard, {"removing:lisa": "1"}))
    sweeper = Sweeper(store, Expirer(store, SignalQueue(store)), lambda _: True)
    for shard in split.layout.counted(ORDERS):
        sweeper.step(shard)


def first_undeclares(shard: str) -> Callable[[Command], bool]:
    def halts(command: Command) -> bool:
        return command[0] == "EVALSHA" and shard in command and "lisa" in command

    return halts


def test_a_removal_takes_the_shards_that_were_made_as_it_began(split: Split) -> None:
    removing = Halting(group_removal.remove(split.store, ORDERS, "lisa"), split)
    assert not removing.run_until(lambda command: command[0] == "HEXISTS")
    split.into(3)
    assert removing.run_until(lambda _: False)
    Sharder(split.store).step(ORDERS)
    assert are_all(split, "audit")
    assert split.store.drive(check(split.store, ["orders"])).findings == []


def test_a_group_declared_again_before_a_shard_is_reached_keeps_its_messages(
    split: Split,
) -> None:
    split.into(2)
    second = split.layout.current(ORDERS)[1]
    removing = Halting(group_removal.remove(split.store, ORDERS, "lisa"), split)
    assert not removing.run_until(first_undeclares(second))
    add_anew(split)
    assert removing.run_until(lambda _: False)
    sweep(split)
    assert are_all(split, "audit", "lisa")
    assert (split.owed(), marks(split)) == (SENT, [])


def test_a_removal_reports_that_its_group_was_declared_again(split: Split) -> None:
    split.into(5)
    split.send_all()
    removing = Halting(groups.remove(split.store, "orders", "lisa"), split)
    last = split.layout.current(ORDERS)[-1]
    assert not removing.run_until(first_undeclares(last))
    split.store.call(Declare("orders", "lisa"))  # a consumer, say
    with pytest.raises(RemovalUnfinished, match="'lisa' of topic 'orders' was declared again"):
        removing.run_until(lambda _: False)
    split.store.drive(spread(split.store, ORDERS))
    assert are_all(split, "audit", "lisa")
    assert marks(split) == []


def test_a_mark_beside_a_declared_group_removes_nothing(split: Split) -> None:
    split.send_all()
    split.store.call(Configure("orders", {"removing:lisa": "1700000000000"}))
    sweep(split)
    assert are_all(split, "audit", "lisa")
    assert (split.owed(), marks(split)) == (SENT, [])


def test_a_declaration_on_a_shard_after_its_removal_is_withdrawn(split: Split) -> None:
    """Its reply was lost; or its process ended, and fsck finds what it left."""
    split.into(2)
    store = split.store
    first = split.layout.current(ORDERS)[0]
    for again in (True, False):
        spreading = Halting(spread(store, ORDERS), split)
        looks_at_first = ("HGETALL", split.keys(first).options)
        assert not spreading.run_until(lambda command: command == looks_at_first)  # noqa: B023
        assert store.drive(group_removal.remove(store, ORDERS, "lisa")) == 0
        assert not spreading.run_until(first_undeclares(first))
        for command in spreading._step.commands:
            store.ask(*command)
        if again:
            assert spreading.run_until(lambda _: False)
            assert are_all(split, "audit")
            store.drive(groups.add(store, "orders", "lisa"))
    assert not are_all(split, "audit")
    split.send_all()
    found = store.drive(check(store, ["orders"]))
    assert found.kinds == {"stray-group": 1}
    assert found.findings[0].what.startswith("declared in orders~0of2, orders~1of2; remove it")
    assert store.drive(check(store, ["orders"], repair=True)).ok
    assert are_all(split, "audit")
    assert store.drive(check(store, ["orders"])).findings == []


def test_a_topic_without_any_group_is_not_mended_by_taking_those_of_its_shards(
    split: Split,
) -> None:
    split.into(2)
    split.send_all()
    split.store.ask("DEL", split.keys("orders").groups)
    report = split.store.drive(check(split.store, ["orders"], repair=True))
    assert report.kinds["stray-group"] == 2
    assert not report.ok
    assert split.owed() == SENT


# Repairs


class Repair:
    """A repair that can be halted before its script calls for the group."""

    def __init__(self, split: Split) -> None:
        self._reports: list[CheckReport] = []
        flow = check(
            split.store,
            ["orders"],
            repair=True,
            progress=lambda _, report: self._reports.append(report),
        )
        self._run = Halting(flow, split)

    def until(self, script: str, shard: str = "orders") -> None:
        assert not self._run.run_until(calls(script, shard))

    def until_command(self, *command: str) -> None:
        assert not self._run.run_until(lambda one: tuple(one) == command)

    def finish(self) -> list[str]:
        assert self._run.run_until(lambda _: False)
        return [one.kind for one in self._reports[-1].findings]


def calls(script: str, shard: str) -> Callable[[Command], bool]:
    name = loader.load(script).sha
    return lambda one: one[:2] == ("EVALSHA", name) and {"lisa", shard} <= set(one)


def lose_declaration(split: Split) -> None:
    split.store.ask("HDEL", split.keys("orders").groups, "lisa")


def lose_stream(split: Split) -> None:
    split.store.ask("DEL", split.keys("orders").group("lisa").ready)


@pytest.mark.parametrize("is_cut_short", [False, True])
@pytest.mark.parametrize("lose", [lose_stream, lose_declaration])
def test_a_group_that_is_removed_before_its_repair_stays_removed(
    split: Split, lose: Callable[[Split], None], *, is_cut_short: bool
) -> None:
    split.send_all()
    lose(split)
    repair = Repair(split)
    repair.until("declare")
    if is_cut_short:
        split.store.call(Undeclare("orders", "lisa"))
    else:
        split.store.drive(groups.remove(split.store, "orders", "lisa"))
    assert repair.finish() == []
    assert are_all(split, "audit")
    assert split.owed() == (SENT if is_cut_short else 0)
    assert bool(split.store.ask("EXISTS", *split.keys("orders").group("lisa"))) == is_cut_short


@pytest.mark.parametrize("is_given", [False, True])
def test_a_group_declared_again_is_not_removed_as_a_leftover(
    split: Split, *, is_given: bool
) -> None:
    lose_declaration(split)
    repair = Repair(split)
    repair.until("undeclare")
    split.store.drive(groups.add(split.store, "orders", "lisa"))
    if is_given:
        split.send_all()
    assert repair.finish() == []
    assert are_all(split, "audit", "lisa")
    assert split.owed() == SENT * is_given
    assert not split.store.ask("HEXISTS", split.keys("orders").options, "removing:lisa")


@pytest.mark.parametrize("moment", ["before it asks", "after it asked"])
def test_a_stray_group_declared_again_keeps_its_messages(split: Split, moment: str) -> None:
    split.into(3)
    split.send_all()
    lose_stream(split)
    lose_declaration(split)
    repair = Repair(split)
    if moment == "before it asks":
        repair.until_command("HEXISTS", split.keys("orders").groups, "lisa")
    else:
        repair.until("undeclare", split.layout.current(ORDERS)[0])
    split.store.drive(groups.add(split.store, "orders", "lisa"))
    assert repair.finish() == []
    assert are_all(split, "audit", "lisa")
    assert split.owed() == SENT


@pytest.fixture
def weak(split: Split) -> Iterator[Split]:
    """A user with all rights to read, but none to create a group."""
    split.store.ask("ACL", "SETUSER", "weak", "on", ">pw", "~*", "&*", "+@all", "-xgroup")
    weak = Split(split.url.replace("//", "//weak:pw@"))
    yield weak
    weak.store.close()
    split.store.ask("ACL", "DELUSER", "weak")


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
    split.store.ask("HSET", split.keys("orders").policy, "gone", "0")
    report = weak.store.drive(check(weak.store, ["orders"], repair=True))
    refused, made = [one for one in report.findings if one.kind in {kind, "no-body"}]
    assert (refused.kind, refused.group, refused.repaired) == (kind, "lisa", False)
    assert said in refused.what
    assert "xgroup" in refused.what
    assert (made.kind, made.id, made.repaired) == ("no-body", "gone", True)
    assert report.total == report.repaired + 1
    assert not report.ok
    found = CliRunner().invoke(main, ["fsck", "--repair", "--redis", weak.url, "orders"])
    assert found.exit_code == 1
    assert "1 inconsistent, 0 repaired, 1 left\n" in found.stdout
    asked = CliRunner().invoke(main, ["fsck", "--repair", "--redis", weak.url, "--json"])
    assert asked.exit_code == 1
    (finding,) = json.loads(asked.stdout)["findings"]
    assert said in finding["what"]
    assert split.store.drive(check(split.store, ["orders"], repair=True)).ok
