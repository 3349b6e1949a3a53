"""Helpers for the tests of deployment files: run their commands with the mounted files."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import httpx
import jsonschema_rs

from lisa.cli.consumer import main as consumer_main
from lisa.cli.gateway import main as gateway_main
from lisa.cli.manager import main as manager_main
from lisa.core.settings import ConsumerSettings, GatewaySettings, ManagerSettings
from lisa.embedded.server import free_port
from tests.gateways import NO_TLS
from tests.servers import ROOT, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import pytest

    from tests.servers import Process, Processes

CONFIGS = ROOT / "configs"
SCHEMAS = Path(__file__).parent / "schemas"
MAINS: dict[str, click.Command] = {
    "lisa-manager": manager_main,
    "lisa-consumer": consumer_main,
    "lisa-gateway": gateway_main,
}
MODULES = {name: f"lisa.cli.{name.removeprefix('lisa-')}" for name in MAINS}
SETTINGS: dict[str, Any] = {
    "lisa-manager": ManagerSettings,
    "lisa-consumer": ConsumerSettings,
    "lisa-gateway": GatewaySettings,
}
SECRET = "0123456789abcdef0123456789abcdef"
EVERYWHERE, PORT = "0.0.0.0", "8080"  # noqa: S104  as the containers listen; here it is replaced
SPARE_S = 5
"""Longer than the grace of a role: what it does after its handlers or requests have ended."""


def validator(name: str, kind: str | None = None) -> jsonschema_rs.Validator:
    """A validator for a vendored schema, or for one kind of it."""
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    if kind is not None:
        assert kind in schema["kinds"], f"no schema of {kind}: see schemas/README.md"
        schema = schema["kinds"][kind] | {"definitions": schema["definitions"]}
    return jsonschema_rs.validator_for(schema)


def parsed(command: Sequence[str]) -> dict[str, Any]:
    """A container's command, parsed by the real command line."""
    program, *arguments = command
    with MAINS[program].make_context(program, list(arguments)) as context:
        return dict(context.params)


def grace_s(
    command: Sequence[str],
    env: Mapping[str, str],
    files: Mapping[str, str],
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> float:
    """Load a role's settings from its container; returns its grace time for stopping.

    `env` is the container's environment, `files` the text of mounted files by path.
    """
    for name in [name for name in os.environ if name.startswith("LISA_")]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    config = Path(parsed(command)["path"])
    local = directory / config.name
    local.write_text(files[str(config)])
    settings = SETTINGS[command[0]].load(local)
    assert settings.enabled
    section = getattr(settings, command[0].removeprefix("lisa-") + "_server")
    grace = getattr(section, "grace", None)
    return grace.total_seconds() if grace is not None else 10.0


def start(
    processes: Processes,
    command: Sequence[str],
    env: Mapping[str, str],
    redis_url: str,
    config: Path,
) -> tuple[Process, str]:
    """Start the real role by a container's command, on a free port; its process and address."""
    port = str(free_port())
    file = str(parsed(command)["path"])
    instead = {
        file: str(config),
        EVERYWHERE: "127.0.0.1",
        PORT: port,
        f"{EVERYWHERE}:{PORT}": f"127.0.0.1:{port}",
    }
    program, *arguments = [instead.get(one, one) for one in command]
    given = {**env, "LISA_REDIS_URL": redis_url}
    return processes.start("-m", MODULES[program], *arguments, env=given), f"127.0.0.1:{port}"


def answers(address: str, path: str) -> None:
    """Wait until a request for the path returns 200."""

    def is_well() -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"http://{address}{path}", verify=NO_TLS).status_code == 200
        return False

    wait_until(is_well)
