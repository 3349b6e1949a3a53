"""`lisa-manager`: the manager as a daemon."""

from __future__ import annotations

import sys
from pathlib import Path

import click

__all__ = ["main"]

EXIT_CONFIG = 2


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", "path", type=click.Path(path_type=Path), help="The YAML file.")
@click.option("--redis", metavar="URL", help="The server, e.g. redis://localhost:6379/0.")
@click.option("--prefix", help="First part of every key.")
@click.option("--http", metavar="HOST:PORT", help="Serve /healthz and /metrics there.")
@click.option("--log-format", type=click.Choice(["text", "json"]))
@click.option("--log-level", type=click.Choice(["debug", "info", "warning", "error"]))
@click.option(
    "--handlers", metavar="MODULE", multiple=True,
    help="Import a module, so that its receivers of message_retrying, message_dead and "
    "message_expired are connected. May be repeated.",
)  # fmt: skip
def main(path: Path | None, handlers: tuple[str, ...], **flags: str | None) -> None:
    """Move delayed messages when they are due, until SIGTERM.

    SIGHUP reads the file's topic options again. Exit codes: 0, or 2 if the configuration is wrong.
    """
    # Late, so that --help answers at once.
    from lisa.cli.modules import import_handlers
    from lisa.core import logs
    from lisa.core.errors import LisaError
    from lisa.core.settings import ManagerSettings

    overrides: dict[str, object] = {**flags, "handlers": handlers or None}
    try:
        settings = ManagerSettings.load(path, **overrides)
        if not settings.enabled:
            click.echo("lisa-manager: enabled is false in the configuration; nothing to do")
            return
        logs.configure(settings.log_format, settings.log_level)
        import_handlers(settings.handlers)

        from lisa.cli.rights import check_rights
        from lisa.core.address import Address
        from lisa.manager import Manager

        check_rights("manager", Address.from_settings(settings.redis), settings.prefix)

        Manager.from_config(path, **overrides).run()
    except LisaError as error:
        click.echo(f"lisa-manager: {error}", err=True)
        sys.exit(EXIT_CONFIG)


if __name__ == "__main__":
    main()
