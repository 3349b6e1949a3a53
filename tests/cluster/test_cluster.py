"""Redis Cluster under load: slots that move, primaries that die."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from lisa import Producer
from tests import topologies
from tests.cluster.company import Company
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.servers import Processes
    from tests.topologies import Cluster, Node


@pytest.fixture
def cluster(kind: str) -> Iterator[Cluster]:
    """Its first primary has two replicas: what is left can still confirm."""
    with topologies.cluster(kind, replicas=1, spares=1) as made:
        yield made


@pytest.fixture
def patient_cluster(kind: str) -> Iterator[Cluster]:
    """One where nobody is promoted because the machine is busy."""
    with topologies.cluster(kind, replicas=1, node_timeout=timedelta(seconds=30)) as made:
        yield made


def met(cluster: Cluster) -> dict[str, int]:
    """The errors that the nodes answered with, by their first word."""
    found: dict[str, int] = {}
    for node in cluster.nodes:
        said = node.info_text("errorstats")
        for name, count in re.findall(r"errorstat_(\w+):count=(\d+)", said):
            found[name] = found.get(name, 0) + int(count)
    return found


def test_a_slot_moves_while_messages_flow(
    patient_cluster: Cluster, processes: Processes, tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    """There and back again; the topic pauses, the others do not notice."""
    cluster = patient_cluster
    topics = [names[0] for names in topologies.topics_on(cluster, 1)]
    moved, *others = topics
    company = Company(processes, tmp_path, topics, {"": cluster.url})
    company.wait_until_at_work()
    before = company.watch()
    with Producer(cluster.url) as producer:  # what makes the move last
        producer.send_many(moved, range(400), delay=timedelta(hours=1))
    slot = topologies.slot_of(f"{{{moved}}}")
    source, target = cluster.primaries[0], cluster.primaries[1]
    began = time.time()
    for one, other in ((source, target), (target, source)):
        assert topologies.migrate(cluster, slot, one, other, batch=10, pause_s=0.005) >= 400
    ended = time.time()
    errors = met(cluster)
    assert {"ASK", "MOVED", "TRYAGAIN"} <= errors.keys(), errors
    late = company.is_soon_normal(before, ended, [moved])
    apart = company.late_s(began, ended, others)
    normal = max(before, company.late_s(ended, topics=others))
    assert apart < 2 * normal + 0.1, f"{apart}, normal is {normal}\n{company.said()}"
    report = company.close(may_refuse=True)
    said = (f"{report}; {errors}; the move took {ended - began:.1f} s, others late by "
            f"{apart * 1000:.0f} ms then; {late}")  # fmt: skip
    assert " alone, 0 lost;" in report
    record_property("migration", said)


def kill(primary: Node) -> None:
    primary.server.kill()


def hang(primary: Node) -> None:
    primary.stop_for_a_while()


@pytest.mark.slow  # by default one is killed where there is TLS
@pytest.mark.parametrize("how", [kill, hang])
def test_a_primary_dies_under_load(
    cluster: Cluster, processes: Processes, tmp_path: Path, how: Callable[[Node], None],
    record_property: Callable[[str, object], None],
) -> None:  # fmt: skip
    topics = [name for names in topologies.topics_on(cluster, 1) for name in names]
    company = Company(processes, tmp_path, topics, {"": cluster.url})
    company.wait_until_at_work()
    before = company.watch()
    old = cluster.primaries[0]
    heirs = cluster.replicas_of(old)
    assert len(heirs) == 2  # one of them stays a replica
    how(old)
    wait_until(lambda: any(one.is_primary() for one in heirs), timeout=timedelta(seconds=30))
    elected = time.time()
    late = company.is_soon_normal(before, elected)
    assert {one.topic for one in company.handled() if one.due > elected + 2} == set(topics)
    report = company.close()
    record_property("promotion", f"{report}; {late}")
