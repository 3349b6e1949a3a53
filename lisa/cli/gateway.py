"""`lisa-gateway`: Lisa over HTTP, and the web page."""

from __future__ import annotations

import mmap
import os
import socket
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from lisa.core.settings import GatewaySettings

__all__ = ["main"]

EXIT_CONFIG = 2


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "path", type=click.Path(path_type=Path), help="The YAML file.")
@click.option("--redis", metavar="URL", help="The server, e.g. redis://localhost:6379/0.")
@click.option("--prefix", help="First part of every key.")
@click.option("--host", help="The address to listen on; 127.0.0.1 unless set.")
@click.option("--port", type=click.IntRange(0, 65_535), help="The port; 8080 unless set.")
@click.option("--workers", type=click.IntRange(1, 256), help="Processes that share the port.")
@click.option(
    "--tokens-file", type=click.Path(path_type=Path), help="YAML with bearer tokens and scopes."
)
@click.option(
    "--allow-actions", is_flag=True, default=None,
    help="Let the web page requeue, purge, cancel, fire and pause.",
)  # fmt: skip
@click.option(
    "--archive", type=click.Path(path_type=Path), help="What /mykit/reStore restores from."
)
@click.option("--log-format", type=click.Choice(["text", "json"]))
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--leash", type=int, hidden=True)
@click.option("--inherited", type=(int, int, Path), hidden=True)
def main(
    path: Path | None, leash: int | None, inherited: tuple[int, int, Path] | None, **flags: Any
) -> None:
    """Serve Lisa over HTTP, until SIGTERM: the native API at /v1, the web page at /.

    Without tokens it is open, and listens on the loopback interface only. Exit codes: 0, or 2 if
    the configuration is wrong.
    """
    # Late, so that --help answers at once.
    from lisa.core import logs
    from lisa.core.errors import LisaError
    from lisa.core.settings import GatewaySettings

    top = ("redis", "prefix", "log_format", "log_level")
    section = {name: value for name, value in flags.items() if name not in top}
    given = {name: value for name, value in section.items() if value is not None}
    try:
        settings = GatewaySettings.load(
            path, **{name: flags[name] for name in top}, gateway_server=given or None
        )
        if not settings.enabled:
            click.echo("lisa-gateway: enabled is false in the configuration; nothing to do")
            return
        logs.configure(settings.log_format, settings.log_level)
        sys.exit(_run(settings, leash, inherited))
    except LisaError as error:
        click.echo(f"lisa-gateway: {error}", err=True)
        sys.exit(EXIT_CONFIG)


def _run(
    settings: GatewaySettings, leash: int | None, inherited: tuple[int, int, Path] | None
) -> int:
    from lisa.cli.rights import check_rights
    from lisa.core.address import Address
    from lisa.core.errors import ConfigError

    try:
        from lisa.gateway.serving import listen, serve
    except ImportError as error:
        if (error.name or "").startswith("lisa"):
            raise
        raise ConfigError(
            f"{error.name} is not installed: pip install 'lisa-delay-queue[gateway]'"
        ) from None
    if inherited is not None:
        from lisa.core.processes import end_with_parent

        if leash is not None:
            end_with_parent(leash)
        number, memory, numbers = inherited
        serve(settings, socket.socket(fileno=number), mmap.mmap(memory, 0), numbers)
        return 0
    check_rights("gateway", Address.from_settings(settings.redis), settings.prefix)
    listening = listen(settings)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    click.echo(f"lisa-gateway: http://{shown}:{port}/", err=True)
    if settings.gateway_server.workers == 1:
        serve(settings, listening)
        return 0
    return _run_family(settings, listening)


def _run_family(settings: GatewaySettings, listening: socket.socket) -> int:
    from lisa.core.processes import Family
    from lisa.gateway.hub import SHARED_BYTES

    with (
        tempfile.TemporaryFile() as memory,  # nameless, and gone with the last of the family
        tempfile.TemporaryDirectory(prefix="lisa-gateway-", ignore_cleanup_errors=True) as numbers,
    ):
        memory.truncate(SHARED_BYTES)
        keeps = [listening.fileno(), memory.fileno()]
        for number in keeps:
            os.set_inheritable(number, True)  # noqa: FBT003  its only argument
        own = [sys.executable, "-m", "lisa.cli.gateway", *sys.argv[1:]]
        command = [*own, "--inherited", *map(str, keeps), numbers]
        family = Family(
            settings.gateway_server.workers,
            lambda leash: [*command, "--leash", str(leash)],
            keeps=keeps,
        )
        return family.run()


if __name__ == "__main__":
    main()
