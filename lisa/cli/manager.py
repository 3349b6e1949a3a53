"""`lisa-manager`: runs the manager as a daemon."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import click


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "path", type=click.Path(path_type=Path), help="YAML configuration file.")
@click.option("--redis", metavar="URL", help="The Redis server, e.g. redis://localhost:6379/0.")
@click.option("--prefix", help="First part of every key.")
@click.option("--http", metavar="[HOST:]PORT", help="Serve /healthz and /metrics at this address.")
@click.option("--log-format", type=click.Choice(["text", "json"]))
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option(
    "--handlers",
    metavar="MODULE",
    multiple=True,
    help="Import a module that connects receivers of message_retrying, message_dead and "
    "message_expired. May be repeated.",
)
def main(path: Path | None, handlers: tuple[str, ...], **flags: str | None) -> None:
    """Promote messages when they are due, until SIGTERM.

    SIGHUP reloads the topic options from the file. Exit codes: 0; 2 for a configuration error; 1
    for another error at the start.
    """
    # Imported here to keep --help fast.
    from lisa.core.daemon.stop_signals import STOPPING, exit_on_signals

    exit_on_signals(STOPPING)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])  # kept until the manager handles it
    from lisa.cli.modules import import_handlers
    from lisa.cli.rights import check_rights, warn_of_password
    from lisa.core.daemon import logs
    from lisa.core.daemon.exit_codes import exit_code
    from lisa.core.daemon.memory import freeze_loaded_objects
    from lisa.core.model.errors import LisaError
    from lisa.core.redis.address import Address
    from lisa.core.settings import ManagerSettings
    from lisa.manager import Manager

    warn_of_password(flags["redis"])
    overrides: dict[str, object] = {**flags, "handlers": handlers or None}
    try:
        settings = ManagerSettings.load(path, **overrides)
        if not settings.enabled:
            click.echo("lisa-manager: enabled is false in the configuration; nothing to do")
            return
        logs.configure(settings.log_format, settings.log_level)
        import_handlers(settings.handlers)
        check_rights("manager", Address.from_settings(settings.redis), settings.prefix)
        manager = Manager.from_config(path, **overrides)
        freeze_loaded_objects()
        manager.run()
    except LisaError as error:
        click.echo(f"lisa-manager: {error}", err=True)
        sys.exit(exit_code(error))


if __name__ == "__main__":
    main()
