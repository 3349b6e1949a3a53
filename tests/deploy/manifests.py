"""Helpers for the tests of deployment files: run their commands with the mounted files."""

import importlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import click
import httpx
import jsonschema_rs

from lisa.core.settings import ConsumerSettings, GatewaySettings, ManagerSettings
from lisa.embedded.server import free_port
from tests.gateways import NO_TLS
from tests.servers import ROOT, Process, Processes, wait_until

CONFIGS = ROOT / "configs"
SCHEMAS = Path(__file__).parent / "schemas"
MAINS: dict[str, click.Command] = {
    f"lisa-{role}": importlib.import_module(f"lisa.cli.{role}").main
    for role in ("manager", "consumer", "gateway")
}
SETTINGS: dict[str, Any] = {
    f"lisa-{one.role}": one for one in (ManagerSettings, ConsumerSettings, GatewaySettings)
}
EVERYWHERE, PORT = "0.0.0.0", "8080"  # noqa: S104  as the containers listen; here it is replaced


def faults(document: dict[str, Any], name: str, kind: str | None = None) -> list[str]:
    """What violates a vendored schema, or one kind of it."""
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    if kind is not None:
        assert kind in schema["kinds"], f"no schema of {kind}: see schemas/README.md"
        schema = schema["kinds"][kind] | {"definitions": schema["definitions"]}
    return [one.message for one in jsonschema_rs.validator_for(schema).iter_errors(document)]


def config_of(command: Sequence[str]) -> str:
    """The file that a container's command names, parsed by the real command line."""
    program, *arguments = command
    with MAINS[program].make_context(program, list(arguments)) as context:
        return str(context.params["path"])


def grace_s(command: Sequence[str], config: Path, env: dict[str, str]) -> float:
    """Load a role's settings from its file and the environment; returns its grace for stopping."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("LISA_")}
    with patch.dict(os.environ, others | env, clear=True):
        settings = SETTINGS[command[0]].load(config)
    assert settings.enabled
    section = getattr(settings, command[0].removeprefix("lisa-") + "_server")
    grace = getattr(section, "grace", None)
    return grace.total_seconds() if grace is not None else 10.0


def start(
    processes: Processes, command: Sequence[str], env: Mapping[str, str], url: str, config: Path
) -> tuple[Process, str]:
    """Start the real role by a container's command, on a free port; its process and address."""
    port = str(free_port())
    instead = {
        config_of(command): str(config),
        EVERYWHERE: "127.0.0.1",
        PORT: port,
        f"{EVERYWHERE}:{PORT}": f"127.0.0.1:{port}",
    }
    program, *arguments = [instead.get(one, one) for one in command]
    module = f"lisa.cli.{program.removeprefix('lisa-')}"
    process = processes.start("-m", module, *arguments, env={**env, "LISA_REDIS_URL": url})
    return process, f"127.0.0.1:{port}"


def answers(address: str, path: str) -> None:
    """Wait until a request for the path returns 200."""

    def is_well() -> bool:
        with suppress(httpx.TransportError):
            return httpx.get(f"http://{address}{path}", verify=NO_TLS).status_code == 200
        return False

    wait_until(is_well)
