"""A cluster without replicas: one node dies or hangs; calls about other nodes' topics succeed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import pytest
import redis

from lisa import ConfigError, Manager, Producer
from lisa.core.redis.address import SOCKET_TIMEOUT_S
from lisa.core.settings.gateway import GatewayServerSettings
from lisa.manager.server_monitor import PROBE_TIMEOUT_S
from tests import topologies
from tests.gateways import Gateway
from tests.producers import Either
from tests.servers import wait_until
from tests.topologies import Cluster, Node

PROMPT_S = SOCKET_TIMEOUT_S / 2
"""No call takes longer that waits for no other node."""
LOCAL = {"at_local": "2030-12-24T09:00", "tz": "UTC"}


@pytest.fixture(scope="module")
def healthy_cluster(kind: str) -> Iterator[Cluster]:
    """Three primaries without replicas, which respond while one of them is away."""
    with topologies.cluster(kind, extra=("--cluster-require-full-coverage", "no")) as made:
        yield made


@pytest.fixture
def cluster(healthy_cluster: Cluster) -> Iterator[Cluster]:
    """All of its nodes run and are empty."""
    for node in healthy_cluster.primaries:
        node.ask("FLUSHALL")
    yield healthy_cluster
    for node in healthy_cluster.primaries:
        node.go_on()
        with suppress(redis.ConnectionError, OSError):
            node.ask("PING")
            continue
        node.server.restart()
    healthy_cluster.wait_until_whole()


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


def topics_elsewhere(cluster: Cluster, away: Node, count: int = 1) -> list[list[str]]:
    """Topics on each node but one: lists of the first, the second and so on."""
    found = zip(cluster.primaries, topologies.topics_on(cluster, count), strict=True)
    names = [names for node, names in found if node is not away]
    return [list(some) for some in zip(*names, strict=True)]


def slowest_s(send: Callable[[str], object], topics: Sequence[str]) -> float:
    """The duration of the slowest call, in seconds."""
    taken = []
    for topic in topics:
        began = time.monotonic()
        send(topic)
        taken.append(time.monotonic() - began)
    return max(taken)


@pytest.mark.parametrize(
    ("key", "flavour", "how"),
    [
        ("lisa:schema", "sync", kill),
        ("lisa:topics", "async", hang),
        pytest.param("lisa:schema", "sync", hang, marks=pytest.mark.full),
        pytest.param("lisa:topics", "sync", kill, marks=pytest.mark.full),
    ],
)
def test_sends_do_not_wait_for_a_node_that_only_registration_needs(
    cluster: Cluster, key: str, flavour: str, how: Callable[[Node], None]
) -> None:
    away = cluster.owner(key)
    topics, others = topics_elsewhere(cluster, away, 2)
    known, new = Either(flavour, cluster.url), Either(flavour, cluster.url)
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
    known.close()
    new.close()


@pytest.mark.parametrize(
    ("flavour", "how"), [("async", hang), pytest.param("sync", kill, marks=pytest.mark.full)]
)
def test_wall_times_do_not_wait_for_the_node_that_lists_them(
    cluster: Cluster, flavour: str, how: Callable[[Node], None]
) -> None:
    """The producer has ended when the node is back; managers list its topics after an outage."""
    away = cluster.owner("lisa:scheduled")
    (topics,) = topics_elsewhere(cluster, away)
    with Manager(cluster.url) as manager:
        producer = Either(flavour, cluster.url)
        for topic in topics:
            producer.send(topic, "before", id="a")
        # What is away now was not asked yet, and its first answer would end no outage.
        wait_until(lambda: not is_away(manager))
        how(away)
        sent = slowest_s(lambda topic: producer.send(topic, "on", **LOCAL), topics)
        moved = slowest_s(lambda topic: producer.ask("reschedule", topic, "a", **LOCAL), topics)
        assert max(sent, moved) < PROMPT_S
        producer.close()
        wait_until(lambda: is_away(manager))
        bring_back(away, how)
        wait_until(lambda: set(topics) <= scheduled(cluster))


def is_away(manager: Manager) -> bool:
    """True if the manager finds a node away."""
    said = manager.health()["redis"]
    assert isinstance(said, dict)
    return bool(said["away"])


def scheduled(cluster: Cluster) -> set[str]:
    """The topics listed as scheduled."""
    listed = cluster.owner("lisa:scheduled").ask("ZRANGE", "lisa:scheduled", 0, -1)
    return {topic.decode() for topic in listed}


@pytest.mark.full
def test_managers_list_topics_after_a_node_was_late_only(cluster: Cluster) -> None:
    """A reply that comes after a second may end no outage, but producers did not wait for it."""
    away = cluster.owner("lisa:scheduled")
    topic = topics_elsewhere(cluster, away)[0][0]
    with Manager(cluster.url) as manager, Producer(cluster.url) as producer:
        producer.send(topic, "on", at_local="2030-12-24T09:00", tz="UTC")
        wait_until(lambda: not is_away(manager))
        away.ask("ZREM", "lisa:scheduled", topic)
        hang(away)
        wait_until(lambda: is_away(manager))
        bring_back(away, hang)
        wait_until(lambda: topic in scheduled(cluster))


@pytest.mark.parametrize("flavour", ["sync", "async"])
def test_a_producer_that_ends_lists_its_topics_after_a_short_hang(
    cluster: Cluster, flavour: str
) -> None:
    """No manager notices such a hang."""
    away = cluster.owner("lisa:scheduled")
    (topics,) = topics_elsewhere(cluster, away)
    producer = Either(flavour, cluster.url)
    hang(away)
    for topic in topics:
        producer.send(topic, "on", **LOCAL)
    back = threading.Timer(PROBE_TIMEOUT_S / 2, lambda: bring_back(away, hang))
    back.start()
    producer.close()
    back.join()
    assert set(topics) <= scheduled(cluster)


def test_a_newer_schema_found_later_still_refuses(cluster: Cluster) -> None:
    away = cluster.owner("lisa:schema")
    topic = topics_elsewhere(cluster, away)[0][0]
    away.ask("SET", "lisa:schema", "99")
    hang(away)
    with Producer(cluster.url) as producer:
        producer.send(topic, "hidden")
        bring_back(away, hang)

        def is_refused() -> bool:
            try:
                producer.send(topic, "now")
            except ConfigError as error:
                return "schema 99" in str(error)
            return False

        wait_until(is_refused)


GATEWAY_PATIENCE_S = GatewayServerSettings().patience.total_seconds()
Request = tuple[str, str, object]
"""Method, path below the topic, and body."""
REQUESTS: tuple[Request, ...] = (
    ("POST", "/messages", {"body": 1}),
    ("POST", "/messages:batch", {"messages": [{"body": 1}, {"body": 2}]}),
    ("GET", "/messages/waits", None),
    ("GET", "/messages?state=waiting", None),
    ("PATCH", "/messages/waits", {"delay_ms": 3_600_000}),
    ("POST", "/pull", {"group": "g", "max": 1}),
    ("GET", "/garbage", None),
    ("GET", "/groups", None),
    ("GET", "/options", None),
    ("GET", "", None),
)


class Answer(NamedTuple):
    """A response of the gateway, with its duration."""

    status: int
    kind: str
    retry_after: str | None
    took_s: float


def ask(gateway: Gateway, topic: str, request: Request) -> Answer:
    """Send one request about a topic."""
    method, path, body = request
    began = time.monotonic()
    found = gateway.client.request(method, f"/v1/topics/{topic}{path}", json=body)
    took_s = time.monotonic() - began
    kind = found.json().get("type", "") if found.status_code >= 400 else ""
    return Answer(found.status_code, kind, found.headers.get("Retry-After"), took_s)


@pytest.mark.full
def test_a_gateway_refuses_only_requests_about_the_away_nodes_topics(
    cluster: Cluster,
) -> None:
    node = cluster.owner("lisa:topics")
    (healthy,) = topics_elsewhere(cluster, node)
    names = zip(cluster.primaries, topologies.topics_on(cluster, 1), strict=True)
    lost = next(names[0] for owner, names in names if owner is node)
    with Manager(cluster.url), Gateway(cluster.url) as gateway:
        for topic in (lost, *healthy):
            url, waits = f"/v1/topics/{topic}", {"id": "waits", "body": 0, "delay_ms": 3_600_000}
            gateway.client.post(f"{url}/groups", json={"group": "g"}).raise_for_status()
            gateway.client.post(f"{url}/messages", json=waits).raise_for_status()
        hang(node)
        with ThreadPoolExecutor(len(REQUESTS)) as pool:
            refused = [pool.submit(ask, gateway, lost, request) for request in REQUESTS]
            for request in REQUESTS * 3:
                for topic in healthy:
                    answer = ask(gateway, topic, request)
                    assert answer.status < 300, (request, answer, gateway.said)
                    # A request that waits for the absent node takes longer.
                    assert answer.took_s < GATEWAY_PATIENCE_S, (request, answer, gateway.said)
            for request, future in zip(REQUESTS, refused, strict=True):
                answer = future.result()
                assert answer.status == 503, (request, answer)
                assert answer.kind == "urn:lisa:problem:server-unavailable", (request, answer)
                assert answer.retry_after is not None
                assert answer.took_s < 2 * GATEWAY_PATIENCE_S, (request, answer, gateway.said)
        assert gateway.client.get("/healthz").status_code == 200
        for topic in healthy:
            wait_until(partial(delivers, gateway, topic))
        bring_back(node, hang)
        wait_until(lambda: ask(gateway, lost, REQUESTS[0]).status == 201)
        said = "\n".join(gateway.said)
        assert "Traceback" not in said
        assert " ERROR " not in said


def delivers(gateway: Gateway, topic: str) -> bool:
    """True if a message sent with a delay reaches a waiting pull."""
    url = f"/v1/topics/{topic}"
    sent = gateway.client.post(f"{url}/messages", json={"body": 1, "delay_ms": 100}).json()["id"]
    pulled = gateway.client.post(f"{url}/pull", json={"group": "g", "max": 99, "wait_ms": 5_000})
    return sent in [one["id"] for one in pulled.json()["deliveries"]]
