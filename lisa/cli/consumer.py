"""`lisa-consumer`: a consumer as a daemon."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from lisa.core.metrics.numbers import Numbers
    from lisa.core.settings import ConsumerSettings

__all__ = ["main"]

EXIT_CONFIG = 2
EXIT_NO_SERVER = 3


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("target", required=False)
@click.option("--config", "path", type=click.Path(path_type=Path), help="The YAML file.")
@click.option("--redis", metavar="URL", help="The server, e.g. redis://localhost:6379/0.")
@click.option("--prefix", help="First part of every key.")
@click.option("--group", help="The group to join on each topic.")
@click.option("--concurrency", type=int, help="Handlers that run at a time.")
@click.option("--processes", type=int, help="Consumer processes to start.")
@click.option("--http", metavar="HOST:PORT", help="Serve /healthz and /metrics there.")
@click.option("--log-format", type=click.Choice(["text", "json"]))
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option("--leash", type=int, hidden=True)
@click.option("--numbers", type=click.Path(path_type=Path), hidden=True)
def main(  # noqa: PLR0917  click passes them by name
    target: str | None,
    path: Path | None,
    group: str | None,
    concurrency: int | None,
    processes: int | None,
    leash: int | None,
    numbers: Path | None,
    **flags: str | None,
) -> None:
    """Handle due messages until SIGTERM.

    TARGET is pkg.module (its only Consumer, or its receivers of message_received) or
    pkg.module:name. Exit codes: 0, 2 if something is configured wrong, 3 without a server.
    """
    # Late, so that --help answers at once.
    from lisa.core import logs
    from lisa.core.errors import LisaError, ServerUnavailable
    from lisa.core.settings import ConsumerSettings

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
        if leash is None and settings.consumer_server.processes > 1:
            sys.exit(_run_family(settings))
        _run_one(settings, group, leash, numbers)
    except LisaError as error:
        click.echo(f"lisa-consumer: {error}", err=True)
        sys.exit(EXIT_NO_SERVER if isinstance(error, ServerUnavailable) else EXIT_CONFIG)


def _run_one(
    settings: ConsumerSettings, group: str | None, leash: int | None, left: Path | None
) -> None:
    from lisa.cli.modules import import_handlers
    from lisa.cli.rights import check_rights
    from lisa.consumer.loader import load
    from lisa.core.errors import ConfigError
    from lisa.core.metrics.numbers import of_process
    from lisa.core.metrics.sharing import leave_numbers
    from lisa.core.processes import end_with_parent

    if leash is not None:
        end_with_parent(leash)
    import_handlers(settings.handlers)
    if settings.target is None:
        raise ConfigError("name what to run: lisa-consumer pkg.module, or pkg.module:name")
    consumer = load(settings.target)
    consumer.configure(settings, only_given=True)
    if group is not None:
        consumer.group = group
    check_rights("consumer", *consumer.server)
    _settle_in()
    with ExitStack() as stack:
        if leash is None:
            _serve_pages(stack, settings, consumer.health,
                         lambda: consumer.numbers() | of_process())  # fmt: skip
        elif left is not None:
            leave_numbers(left, lambda: (own := consumer.numbers()) and own | of_process())
        consumer.run()


def _settle_in() -> None:
    """Spare the garbage collector what was loaded: it stays, and a look at it all takes 20 ms.

    Messages that fall due meanwhile would be that late.
    """
    gc.collect()
    gc.freeze()


def _run_family(settings: ConsumerSettings) -> int:
    from lisa.core.errors import ConfigError
    from lisa.core.metrics.sharing import Shared
    from lisa.core.processes import Family

    if settings.target is None:
        raise ConfigError("name what to run: lisa-consumer pkg.module, or pkg.module:name")
    command = [sys.executable, "-m", "lisa.cli.consumer", *sys.argv[1:]]
    with ExitStack() as stack:
        if settings.http is not None:
            # Whoever is asked at the one address answers for all processes.
            left = Path(
                stack.enter_context(
                    TemporaryDirectory(prefix="lisa-consumer-", ignore_cleanup_errors=True)
                )
            )
            command += ["--numbers", str(left)]
        family = Family(
            settings.consumer_server.processes, lambda leash: [*command, "--leash", str(leash)]
        )
        if settings.http is not None:
            shared = Shared(left)
            none_alive: Numbers = {"lisa_up": {(): 0.0}, "lisa_processes": {(): 0.0}}
            _serve_pages(stack, settings, family.health, lambda: none_alive | shared.read())
        return family.run()


def _serve_pages(
    stack: ExitStack,
    settings: ConsumerSettings,
    report: Callable[[], Mapping[str, Any]],
    numbers: Callable[[], Numbers],
) -> None:
    from lisa.core.metrics.cache import METRICS
    from lisa.core.status import HEALTH, Page, StatusServer, health_page

    def metrics() -> Page:
        # Late: a consumer that nobody asks does not pay for it.
        from lisa.core.metrics.page import metrics_page

        return metrics_page("consumer", [numbers()])

    if settings.http is not None:
        pages = {HEALTH: lambda: health_page(report()), METRICS: metrics}
        stack.enter_context(StatusServer(settings.http, pages))


if __name__ == "__main__":
    main()
