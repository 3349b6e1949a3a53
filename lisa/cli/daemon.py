"""What the daemons' commands share: options, checks at the start, exit codes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lisa.cli.options import together, warn_of_password
from lisa.core.model.errors import ConfigError, LisaError

if TYPE_CHECKING:
    from lisa.core.metrics.numbers import Numbers
    from lisa.core.redis.address import Address
    from lisa.core.settings import (
        ConsumerSettings,
        GatewaySettings,
        ManagerSettings,
        RelaySettings,
    )
    from lisa.core.settings.roles import StatusSettings

    S = TypeVar("S", ConsumerSettings, GatewaySettings, ManagerSettings, RelaySettings)

SUBSCRIBE_TIMEOUT_S = 0.1
"""How long to wait for a refused SUBSCRIBE; the subscriber reports later refusals."""

NODE_TIMEOUT_S = 1.0


http_option = click.option(
    "--http", metavar="[HOST:]PORT", help="Serve /healthz and /metrics at this address."
)
parent_option = click.option("--parent-pipe", type=int, hidden=True)


def daemon_command(*options: Callable[[Any], Any]) -> Callable[[Any], click.Command]:
    """A command with the options of all daemons, and its own between them."""
    return together(
        click.command(context_settings={"help_option_names": ["-h", "--help"]}),
        click.option(
            "--config", "path", type=click.Path(path_type=Path), help="YAML configuration file."
        ),
        click.option(
            "--redis", metavar="URL", help="The Redis server, e.g. redis://localhost:6379/0."
        ),
        click.option("--prefix", help="First part of every key."),
        *options,
        click.option("--log-format", type=click.Choice(["text", "json"])),
        click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"])),
    )


def run_daemon(
    name: str,
    kind: type[S],
    path: Path | None,
    work: Callable[[S], int | None],
    *,
    is_child: bool = False,
    **overrides: Any,
) -> None:
    """Load the settings, set up logs and work; exits with the code of an error.

    is_child: another process of this command started this one, and has checked the options.
    """
    from lisa.core.daemon import logs
    from lisa.core.daemon.processes import exit_code

    if not is_child:
        warn_of_password(overrides["redis"])
    try:
        settings = kind.load(path, **overrides)
        if not settings.enabled:
            click.echo(f"{name}: enabled is false in the configuration; nothing to do")
            return
        logs.configure(settings.log_format, settings.log_level)
        sys.exit(work(settings))
    except LisaError as error:
        click.echo(f"{name}: {error}", err=True)
        sys.exit(exit_code(error))


def check_rights(role: str, address: Address, prefix: str) -> None:
    """Raise ConfigError, in one line, if this user lacks rights.

    An unavailable server is not an error: the daemon waits for it.
    """
    from lisa.admin.acl import check, rights_of
    from lisa.core.model.errors import ServerUnavailable
    from lisa.core.model.keys import Keys
    from lisa.core.redis import errors
    from lisa.core.redis.connection import Connection
    from lisa.core.store.store import SyncStore

    if address.kind == "cluster":  # an unresponsive node must not delay the start
        timeout_s = min(address.socket_timeout_s, NODE_TIMEOUT_S)
        address = replace(address, socket_timeout_s=timeout_s)
    with (
        suppress(ServerUnavailable),
        closing(SyncStore(Connection(address), Keys(prefix), timedelta(0), who=role)) as store,
    ):
        store.drive(check(store, role))
        if "subscribe" in rights_of([role]):
            try:
                with closing(store.connection.subscribe(store.keys.wake)) as subscription:
                    subscription.ping()  # its reply follows that to SUBSCRIBE
                    subscription.get(SUBSCRIBE_TIMEOUT_S)
            except errors.ClientError as error:
                raise errors.translated(error, store.where) from error


def serve_pages(
    stack: ExitStack,
    settings: StatusSettings,
    report: Callable[[], Mapping[str, Any]],
    numbers: Callable[[], Numbers],
) -> None:
    """Serve `/healthz` and `/metrics` if the settings have an address, until the stack closes."""
    from lisa.core.daemon.status import HEALTH, StatusResponse, StatusServer, health_page
    from lisa.core.metrics.numbers import METRICS

    def metrics() -> StatusResponse:
        # Imported on the first request, to keep the start fast.
        from lisa.core.metrics.page import metrics_page

        return metrics_page(settings.role, [numbers()])

    if settings.http is not None:
        pages = {HEALTH: lambda: health_page(report()), METRICS: metrics}
        stack.enter_context(StatusServer(settings.http, pages))


def import_handlers(modules: Iterable[str]) -> None:
    """Import modules; the search path begins with the current directory.

    Raises ConfigError if an import fails. Other exceptions raised by a module propagate.
    """
    sys.path.insert(0, "")  # console scripts do not have the current directory on their path
    for module in modules:
        if not module or module.startswith("."):
            raise ConfigError(f"handlers: {module!r} is not a module name; write pkg.module")
        try:
            import_module(module)
        except ImportError as error:
            raise ConfigError(f"handlers: cannot import {module!r}: {error}") from None
