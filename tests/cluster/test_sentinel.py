"""A failover under load: confirmed writes survive, and all roles find the new primary."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest

from tests import topologies
from tests.cluster.company import Company
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.servers import Processes
    from tests.topologies import Node, Sentinels

STAYS_AWAY, COMES_BACK = "away", "back"


@pytest.fixture
def watched(kind: str, tmp_path: Path) -> Iterator[Sentinels]:
    with topologies.sentinels(kind, tmp_path) as made:
        yield made


def kill(watched: Sentinels, primary: Node) -> None:
    """Kill the primary and the first sentinel, because they often share a machine."""
    watched.kill_sentinel(0)
    primary.server.kill()


def ask_sentinels(watched: Sentinels, primary: Node) -> None:
    assert watched.ask(0, "SENTINEL", "FAILOVER", topologies.SERVICE) == b"OK"


def hang(watched: Sentinels, primary: Node) -> None:
    """Stop responding with open connections, like a machine after a power loss."""
    primary.stop_for_a_while()


@pytest.mark.parametrize(
    ("how", "afterwards"),
    [
        pytest.param(hang, STAYS_AWAY, id="hang"),
        pytest.param(ask_sentinels, STAYS_AWAY, id="ask", marks=pytest.mark.slow),
        # By default, kill is tested with TLS. Sentinels ignore a returning node for ten seconds.
        pytest.param(kill, COMES_BACK, id="kill-and-back", marks=pytest.mark.slow),
        pytest.param(hang, COMES_BACK, id="hang-and-back", marks=pytest.mark.slow),
        pytest.param(ask_sentinels, COMES_BACK, id="ask-and-back", marks=pytest.mark.slow),
    ],
)
def test_a_failover_under_load(  # noqa: PLR0917  fixtures, and what is to happen
    watched: Sentinels,
    processes: Processes,
    tmp_path: Path,
    how: Callable[..., None],
    afterwards: str,
    record_property: Callable[[str, object], None],
) -> None:
    # During a manual failover the old primary and its remaining replica keep confirming writes that
    # are lost afterwards; only a confirmation by all replicas prevents that.
    count = 2 if how is ask_sentinels else 1
    company = Company(processes, tmp_path, ["orders", "mails"], {"": watched.url}, replicas=count)
    company.wait_until_at_work()
    before = company.watch()
    old = watched.primary
    how(watched, old)
    elected = watched.wait_for_another(old)
    late = company.is_soon_normal(before, elected)
    if afterwards == COMES_BACK:
        if how is kill:
            old.server.restart()
        elif how is hang:
            old.go_on()
        watched.wait_until_whole()
        assert old.info("role") == "slave"
        wait_until(partial(nobody_is_at, old))
    report = company.close(may_refuse=how is ask_sentinels)
    record_property("failover", f"{report}; {late}")


def nobody_is_at(node: Node) -> bool:
    """True if no role is connected to it, only sentinels, the primary and this client."""
    clients = [
        dict(one.partition("=")[::2] for one in line.split(" "))
        for line in node.ask("CLIENT", "LIST").decode().splitlines()
    ]
    return not [
        one
        for one in clients
        if not one["name"].startswith("sentinel-")
        and one["cmd"] != "client|list"
        and not set(one["flags"]) & set("MS")
    ]
