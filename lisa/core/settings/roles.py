"""One frozen settings model per role, and how it is loaded."""

import re
from collections.abc import Mapping
from datetime import timedelta, tzinfo
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    InstanceOf,
    ValidationError,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from lisa.core.clock import parse_zone
from lisa.core.errors import ConfigError
from lisa.core.keys import DEFAULT_PREFIX, Keys, check_group
from lisa.core.settings.explain import explain
from lisa.core.settings.gateway import CamelliaSettings, GatewayServerSettings
from lisa.core.settings.layers import Layers
from lisa.core.settings.names import kebab
from lisa.core.settings.sections import (
    ConsumerServerSettings,
    DurabilityField,
    GroupSettings,
    ManagerServerSettings,
    RedisSettings,
    listed,
)

_LAYERS = "layers"


def _check_prefix(prefix: str) -> str:
    try:
        return Keys(prefix).prefix
    except ConfigError as error:
        raise ValueError(str(error)) from None


def _check_address(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not (host and re.fullmatch(r"\d{1,5}", port) and int(port) <= 65_535):
        raise ValueError(f"not an address: {text!r}; write HOST:PORT, as in 127.0.0.1:8088")
    return text


def _lower(value: object) -> object:
    return value.lower() if isinstance(value, str) else value


Address = Annotated[str, AfterValidator(_check_address)]
Modules = Annotated[tuple[str, ...], BeforeValidator(listed)]


class RoleSettings(BaseSettings):
    """What every role is configured with."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid")

    role: ClassVar[str]

    redis: RedisSettings = Field(default_factory=RedisSettings, description="The server.")
    prefix: Annotated[str, AfterValidator(_check_prefix)] = Field(
        default=DEFAULT_PREFIX,
        description="First part of every key; all roles of a system share it.",
    )
    enabled: bool = Field(
        default=True,
        description="`false`: the role says so in one line and ends with exit code 0. "
        "Unset counts as true (the original started nothing without it).",
    )
    groups: tuple[GroupSettings, ...] = Field(
        default=(), description="The topics and their groups."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - reads names without a check
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - not one of Lisa's sources
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - neither
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Flags above environment above file: sections merge key by key, the rest is replaced."""
        given = init_settings()
        layers = given.get(_LAYERS)
        if not isinstance(layers, Layers):
            return (init_settings,)
        known = settings_cls.model_fields
        return tuple(
            InitSettingsSource(settings_cls, {key: layer[key] for key in layer if key in known})
            for layer in (layers.overrides, layers.environment, layers.file)
        )

    @classmethod
    def load(cls, path: Path | str | None = None, **overrides: Any) -> Self:
        """Read the file (if any), the environment and the overrides, each above the one before.

        Without `path` the file is the one that `LISA_CONFIG` names, if set. Overrides are this
        model's fields, sections as mappings (`consumer_server={"concurrency": 8}`); `redis` may be
        just the URL; None stands for a flag that was not given. Raises `ConfigError`, one line.
        """
        layers = Layers.read(path, overrides, ROLES)
        given: dict[str, Any] = {_LAYERS: layers}
        try:
            return cls(**given)
        except ValidationError as error:
            raise explain(error, layers) from None

    @model_validator(mode="after")
    def _groups_agree(self) -> Self:
        seen: set[tuple[str, str | None]] = set()
        for entry in self.groups:
            if (entry.topic, entry.group) in seen:
                group = f" with group {entry.group!r}" if entry.group else ""
                raise ValueError(f"topic {entry.topic!r}{group} is listed twice; remove one entry")
            seen.add((entry.topic, entry.group))
        self.topic_options()
        return self

    def require_enabled(self) -> None:
        """Raise ConfigError if the configuration switches the role off."""
        if not self.enabled:
            raise ConfigError("switched off by the configuration: enabled is false")

    def topics(self) -> dict[str, tuple[str, ...]]:
        """The topics listed, each with the groups named for it (none named: empty)."""
        found: dict[str, tuple[str, ...]] = {}
        for entry in self.groups:
            named = (entry.group,) if entry.group else ()
            found[entry.topic] = found.get(entry.topic, ()) + named
        return found

    def topic_options(self) -> dict[str, dict[str, object]]:
        """Per topic listed, the options that the configuration sets, by their names in Redis."""
        found: dict[str, dict[str, object]] = {}
        for entry in self.groups:
            options = found.setdefault(entry.topic, {})
            for name, value in entry.options().items():
                if options.setdefault(name, value) != value:
                    key = "max-length" if name == "max_ready" else kebab(name)
                    raise ValueError(
                        f"the groups of topic {entry.topic!r} disagree about {key}, an option of "
                        "the whole topic; write it once"
                    )
        shared = self._shared_options()
        return {topic: {**shared, **options} for topic, options in found.items()}

    def moving_sizes(self) -> dict[str, int]:
        """Per topic that sets one, the batch of a promote call; of several groups the largest."""
        found: dict[str, int] = {}
        for entry in self.groups:
            if entry.moving_size is not None:
                found[entry.topic] = max(entry.moving_size, found.get(entry.topic, 0))
        return found

    def _shared_options(self) -> Mapping[str, object]:
        return {}


class LoggedSettings(RoleSettings):
    """What a role that runs by itself is configured with besides."""

    log_format: Annotated[Literal["text", "json"], BeforeValidator(_lower)] = Field(
        default="text", description="`text` for people, `json` for programs."
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], BeforeValidator(_lower)] = (
        Field(
            default="info", description="The least that is logged: debug, info, warning or error."
        )
    )


class DaemonSettings(LoggedSettings):
    """What a role that has no web server of its own, and runs handlers, is configured with."""

    http: Address | None = Field(
        default=None,
        description="`HOST:PORT` where `/healthz` and `/metrics` are served. Unset: nowhere.",
    )
    handlers: Modules = Field(
        default=(), description="Modules to import, so that their signal receivers are connected."
    )


class ManagerSettings(DaemonSettings):
    """The manager: promotes, reclaims, trims and sweeps."""

    role: ClassVar[str] = "manager"

    manager_server: ManagerServerSettings = Field(
        default_factory=ManagerServerSettings, description="The manager's services."
    )
    default_group: Annotated[str, AfterValidator(check_group)] = Field(
        default="lisa",
        description="The group declared for a topic whose consumers name none, "
        "where the configuration names none either.",
    )

    def _shared_options(self) -> Mapping[str, object]:
        return self.manager_server.options()


class ProducerSettings(RoleSettings):
    """The producer: sends, cancels, reschedules."""

    role: ClassVar[str] = "producer"

    zone: Annotated[InstanceOf[tzinfo], BeforeValidator(parse_zone)] | None = Field(
        default=None,
        description="Zone of datetimes that name none: `Asia/Shanghai`, `+08:00`. "
        "Unset: they are refused.",
    )
    durability: DurabilityField = Field(
        default=None,
        description="When a write counts as done: `replicas(1)` once one replica has it, "
        "`replicas(1, fsync)` once its disk has it. Unset: once the primary has it.",
    )


class ConsumerSettings(DaemonSettings):
    """The consumer: reads, runs handlers, settles."""

    role: ClassVar[str] = "consumer"

    consumer_server: ConsumerServerSettings = Field(
        default_factory=ConsumerServerSettings, description="Reading and running."
    )
    target: str | None = Field(
        default=None,
        min_length=1,
        description="`pkg.module` or `pkg.module:name`, where the command line names none.",
    )

    @model_validator(mode="after")
    def _poll_within_socket_timeout(self) -> Self:
        limit = self.redis.socket_timeout
        poll_ms = self.consumer_server.poll_timeout_millis
        if limit is not None and timedelta(milliseconds=poll_ms) >= limit:
            raise ValueError(
                f"consumer-server.poll-timeout-millis ({poll_ms}) is not below "
                f"redis.socket-timeout ({limit.total_seconds():g}s); raise the latter or remove it"
            )
        return self


class GatewaySettings(LoggedSettings):
    """The gateway: HTTP for every language, the earlier systems' wire formats, the web page."""

    role: ClassVar[str] = "gateway"

    gateway_server: GatewayServerSettings = Field(
        default_factory=GatewayServerSettings, description="Listening, and whom to let in."
    )
    camellia: CamelliaSettings = Field(
        default_factory=CamelliaSettings, description="Defaults of camellia's paths."
    )


ROLES: tuple[type[RoleSettings], ...] = (
    ManagerSettings,
    ProducerSettings,
    ConsumerSettings,
    GatewaySettings,
)
