"""`lisa up`: a server and a manager for development, in one process tree."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import click

from lisa.embedded import EmbeddedServer, RoleProcess

__all__ = ["up"]


@click.command()
@click.option("--port", default=6379, show_default=True, type=click.IntRange(1, 65_535))
@click.option(
    "--data",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the data in this directory (append-only); without it, it goes with the server.",
)
@click.option(
    "--config",
    type=click.Path(dir_okay=False, exists=True, path_type=Path),
    help="The manager's YAML.",
)
def up(port: int, data: Path | None, config: Path | None) -> None:
    """Run an embedded server and a manager until Ctrl-C.

    Both listen on the loopback interface only and end with this command, however it ends.
    """
    with ExitStack() as stack:
        server = stack.enter_context(
            EmbeddedServer(port=port, directory=data, appendonly=data is not None)
        )
        arguments = ["--redis", server.url]
        if config is not None:
            arguments += ["--config", str(config)]
        manager = stack.enter_context(RoleProcess("lisa.cli.manager", *arguments))
        kept = f"kept in {data}" if data else "gone when this ends"
        click.echo(f"server   {server.url}  (data {kept})")
        click.echo("manager  running; Ctrl-C ends both")
        click.echo(f"try      lisa --redis {server.url} send orders '{{\"order\": 42}}' --delay 2s")
        raise SystemExit(manager.wait())
