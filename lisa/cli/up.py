"""`lisa up`: server, manager and gateway for development, in one process tree."""

from __future__ import annotations

import signal
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import FrameType

import click

from lisa.embedded import EmbeddedServer, RoleProcess
from lisa.embedded.server import free_port

__all__ = ["up"]

LOOK_EVERY_S = 0.2


@click.command()
@click.option("--port", default=6379, show_default=True, type=click.IntRange(1, 65_535))
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the data in this directory (append-only); without it, it goes with the server.",
)
@click.option(
    "--http-port",
    default=8080,
    show_default=True,
    type=click.IntRange(0, 65_535),
    help="The gateway's port; 0 takes a free one.",
)
@click.option(
    "--allow-actions", is_flag=True, help="Let the web page requeue, purge, cancel, fire and pause."
)
@click.option(
    "--config",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="The YAML of manager and gateway.",
)
def up(
    port: int, data: Path | None, http_port: int, config: Path | None, *, allow_actions: bool
) -> None:
    """Run an embedded server, a manager and the gateway with its web page, until Ctrl-C.

    All listen on the loopback interface only and end with this command, however it ends.
    """
    signal.signal(signal.SIGTERM, _end)
    with ExitStack() as stack:
        server = stack.enter_context(
            EmbeddedServer(port=port, directory=data, appendonly=data is not None)
        )
        arguments = ["--redis", server.url]
        if config is not None:
            arguments += ["--config", str(config)]
        roles = [stack.enter_context(RoleProcess("lisa.cli.manager", *arguments))]
        kept = f"kept in {data}" if data else "gone when this ends"
        click.echo(f"server   {server.url}  (data {kept})")
        click.echo("manager  running; Ctrl-C ends all")
        if find_spec("uvicorn") is None:
            click.echo("page     needs: pip install 'lisa-delay-queue[gateway]'")
        else:
            http_port = http_port or free_port()
            web = ["--port", str(http_port), *(["--allow-actions"] if allow_actions else [])]
            gateway = RoleProcess("lisa.cli.gateway", *arguments, *web)
            roles.append(stack.enter_context(gateway))
            click.echo(
                f"page     http://127.0.0.1:{http_port}/  (API at /v1, described at /v1/docs)"
            )
        click.echo(f"try      lisa --redis {server.url} send orders '{{\"order\": 42}}' --delay 2s")
        raise SystemExit(_first_to_end(roles))


def _end(_number: int, _frame: FrameType | None) -> None:
    """As Ctrl-C: the roles first, then their server."""
    raise SystemExit(0)


def _first_to_end(roles: list[RoleProcess]) -> int:
    """The exit code of the role that ends by itself before the others do."""
    while True:
        for role in roles:
            if (code := role.poll()) is not None:
                return code
        time.sleep(LOOK_EVERY_S)
