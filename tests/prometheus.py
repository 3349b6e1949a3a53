"""Debian's Prometheus with the shipped files, and the deployments that it scrapes."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from typing import TYPE_CHECKING, Any, TypeAlias

import httpx
import yaml

from lisa.embedded.server import free_port
from tests.servers import ROOT, wait_until

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from lisa.embedded import EmbeddedServer
    from tests.gateways import Gateway

Alert: TypeAlias = tuple[tuple[str, str], ...]
"""The labels of an alert, sorted by name."""

PROMETHEUS = shutil.which("prometheus")
CONFIGS = ROOT / "configs"


def name_of(alert: Alert) -> str:
    return dict(alert)["alertname"]


class Prometheus:
    """`prometheus` with the shipped files; alerts fire after a second, not after minutes.

    targets: by environment and job, the address to scrape.
    """

    def __init__(self, directory: Path, targets: Mapping[str, Mapping[str, str]]) -> None:
        rules = (CONFIGS / "alerts.yml").read_text(encoding="utf-8")
        shortened = re.sub(r"^( +(?:keep_firing_)?for:) \w+$", r"\1 1s", rules, flags=re.MULTILINE)
        (directory / "alerts.yml").write_text(shortened, encoding="utf-8")
        config = yaml.safe_load((CONFIGS / "prometheus.yml").read_text(encoding="utf-8"))
        config["global"] |= {"scrape_interval": "1s", "evaluation_interval": "500ms"}
        for job in config["scrape_configs"]:
            job["static_configs"] = [
                {"targets": [jobs[job["job_name"]]], "labels": {"environment": environment}}
                for environment, jobs in targets.items()
                if job["job_name"] in jobs
            ]
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

    def alerts(self, environment: str) -> list[dict[str, Any]]:
        """The firing alerts of an environment."""
        return [
            one
            for one in self.get("/alerts")["alerts"]
            if one["state"] == "firing" and one["labels"].get("environment") == environment
        ]

    def firing(self, environment: str) -> set[Alert]:
        return {tuple(sorted(one["labels"].items())) for one in self.alerts(environment)}

    def wait_for(self, environment: str, *expected: Alert, ignored: Collection[str] = ()) -> None:
        """Wait until exactly these alerts of an environment fire, besides `ignored` names."""
        wanted, found = set(expected), set[Alert]()

        def are_firing() -> bool:
            nonlocal found
            found = {one for one in self.firing(environment) if name_of(one) not in ignored}
            return found == wanted

        try:
            wait_until(are_firing)
        except AssertionError as error:
            raise AssertionError(f"missing {wanted - found}, unwanted {found - wanted}") from error

    def wait_for_value(self, series: str, least: float = 0) -> None:
        """Wait until a series has a sample, and the sample is at least this high."""
        wait_until(lambda: (value := self.value(series)) is not None and value >= least)

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


class Deployment:
    """A server and a gateway in an environment; the addresses of roles that do not run yet."""

    def __init__(self, environment: str, server: EmbeddedServer, gateway: Gateway) -> None:
        self.environment, self.server, self.api = environment, server, gateway.client
        self.manager_at = f"127.0.0.1:{free_port()}"
        self.consumer_at = f"127.0.0.1:{free_port()}"
        self.gateway_at = gateway.url.removeprefix("http://")

    def alert(self, name: str, severity: str, **labels: str) -> Alert:
        common = {"alertname": name, "severity": severity, "environment": self.environment}
        return tuple(sorted((common | labels).items()))

    def series(self, name: str, **labels: str) -> str:
        """The PromQL selector of one of its series."""
        labels["environment"] = self.environment
        pairs = ",".join(f'{key}="{value}"' for key, value in labels.items())
        return f"{name}{{{pairs}}}"

    def post(self, path: str, **body: Any) -> Any:
        answer = self.api.post(f"/v1/topics/{path}", json=body)
        assert answer.is_success, answer.text
        return answer.json()

    def set_options(self, topic: str, **options: Any) -> None:
        self.api.patch(f"/v1/topics/{topic}/options", json=options).raise_for_status()

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

    def ack(self, topic: str, delivery: dict[str, Any]) -> None:
        self.post(f"{topic}/messages/{delivery['id']}/ack", receipt=delivery["receipt"])
