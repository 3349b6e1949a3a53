"""`lisa-manager`: runs the manager as a daemon."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.daemon import check_rights, daemon_command, http_option, import_handlers, run_daemon

if TYPE_CHECKING:
    from lisa.core.settings import ManagerSettings


@daemon_command(
    http_option,
    click.option(
        "--handlers",
        metavar="MODULE",
        multiple=True,
        help="Import a module that connects receivers of message_retrying, message_dead and "
        "message_expired. May be repeated.",
    ),
)
def main(path: Path | None, handlers: tuple[str, ...], **flags: str | None) -> None:
    """Promote messages when they are due, until SIGTERM.

    SIGHUP reloads the topic options from the file. Exit codes: 0; 2 for a configuration error; 1
    for another error at the start.
    """
    # Imported here to keep --help fast.
    from lisa.core.daemon.process_signals import STOPPING, exit_on_signals

    exit_on_signals(STOPPING)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # kept until the manager handles it
    from lisa.core.daemon.processes import freeze_loaded_objects
    from lisa.core.redis.address import Address
    from lisa.core.settings import ManagerSettings
    from lisa.manager import Manager

    overrides: dict[str, Any] = {**flags, "handlers": handlers or None}

    def work(settings: ManagerSettings) -> None:
        import_handlers(settings.handlers)
        check_rights("manager", Address.from_settings(settings.redis), settings.prefix)
        manager = Manager.from_config(path, **overrides)
        with ExitStack() as stack:
            if settings.manager_server.relay:
                from lisa.cli.relay import health, numbers, relay_of

                relay = relay_of(settings)
                manager.include("relay", partial(health, relay), partial(numbers, relay))
                stack.enter_context(relay)
            freeze_loaded_objects()
            manager.run()

    run_daemon("lisa-manager", ManagerSettings, path, work, **overrides)


if __name__ == "__main__":
    main()
