"""The gateway's `/metrics`; the docs list exactly the metrics that real roles export."""

import shutil
import subprocess
import time
from collections.abc import Iterator

import httpx
import msgspec
import pytest
from sqlalchemy import create_engine

from lisa import Manager
from lisa.core.metrics.families import FAMILIES, SECTIONS
from lisa.core.model.keys import Keys
from lisa.core.store.presence import LoaderRecord
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from lisa.outbox import Outbox, Tables
from tests.exposition import Exposed
from tests.gateway.native_client import pull, send
from tests.gateways import NO_TLS, Gateway, RawPull, new_topic
from tests.servers import Processes, connect, wait_until

REQUESTS = "lisa_gateway_requests_total"
PROMTOOL = shutil.which("promtool")
SENT = {"face": "native", "method": "POST", "code": "201"}


def page_of(client: httpx.Client, **headers: str) -> Exposed:
    answer = client.get("/metrics", headers=headers)
    assert answer.status_code == 200, answer.text
    return Exposed(answer.text)


def fresh(url: str) -> Exposed:
    """Metrics read over a new connection: with several workers, any may respond."""
    with httpx.Client(base_url=url, timeout=30, verify=NO_TLS) as client:
        return page_of(client)


@pytest.fixture(scope="module")
def live(
    redis_url: str, gateway: Gateway, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Exposed]]:
    """The metrics of each role after all roles have worked on one topic."""
    topic, http = new_topic("live"), f"127.0.0.1:{free_port()}"
    directory = tmp_path_factory.mktemp("live")
    (directory / "shop.py").write_text(
        "from lisa import Consumer\nconsumer = Consumer(group='g')\n"
        f"@consumer.on('{topic}')\ndef handle(message): pass\n"
    )
    processes, pages = Processes(directory), dict[str, Exposed]()
    options = {topic: {"group": "g", "capacity": 1000, "ramp": "9/s", "key_rate": "1 per 1d"}}
    processes.start("-m", "lisa.cli.consumer", "--redis", redis_url, "--http", http, "shop")
    database, relay = f"sqlite:///{directory / 'shop.db'}", f"127.0.0.1:{free_port()}"
    engine, tables = create_engine(database), Tables()
    tables.metadata.create_all(engine)
    with engine.begin() as connection:
        Outbox().send(connection, topic, 1, delay="1h")
    engine.dispose()
    of_relay = ("--redis", redis_url, "--http", relay, "--database", database)
    processes.start("-m", "lisa.cli.relay", *of_relay)
    try:
        with Manager(redis_url, topics=options, http="127.0.0.1:0") as manager:
            now_ms = time.time_ns() // 1_000_000
            send(gateway.client, topic, due_ms=now_ms - 5_000)  # so that its lateness is kept
            send(gateway.client, topic, delay_ms=60_000)
            for _ in range(2):  # the second one is parked
                send(gateway.client, topic, key="k")
            with connect(redis_url) as client:
                client.hset(Keys().topic(topic).archived, "a", f"1-0 1 {now_ms}")
                loader = LoaderRecord(
                    name="l", horizon_ms=1, seen_ms=now_ms, floor_ms=now_ms, until_ms=now_ms
                )
                client.hset(Keys().loaders, "l", msgspec.json.encode(loader))
            push = {"url": "https://hooks.example/", "group": "pushed"}
            gateway.client.put(f"/v1/topics/{new_topic('pushed')}/push", json=push)
            urls = {"manager": f"http://127.0.0.1:{manager.status_port}", "gateway": gateway.url}
            urls |= {"consumer": f"http://{http}", "relay": f"http://{relay}"}

            def are_settled() -> bool:
                try:
                    pages.update({role: fresh(url) for role, url in urls.items()})
                except httpx.TransportError:  # the consumer or the relay has not started yet
                    return False
                handled = pages["consumer"].value(
                    "lisa_consumer_handled_total", topic=topic, group="g", outcome="ok"
                )
                seen = [
                    pages[role].value(name, topic=topic, group="g")
                    for role in ("manager", "gateway")
                    for name in ("lisa_topic_acked_total", "lisa_topic_consumers_alive")
                ]
                done = pages["relay"].total("lisa_relay_operations_total")
                up = [page.value("lisa_up") for page in pages.values()]
                return (handled, done, seen, up) == (2, 1, [2, 1, 2, 1], [1] * len(pages))

            wait_until(are_settled)
            yield pages
    finally:
        processes.end()


@pytest.mark.parametrize("role", ["manager", "consumer", "gateway", "relay"])
def test_the_documented_metrics_are_the_exported_ones(live: dict[str, Exposed], role: str) -> None:
    sections = [section for section in SECTIONS if role in section.roles]
    listed = {family.name for section in sections for family in section.families}
    page = live[role]
    assert page.families.keys() == listed
    for name, family in page.families.items():
        assert family.type == FAMILIES[name].kind, name
        assert page.labels(name) == {tuple(sorted(FAMILIES[name].labels))}, name
        assert family.documentation == FAMILIES[name].help


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not on PATH (Debian: prometheus)")
@pytest.mark.parametrize("role", ["manager", "consumer", "gateway", "relay"])
def test_promtool_finds_no_fault_in_a_page(live: dict[str, Exposed], role: str) -> None:
    command = [str(PROMTOOL), "check", "metrics"]
    done = subprocess.run(
        command, input=live[role].text, check=False, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_requests_and_deliveries_are_counted(client: httpx.Client) -> None:
    topic, before = new_topic(), page_of(client)
    send(client, topic)
    send(client, topic)
    for path, status in (
        (f"/v1/topics/{topic}/messages/nosuch", 404),
        ("/camellia/health/status", 200),
        ("/nosuch", 404),
    ):
        assert client.get(path).status_code == status
    handed_out = len(pull(client, topic, max=2))
    assert handed_out >= 1
    after = page_of(client)

    def more(name: str, **labels: str) -> float:
        return after.total(name, **labels) - before.total(name, **labels)

    assert more(REQUESTS, **SENT) == 2
    for face, code in (("native", "404"), ("camellia", "200"), ("page", "404")):
        assert more(REQUESTS, face=face, method="GET", code=code) == 1
    assert more("lisa_gateway_deliveries_total", outcome="handed_out") == handed_out
    # The pull is counted, but not timed.
    assert more(REQUESTS, face="native") == 4
    assert more("lisa_gateway_request_seconds_count", face="native") == 3
    faces = {labels["face"] for labels, _ in after.samples(REQUESTS)}
    assert faces <= {"native", "camellia", "mykit", "delay-queue", "page", "metrics", "health"}


def test_waiting_pulls_and_disconnected_clients_are_counted(gateway: Gateway) -> None:
    def waiting_and_gone() -> tuple[float | None, float]:
        page = page_of(gateway.client)
        gone = page.total(REQUESTS, face="native", code="499")
        return page.value("lisa_gateway_pulls_waiting"), gone

    _, before = waiting_and_gone()
    with RawPull(gateway, new_topic()):
        wait_until(lambda: waiting_and_gone() == (1, before))
    wait_until(lambda: waiting_and_gone() == (0, before + 1))


def test_openmetrics_is_used_if_accepted(client: httpx.Client) -> None:
    answer = client.get(
        "/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0,text/plain;q=.1"}
    )
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert answer.text.endswith("# EOF\n")
    assert client.get("/metrics").headers["content-type"].startswith("text/plain; version=0.0.4")


def test_metrics_need_the_scope_operate(redis_url: str) -> None:
    tokens = (
        "tokens:\n"
        "  - {name: a, token: produces-and-nothing-else, scopes: [produce]}\n"
        "  - {name: b, token: operates-some-topics, scopes: [operate], topics: [orders]}\n"
        "  - {name: c, token: operates-all-topics, scopes: [operate]}\n"
    )
    secrets = ("produces-and-nothing-else", "operates-some-topics", "operates-all-topics")
    with Gateway(redis_url, tokens=tokens) as gateway:
        client = gateway.client
        assert client.get("/metrics").status_code == 401
        headers = [{"authorization": f"Bearer {secret}"} for secret in secrets]
        codes = [client.get("/metrics", headers=one).status_code for one in headers]
        assert codes == [403, 403, 200]
        page = page_of(client, **headers[2])
        assert page.value(REQUESTS, face="metrics", method="GET", code="401") == 1
        assert page.value(REQUESTS, face="metrics", method="GET", code="403") == 2


@pytest.mark.full
def test_any_worker_returns_the_metrics_of_all(redis_url: str, manager: Manager) -> None:
    topic = new_topic()
    with Gateway(redis_url, "--workers", "3") as gateway:

        def sent() -> float:
            return fresh(gateway.url).value(REQUESTS, **SENT) or 0.0

        def send_anew() -> None:
            with httpx.Client(base_url=gateway.url, verify=NO_TLS) as client:
                send(client, topic)

        wait_until(lambda: fresh(gateway.url).value("lisa_processes") == 3)
        for _ in range(10):
            send_anew()
        wait_until(lambda: sent() == 10)
        assert [sent() for _ in range(6)] == [10] * 6
        seen: list[float] = []

        def all_are_seen() -> bool:
            """The workers save theirs each second."""
            send_anew()
            seen.append(sent())
            return seen[-1] >= 20

        wait_until(all_are_seen)
        assert seen == sorted(seen), "a counter went back from one scrape to the next"
        total = 10 + len(seen)
        name = "lisa_topic_sent_total"
        wait_until(lambda: fresh(gateway.url).value(name, topic=topic) == total)
    # A single process saves nothing, and reports the same.
    with Gateway(redis_url) as gateway:
        assert fresh(gateway.url).value("lisa_processes") == 1


@pytest.mark.full
def test_in_an_outage_the_gateways_own_metrics_remain() -> None:
    with (
        EmbeddedServer() as server,
        Gateway(server.url, env={"LISA_GATEWAY_SERVER__PATIENCE": "100ms"}) as gateway,
    ):

        def value(name: str, **labels: str) -> float | None:
            return page_of(gateway.client).value(name, **labels)

        send(gateway.client, "orders")
        wait_until(lambda: value("lisa_topic_sent_total", topic="orders") == 1)
        server.kill()
        wait_until(lambda: value("lisa_up") == 0)
        assert "lisa_topic_sent_total" not in page_of(gateway.client).families
        assert value(REQUESTS, **SENT) == 1
        refused = value("lisa_gateway_refused_total", reason="server") or 0
        answer = gateway.client.post("/v1/topics/orders/messages", json={"body": 1})
        assert answer.status_code == 503
        assert value("lisa_gateway_refused_total", reason="server") == refused + 1
        server.restart()
        wait_until(lambda: value("lisa_up") == 1)
