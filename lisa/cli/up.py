"""`lisa up`: runs a server, a manager and a gateway for development."""

from __future__ import annotations

import os
import signal
import socket
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import click

from lisa.core.model.errors import ConfigError
from lisa.embedded import EmbeddedServer, RoleProcess
from lisa.embedded.server import HOST, free_port

POLL_S = 0.2


@click.command()
@click.option("--port", default=6379, show_default=True, type=click.IntRange(1, 65_535))
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the data in this directory (append-only file). Default: discard it at the end.",
)
@click.option(
    "--http-port",
    default=8080,
    show_default=True,
    type=click.IntRange(0, 65_535),
    help="The gateway's port; 0 selects a free one.",
)
@click.option(
    "--allow-actions",
    is_flag=True,
    help="Allow the web page to requeue, purge, cancel, fire and pause.",
)
@click.option(
    "--config",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="YAML configuration of the manager and the gateway.",
)
def up(
    port: int, data: Path | None, http_port: int, config: Path | None, *, allow_actions: bool
) -> None:
    """Run an embedded server, a manager and the gateway with its web page until Ctrl-C.

    All processes listen on the loopback interface only and always end with this command.
    """
    has_page = find_spec("uvicorn") is not None
    _require_free(port, "--port", "; lisa-manager and lisa-gateway use a server that runs already")
    if has_page and http_port:
        _require_free(http_port, "--http-port")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    with ExitStack() as stack:
        server = stack.enter_context(
            EmbeddedServer(port=port, directory=data, appendonly=data is not None)
        )
        arguments = ["--redis", server.url]
        if config is not None:
            arguments += ["--config", str(config)]
        roles = [stack.enter_context(RoleProcess("lisa.cli.manager", *arguments))]
        kept = f"kept in {data}" if data else "discarded at the end"
        click.echo(f"server   {server.url}  (data {kept})")
        click.echo("manager  running; Ctrl-C stops everything")
        if not has_page:
            click.echo("page     requires pip install 'lisa-delay-queue[gateway]'")
        else:
            gateway = _gateway(arguments, http_port or free_port(), allow_actions=allow_actions)
            roles.append(stack.enter_context(gateway))
        is_default = port == 6379 and not os.environ.get("LISA_REDIS_URL")
        server_option = "" if is_default else f" --redis redis://{HOST}:{port}"
        click.echo(f"try      lisa send orders hello --delay 2s{server_option}")
        raise SystemExit(_first_to_end(roles))


def _gateway(arguments: list[str], port: int, *, allow_actions: bool) -> RoleProcess:
    """The gateway's process; prints the address of its page."""
    click.echo(f"page     http://{HOST}:{port}/  (API at /v1, described at /v1/docs)")
    web = ["--port", str(port), *(["--allow-actions"] if allow_actions else [])]
    return RoleProcess("lisa.cli.gateway", *arguments, *web)


def _end(_number: int, _frame: FrameType | None) -> None:
    """Stop the roles, then the server, and exit with code 0."""
    raise SystemExit(0)


def _require_free(port: int, option: str, more: str = "") -> None:
    """Raise ConfigError if another program listens on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on port {port}: {error.strerror}. Choose another one, as in lisa "
                f"up {option} {free_port()}{more}"
            ) from None


def _first_to_end(roles: list[RoleProcess]) -> int:
    """Wait for the first role to exit; return its exit code."""
    while True:
        for role in roles:
            if (code := role.poll()) is not None:
                return code
        time.sleep(POLL_S)
