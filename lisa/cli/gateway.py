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

from lisa.cli.daemon import check_rights, daemon_command, parent_option, run_daemon

if TYPE_CHECKING:
    from lisa.core.settings import GatewaySettings


@daemon_command(
    click.option("--host", help="Address to listen on. Default: 127.0.0.1."),
    click.option("--port", type=click.IntRange(0, 65_535), help="Port. Default: 8080."),
    click.option(
        "--grpc-port", type=click.IntRange(0, 65_535), help="Port for gRPC. Default: no gRPC."
    ),
    click.option(
        "--workers", type=click.IntRange(1, 256), help="Number of processes that share the port."
    ),
    click.option(
        "--tokens-file",
        type=click.Path(path_type=Path),
        help="YAML file with bearer tokens and scopes.",
    ),
    click.option(
        "--allow-actions",
        is_flag=True,
        default=None,
        help="Allow the web page to requeue, purge, cancel, fire and pause.",
    ),
    click.option(
        "--archive",
        metavar="DIR",
        help="Archive that the web page searches (also s3://...) and /mykit/reStore restores from.",
    ),
    parent_option,
    click.option("--inherited", type=(int, int, Path), hidden=True),
)
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
    from lisa.core.daemon.process_signals import exit_on_signals, stopping

    exit_on_signals(stopping())
    from lisa.core.settings import GatewaySettings

    top = {name: flags.pop(name) for name in ("redis", "prefix", "log_format", "log_level")}
    port = flags.pop("grpc_port")
    given = {name: value for name, value in flags.items() if value is not None}
    run_daemon(
        "lisa-gateway",
        GatewaySettings,
        path,
        lambda settings: _run(settings, parent_pipe, inherited),
        is_child=parent_pipe is not None,
        **top,
        gateway_server=given or None,
        grpc=None if port is None else {"port": port},
    )


def _run(
    settings: GatewaySettings, parent_pipe: int | None, inherited: tuple[int, int, Path] | None
) -> int:
    from lisa.core.daemon.processes import freeze_loaded_objects
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
