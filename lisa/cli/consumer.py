"""`lisa-consumer`: runs a consumer as a daemon."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Collection, Coroutine, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from lisa.core.metrics.numbers import Numbers
    from lisa.core.redis.address import Address
    from lisa.core.settings import ConsumerSettings

log = logging.getLogger(__name__)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("target", required=False)
@click.option("--config", "path", type=click.Path(path_type=Path), help="YAML configuration file.")
@click.option("--redis", metavar="URL", help="The Redis server, e.g. redis://localhost:6379/0.")
@click.option("--prefix", help="First part of every key.")
@click.option("--group", help="Group to join on each topic.")
@click.option("--concurrency", type=int, help="Number of handlers that run concurrently.")
@click.option("--processes", type=int, help="Number of consumer processes.")
@click.option("--http", metavar="[HOST:]PORT", help="Serve /healthz and /metrics at this address.")
@click.option("--log-format", type=click.Choice(["text", "json"]))
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--parent-pipe", type=int, hidden=True)
@click.option("--numbers", type=click.Path(path_type=Path), hidden=True)
def main(  # noqa: PLR0917  click passes them by name
    target: str | None,
    path: Path | None,
    group: str | None,
    concurrency: int | None,
    processes: int | None,
    parent_pipe: int | None,
    numbers: Path | None,
    **flags: str | None,
) -> None:
    """Handle due messages until SIGTERM.

    TARGET is pkg.module:name, or pkg.module: its only Consumer or AsyncConsumer, or its receivers
    of the signal message_received. Exit codes: 0; 2 for a configuration error; 3 if the server is
    unavailable; 1 for another error, such as one of the consumer's lifespan.
    """
    # Imported here to keep --help fast.
    from lisa.core.daemon.stop_signals import exit_on_signals, stopping

    exit_on_signals(stopping())
    from lisa.cli.rights import warn_of_password
    from lisa.core.daemon import logs
    from lisa.core.daemon.exit_codes import exit_code
    from lisa.core.model.errors import LisaError
    from lisa.core.settings import ConsumerSettings

    if parent_pipe is None:
        warn_of_password(flags["redis"])
    server = {"concurrency": concurrency, "processes": processes}
    overrides: dict[str, Any] = {
        **flags,
        "target": target,
        "consumer_server": {name: value for name, value in server.items() if value is not None},
    }
    try:
        settings = ConsumerSettings.load(path, **overrides)
        if not settings.enabled:
            click.echo("lisa-consumer: enabled is false in the configuration; nothing to do")
            return
        logs.configure(settings.log_format, settings.log_level)
        if parent_pipe is None and settings.consumer_server.processes > 1:
            sys.exit(_run_processes(settings))
        given = [name for name, value in flags.items() if value is not None]
        _run_one(settings, given, group, parent_pipe, numbers)
    except LisaError as error:
        click.echo(f"lisa-consumer: {error}", err=True)
        sys.exit(exit_code(error))


def _run_one(
    settings: ConsumerSettings,
    flags: Collection[str],
    group: str | None,
    parent_pipe: int | None,
    numbers: Path | None,
) -> None:
    from lisa.cli.modules import import_handlers
    from lisa.cli.rights import check_rights
    from lisa.consumer.loader import load
    from lisa.core.daemon.memory import freeze_loaded_objects
    from lisa.core.daemon.processes import end_with_parent
    from lisa.core.metrics.numbers import of_process
    from lisa.core.metrics.sharing import leave_numbers

    if parent_pipe is not None:
        end_with_parent(parent_pipe)
    import_handlers(settings.handlers)
    consumer = load(_target(settings))
    consumer.configure(settings, flags)
    _warn_of_another_server(settings, consumer.server[0])
    if group is not None:
        consumer.group = group
    check_rights("consumer", *consumer.server)
    freeze_loaded_objects()
    with ExitStack() as stack:
        if parent_pipe is None:
            _serve_pages(
                stack, settings, consumer.health, lambda: consumer.numbers() | of_process()
            )
        elif numbers is not None:
            leave_numbers(numbers, lambda: (own := consumer.numbers()) and own | of_process())
        running = consumer.run()
        if running is not None:
            _run_on_loop(running)


def _target(settings: ConsumerSettings) -> str:
    from lisa.core.model.errors import ConfigError

    if settings.target is None:
        raise ConfigError("no target: write lisa-consumer pkg.module, or pkg.module:name")
    return settings.target


def _run_on_loop(running: Coroutine[Any, Any, None]) -> None:
    """Run an `AsyncConsumer` until SIGTERM, SIGINT or SIGHUP."""
    import asyncio

    signal.signal(signal.SIGINT, signal.default_int_handler)  # else asyncio would not replace it
    with suppress(KeyboardInterrupt):  # raised by asyncio after the consumer has stopped
        asyncio.run(running)


def _warn_of_another_server(settings: ConsumerSettings, used: Address) -> None:
    """Warn if the module gives its consumer another server than the configuration."""
    from lisa.core.redis.address import Address

    configured = Address.from_settings(settings.redis)
    if settings.redis.model_fields_set and used != configured:
        log.warning(
            "using the server given in %s, %s; the configuration names %s. To use that, create "
            "the consumer without a server, or pass --redis",
            settings.target,
            used.shown,
            configured.shown,
        )


def _run_processes(settings: ConsumerSettings) -> int:
    from lisa.core.daemon.processes import ChildProcesses, python, writable_folder
    from lisa.core.metrics.sharing import Shared

    _target(settings)  # reports a missing one before any process starts
    command = python("lisa.cli.consumer", *sys.argv[1:])
    with ExitStack() as stack:
        if settings.http is not None:
            # The parent serves the address and reports the metrics of all processes.
            temporary = TemporaryDirectory(
                prefix="lisa-consumer-", dir=writable_folder(), ignore_cleanup_errors=True
            )
            folder = Path(stack.enter_context(temporary))
            command += ["--numbers", str(folder)]
        family = ChildProcesses(settings.consumer_server.processes, command)
        if settings.http is not None:
            shared = Shared(folder)
            none_alive: Numbers = {"lisa_up": {(): 0.0}, "lisa_processes": {(): 0.0}}
            _serve_pages(stack, settings, family.health, lambda: none_alive | shared.read())
        return family.run()


def _serve_pages(
    stack: ExitStack,
    settings: ConsumerSettings,
    report: Callable[[], Mapping[str, Any]],
    numbers: Callable[[], Numbers],
) -> None:
    from lisa.core.daemon.status import HEALTH, StatusResponse, StatusServer, health_page
    from lisa.core.metrics.cache import METRICS

    def metrics() -> StatusResponse:
        # Imported on the first request, to keep the start fast.
        from lisa.core.metrics.page import metrics_page

        return metrics_page("consumer", [numbers()])

    if settings.http is not None:
        pages = {HEALTH: lambda: health_page(report()), METRICS: metrics}
        stack.enter_context(StatusServer(settings.http, pages))


if __name__ == "__main__":
    main(prog_name="lisa-consumer")
