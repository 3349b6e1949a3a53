"""Two nodes of a cluster without replicas fail at the same time, in every combination.

LISA_PAIRS_SEED=7 chooses other nodes.
"""

from __future__ import annotations

import itertools
import os
import random
import time
from collections import Counter
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from lisa import Producer
from lisa.core.model.options import PRODUCER_RETRY_TIME
from lisa.embedded.server import free_port
from lisa.manager.server_monitor import PROBE_INTERVAL_S, PROBE_TIMEOUT_S
from tests import topologies
from tests.cluster.company import REDELIVERED_WITHIN, Company, busyness, latest_s
from tests.cluster.node_faults import (
    SERVER_OPTIONS,
    Dies,
    Hangs,
    Joins,
    Leaves,
    Move,
    NodeFault,
    ReturnsEmpty,
    is_whole,
)
from tests.cluster.test_scaling import health
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from _pytest.mark import ParameterSet

    from tests.servers import Processes
    from tests.topologies import Cluster

pytestmark = pytest.mark.full

PRIMARIES = 5
"""Three of five are a majority: the cluster is up while two are away."""
APART_S = 1.0
TOGETHER_S = 3.0
"""Longer than a manager takes to find a node away, and than a consumer's ack timeout here."""
LONG_S = 7.0
"""The slow pairs: longer than a call waits for its reply."""
STORED = 300
"""Messages that wait in a slot that moves: the move lasts some seconds."""
FOUND_S = PROBE_INTERVAL_S + PROBE_TIMEOUT_S
"""By then a manager knows that a node hangs, and its threads are free."""
SLACK_S = 0.5
NOW = timedelta(0)

KINDS: list[type[NodeFault]] = [Dies, Hangs, Joins, Leaves, ReturnsEmpty]
PAIRS = list(itertools.combinations_with_replacement(KINDS, 2))
QUICK = [(Dies, Joins), (Hangs, Leaves), (Hangs, ReturnsEmpty)]
"""Each kind once; `make test-slow` runs the other pairs."""


def case(pair: tuple[type[NodeFault], type[NodeFault]]) -> ParameterSet:
    """A pair of faults by their names."""
    marks = [] if pair in QUICK else [pytest.mark.slow]
    return pytest.param(pair, id="-".join(one.__name__ for one in pair), marks=marks)


@pytest.fixture
def cluster(kind: str) -> Iterator[Cluster]:
    with topologies.cluster(kind, primaries=PRIMARIES, extra=SERVER_OPTIONS) as made:
        yield made


@pytest.mark.parametrize("pair", [case(pair) for pair in PAIRS])
def test_two_node_faults_overlap(
    cluster: Cluster,
    processes: Processes,
    tmp_path: Path,
    pair: tuple[type[NodeFault], type[NodeFault]],
    record_property: Callable[[str, object], None],
) -> None:
    seed = int(os.environ.get("LISA_PAIRS_SEED", PAIRS.index(pair)))
    topics = [names[0] for names in topologies.topics_on(cluster, 1)]
    faults = chosen(cluster, topics, pair, seed)
    untouched = [topic for topic in topics if topic not in [one.topic for one in faults]]
    ports = [free_port() for _ in range(3)]
    company = Company(processes, tmp_path, topics, {"": cluster.url}, replicas=0, ports=ports)
    company.wait_until_at_work()
    store(cluster, faults)
    normal = company.watch()

    began = time.time()
    overlap(faults, TOGETHER_S if pair in QUICK else LONG_S, company, ports[:2])
    wait_until(lambda: is_whole(cluster))
    whole = time.time()

    said = [company.is_soon_normal(normal, whole, [topic], beside=untouched) for topic in topics]
    late = on_time(company, untouched, normal, began, whole)
    roles_are_well(company, ports)
    refused_only_after_patience(company, faults, whole)
    lost = nothing_is_lost(company, faults)
    again = nothing_is_early_or_repeated(company, faults)
    record_property("result", f"seed {seed}: {late}; {lost}; {again}; {said}")


def chosen(
    cluster: Cluster, topics: Sequence[str], kinds: Sequence[type[NodeFault]], seed: int
) -> list[NodeFault]:
    """One fault per kind, on different nodes; leaving slots move to nodes without a fault."""
    away: list[topologies.Node] = []
    order = random.Random(seed).sample(range(PRIMARIES), 4)
    return [
        kind(cluster, cluster.primaries[node], topics[node], cluster.primaries[heir], away)
        for kind, node, heir in zip(kinds, order[:2], order[2:], strict=True)
    ]


def store(cluster: Cluster, faults: Sequence[NodeFault]) -> None:
    """Send waiting messages into the slots that will move."""
    with Producer(cluster.url) as producer:
        for fault in faults:
            if isinstance(fault, Move):
                producer.send_many(fault.topic, range(STORED), delay=timedelta(hours=1))


def overlap(
    faults: Sequence[NodeFault], together_s: float, company: Company, managers: Sequence[int]
) -> None:
    """Begin both faults, then end both in order; the managers must report status ok."""
    first, second = faults
    first.begin()
    time.sleep(APART_S)
    second.begin()
    time.sleep(together_s)
    for port in managers:
        assert health(port)["status"] == "ok", company.said()
    first.end()
    time.sleep(APART_S)
    second.end()
    for fault in faults:
        if isinstance(fault, Leaves):  # absent nodes could not be reached
            fault.forget()


def roles_are_well(company: Company, ports: Sequence[int]) -> None:
    """Check that no process or service thread ended or had unexpected errors; stop sending."""
    for port in ports:
        wait_until(lambda port=port: health(port)["status"] == "ok")  # type: ignore[misc]
        assert health(port)["faults"] == [], company.said()
    assert company.sender.stop() == 0, company.sender.output
    assert all(role.alive for role in [*company.managers, company.consumer]), company.said()
    assert "Traceback" not in company.said(), company.said()


def on_time(
    company: Company, topics: Sequence[str], normal: float, began: float, ended: float
) -> str:
    """Check the lateness on topics whose nodes had no fault; describes the result."""
    worst = max(
        one.late_s
        for one in company.handled()
        if one.topic in topics and began <= one.due < ended and one.attempt == 1
    )
    late = company.late_s(began, ended, topics)
    said = f"others late by {late:.3f} s, {worst:.3f} s at worst, normal {normal:.3f} s"
    assert worst < FOUND_S + SLACK_S * busyness() + 2 * normal, f"{said}\n{company.said()}"
    assert late < latest_s(normal), f"{said}\n{company.said()}"
    return said


def refused_only_after_patience(
    company: Company, faults: Sequence[NodeFault], whole: float
) -> None:
    """Check that sends fail only if their node was away for longer than the patience."""
    patience_s = PRODUCER_RETRY_TIME.total_seconds()
    long = [one.topic for one in faults if whole - one.began_at > patience_s]
    refused = [one for one in company.sent().refused if one.split()[0] not in long]
    assert refused == [], f"{refused[:9]}\n{company.said()}"


def nothing_is_lost(company: Company, faults: Sequence[NodeFault]) -> str:
    """Check that all confirmed messages were handled, except on emptied nodes; a summary."""
    emptied = {one.topic: one.ended_at for one in faults if one.loses_data}
    sent = company.sent()
    sure = [name for name, at in sent.confirmed.items() if at > emptied.get(name.split()[0], 0.0)]
    assert len(sure) > 100
    assert (left := company.missing(sure, REDELIVERED_WITHIN)) == [], (
        f"{len(left)} lost: {left[:20]}\n{company.said()}"
    )
    known = set(sure)
    others = [name for name in sent.confirmed if name not in known]
    gone = company.missing(others, NOW)
    return f"{len(sure)} confirmed, none lost; {len(gone)} lost with a node: {' '.join(gone)}"


def nothing_is_early_or_repeated(company: Company, faults: Sequence[NodeFault]) -> str:
    """Check that no message was early, and only those of an emptied node were repeated."""
    handled = company.handled()
    assert [one for one in handled if one.late_s < 0] == []
    emptied = [one.topic for one in faults if one.loses_data]
    times = Counter((one.topic, one.id) for one in handled)
    again = [one for one in handled if times[one.topic, one.id] > 1]
    unexplained = [one for one in again if one.topic not in emptied]
    assert unexplained == [], f"{unexplained}\n{company.said()}"
    return f"{len(again)} deliveries of messages handled again"
