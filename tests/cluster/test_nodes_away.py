"""A cluster without replicas: one node dies, hangs or returns empty; the others work."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import TYPE_CHECKING

import pytest

from lisa import AsyncProducer, ConfigError, Manager, Producer
from lisa.core.redis.address import SOCKET_TIMEOUT_S
from lisa.manager.server_monitor import PROBE_INTERVAL_S, PROBE_TIMEOUT_S
from tests import topologies
from tests.cluster.company import REDELIVERED_WITHIN, Company, busyness, latest_s
from tests.producers import Either
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from tests.servers import Processes
    from tests.topologies import Cluster, Node

PROMPT_S = SOCKET_TIMEOUT_S / 2
"""No call takes longer that waits for no other node."""


@pytest.fixture
def cluster(kind: str) -> Iterator[Cluster]:
    """Three primaries without replicas, which respond while one of them is away."""
    with topologies.cluster(kind, extra=("--cluster-require-full-coverage", "no")) as made:
        yield made


def kill(node: Node) -> None:
    node.server.kill()


def hang(node: Node) -> None:
    node.stop_for_a_while()


def bring_back(node: Node, how: Callable[[Node], None]) -> None:
    """Restart a node; a killed one returns empty under its old name, without persistence."""
    if how is hang:
        node.go_on()
    else:
        node.server.restart()
    wait_until(lambda: b"cluster_state:ok" in node.ask("CLUSTER", "INFO"))


def topics_elsewhere(cluster: Cluster, away: Node) -> list[str]:
    """One topic on each node but one."""
    return [
        names[0]
        for node, names in zip(cluster.primaries, topologies.topics_on(cluster, 1), strict=True)
        if node is not away
    ]


def two_on_each(cluster: Cluster, away: Node) -> tuple[list[str], list[str]]:
    """Two topics on each node but one."""
    found = [
        names
        for node, names in zip(cluster.primaries, topologies.topics_on(cluster, 2), strict=True)
        if node is not away
    ]
    return [first for first, _ in found], [second for _, second in found]


def slowest_s(send: Callable[[str], object], topics: Sequence[str]) -> float:
    """The duration of the slowest call, in seconds."""
    taken = []
    for topic in topics:
        began = time.monotonic()
        send(topic)
        taken.append(time.monotonic() - began)
    return max(taken)


@pytest.mark.parametrize("how", [kill, hang])
@pytest.mark.parametrize("key", ["lisa:schema", "lisa:topics"])
def test_sends_do_not_wait_for_a_node_that_only_registration_needs(
    cluster: Cluster, key: str, how: Callable[[Node], None]
) -> None:
    away = cluster.owner(key)
    topics, others = two_on_each(cluster, away)
    with Producer(cluster.url) as known, Producer(cluster.url) as new:
        for topic in topics:
            known.send(topic, "before")
        how(away)
        assert slowest_s(lambda topic: known.send(topic, "on"), [*others, *topics * 10]) < PROMPT_S
        new.send(topics[0], "reads the topology first, perhaps from the node that hangs")
        assert slowest_s(lambda topic: new.send(topic, "on"), [*others, *topics * 10]) < PROMPT_S
        bring_back(away, how)

        def is_made_up_for() -> bool:
            new.send(topics[0], "after")
            listed = cluster.owner("lisa:topics").ask("ZRANGE", "lisa:topics", 0, -1)
            return {topics[0].encode(), *map(str.encode, others)} <= set(listed) and (
                cluster.owner("lisa:schema").ask("GET", "lisa:schema") == b"1"
            )

        wait_until(is_made_up_for)


@pytest.mark.parametrize("how", [kill, hang])
def test_an_async_producer_does_not_wait_either(
    cluster: Cluster, how: Callable[[Node], None]
) -> None:
    away = cluster.owner("lisa:topics")
    topics, others = two_on_each(cluster, away)

    async def send() -> list[float]:
        taken = []
        async with AsyncProducer(cluster.url) as producer:
            await producer.send(topics[0], "before")
            how(away)
            for topic in [*others, *topics * 10]:
                began = time.monotonic()
                await producer.send(topic, "on")
                taken.append(time.monotonic() - began)
        return taken

    assert max(asyncio.run(send())) < PROMPT_S


@pytest.mark.parametrize(("flavour", "how"), [("sync", kill), ("async", hang)])
def test_wall_times_do_not_wait_for_the_node_that_lists_them(
    cluster: Cluster, flavour: str, how: Callable[[Node], None]
) -> None:
    """The producer has ended when the node is back; managers list its topics after an outage."""
    away = cluster.owner("lisa:scheduled")
    topics = topics_elsewhere(cluster, away)
    with Manager(cluster.url) as manager:
        producer = Either(flavour, cluster.url)
        for topic in topics:
            producer.send(topic, "before", id="a")
        # What is away now was not asked yet, and its first answer would end no outage.
        wait_until(lambda: not manager.health()["redis"]["away"])  # type: ignore[index]
        how(away)
        local = {"at_local": "2030-12-24T09:00", "tz": "UTC"}
        sent = slowest_s(lambda topic: producer.send(topic, "on", **local), topics)
        moved = slowest_s(lambda topic: producer.ask("reschedule", topic, "a", **local), topics)
        assert max(sent, moved) < PROMPT_S
        producer.close()
        wait_until(lambda: manager.health()["redis"]["away"])  # type: ignore[index]
        bring_back(away, how)
        wait_until(lambda: set(topics) <= scheduled(cluster))


def scheduled(cluster: Cluster) -> set[str]:
    """The topics listed as scheduled."""
    listed = cluster.owner("lisa:scheduled").ask("ZRANGE", "lisa:scheduled", 0, -1)
    return {topic.decode() for topic in listed}


def test_managers_list_topics_after_a_node_was_late_only(cluster: Cluster) -> None:
    """A reply that comes after a second may end no outage, but producers did not wait for it."""
    away = cluster.owner("lisa:scheduled")
    topic = topics_elsewhere(cluster, away)[0]
    with Manager(cluster.url) as manager, Producer(cluster.url) as producer:
        producer.send(topic, "on", at_local="2030-12-24T09:00", tz="UTC")
        wait_until(lambda: not manager.health()["redis"]["away"])  # type: ignore[index]
        away.ask("ZREM", "lisa:scheduled", topic)
        hang(away)
        wait_until(lambda: manager.health()["redis"]["away"])  # type: ignore[index]
        bring_back(away, hang)
        wait_until(lambda: topic in scheduled(cluster))


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_producer_that_ends_lists_its_topics_after_a_short_hang(
    cluster: Cluster, flavour: str
) -> None:
    """No manager notices such a hang."""
    away = cluster.owner("lisa:scheduled")
    topics = topics_elsewhere(cluster, away)
    producer = Either(flavour, cluster.url)
    hang(away)
    for topic in topics:
        producer.send(topic, "on", at_local="2030-12-24T09:00", tz="UTC")
    back = threading.Timer(PROBE_TIMEOUT_S / 2, lambda: bring_back(away, hang))
    back.start()
    producer.close()
    back.join()
    assert set(topics) <= scheduled(cluster)


def test_a_newer_schema_found_later_still_refuses(cluster: Cluster) -> None:
    away = cluster.owner("lisa:schema")
    topics = topics_elsewhere(cluster, away)
    away.ask("SET", "lisa:schema", "99")
    hang(away)
    with Producer(cluster.url) as producer:
        producer.send(topics[0], "nobody could say")
        bring_back(away, hang)

        def is_refused() -> bool:
            try:
                producer.send(topics[0], "now")
            except ConfigError as error:
                return "schema 99" in str(error)
            return False

        wait_until(is_refused)


AWAY_S = 4.0
"""Longer than a manager takes to find a node away, and than a consumer's ack timeout here."""
FOUND_S = PROBE_INTERVAL_S + PROBE_TIMEOUT_S
"""By then a manager knows that a node hangs, and its threads are free."""
SLACK_S = 0.5


@pytest.mark.full
@pytest.mark.parametrize("how", [kill, pytest.param(hang, marks=pytest.mark.slow)])
def test_each_node_fails_and_returns_under_load(
    cluster: Cluster,
    processes: Processes,
    tmp_path: Path,
    how: Callable[[Node], None],
    record_property: Callable[[str, object], None],
) -> None:
    """Processes started meanwhile work as well; a killed node returns empty."""
    owned = topologies.topics_on(cluster, 5)
    topics = [names[0] for names in owned]
    company = Company(processes, tmp_path, topics, {"": cluster.url}, replicas=0)
    company.wait_until_at_work()
    normal = company.watch()
    back_at: dict[str, float] = {}
    for number, (node, names) in enumerate(zip(cluster.primaries, owned, strict=True), 1):
        lost, others = names[0], [topic for topic in topics if topic != names[0]]
        began = time.time()
        how(node)
        directory = tmp_path / f"new_{number}"
        directory.mkdir()
        young = [other[number] for other in owned if other is not names]
        new = Company(
            processes,
            directory,
            young,
            {"": cluster.url},
            replicas=0,
            module=f"{directory.name}.shop",
        )
        new.wait_until_at_work()
        time.sleep(max(0.0, began + AWAY_S - time.time()))
        ended = time.time()
        bring_back(node, how)
        back_at[lost] = time.time()
        worst = max(
            one.late_s
            for one in company.handled()
            if one.topic in others and began <= one.due < ended and one.attempt == 1
        )
        late = company.late_s(began, ended, others)
        record_property(f"node {number}", f"others late by {late:.3f} s, {worst:.3f} s at worst")
        assert worst < FOUND_S + SLACK_S * busyness(), company.said()
        assert late < latest_s(normal), company.said()
        company.is_soon_normal(normal, back_at[lost], [lost], beside=others)
        assert any(one.topic == lost and one.due > back_at[lost] for one in company.handled())
        for role in new.roles:
            role.stop()
    assert company.sender.stop() == 0, company.sender.output
    sent = company.sent()
    sure = [
        name for name, at in sent.confirmed.items() if how is hang or at > back_at[name.split()[0]]
    ]
    assert len(sure) > 100
    assert company.missing(sure, REDELIVERED_WITHIN) == [], company.said()
    assert [one for one in company.handled() if one.late_s < 0] == []
    assert all(role.alive for role in [*company.managers, company.consumer]), company.said()
