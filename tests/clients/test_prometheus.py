"""The shipped scrape configuration and alert rules, in Debian's Prometheus, on a real gateway."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import httpx
import pytest
import yaml

from lisa import Manager
from lisa.core.metrics.families import FAMILIES
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from tests.gateways import Gateway
from tests.servers import ROOT, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

Alert: TypeAlias = tuple[tuple[str, str], ...]
"""The labels of an alert, sorted by name."""

PROMETHEUS = shutil.which("prometheus")
CONFIGS = ROOT / "configs"

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is not on PATH (Debian: prometheus)"),
]

PUSHES = """
lisa-delay-queue:
  gateway-server:
    push-allow: ["127.0.0.0/8"]
"""


class Prometheus:
    """`prometheus` with the shipped files; alerts fire after a second, not after minutes."""

    def __init__(self, directory: Path, targets: Mapping[str, str]) -> None:
        rules = (CONFIGS / "alerts.yml").read_text(encoding="utf-8")
        shortened = re.sub(r"^( +(?:keep_firing_)?for:) \w+$", r"\1 1s", rules, flags=re.MULTILINE)
        (directory / "alerts.yml").write_text(shortened, encoding="utf-8")
        config = yaml.safe_load((CONFIGS / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] |= {"scrape_interval": "1s", "evaluation_interval": "500ms"}
        for job in config["scrape_configs"]:
            job["static_configs"][0]["targets"] = [targets[job["job_name"]]]
        (directory / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
        port = free_port()
        self._log = (directory / "log").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [
                str(PROMETHEUS),
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stderr=self._log,
        )
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}/api/v1", timeout=30)

    def get(self, path: str, **parameters: str) -> Any:
        """The `data` of an answer."""
        answer = self._client.get(path, params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def is_up(self) -> bool:
        assert self._process.poll() is None, self.log()
        try:
            return self._client.get("/status/runtimeinfo").status_code == 200
        except httpx.TransportError:
            return False

    def value(self, expression: str) -> float | None:
        found = self.get("/query", query=expression)["result"]
        return float(found[0]["value"][1]) if found else None

    def alerts(self) -> list[dict[str, Any]]:
        """The firing alerts."""
        return [one for one in self.get("/alerts")["alerts"] if one["state"] == "firing"]

    def firing(self) -> set[Alert]:
        return {tuple(sorted(one["labels"].items())) for one in self.alerts()}

    def wait_for(self, *expected: Alert) -> None:
        """Wait until exactly these alerts fire."""
        wanted, found = set(expected), set[Alert]()

        def are_firing() -> bool:
            nonlocal found
            found = self.firing()
            return found == wanted

        try:
            wait_until(are_firing)
        except AssertionError as error:
            raise AssertionError(f"missing {wanted - found}, unwanted {found - wanted}") from error

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def end(self) -> None:
        self._client.close()
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()


class Shop:
    """A server, a gateway and Prometheus; the port of a manager, on which none runs yet."""

    def __init__(self, server: EmbeddedServer, gateway: Gateway, directory: Path) -> None:
        self.server, self.api = server, gateway.client
        self.manager_at = f"127.0.0.1:{free_port()}"
        self.consumer_at = f"127.0.0.1:{free_port()}"
        self.gateway_at = gateway.url.removeprefix("http://")
        targets = {
            "lisa-manager": self.manager_at,
            "lisa-consumer": self.consumer_at,
            "lisa-gateway": self.gateway_at,
        }
        self.prometheus = Prometheus(directory, targets)

    def post(self, path: str, **body: Any) -> Any:
        answer = self.api.post(f"/v1/topics/{path}", json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def send(self, topic: str, *, overdue_s: int = 0) -> None:
        due_ms = time.time_ns() // 1_000_000 - overdue_s * 1_000
        self.post(f"{topic}/messages", body=1, due_ms=due_ms)

    def pull(self, topic: str, most: int) -> list[dict[str, Any]]:
        """Exactly so many deliveries."""
        found: list[dict[str, Any]] = []
        while len(found) < most:
            pulled = self.post(f"{topic}/pull", group="g", max=most - len(found), wait_ms=20_000)
            found += pulled["deliveries"]
            assert pulled["deliveries"], f"{topic} has only {len(found)} messages"
        return found

    def cause_trouble(self) -> None:
        """Due messages without a consumer and without a group; late ones, garbage, failed pushes.

        Counters grow after Prometheus has seen them: the first value of a series is no increase.
        """
        for topic in ("unattended", "late", "broken"):
            self.post(f"{topic}/groups", group="g")
        target = {"url": f"http://127.0.0.1:{free_port()}/", "group": "g"}
        assert self.api.put("/v1/topics/pushed/push", json=target).is_success
        self.api.patch("/v1/topics/pushed/options", json={"retry_delays": "1h"}).raise_for_status()
        self.send("unattended", overdue_s=100)
        self.send("groupless")
        self.send("pushed")
        for topic in ("late", "broken"):
            self.wait_for_sample(f'lisa_topic_garbage_total{{topic="{topic}",group="g"}}')
        self.wait_for_sample('lisa_gateway_pushes_total{topic="pushed",outcome="failed"}')
        self.send("pushed")
        self.send("late", overdue_s=5)
        for _ in range(20):
            self.send("broken")
        (late,) = self.pull("late", 1)
        self.post(f"late/messages/{late['id']}/ack", receipt=late["receipt"])
        for one in self.pull("broken", 20):
            self.post(f"broken/messages/{one['id']}/retry", receipt=one["receipt"], discard=True)

    def wait_for_sample(self, series: str) -> None:
        wait_until(lambda: self.prometheus.value(series) is not None)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    directory = tmp_path_factory.mktemp("prometheus")
    with (
        EmbeddedServer() as server,
        Gateway(server.url, config=PUSHES, directory=directory) as gateway,
    ):
        running = Shop(server, gateway, directory)
        try:
            wait_until(running.prometheus.is_up)
            yield running
        finally:
            running.prometheus.end()


def alert(name: str, severity: str, **labels: str) -> Alert:
    common = {"alertname": name, "severity": severity, "environment": "production"}
    return tuple(sorted((common | labels).items()))


def test_the_shipped_alerts_fire_and_end(shop: Shop) -> None:
    prometheus = shop.prometheus
    shop.cause_trouble()
    down = alert("LisaRoleDown", "warning", job="lisa-consumer", instance=shop.consumer_at)
    of_topics = (
        alert("LisaNotTaken", "critical", topic="unattended", group="g"),
        alert("LisaNoConsumer", "critical", topic="unattended", group="g"),
        alert("LisaNoGroup", "warning", topic="groupless"),
        alert("LisaLate", "warning", topic="late", group="g"),
        alert("LisaGarbageGrows", "warning", topic="broken", group="g"),
        alert("LisaPushFails", "warning", topic="pushed"),
    )
    prometheus.wait_for(
        *of_topics,
        down,
        alert("LisaNoManager", "critical"),
        alert("LisaRoleDown", "warning", job="lisa-manager", instance=shop.manager_at),
    )
    for one in prometheus.alerts():
        assert "template" not in str(one["annotations"]), one
    with Manager(shop.server.url, http=shop.manager_at):
        prometheus.wait_for(*of_topics, down)
        check_metadata(prometheus)
        shop.server.kill()
        away = [
            alert("LisaServerAway", "critical", job=job, instance=at)
            for job, at in (("lisa-gateway", shop.gateway_at), ("lisa-manager", shop.manager_at))
        ]
        wait_until(lambda: prometheus.firing() >= set(away))
        shop.server.restart()
    assert "level=warn" not in prometheus.log()
    assert "level=error" not in prometheus.log()


def check_metadata(prometheus: Prometheus) -> None:
    """Prometheus reads every metric with its own parser, and with the kind that Lisa lists."""
    targets = prometheus.get("/targets")["activeTargets"]
    errors = {one["labels"]["job"]: one["lastError"] for one in targets}
    assert errors.pop("lisa-consumer")  # none runs
    assert errors == {"lisa-manager": "", "lisa-gateway": ""}
    kinds = {one["metric"]: one["type"] for one in prometheus.get("/targets/metadata")}
    assert len(kinds) > 50
    for name, kind in kinds.items():
        # The gateway answers in OpenMetrics, which names counters without their suffix.
        family = FAMILIES.get(name) or FAMILIES[f"{name}_total"]
        assert family.kind == kind, name
