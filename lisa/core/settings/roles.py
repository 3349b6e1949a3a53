"""One frozen settings model per role, and the code that loads it."""

from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from lisa.core.model.addresses import listen_address
from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import DEFAULT_GROUP, DEFAULT_PREFIX, Keys, check_group
from lisa.core.model.lanes import KeyLimits
from lisa.core.model.options import PRODUCER_RETRY_TIME
from lisa.core.settings.gateway import CamelliaSettings, GatewayServerSettings, GrpcSettings
from lisa.core.settings.names import kebab
from lisa.core.settings.sections import (
    ConsumerServerSettings,
    DurabilityField,
    Duration,
    GroupSettings,
    ManagerServerSettings,
    Names,
    RedisSettings,
    RelaySection,
    ScheduleSettings,
    Strict,
    Zone,
    checked,
)
from lisa.core.settings.sources import explain, read_sources

_SOURCES = "sources"


_MIDDLEWARE = Field(
    default=(),
    description="Middleware as `pkg.module:name`, the outermost first: objects, or classes that "
    "take no arguments.",
)


_RELAY = Field(default_factory=RelaySection, description="The outbox of a relay.")


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


ListenAddress = Annotated[str, BeforeValidator(checked(listen_address))]


class RoleSettings(Strict, BaseSettings):
    """Settings of every role."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    role: ClassVar[str]

    redis: RedisSettings = Field(default_factory=RedisSettings, description="The server.")
    prefix: Annotated[str, AfterValidator(checked(lambda prefix: Keys(prefix).prefix))] = Field(
        default=DEFAULT_PREFIX,
        description="First part of every key; all roles of a system share it.",
    )
    enabled: bool = Field(
        default=True,
        description="`false`: the role reports that it is disabled and exits with code 0. "
        "Unset means true (the original system started nothing without it).",
    )
    groups: tuple[GroupSettings, ...] = Field(
        default=(), description="The topics and their groups."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - known to the sources
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - does not check names
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - not supported
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - not supported
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The sources that `load` reads; sections merge key by key, other values replace."""
        sources: tuple[PydanticBaseSettingsSource, ...] | None = init_settings().get(_SOURCES)
        return sources or (init_settings,)

    @classmethod
    def load(cls, path: Path | str | None = None, **overrides: Any) -> Self:
        """Load the settings. Precedence: overrides, environment, file.

        `path` defaults to `LISA_CONFIG`, if set. Overrides are fields of this model, with sections
        as mappings (`consumer_server={"concurrency": 8}`); `redis` may be just the URL; None means
        not given. Raises ConfigError with a one-line message.
        """
        sources = read_sources(cls, path, overrides, ROLES)
        given: dict[str, Any] = {_SOURCES: sources}
        try:
            return cls(**given)
        except ValidationError as error:
            raise explain(error, sources) from None

    @model_validator(mode="after")
    def _groups_agree(self) -> Self:
        seen: set[tuple[str, str | None]] = set()
        for entry in self.groups:
            if (entry.topic, entry.group) in seen:
                group = f" with group {entry.group!r}" if entry.group else ""
                raise ValueError(f"topic {entry.topic!r}{group} is listed twice; remove one entry")
            seen.add((entry.topic, entry.group))
        self.topic_options()
        self.key_limits()
        return self

    def require_enabled(self) -> None:
        """Raise ConfigError if the configuration switches the role off."""
        if not self.enabled:
            raise ConfigError("this role is disabled: the setting enabled is false")

    def topics(self) -> dict[str, tuple[str, ...]]:
        """The listed topics, each with its named groups, possibly none."""
        found: dict[str, tuple[str, ...]] = {}
        for entry in self.groups:
            named = (entry.group,) if entry.group else ()
            found[entry.topic] = found.get(entry.topic, ()) + named
        return found

    def topic_options(self) -> dict[str, dict[str, object]]:
        """The options set for each listed topic, by their names in Redis. Raises ValueError."""
        found: dict[str, dict[str, object]] = {}
        for entry in self.groups:
            options = found.setdefault(entry.topic, {})
            for name, value in entry.options().items():
                if options.setdefault(name, value) != value:
                    key = "max-length" if name == "max_ready" else kebab(name)
                    raise ValueError(
                        f"the groups of topic {entry.topic!r} disagree about {key}, which applies "
                        "to the whole topic; set it once"
                    )
        shared = self._shared_options()
        return {topic: {**shared, **options} for topic, options in found.items()}

    def key_limits(self) -> dict[str, dict[str, KeyLimits]]:
        """The limits of single keys of each topic, by `limits_field`. Raises ValueError."""
        found: dict[str, dict[str, KeyLimits]] = {}
        for entry in self.groups:
            limits = found.setdefault(entry.topic, {})
            for name, given in entry.limits().items():
                if limits.setdefault(name, given) != given:
                    raise ValueError(
                        f"the groups of topic {entry.topic!r} disagree about the limits of key "
                        f"{name!r}, which apply to the whole topic; set them once"
                    )
        return found

    def moving_sizes(self) -> dict[str, int]:
        """Batch size of promote calls by topic, where set; the largest of several groups."""
        found: dict[str, int] = {}
        for entry in self.groups:
            if entry.moving_size is not None:
                found[entry.topic] = max(entry.moving_size, found.get(entry.topic, 0))
        return found

    def _shared_options(self) -> Mapping[str, object]:
        return {}


class LoggedSettings(RoleSettings):
    """Settings of a role with its own process: logging."""

    log_format: Annotated[Literal["text", "json"], BeforeValidator(_lower)] = Field(
        default="text", description="`text` for people, `json` for programs."
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = (
        Field(default="info", description="Minimum level to log: debug, info, warning or error.")
    )


class StatusSettings(LoggedSettings):
    """Settings of a process with a status server."""

    http: ListenAddress | None = Field(
        default=None,
        description="`HOST:PORT`, or a port of 127.0.0.1, for `/healthz` and `/metrics`. "
        "Unset: not served.",
    )


class DaemonSettings(StatusSettings):
    """Settings of a manager or consumer process, which have signal receivers."""

    handlers: Names = Field(
        default=(), description="Modules to import, to connect their signal receivers."
    )


class ManagerSettings(DaemonSettings):
    """The manager: promotes, reclaims, trims and sweeps."""

    role: ClassVar[str] = "manager"

    manager_server: ManagerServerSettings = Field(
        default_factory=ManagerServerSettings, description="The manager's services."
    )
    default_group: Annotated[str, AfterValidator(check_group)] = Field(
        default=DEFAULT_GROUP,
        description="The group declared for a topic if neither its consumers nor the settings "
        "name one.",
    )

    schedules: tuple[ScheduleSettings, ...] = Field(
        default=(), description="Recurring messages that managers define."
    )
    relay: RelaySection = _RELAY

    @model_validator(mode="after")
    def _schedules_differ(self) -> Self:
        seen: set[tuple[str, str]] = set()
        for schedule in self.schedules:
            if (schedule.topic, schedule.name) in seen:
                raise ValueError(
                    f"schedule {schedule.name!r} of topic {schedule.topic!r} is listed twice; "
                    "remove one"
                )
            seen.add((schedule.topic, schedule.name))
        return self

    def _shared_options(self) -> Mapping[str, object]:
        return self.manager_server.options()


class ProducerSettings(RoleSettings):
    """The producer: sends, cancels, reschedules."""

    role: ClassVar[str] = "producer"

    middleware: Names = _MIDDLEWARE

    zone: Zone | None = Field(
        default=None,
        description="Zone for naive datetimes: `Asia/Shanghai`, `+08:00`. "
        "Unset: naive datetimes are refused.",
    )
    patience: Duration = Field(
        default=PRODUCER_RETRY_TIME,
        ge=timedelta(0),
        description="How long a call is repeated while the server does not answer. More than 10s "
        "requires topics with a retention of at least twice as much.",
    )
    durability: DurabilityField = Field(
        default=None,
        description="When a write counts as done: `replicas(1)` once one replica has it, "
        "`replicas(1, fsync)` once its disk has it. Unset: once the primary has it.",
    )


class ConsumerSettings(DaemonSettings):
    """The consumer: reads messages, runs handlers, settles deliveries."""

    role: ClassVar[str] = "consumer"

    consumer_server: ConsumerServerSettings = Field(
        default_factory=ConsumerServerSettings,
        description="How messages are read and handlers run.",
    )
    middleware: Names = _MIDDLEWARE
    target: str | None = Field(
        default=None,
        min_length=1,
        description="`pkg.module` or `pkg.module:name`; the command line takes precedence.",
    )

    @model_validator(mode="after")
    def _poll_within_socket_timeout(self) -> Self:
        limit = self.redis.socket_timeout
        poll_ms = self.consumer_server.poll_timeout_millis
        if limit is not None and timedelta(milliseconds=poll_ms) >= limit:
            raise ValueError(
                f"consumer-server.poll-timeout-millis ({poll_ms}) must be below "
                f"redis.socket-timeout ({limit.total_seconds():g}s); raise or remove the latter"
            )
        return self


class GatewaySettings(LoggedSettings):
    """The gateway: an HTTP API, the earlier systems' wire formats, and the web page."""

    role: ClassVar[str] = "gateway"

    gateway_server: GatewayServerSettings = Field(
        default_factory=GatewayServerSettings, description="Address, access control and limits."
    )
    grpc: GrpcSettings = Field(
        default_factory=GrpcSettings, description="gRPC; needs the extra `grpc`."
    )
    camellia: CamelliaSettings = Field(
        default_factory=CamelliaSettings, description="Defaults of the camellia API."
    )


class RelaySettings(StatusSettings):
    """The relay: forwards the operations of an application's outbox."""

    role: ClassVar[str] = "relay"

    relay: RelaySection = _RELAY


ROLES: tuple[type[RoleSettings], ...] = (
    ManagerSettings,
    ProducerSettings,
    ConsumerSettings,
    GatewaySettings,
    RelaySettings,
)
