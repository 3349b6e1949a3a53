"""The options that all commands share, and values as people write them."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from lisa.core.address import Address
    from lisa.core.store import SyncStore
    from lisa.producer import Producer

    _DurationType = click.ParamType[timedelta]
    _MomentType = click.ParamType[datetime]
else:  # not generic before click 8.4
    _DurationType = _MomentType = click.ParamType

__all__ = [
    "Chosen", "Duration", "Moment", "check_zone", "common", "due_options",
    "pass_chosen",
]  # fmt: skip

F = TypeVar("F", bound=Callable[..., Any])

PATIENCE = timedelta(seconds=3)
"""How long a command waits for a server that does not answer."""


@dataclass(slots=True)
class Chosen:
    """What the shared options say; opens what a command works on."""

    redis: str | None = None
    prefix: str | None = None
    config: Path | None = None
    json: bool = False
    zone: tzinfo | None = None

    def server(self) -> tuple[Address, str]:
        """Address and prefix; notes the configuration's time zone. Raises ConfigError."""
        from lisa.core.address import DEFAULT_URL, Address
        from lisa.core.keys import DEFAULT_PREFIX

        environ = os.environ
        in_sections = any(name.startswith("LISA_REDIS__") for name in environ)
        if self.config or environ.get("LISA_CONFIG") or in_sections:
            # Only then: reading a configuration takes longer than most commands.
            from lisa.core.settings import ProducerSettings

            settings = ProducerSettings.load(self.config, redis=self.redis, prefix=self.prefix)
            self.zone = settings.zone
            return Address.from_settings(settings.redis), settings.prefix
        url = self.redis or environ.get("LISA_REDIS_URL") or DEFAULT_URL
        return Address(url), self.prefix or environ.get("LISA_PREFIX") or DEFAULT_PREFIX

    def producer(self) -> Producer:
        """A producer, closed at the command's end."""
        from lisa.producer import Producer

        address, prefix = self.server()
        producer = Producer(address, prefix=prefix, zone=self.zone, patience=PATIENCE)
        click.get_current_context().call_on_close(producer.close)
        return producer

    def store(self, *, checked: bool = True) -> SyncStore:
        """A store, closed at the command's end; its layout is one that this build can read."""
        from lisa.core.connection import Connection
        from lisa.core.keys import Keys
        from lisa.core.store import SyncStore

        address, prefix = self.server()
        store = SyncStore(Connection(address), Keys(prefix), PATIENCE, who="cli")
        click.get_current_context().call_on_close(store.close)
        if checked:
            store.drive(store.check_schema())
        return store


pass_chosen = click.make_pass_decorator(Chosen, ensure=True)


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    chosen = ctx.find_root().ensure_object(Chosen)
    if value not in (None, False) and param.name is not None:
        setattr(chosen, param.name, value)


def common(command: F) -> F:
    """Add --redis, --prefix, --config and --json; the innermost one that is given counts."""
    for option in (
        click.option("--json", is_flag=True, expose_value=False, callback=_keep,
                     help="One JSON document, for programs."),
        click.option("--config", type=click.Path(dir_okay=False, path_type=Path),
                     expose_value=False, callback=_keep, help="YAML that names the server."),
        click.option("--prefix", expose_value=False, callback=_keep,
                     help="First part of every key (LISA_PREFIX)."),
        click.option("--redis", metavar="URL", expose_value=False, callback=_keep,
                     help="The server (LISA_REDIS_URL)."),
    ):  # fmt: skip
        command = option(command)
    return command


class Duration(_DurationType):
    """A duration with its unit: 500ms, 10s, 1h30m."""

    name = "duration"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> timedelta:
        """Read it, or fail with what is wrong."""
        from lisa.core.clock import parse_duration

        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Moment(_MomentType):
    """An ISO 8601 date and time, with or without an offset."""

    name = "iso time"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> datetime:
        """Read it, or fail with what is wrong."""
        try:
            return value if isinstance(value, datetime) else datetime.fromisoformat(value)
        except ValueError:
            self.fail(f"{value!r} is no ISO time; write 2026-01-31T17:00:00+01:00", param, ctx)


def check_zone(chosen: Chosen, at: datetime | None, tz: str | None) -> None:
    """Refuse a time that names no zone where nothing else does."""
    if at is not None and at.utcoffset() is None and tz is None and chosen.zone is None:
        raise click.UsageError(
            f"--at {at.isoformat()} names no time zone; add an offset (+01:00) or --tz ZONE"
        )


def due_options(command: F) -> F:
    """Add --delay, --at, --at-ms and --tz."""
    for option in (
        click.option("--tz", metavar="ZONE", help="Zone of --at: Europe/Vienna, +01:00."),
        click.option("--at-ms", type=int, metavar="MS", help="Due at this epoch millisecond."),
        click.option("--at", type=Moment(), metavar="ISO", help="Due at this time."),
        click.option("--delay", type=Duration(), metavar="DURATION", help="Due so long from now."),
    ):
        command = option(command)
    return command
