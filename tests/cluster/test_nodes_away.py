"""A cluster without replicas: one node dies or hangs; calls about other nodes' topics succeed."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import httpx
import pytest
import redis

from lisa import ConfigError, Manager, Producer
from lisa.admin.doctor import examine
from lisa.core.metrics import topics
from lisa.core.redis.address import SOCKET_TIMEOUT_S
from lisa.core.settings.gateway import GatewayServerSettings
from lisa.core.transitions.groups import Declare
from lisa.embedded.server import HOST
from lisa.manager import idle_topics
from lisa.manager.nodes import PROBE_TIMEOUT_S
from tests import topologies
from tests.gateways import Gateway
from tests.producers import Either
from tests.servers import open_store, wait_until
from tests.topologies import Cluster, Node

PROMPT_S = SOCKET_TIMEOUT_S / 2
"""No call takes longer that waits for no other node."""
LOCAL = {"at_local": "2030-12-24T09:00", "tz": "UTC"}


@pytest.fixture(scope="module")
def healthy_cluster(kind: str) -> Iterator[Cluster]:
    """Three primaries without replicas, which respond while one of them is away."""
    extra = ("--cluster-require-full-coverage", "no", "--enable-debug-command", "yes")
    with topologies.cluster(kind, extra=extra) as made:
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


hang = Node.stop_for_a_while


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
        wait_until(lambda: not finds_a_node_away(manager))
        how(away)
        sent = slowest_s(lambda topic: producer.send(topic, "on", **LOCAL), topics)
        moved = slowest_s(lambda topic: producer.ask("reschedule", topic, "a", **LOCAL), topics)
        assert max(sent, moved) < PROMPT_S
        producer.close()
        wait_until(lambda: finds_a_node_away(manager))
        bring_back(away, how)
        wait_until(lambda: set(topics) <= scheduled(cluster))
        # A reply that comes after a second may end no outage, but producers do not wait for it.
        wait_until(lambda: not finds_a_node_away(manager))
        away.ask("ZREM", "lisa:scheduled", topics[0])
        hang(away)
        wait_until(lambda: finds_a_node_away(manager))
        bring_back(away, hang)
        wait_until(lambda: topics[0] in scheduled(cluster))


def finds_a_node_away(manager: Manager) -> bool:
    said = manager.health()["redis"]
    assert isinstance(said, dict)
    return bool(said["away"])


def scheduled(cluster: Cluster) -> set[str]:
    listed = cluster.owner("lisa:scheduled").ask("ZRANGE", "lisa:scheduled", 0, -1)
    return {topic.decode() for topic in listed}


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


PUBLISHED = 4
"""The type of the packets by which nodes tell each other what was published."""


def test_a_broken_link_between_primaries_delays_no_message(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes drop what others publish, as over a broken link; nobody fails over, all is healthy.

    All topics are idle, so a manager's checks would take more than a minute to find a message.
    """
    for name, value in {"FEW": 0, "ACTIVE_S": 0.0, "PER_S": 0}.items():
        monkeypatch.setattr(idle_topics, name, value)
    on_nodes, store = topologies.topics_on(cluster, 30), open_store(cluster.url)
    topics = [topic for names in on_nodes for topic in names]
    for topic in topics:
        store.call(Declare(topic, "g"))
    store.drive(store.register(topics))

    def drop_packets(kind: int) -> None:
        for node in cluster.primaries:
            node.ask("DEBUG", "DROP-CLUSTER-PACKET-FILTER", kind)

    with Manager(cluster.url) as manager, Producer(cluster.url) as producer:
        idle = manager._engine.idle
        wait_until(lambda: len(idle._idle) == len(topics) and not idle.active())
        drop_packets(PUBLISHED)
        try:
            # Later names come last in a check's round.
            sent = {max(names): producer.send(max(names), 1, delay="200ms") for names in on_nodes}
            ready = [store.keys.topic(topic).group("g").ready for topic in sent]
            began = time.monotonic()
            wait_until(lambda: all(store.ask("XLEN", key) for key in ready))
            assert time.monotonic() - began < len(topics) / 6
            assert manager.health()["status"] == "ok"
        finally:
            drop_packets(-1)


def test_doctor_and_metrics_ask_every_primary(cluster: Cluster) -> None:
    first, second, third = cluster.primaries
    store, limit = open_store(cluster.url), 64 << 20
    for (topic,) in topologies.topics_on(cluster, 1):
        store.ask("EXISTS", store.keys.topic(topic).options)  # those of other tests were away
    first.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    second.ask("CONFIG", "SET", "maxmemory", limit)
    hang(third)
    try:
        found = {one.name: one.found for one in store.drive(examine(store))}
        assert found["maxmemory-policy"] == (
            f"{HOST}:{first.port}: allkeys-lru: messages may be evicted"
        )
        assert found["cluster"].startswith(f"{HOST}:{third.port}: does not answer")
        third.go_on()
        cluster.wait_until_whole()
        numbers = store.drive(topics.read(store))
        assert numbers["lisa_server_memory_max_bytes"] == {(): limit}
    finally:
        third.go_on()
        first.ask("CONFIG", "SET", "maxmemory-policy", "noeviction")
        second.ask("CONFIG", "SET", "maxmemory", 0)


def test_a_newer_schema_found_later_still_refuses(cluster: Cluster) -> None:
    away = cluster.owner("lisa:schema")
    topic = topics_elsewhere(cluster, away)[0][0]
    away.ask("SET", "lisa:schema", "99")
    hang(away)
    with Producer(cluster.url) as producer:
        producer.send(topic, "hidden")
        bring_back(away, hang)

        with pytest.raises(ConfigError, match="schema 99"):
            wait_until(lambda: not producer.send(topic, "now"))


GATEWAY_PATIENCE = GatewayServerSettings().patience
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


def ask(gateway: Gateway, topic: str, request: Request) -> httpx.Response:
    method, path, body = request
    return gateway.client.request(method, f"/v1/topics/{topic}{path}", json=body)


@pytest.mark.full
def test_a_gateway_refuses_only_requests_about_the_away_nodes_topics(cluster: Cluster) -> None:
    node = cluster.owner("lisa:topics")
    (healthy,) = topics_elsewhere(cluster, node)
    names = zip(cluster.primaries, topologies.topics_on(cluster, 1), strict=True)
    lost = next(names[0] for owner, names in names if owner is node)
    with Manager(cluster.url), Gateway(cluster.url) as gateway:
        for topic in (lost, *healthy):
            waits = {"id": "waits", "body": 0, "delay_ms": 3_600_000}
            for path, body in (("/groups", {"group": "g"}), ("/messages", waits)):
                ask(gateway, topic, ("POST", path, body)).raise_for_status()
        hang(node)
        with ThreadPoolExecutor(len(REQUESTS)) as pool:
            refused = [pool.submit(ask, gateway, lost, request) for request in REQUESTS]
            for request in REQUESTS * 3:
                for topic in healthy:
                    answer = ask(gateway, topic, request)
                    assert answer.is_success, (request, answer.text, gateway.said)
                    # A request that waits for the absent node takes longer.
                    assert answer.elapsed < GATEWAY_PATIENCE, (request, gateway.said)
            for request, future in zip(REQUESTS, refused, strict=True):
                answer = future.result()
                assert answer.status_code == 503, (request, answer.text)
                assert answer.json()["type"] == "urn:lisa:problem:server-unavailable", request
                assert answer.headers["Retry-After"]
                assert answer.elapsed < 2 * GATEWAY_PATIENCE, (request, gateway.said)
        assert gateway.client.get("/healthz").status_code == 200

        def pulls(topic: str, message_id: str) -> bool:
            """Whether a waiting pull returns the message, perhaps after earlier ones."""
            waiting = {"group": "g", "max": 99, "wait_ms": 5_000}
            pulled = ask(gateway, topic, ("POST", "/pull", waiting)).json()["deliveries"]
            return message_id in [delivery["id"] for delivery in pulled]

        for topic in healthy:
            sent = ask(gateway, topic, ("POST", "/messages", {"body": 1, "delay_ms": 100}))
            wait_until(partial(pulls, topic, sent.json()["id"]))
        bring_back(node, hang)
        wait_until(lambda: ask(gateway, lost, REQUESTS[0]).status_code == 201)
        said = "\n".join(gateway.said)
        assert "Traceback" not in said
        assert " ERROR " not in said
