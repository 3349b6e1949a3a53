"""`lisa-consumer`: runs a consumer as a daemon."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Collection, Coroutine
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.daemon import (
    check_rights,
    daemon_command,
    http_option,
    import_handlers,
    parent_option,
    run_daemon,
    serve_pages,
)

if TYPE_CHECKING:
    from lisa.core.metrics.numbers import Numbers
    from lisa.core.redis.address import Address
    from lisa.core.settings import ConsumerSettings

log = logging.getLogger(__name__)


@daemon_command(
    click.argument("target", required=False),
    click.option("--group", help="Group to join on each topic."),
    click.option("--concurrency", type=int, help="Number of handlers that run concurrently."),
    click.option("--processes", type=int, help="Number of consumer processes."),
    http_option,
    parent_option,
    click.option("--numbers", type=click.Path(path_type=Path), hidden=True),
)
def main(  # noqa: PLR0917  click passes them by name
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
    from lisa.core.daemon.process_signals import exit_on_signals, stopping

    exit_on_signals(stopping())
    from lisa.core.settings import ConsumerSettings

    server = {"concurrency": concurrency, "processes": processes}
    own = {name: value for name, value in server.items() if value is not None}

    def work(settings: ConsumerSettings) -> int | None:
        if parent_pipe is None and settings.consumer_server.processes > 1:
            return _run_processes(settings)
        given = [name for name, value in flags.items() if name != "target" and value is not None]
        _run_one(settings, given, group, parent_pipe, numbers)
        return None

    run_daemon(
        "lisa-consumer",
        ConsumerSettings,
        path,
        work,
        is_child=parent_pipe is not None,
        **flags,
        consumer_server=own,
    )


def _run_one(
    settings: ConsumerSettings,
    flags: Collection[str],
    group: str | None,
    parent_pipe: int | None,
    numbers: Path | None,
) -> None:
    from lisa.consumer.loader import load
    from lisa.core.daemon.processes import end_with_parent, freeze_loaded_objects
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
            serve_pages(stack, settings, consumer.health, lambda: consumer.numbers() | of_process())
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
            serve_pages(stack, settings, family.health, lambda: none_alive | shared.read())
        return family.run()


if __name__ == "__main__":
    main(prog_name="lisa-consumer")
