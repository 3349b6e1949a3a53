"""A gateway on a cluster without replicas while one node is dead or hangs."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import pytest

from lisa import Manager
from lisa.core.settings.gateway import GatewayServerSettings
from lisa.manager.server_monitor import PROBE_INTERVAL_S, PROBE_TIMEOUT_S
from tests import topologies
from tests.cluster.test_nodes_away import bring_back, hang, kill
from tests.gateways import Gateway
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.topologies import Cluster, Node

pytestmark = pytest.mark.full

PATIENCE_S = GatewayServerSettings().patience.total_seconds()
SLACK_S = PATIENCE_S  # allowance for a busy machine
PROMPT_S = PATIENCE_S  # a request that waits for the absent node takes longer
HEALTHY_S = PROBE_INTERVAL_S + PROBE_TIMEOUT_S + SLACK_S
"""A manager that finds a node away promotes late for so long, once."""


Request = tuple[str, str, object]
"""Method, path below the topic, and body."""


class Answer(NamedTuple):
    """A response of the gateway, with its duration."""

    status: int
    kind: str
    retry_after: str | None
    took_s: float


@pytest.fixture
def cluster(kind: str) -> Iterator[Cluster]:
    with topologies.cluster(kind, extra=("--cluster-require-full-coverage", "no")) as made:
        yield made


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


def ask(gateway: Gateway, topic: str, request: Request) -> Answer:
    """Send one request about a topic."""
    method, path, body = request
    began = time.monotonic()
    found = gateway.client.request(method, f"/v1/topics/{topic}{path}", json=body)
    took_s = time.monotonic() - began
    kind = found.json().get("type", "") if found.status_code >= 400 else ""
    return Answer(found.status_code, kind, found.headers.get("Retry-After"), took_s)


def prepare(gateway: Gateway, topics: list[str]) -> None:
    """Create a group and a waiting message for each topic."""
    for topic in topics:
        url = f"/v1/topics/{topic}"
        gateway.client.post(f"{url}/groups", json={"group": "g"}).raise_for_status()
        message = {"id": "waits", "body": 0, "delay_ms": 3_600_000}
        gateway.client.post(f"{url}/messages", json=message).raise_for_status()


ALWAYS = ((0, kill), (1, hang))
"""The cases that are not slow tests: each takes a node away and waits until it is back."""


@pytest.mark.parametrize(
    ("number", "how"),
    [
        pytest.param(number, how, marks=[] if (number, how) in ALWAYS else [pytest.mark.slow])
        for number in range(3)
        for how in (kill, hang)
    ],
)
def test_only_requests_about_the_away_nodes_topics_are_refused(
    cluster: Cluster, how: Callable[[Node], None], number: int
) -> None:
    topics = [names[0] for names in topologies.topics_on(cluster, 1)]
    node, lost = cluster.primaries[number], topics[number]
    healthy = [topic for topic in topics if topic != lost]
    with Manager(cluster.url), Gateway(cluster.url) as gateway:
        prepare(gateway, topics)
        how(node)
        with ThreadPoolExecutor(len(REQUESTS)) as pool:
            refused = [pool.submit(ask, gateway, lost, request) for request in REQUESTS]
            for request in REQUESTS * 3:
                for topic in healthy:
                    answer = ask(gateway, topic, request)
                    assert answer.status < 300, (request, answer, gateway.said)
                    assert answer.took_s < PROMPT_S, (request, answer, gateway.said)
            for request, future in zip(REQUESTS, refused, strict=True):
                answer = future.result()
                assert answer.status == 503, (request, answer)
                assert answer.kind == "urn:lisa:problem:server-unavailable", (request, answer)
                assert answer.retry_after is not None
                assert answer.took_s < PATIENCE_S + SLACK_S, (request, answer, gateway.said)
        assert gateway.client.get("/healthz").status_code == 200
        for topic in healthy:
            delivers(gateway, topic)
        bring_back(node, how)
        wait_until(lambda: ask(gateway, lost, REQUESTS[0]).status == 201)
        said = "\n".join(gateway.said)
        assert "Traceback" not in said
        assert " ERROR " not in said


def delivers(gateway: Gateway, topic: str) -> None:
    """True if a message sent with a delay reaches a waiting pull."""
    url = f"/v1/topics/{topic}"
    sent = gateway.client.post(f"{url}/messages", json={"body": 1, "delay_ms": 100}).json()["id"]
    began = time.monotonic()
    taken: list[str] = []
    while sent not in taken and time.monotonic() - began < HEALTHY_S:
        rows = gateway.client.post(f"{url}/pull", json={"group": "g", "max": 50, "wait_ms": 500})
        taken += [one["id"] for one in rows.json()["deliveries"]]
    assert sent in taken
