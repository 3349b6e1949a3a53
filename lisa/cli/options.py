"""The options shared by all commands, and the values of options: durations, times, files."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta, tzinfo
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from lisa.cli.output import print_json

if TYPE_CHECKING:
    from lisa.core.model.durability import Replicas
    from lisa.core.redis.address import Address
    from lisa.core.store.store import SyncStore
    from lisa.producer import Producer

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

PATIENCE = timedelta(seconds=3)
"""How long a command waits for an unresponsive server, by default."""

_VARIABLES = ("LISA_CONFIG", "LISA_DURABILITY", "LISA_PATIENCE", "LISA_REDIS", "LISA_ZONE")
"""The variables, besides those of the section `redis`, for which a command loads the settings."""


_DATABASE_PASSWORD = re.compile(r"[^:/]*://[^:/]*:[^@]+@|.*[?&]password=")


def warn_of_password(url: str | None) -> None:
    """Warn if the value of --redis has a password, because the process list shows it."""
    from lisa.core.model.addresses import ServerUrl
    from lisa.core.model.errors import ConfigError

    try:
        has_password = url and ServerUrl.parse(url).has_password
    except ConfigError:  # the address is checked later
        return
    if has_password:
        _warn_of_password("--redis", "LISA_REDIS_URL or LISA_REDIS__PASSWORD")


def has_database_password(url: str | None) -> bool:
    """Whether the URL of a database has a password; any text."""
    return bool(url and _DATABASE_PASSWORD.match(url))


def warn_of_database_password(url: str | None) -> None:
    """The same for --database."""
    if has_database_password(url):
        _warn_of_password("--database", "LISA_RELAY__DATABASE")


def _warn_of_password(option: str, instead: str) -> None:
    sys.stderr.write(
        f"warning: every user of this machine can read the password in {option} from the process "
        f"list: set {instead} instead\n"
    )


@dataclass(slots=True)
class Chosen:
    """The values of the shared options; opens the producer or store that a command uses."""

    redis: str | None = None
    prefix: str | None = None
    config: Path | None = None
    json: bool = False
    zone: tzinfo | None = None
    patience: timedelta = PATIENCE
    durability: Replicas | None = None

    def server(self) -> tuple[Address, str]:
        """Return the address and the prefix; set `zone`, `patience` and `durability`.

        Raises ConfigError.
        """
        from lisa.core.model.keys import Keys
        from lisa.core.redis.address import Address

        is_configured = any(
            (name in _VARIABLES or name.startswith("LISA_REDIS__")) and value.strip()
            for name, value in os.environ.items()
        )
        if self.config or is_configured:
            # Loading a configuration takes longer than most commands, so only if there is one.
            from lisa.core.settings import ProducerSettings

            settings = ProducerSettings.load(self.config, redis=self.redis, prefix=self.prefix)
            self.zone, self.durability = settings.zone, settings.durability
            if "patience" in settings.model_fields_set:
                self.patience = settings.patience
            return Address.from_settings(settings.redis), settings.prefix
        return Address.of(self.redis or None), Keys.of(self.prefix or None).prefix

    def producer(self) -> Producer:
        """A producer that is closed when the command ends."""
        import logging

        from lisa.core.store import server_checks
        from lisa.producer import Producer

        address, prefix = self.server()
        # Not at each command: `lisa doctor` reports the server's configuration.
        server_checks.log.setLevel(logging.ERROR)
        click.get_current_context().call_on_close(
            lambda: server_checks.log.setLevel(logging.NOTSET)
        )
        producer = Producer(
            address,
            prefix=prefix,
            zone=self.zone,
            patience=self.patience,
            durability=self.durability,
        )
        click.get_current_context().call_on_close(producer.close)
        return producer

    def store(self, *, checked: bool = True) -> SyncStore:
        """A store that is closed when the command ends.

        Raises ConfigError if `checked` and this build cannot read the server's key layout.
        """
        from lisa.core.model.keys import Keys
        from lisa.core.redis.connection import Connection
        from lisa.core.store.store import SyncStore

        address, prefix = self.server()
        address = address.answering_within(self.patience.total_seconds())
        store = SyncStore(Connection(address), Keys(prefix), self.patience, who="cli")
        click.get_current_context().call_on_close(store.close)
        if checked:
            store.drive(store.check_schema())
        return store

    def answer(self, document: Any, line: str) -> None:
        """Print the outcome of a command: a line, or with --json the document."""
        if self.json:
            print_json(document)
        else:
            click.echo(line)

    def server_ms(self) -> int:
        """The server's clock in epoch milliseconds, from which a command measures distances."""
        store = self.store(checked=False)
        return store.drive(store.server_time_ms())


def _set_option(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    chosen = ctx.find_root().ensure_object(Chosen)
    if param.name == "redis":
        warn_of_password(value)
    if value not in (None, False) and param.name is not None:
        setattr(chosen, param.name, value)


def together(*options: Callable[[Any], Any]) -> Callable[[F], F]:
    """A decorator that adds several options, in this order."""

    def add(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return add


_shared = partial(click.option, expose_value=False, callback=_set_option)
common_options = together(
    _shared("--redis", metavar="URL", help="The Redis server (LISA_REDIS_URL)."),
    _shared("--prefix", help="First part of every key (LISA_PREFIX)."),
    _shared(
        "--config",
        type=click.Path(dir_okay=False, path_type=Path),
        help="YAML file with the server's address.",
    ),
    _shared("--json", is_flag=True, help="Print one JSON document."),
)
"""The options of every command. One after the command overrides the same one before it."""

common = together(common_options, click.make_pass_decorator(Chosen, ensure=True))
"""Adds these options to a command and passes their values as its first argument."""


def duration(value: Any) -> timedelta:
    """The value of an option: a duration with its unit, as in 500ms, 10s, 1h30m."""
    from lisa.core.model.clock import parse_duration

    return _converted(parse_duration, value)


def moment(value: Any) -> datetime:
    """The value of an option: an ISO 8601 date and time, with or without an offset."""
    from lisa.core.model.clock import parse_moment

    return value if isinstance(value, datetime) else _converted(parse_moment, value)


def _converted(parse: Callable[[Any], T], value: Any) -> T:
    """The value of an option. Raises BadParameter with the parser's message, which click drops."""
    try:
        return parse(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def read_text_file(path: Path) -> str:
    """The content of a text file that an option names. Raises ConfigError."""
    from lisa.core.model.errors import ConfigError

    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def check_zone(chosen: Chosen, at: datetime | None, tz: str | None) -> None:
    """Raise UsageError if --at has no time zone and no default is configured."""
    if at is not None and at.utcoffset() is None and tz is None and chosen.zone is None:
        raise click.UsageError(
            f"--at {at.isoformat()} has no time zone; add an offset (+01:00) or --tz ZONE"
        )


key_option = click.option("--key", metavar="KEY", help="The key of the message, if it has one.")
"""Given to a command of single messages: ids are what follows the key; see `whole_id`."""


def whole_id(key: str | None, message_id: str) -> str:
    """The id of a message from the option --key and an id. Raises InvalidMessage."""
    from lisa.core.model.keys import check_key, keyed_id

    return keyed_id(None if key is None else check_key(key), message_id)


due_options = together(
    click.option("--delay", type=duration, metavar="DURATION", help="Due after this delay."),
    click.option("--at", type=moment, metavar="ISO", help="Due at this time."),
    click.option("--at-ms", type=int, metavar="MS", help="Due at this epoch millisecond."),
    click.option("--tz", metavar="ZONE", help="Time zone of local times: Europe/Vienna, +01:00."),
)

local_options = together(
    click.option(
        "--at-local",
        metavar="ISO",
        help="Due when the clock in --tz shows this: 2026-12-24T09:00; or 09:00.",
    ),
    click.option(
        "--fold",
        type=click.IntRange(0, 1),
        help="Of a local time that occurs twice, 0 is the first and 1 the second.",
    ),
    click.option(
        "--business-days",
        type=click.IntRange(0),
        metavar="N",
        help="With --at-local 09:00: on the Nth business day after today.",
    ),
)
"""Options that choose the due time by a wall clock; see `due_options` for --tz."""

calendar_options = together(
    local_options,
    click.option(
        "--window", metavar="WINDOW", help="Hand over only then: 'mon-fri 9-17; not 12-13'."
    ),
)
"""Options that choose the due time by a calendar."""
