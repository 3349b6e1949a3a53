"""`lisa-gateway`: serves the HTTP API and the web page."""

from __future__ import annotations

import mmap
import os
import socket
import sys
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from lisa.core.settings import GatewaySettings


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "path", type=click.Path(path_type=Path), help="YAML configuration file.")
@click.option("--redis", metavar="URL", help="The Redis server, e.g. redis://localhost:6379/0.")
@click.option("--prefix", help="First part of every key.")
@click.option("--host", help="Address to listen on. Default: 127.0.0.1.")
@click.option("--port", type=click.IntRange(0, 65_535), help="Port. Default: 8080.")
@click.option(
    "--grpc-port", type=click.IntRange(0, 65_535), help="Port for gRPC. Default: no gRPC."
)
@click.option(
    "--workers", type=click.IntRange(1, 256), help="Number of processes that share the port."
)
@click.option(
    "--tokens-file",
    type=click.Path(path_type=Path),
    help="YAML file with bearer tokens and scopes.",
)
@click.option(
    "--allow-actions",
    is_flag=True,
    default=None,
    help="Allow the web page to requeue, purge, cancel, fire and pause.",
)
@click.option(
    "--archive",
    metavar="DIR",
    help="Archive that the web page searches (also s3://...) and /mykit/reStore restores from.",
)
@click.option("--log-format", type=click.Choice(["text", "json"]))
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--parent-pipe", type=int, hidden=True)
@click.option("--inherited", type=(int, int, Path), hidden=True)
def main(
    path: Path | None,
    parent_pipe: int | None,
    inherited: tuple[int, int, Path] | None,
    **flags: Any,
) -> None:
    """Serve Lisa over HTTP until SIGTERM: the native API at /v1, the web page at /; and over gRPC.

    Without tokens, the gateway needs no authentication and listens on the loopback interface only.
    Exit codes: 0; 2 for a configuration error; 1 for another error at the start.
    """
    # Imported here to keep --help fast.
    from lisa.core.daemon.stop_signals import exit_on_signals, stopping

    exit_on_signals(stopping())
    from lisa.cli.rights import warn_of_password
    from lisa.core.daemon import logs
    from lisa.core.daemon.exit_codes import exit_code
    from lisa.core.model.errors import LisaError
    from lisa.core.settings import GatewaySettings

    if parent_pipe is None:
        warn_of_password(flags["redis"])
    top = ("redis", "prefix", "log_format", "log_level")
    grpc = {"port": port} if (port := flags.pop("grpc_port")) is not None else None
    section = {name: value for name, value in flags.items() if name not in top}
    given = {name: value for name, value in section.items() if value is not None}
    try:
        settings = GatewaySettings.load(
            path, **{name: flags[name] for name in top}, gateway_server=given or None, grpc=grpc
        )
        if not settings.enabled:
            click.echo("lisa-gateway: enabled is false in the configuration; nothing to do")
            return
        logs.configure(settings.log_format, settings.log_level)
        sys.exit(_run(settings, parent_pipe, inherited))
    except LisaError as error:
        click.echo(f"lisa-gateway: {error}", err=True)
        sys.exit(exit_code(error))


def _run(
    settings: GatewaySettings, parent_pipe: int | None, inherited: tuple[int, int, Path] | None
) -> int:
    from lisa.cli.rights import check_rights
    from lisa.core.daemon.memory import freeze_loaded_objects
    from lisa.core.model.extras import requires
    from lisa.core.redis.address import Address

    with requires("gateway"):
        from lisa.gateway.serving import listen, serve
    freeze_loaded_objects()
    if inherited is not None:
        from lisa.core.daemon.processes import end_with_parent

        if parent_pipe is not None:
            end_with_parent(parent_pipe)
        number, memory, numbers = inherited
        serve(settings, socket.socket(fileno=number), mmap.mmap(memory, 0), numbers)
        return 0
    check_rights("gateway", Address.from_settings(settings.redis), settings.prefix)
    listening = listen(settings)
    host, port = listening.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    _show(f"http://{shown}:{port}/")
    with ExitStack() as stack:
        if settings.grpc.port is not None:
            with requires("grpc"):
                from lisa.gateway.rpc.server import reserve

            # Held until the end: a chosen port stays the gateway's while its workers restart.
            reserved = stack.enter_context(reserve(settings))
            grpc = settings.grpc.model_copy(update={"port": reserved.getsockname()[1]})
            settings = settings.model_copy(update={"grpc": grpc})
            _show(f"grpc://{shown}:{grpc.port}")
        if settings.gateway_server.workers == 1:
            serve(settings, listening)
            return 0
        return _run_processes(settings, listening)


def _show(address: str) -> None:
    with suppress(OSError):  # a log on a full disk must not prevent the start
        click.echo(f"lisa-gateway: {address}", err=True)


def _run_processes(settings: GatewaySettings, listening: socket.socket) -> int:
    from lisa.core.daemon.processes import ChildProcesses, python, writable_folder
    from lisa.gateway.context import SHARED_BYTES

    folder = writable_folder()
    with (
        tempfile.TemporaryFile(dir=folder) as memory,  # unnamed; freed when the last process ends
        tempfile.TemporaryDirectory(
            prefix="lisa-gateway-", dir=folder, ignore_cleanup_errors=True
        ) as numbers,
    ):
        memory.truncate(SHARED_BYTES)
        keeps = [listening.fileno(), memory.fileno()]
        for number in keeps:
            os.set_inheritable(number, True)  # noqa: FBT003  its only argument
        own = python("lisa.cli.gateway", *sys.argv[1:])
        if settings.grpc.port is not None:
            own += ["--grpc-port", str(settings.grpc.port)]
        command = [*own, "--inherited", *map(str, keeps), numbers]
        return ChildProcesses(settings.gateway_server.workers, command, keeps=keeps).run()


if __name__ == "__main__":
    main()
