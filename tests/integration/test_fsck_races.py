"""Changes between fsck's check and its repair, and repairs refused by the server."""

from __future__ import annotations

import json
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner

from lisa.admin import groups
from lisa.admin.fsck import check
from lisa.cli.main import main
from lisa.core.transitions import loader
from lisa.core.transitions.undeclare import Undeclare
from tests.servers import open_store
from tests.shards import ORDERS, SENT, Halting, Split

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lisa.admin.fsck import CheckReport
    from lisa.core.redis.flow import Command
    from lisa.core.store.store import SyncStore


@pytest.fixture
def here(split_in_two_groups: Split) -> Split:
    return split_in_two_groups


class Repair:
    """A repair that can be halted before its script calls for the group."""

    def __init__(self, here: Split) -> None:
        self._reports: list[CheckReport] = []
        flow = check(
            here.store,
            ["orders"],
            repair=True,
            progress=lambda _, report: self._reports.append(report),
        )
        self._run = Halting(flow, here)

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


def declared(here: Split) -> tuple[str, ...]:
    return here.store.drive(here.store.groups("orders"))


@contextmanager
def another(here: Split) -> Iterator[SyncStore]:
    """The store of another process."""
    store = open_store(here.url)
    yield store
    store.close()


def lose_declaration(here: Split) -> None:
    here.store.ask("HDEL", here.keys("orders").groups, "lisa")


def lose_stream(here: Split) -> None:
    here.store.ask("DEL", here.keys("orders").group("lisa").ready)


@pytest.mark.parametrize("is_cut_short", [False, True])
@pytest.mark.parametrize("lose", [lose_stream, lose_declaration])
def test_a_group_that_is_removed_before_its_repair_stays_removed(
    here: Split, lose: Callable[[Split], None], *, is_cut_short: bool
) -> None:
    here.send_all()
    lose(here)
    repair = Repair(here)
    repair.until("declare")
    if is_cut_short:
        here.store.call(Undeclare("orders", "lisa"))
    else:
        with another(here) as store:
            store.drive(groups.remove(store, "orders", "lisa"))
    assert repair.finish() == []
    assert declared(here) == ("audit",)
    assert here.owed() == (SENT if is_cut_short else 0)
    assert bool(here.store.ask("EXISTS", *here.keys("orders").group("lisa"))) == is_cut_short


@pytest.mark.parametrize("is_given", [False, True])
def test_a_group_declared_again_is_not_removed_as_a_leftover(
    here: Split, *, is_given: bool
) -> None:
    lose_declaration(here)
    repair = Repair(here)
    repair.until("undeclare")
    with another(here) as store:
        store.drive(groups.add(store, "orders", "lisa"))
    if is_given:
        here.send_all()
    assert repair.finish() == []
    assert declared(here) == ("audit", "lisa")
    assert here.owed() == SENT * is_given
    assert not here.store.ask("HEXISTS", here.keys("orders").options, "removing:lisa")


@pytest.mark.parametrize("moment", ["before it asks", "after it asked"])
def test_a_stray_group_declared_again_keeps_its_messages(here: Split, moment: str) -> None:
    here.into(3)
    here.send_all()
    lose_stream(here)
    lose_declaration(here)
    repair = Repair(here)
    if moment == "before it asks":
        repair.until_command("HEXISTS", here.keys("orders").groups, "lisa")
    else:
        repair.until("undeclare", here.layout.current(ORDERS)[0])
    with another(here) as store:
        store.drive(groups.add(store, "orders", "lisa"))
    assert repair.finish() == []
    assert {here.store.drive(here.store.groups(one)) for one in here.layout.counted(ORDERS)} == {
        ("audit", "lisa")
    }
    assert here.owed() == SENT


@pytest.fixture
def weak(here: Split) -> Iterator[Split]:
    """A user with all rights to read, but none to create a group."""
    here.store.ask("ACL", "SETUSER", "weak", "on", ">pw", "~*", "&*", "+@all", "-xgroup")
    weak = Split(here.url.replace("//", "//weak:pw@"))
    yield weak
    weak.store.close()
    here.store.ask("ACL", "DELUSER", "weak")


@pytest.mark.parametrize(
    ("lose", "kind", "said"),
    [
        (lose_stream, "no-stream", "not repaired: "),
        (lose_declaration, "undeclared-group", "declare it again, or remove it; not repaired: "),
    ],
)
def test_a_refused_repair_is_reported_and_the_others_are_made(
    here: Split, weak: Split, lose: Callable[[Split], None], kind: str, said: str
) -> None:
    here.send_all()
    lose(here)
    here.store.ask("HSET", here.keys("orders").policy, "gone", "0")
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
    assert here.store.drive(check(here.store, ["orders"], repair=True)).ok
