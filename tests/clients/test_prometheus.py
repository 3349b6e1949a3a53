"""The shipped scrape configuration and alert rules, in Debian's Prometheus, on real deployments."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from datetime import timedelta
from typing import TYPE_CHECKING

import pytest
import yaml

from lisa import Consumer, Manager, Message, Producer
from lisa.core.metrics.families import FAMILIES
from lisa.core.model.keys import Keys
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from lisa.pipeline.source.following import record_archived
from lisa.pipeline.source.marks import Mark
from tests.gateways import Gateway
from tests.prometheus import CONFIGS, PROMETHEUS, Deployment, Prometheus, name_of
from tests.roles import Cast
from tests.servers import connect, wait_until
from tests.shifted_server import ShiftedServer, missing

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not on PATH (Debian: prometheus)"),
]

PUSHES = """
lisa-delay-queue:
  gateway-server:
    push-allow: ["127.0.0.0/8"]
"""
QUICK = {"LISA_GATEWAY_SERVER__PATIENCE": "1s"}

OF_ABSENCE = {
    "LisaNotTaken",
    "LisaNoConsumer",
    "LisaNoGroup",
    "LisaLate",
    "LisaGarbageGrows",
    "LisaPushFails",
    "LisaRoleDown",
    "LisaNoManager",
    "LisaServerAway",
    "LisaGatewayRefuses",
}
OF_OVERLOAD = {
    "LisaBacklogGrows",
    "LisaGroupFull",
    "LisaTopicNearlyFull",
    "LisaConsumerDegraded",
    "LisaJournalLosing",
    "LisaArchiveBehind",
    "LisaEarly",
    "LisaManagerMissing",
    "LisaServerMemory",
    "LisaManagerTroubled",
}
"""The alerts that each of the two tests sees fire."""

HOURS = timedelta(hours=2)


@pytest.fixture(scope="module")
def production(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("production")
    with (
        EmbeddedServer() as server,
        Gateway(server.url, config=PUSHES, directory=directory, env=QUICK) as gateway,
    ):
        yield Deployment("production", server, gateway)


@pytest.fixture(scope="module")
def staging(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment whose server's clock can be set."""
    directory = tmp_path_factory.mktemp("staging")
    server = EmbeddedServer() if missing() else ShiftedServer(directory)
    with server, Gateway(server.url) as gateway:
        yield Deployment("staging", server, gateway)


@pytest.fixture(scope="module")
def prometheus(
    production: Deployment, staging: Deployment, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """Scrapes both deployments; no consumer is expected in `staging`."""
    targets = {
        one.environment: {"lisa-manager": one.manager_at, "lisa-gateway": one.gateway_at}
        for one in (production, staging)
    }
    targets["production"]["lisa-consumer"] = production.consumer_at
    running = Prometheus(tmp_path_factory.mktemp("prometheus"), targets)
    try:
        wait_until(running.is_up)
        yield running
        assert "level=warn" not in running.log()
        assert "level=error" not in running.log()
    finally:
        running.end()


def cause_absence(shop: Deployment, prometheus: Prometheus) -> None:
    """Due messages without a consumer and without a group; late ones, garbage, failed pushes.

    Prometheus must scrape each counter once before it grows, because it does not count the first
    value of a series as an increase.
    """
    for topic in ("unattended", "late", "broken"):
        shop.post(f"{topic}/groups", group="g")
    target = {"url": f"http://127.0.0.1:{free_port()}/", "group": "g"}
    assert shop.api.put("/v1/topics/pushed/push", json=target).is_success
    shop.set_options("pushed", retry_delays="1h")
    shop.send("unattended", overdue_s=100)
    shop.send("groupless")
    shop.send("pushed")
    for topic in ("late", "broken"):
        prometheus.wait_for_value(shop.series("lisa_topic_garbage_total", topic=topic, group="g"))
    pushes = shop.series("lisa_gateway_pushes_total", topic="pushed", outcome="failed")
    prometheus.wait_for_value(pushes)
    shop.send("pushed")
    shop.send("late", overdue_s=5)
    for _ in range(20):
        shop.send("broken")
    (late,) = shop.pull("late", 1)
    shop.ack("late", late)
    for one in shop.pull("broken", 20):
        shop.post(f"broken/messages/{one['id']}/retry", receipt=one["receipt"], discard=True)


def test_alerts_about_absent_roles_fire_and_end(
    production: Deployment, prometheus: Prometheus
) -> None:
    shop, alert = production, production.alert
    cause_absence(shop, prometheus)
    down = alert("LisaRoleDown", "warning", job="lisa-consumer", instance=shop.consumer_at)
    remain = {
        alert("LisaNotTaken", "critical", topic="unattended", group="g"),
        alert("LisaNoConsumer", "critical", topic="unattended", group="g"),
        alert("LisaNoGroup", "warning", topic="groupless"),
        alert("LisaLate", "warning", topic="late", group="g"),
        alert("LisaGarbageGrows", "warning", topic="broken", group="g"),
        alert("LisaPushFails", "warning", topic="pushed"),
        down,
    }
    end = {
        alert("LisaNoManager", "critical"),
        alert("LisaRoleDown", "warning", job="lisa-manager", instance=shop.manager_at),
    }
    prometheus.wait_for("production", *remain, *end)
    check_annotations(prometheus, "production")
    with Manager(shop.server.url, http=shop.manager_at):
        prometheus.wait_for("production", *remain)
        check_metadata(prometheus)
        shop.server.kill()
        assert shop.api.post("/v1/topics/late/messages", json={"body": 1}).status_code == 503
        away = {
            alert("LisaServerAway", "critical", job="lisa-gateway", instance=shop.gateway_at),
            alert("LisaServerAway", "critical", job="lisa-manager", instance=shop.manager_at),
            alert("LisaGatewayRefuses", "warning", instance=shop.gateway_at, reason="server"),
        }
        # Services that the outage interrupted also count as troubled.
        others = (OF_ABSENCE | OF_OVERLOAD) - set(map(name_of, away))
        prometheus.wait_for("production", *away, ignored=others)
        shop.server.restart()
    assert set(map(name_of, remain | end | away)) == OF_ABSENCE


def check_annotations(prometheus: Prometheus, environment: str) -> None:
    for one in prometheus.alerts(environment):
        assert "template" not in str(one["annotations"]), one


def check_metadata(prometheus: Prometheus) -> None:
    """Prometheus reads every metric with its own parser, and with the kind that Lisa lists."""
    targets = prometheus.get("/targets")["activeTargets"]
    errors = {
        one["labels"]["job"]: one["lastError"]
        for one in targets
        if one["labels"]["environment"] == "production"
    }
    assert errors.pop("lisa-consumer")  # none runs
    assert errors == {"lisa-manager": "", "lisa-gateway": ""}
    kinds = {one["metric"]: one["type"] for one in prometheus.get("/targets/metadata")}
    assert len(kinds) > 50
    for name, kind in kinds.items():
        # The gateway answers in OpenMetrics, which names counters without their suffix.
        family = FAMILIES.get(name) or FAMILIES[f"{name}_total"]
        assert family.kind == kind, name


def set_clock_back(shop: Deployment, server: ShiftedServer, prometheus: Prometheus) -> None:
    """Two hours back and forth: a ready message is early, an event was not archived in time."""
    keys = Keys()
    shop.post("early/groups", group="g")
    with connect(server.url) as client:
        with Manager(server.url):
            shop.send("early")
            wait_until(lambda: client.xlen(keys.topic("early").group("g").ready) == 1)
        early = shop.series("lisa_topic_early_total", topic="early", group="g")
        prometheus.wait_for_value(early)
        server.step(-HOURS)
        (message,) = shop.pull("early", 1)
        shop.ack("early", message)
        shop.set_options("journaled", journal=True)
        for _ in range(2):
            shop.post("journaled/messages", body=1, delay_ms=100_000_000)
        [(entry, _), _] = client.xrange(keys.topic("journaled").events)
    cast = Cast(server.url)
    marks = {"journaled": Mark(entry.decode(), 1)}
    cast.store.drive(record_archived(cast.store, "nightly", marks))
    cast.store.close()
    server.step(HOURS)


def cause_overload(shop: Deployment, prometheus: Prometheus) -> None:
    """More messages than a group, a topic and a journal hold, and than a consumer handles."""
    for topic in ("backlog", "full", "failing", "lossy"):
        shop.post(f"{topic}/groups", group="g")
    shop.set_options("full", max_ready=5)
    shop.set_options("nearly-full", capacity=10)
    shop.set_options("lossy", journal=True, journal_max=100)
    with connect(shop.server.url) as client, Producer(shop.server.url) as producer:
        prometheus.wait_for_value(shop.series("lisa_topic_journal_lost_total", topic="lossy"))
        backlog = shop.series("lisa_topic_backlog_messages", topic="backlog", group="g")
        prometheus.wait_for_value(backlog)
        later = timedelta(hours=1)
        producer.send_many("backlog", range(150))
        producer.send_many("full", range(30))
        producer.send_many("nearly-full", range(10), delay=later)
        producer.send_many("lossy", range(1000), delay=later)
        producer.send_many("failing", range(20), retry=[later])  # degraded after 20
        client.setrange("of another program", 30_000_000, b"x")
        used = int(client.info("memory")["used_memory"])
        client.config_set("maxmemory", int(used / 0.95))


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_alerts_about_overload_and_clocks_fire(staging: Deployment, prometheus: Prometheus) -> None:
    shop, alert = staging, staging.alert
    assert isinstance(shop.server, ShiftedServer)
    set_clock_back(shop, shop.server, prometheus)
    may_end = threading.Event()
    slow, failing = (Consumer(shop.server.url, group="g") for _ in range(2))

    @slow.on("backlog")
    @slow.on("full")
    def wait(message: Message) -> None:
        may_end.wait()

    @failing.on("failing")
    def fail(message: Message) -> None:
        raise ValueError("no")

    shop.post("damaged/groups", group="g")
    with connect(shop.server.url) as client:
        client.set(Keys().topic("damaged").waiting, "not a sorted set")
    with ExitStack() as roles:
        roles.enter_context(Manager(shop.server.url, http=shop.manager_at))
        second = roles.enter_context(Manager(shop.server.url))
        roles.enter_context(slow)
        roles.callback(may_end.set)
        roles.enter_context(failing)
        prometheus.wait_for_value(shop.series("lisa_managers_alive"), 2)
        second.stop()
        cause_overload(shop, prometheus)
        expected = {
            alert("LisaBacklogGrows", "warning", topic="backlog", group="g"),
            alert("LisaGroupFull", "warning", topic="full", group="g"),
            alert("LisaTopicNearlyFull", "warning", topic="nearly-full"),
            alert("LisaConsumerDegraded", "warning", topic="failing", group="g"),
            alert("LisaJournalLosing", "critical", topic="lossy"),
            alert("LisaArchiveBehind", "warning", topic="journaled", archive="nightly"),
            alert("LisaEarly", "warning", topic="early", group="g"),
            alert("LisaManagerMissing", "warning"),
            alert("LisaServerMemory", "critical"),
            alert("LisaManagerTroubled", "warning", instance=shop.manager_at, service="promoter"),
        }
        # On a busy machine, messages may also be late.
        prometheus.wait_for("staging", *expected, ignored=["LisaLate"])
        check_annotations(prometheus, "staging")
    assert set(map(name_of, expected)) == OF_OVERLOAD


def test_no_shipped_alert_is_left_out() -> None:
    groups = yaml.safe_load((CONFIGS / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    shipped = {rule["alert"] for one in groups for rule in one["rules"]}
    assert shipped == OF_ABSENCE | OF_OVERLOAD
