"""`lisa-relay`: runs a relay as a daemon; the relay of `lisa-manager`."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lisa.cli.daemon import check_rights, daemon_command, http_option, run_daemon, serve_pages
from lisa.cli.options import warn_of_database_password

if TYPE_CHECKING:
    from lisa.core.metrics.numbers import Numbers, Value
    from lisa.core.settings import ManagerSettings, RelaySettings
    from lisa.outbox import Relay

log = logging.getLogger(__name__)


@daemon_command(
    click.option(
        "--database",
        metavar="URL",
        help="The application's database, e.g. postgresql://shop@localhost/shop.",
    ),
    click.option(
        "--notify", is_flag=True, default=None, help="Wake at commits of outboxes with notify, too."
    ),
    http_option,
)
def main(path: Path | None, database: str | None, notify: bool | None, **flags: Any) -> None:  # noqa: FBT001
    """Forward the operations of an outbox to Redis, until SIGTERM.

    Any number of relays may run on one table. Exit codes: 0; 2 for a configuration error; 1 for
    another error at the start.
    """
    # Imported here to keep --help fast.
    from lisa.core.daemon.process_signals import Mailbox, exit_on_signals, stopping

    exit_on_signals(stopping())
    from lisa.core.daemon.processes import freeze_loaded_objects
    from lisa.core.metrics.numbers import of_process
    from lisa.core.settings import RelaySettings

    warn_of_database_password(database)
    arguments = click.get_current_context().obj or {}

    def work(settings: RelaySettings) -> None:
        relay = relay_of(settings, **arguments)
        freeze_loaded_objects()
        signals: Mailbox[int] = Mailbox()
        with signals.handling_signals(signals.post, stopping()), ExitStack() as stack:
            serve_pages(
                stack, settings, lambda: health(relay), lambda: numbers(relay) | of_process()
            )
            stack.enter_context(relay)
            log.info("relay %s forwards %s to %s", relay.name, relay.table, relay.store.where)
            signals.get()
            log.info("relay %s: stopping", relay.name)

    own = {"database": database, "notify": notify}
    run_daemon("lisa-relay", RelaySettings, path, work, **flags, relay=own)


def relay_of(settings: RelaySettings | ManagerSettings, **arguments: Any) -> Relay:
    """The relay of these settings, not started. Raises ConfigError.

    arguments: those of `Relay` that replace settings; the context's object of `main`, for Django.
    """
    from lisa.core.redis.address import Address
    from lisa.outbox import Relay, Tables

    given = settings.relay
    usual = {
        "server": Address.from_settings(settings.redis),
        "prefix": settings.prefix,
        "tables": Tables(outbox=given.outbox, schema=given.database_schema),
        "durability": given.durability,
        "notify": given.notify,
    }
    if "database" not in arguments:
        usual["database"] = given.require_database()
    chosen: dict[str, Any] = usual | arguments
    check_rights("relay", Address.of(chosen["server"]), chosen["prefix"])
    return Relay(**chosen)


def health(relay: Relay) -> dict[str, object]:
    """The content of `/healthz`; `status` is ok, starting or failing."""
    error = relay.error or relay.thread.fault
    is_ok = error is None and relay.is_redis_there is not None
    return {
        "status": "failing" if error else "ok" if is_ok else "starting",
        "name": relay.name,
        "redis": relay.store.where,
        "table": relay.table,
        "error": error,
        **relay.backlog._asdict(),
    }


def numbers(relay: Relay) -> Numbers:
    """The relay's metrics, see `lisa.core.metrics.families`."""
    backlog = relay.backlog
    single: dict[str, Value] = {
        "lisa_up": float(bool(relay.is_redis_there)),
        "lisa_relay_backlog_rows": backlog.rows,
        "lisa_relay_oldest_seconds": backlog.age_s,
        "lisa_relay_set_aside_rows": backlog.set_aside,
        "lisa_relay_errors_total": relay.errors,
        "lisa_relay_step_seconds": relay.seconds.numbers(),
    }
    rows: Numbers = {name: {(): value} for name, value in single.items()}
    return rows | {"lisa_relay_operations_total": relay.done.numbers()}


if __name__ == "__main__":
    main(prog_name="lisa-relay")
