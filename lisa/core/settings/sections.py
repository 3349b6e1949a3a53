"""The sections of settings: redis, groups, schedules, manager-server and consumer-server.

Types of settings say how a value of a file or a variable is read and checked.
"""

from collections.abc import Callable
from datetime import timedelta, tzinfo
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    SecretStr,
    ValidationInfo,
    create_model,
    field_validator,
    model_validator,
)

from lisa.core.model.addresses import ServerUrl
from lisa.core.model.clock import parse_duration, parse_zone
from lisa.core.model.durability import Replicas, parse_durability
from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import check_group, check_key, check_topic
from lisa.core.model.lanes import KeyLimits, limits_field
from lisa.core.model.late import LatePolicy
from lisa.core.model.options import (
    GRACE,
    LANE_OPTIONS,
    LARGEST_BATCH,
    LARGEST_WINDOW,
    OF_GROUP,
    OPTIONS,
    Option,
)
from lisa.core.model.recurring.calendar import parse_job_schedule
from lisa.core.model.recurring.definition import (
    ScheduleDefinition,
    ScheduleOptions,
    check_name,
    define,
)
from lisa.core.model.retry_policy import DEFAULT_DELAY, DEFAULT_RETRIES, MAX_RETRIES, RetryPolicy
from lisa.core.settings.names import kebab, leaves

T = TypeVar("T")

Duration = Annotated[timedelta, BeforeValidator(parse_duration)]
Millis = Annotated[timedelta, BeforeValidator(partial(parse_duration, bare_ms=True))]
Policy = Annotated[InstanceOf[RetryPolicy], BeforeValidator(RetryPolicy.parse)]
LateField = Annotated[InstanceOf[LatePolicy], BeforeValidator(LatePolicy.parse)]


def checked(read: Callable[[Any], T]) -> Callable[[Any], T]:
    """A validator that calls `read`; its ConfigError becomes an error of the setting."""

    def validate(value: Any) -> T:
        try:
            return read(value)
        except ConfigError as error:
            raise ValueError(str(error)) from None

    return validate


Zone = Annotated[InstanceOf[tzinfo], BeforeValidator(parse_zone)]
DurabilityField = Annotated[InstanceOf[Replicas] | None, BeforeValidator(checked(parse_durability))]
Batch = Annotated[int, Field(ge=1), AfterValidator(partial(min, LARGEST_BATCH))]
Window = Annotated[int, Field(ge=1), AfterValidator(partial(min, LARGEST_WINDOW))]


def listed(value: object) -> object:
    """Split a comma-separated text into a list; environment variables have no lists."""
    if isinstance(value, str):
        return [name for part in value.split(",") if (name := part.strip())]
    return value


def topic_option(name: str) -> AfterValidator:
    """A validator of a setting that is the topic option `name`."""

    def check(value: T) -> T:
        OPTIONS[name].kind.encode(value)
        return value

    return AfterValidator(check)


def _check_schedule(text: str) -> str:
    parse_job_schedule(text)
    return text


Schedule = Annotated[str, AfterValidator(checked(_check_schedule))]
Names = Annotated[tuple[str, ...], BeforeValidator(listed)]


class Strict(BaseModel):
    """Settings whose numbers are numbers."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `count: true`, which pydantic takes for 1."""
        kinds = set(leaves(cls.model_fields[info.field_name or ""].annotation))
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError(f"{str(value).lower()} is not a number")
        return value


class Section(Strict):
    """A frozen section that refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def check_key_pair(certificate: Path | None, key: Path | None) -> None:
    """Raise ValueError if only one of the two is set."""
    if (certificate is None) != (key is None):
        raise ValueError("tls-cert-file and tls-key-file must be set together")


class RedisSettings(Section):
    """The server's address, credentials and TLS."""

    url: str = Field(
        default="redis://localhost:6379/0",
        repr=False,
        description="The server: `redis://HOST:PORT/DB`, or `rediss://` for TLS. Also "
        "`redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB` and `redis+cluster://HOST:PORT,HOST:PORT`.",
    )
    username: str | None = Field(default=None, description="User name, unless the URL has one.")
    password: SecretStr | None = Field(
        default=None, description="Password, unless the URL has one."
    )
    sentinel_username: str | None = Field(
        default=None, description="User name for the sentinels, if they require one."
    )
    sentinel_password: SecretStr | None = Field(
        default=None, description="Password for the sentinels, if they require one."
    )
    socket_timeout: Duration | None = Field(
        default=None,
        gt=timedelta(0),
        description="Maximum time for a reply. Unset: chosen by each role, longer than its polls.",
    )
    tls_ca_file: Path | None = Field(
        default=None, description="Trusted certificates. Unset: the system's."
    )
    tls_cert_file: Path | None = Field(default=None, description="The client's certificate.")
    tls_key_file: Path | None = Field(default=None, description="The key of the certificate.")
    tls_check_hostname: bool = Field(
        default=True, description="Refuse a server whose certificate names another host."
    )

    @field_validator("url")
    @classmethod
    def _is_a_server(cls, url: str) -> str:
        from lisa.core.redis.address import Address  # late: settings may be read for their page

        checked(Address)(url)
        return str(ServerUrl.parse(url))

    @model_validator(mode="after")
    def _key_and_certificate(self) -> Self:
        check_key_pair(self.tls_cert_file, self.tls_key_file)
        if (self.tls_ca_file or self.tls_cert_file) and not self.url.startswith("rediss"):
            raise ValueError("tls-ca-file and tls-cert-file need a url that begins with rediss")
        return self


def _option_field(name: str, option: Option) -> tuple[Any, Any]:
    """The pydantic field of one topic option, which the option's own type reads."""
    kind = option.kind
    meaning = f"`{name}` of the topic. {option.text}" if option.yaml_name else option.text
    unset = option.unset or kind.show(option.default)
    return (
        Annotated[Any, BeforeValidator(lambda value: kind.decode(kind.encode(value)))],
        Field(default=None, description=f"{meaning} Unset: {unset}."),
    )


if TYPE_CHECKING:
    _LaneOptionKeys = Section
else:
    _LaneOptionKeys = create_model(
        "_LaneOptionKeys",
        __base__=Section,
        **{name: _option_field(name, OPTIONS[name]) for name in LANE_OPTIONS},
    )


_KeyLimits = dict[
    Annotated[str, AfterValidator(check_key)], Annotated[Any, AfterValidator(KeyLimits.of)]
]


class GroupOptions(_LaneOptionKeys):
    """A group's own values of topic options."""

    key_limits: _KeyLimits = Field(default_factory=dict, description="Limits of single keys.")


class _GroupEntry(Section):
    topic: Annotated[str, AfterValidator(check_topic)] = Field(description="The topic.")
    group: Annotated[str, AfterValidator(check_group)] | None = Field(
        default=None,
        description="The group. Managers declare it; consumers join it. "
        "Unset: the topic's only group.",
    )
    consumer: str | None = Field(
        default=None,
        min_length=1,
        description="Prefix of the consumer's name; host, pid and a random suffix follow.",
    )
    moving_size: Batch | None = Field(
        default=None,
        description=f"Messages per promote call, at most {LARGEST_BATCH}. "
        "Calls repeat until no message is due.",
    )
    group_options: GroupOptions = Field(
        default_factory=GroupOptions,
        description="Options for this group only, in place of the topic's: any of "
        f"{', '.join(map(kebab, LANE_OPTIONS))}, key-limits.",
    )
    key_limits: _KeyLimits = Field(
        default_factory=dict,
        description="Limits of single keys in all groups of the topic, as in "
        "`customer-7: {rate: 10/s, concurrency: 4, weight: 3}`.",
    )

    @model_validator(mode="after")
    def _group_options_have_a_group(self) -> Self:
        if self.group_options.model_fields_set and self.group is None:
            raise ValueError("group-options apply to one group; name it with group")
        return self


_BY_KEY = {option.yaml_name or name: name for name, option in OPTIONS.items() if option.is_in_yaml}
"""Key in YAML -> name of the topic option."""

if TYPE_CHECKING:
    _OptionKeys = _GroupEntry
else:
    _OptionKeys = create_model(
        "_OptionKeys",
        __base__=_GroupEntry,
        **{key: _option_field(name, OPTIONS[name]) for key, name in _BY_KEY.items()},
    )


class GroupSettings(_OptionKeys):
    """One topic, the group of this deployment, and the topic's options."""

    def options(self) -> dict[str, object]:
        """The topic options that this entry sets, by their names in Redis."""
        given = self.model_fields_set
        values = {name: getattr(self, key) for key, name in _BY_KEY.items() if key in given}
        own = self.group_options
        return values | {
            f"{name}{OF_GROUP}{self.group}": getattr(own, name)
            for name in LANE_OPTIONS
            if name in own.model_fields_set
        }

    def limits(self) -> dict[str, KeyLimits]:
        """The limits of single keys that this entry sets, by `limits_field`."""
        own = self.group_options.key_limits
        of_group = {limits_field(key, self.group): given for key, given in own.items()}
        return self.key_limits | of_group


class ManagerServerSettings(Section):
    """Schedules of the manager's services, and defaults for its topics."""

    crontab_move_to_ready_queue: Schedule = Field(
        default="0/1 * * * * ?",
        description="When to promote at the latest; the promoter also wakes at each due time.",
    )
    crontab_clean_stream: Schedule = Field(
        default="0 */1 * * * ?", description="When to remove foreign entries from ready streams."
    )
    crontab_process_pending_message: Schedule = Field(
        default="0/5 * * * * ?",
        description="When to reclaim at the latest; the reclaimer also wakes when a lease can end.",
    )
    crontab_sweep: Schedule = Field(
        default="0/30 * * * * ?",
        description="When to expire messages that exceeded their ttl, and remove dead consumers "
        "and idle topics.",
    )
    range_start: Literal["-"] = Field(
        default="-",
        description="For compatibility with the original system. Every pending message is checked.",
    )
    range_end: Literal["+"] = Field(default="+", description="See `range-start`.")
    count: Window = Field(
        default=LARGEST_WINDOW,
        description=f"Messages per reclaim call, at most {LARGEST_WINDOW}. "
        "Calls repeat to the end of the list.",
    )
    timeout: Annotated[Millis, topic_option("ack_timeout")] = Field(
        default=timedelta(seconds=10),
        description="`ack_timeout` of every listed topic, in milliseconds or with a unit.",
    )
    delay_time: Millis = Field(
        default=DEFAULT_DELAY,
        description="The pause before each retry, in milliseconds or with a unit.",
    )
    max_retry_count: int = Field(
        default=DEFAULT_RETRIES, ge=0, le=MAX_RETRIES, description="The number of retries."
    )
    retry: Policy | None = Field(
        default=None,
        description="A complete retry policy, replacing `delay-time` and `max-retry-count`: "
        "`0,0,2m,10m`, or a mapping (`fixed`, `exponential`, `delays`).",
    )

    relay: bool = Field(
        default=False,
        description="Run a relay in the manager, too, with the section `relay`.",
    )

    @model_validator(mode="after")
    def _one_policy(self) -> Self:
        twice = self.model_fields_set & {"delay_time", "max_retry_count"}
        if self.retry is not None and twice:
            key = min(twice).replace("_", "-")
            raise ValueError(f"retry and {key} contradict each other; remove one")
        return self

    def options(self) -> dict[str, object]:
        """The topic options that this section sets for every listed topic."""
        options: dict[str, object] = {}
        if "timeout" in self.model_fields_set:
            options["ack_timeout"] = self.timeout
        if self.retry is not None:
            options["retry_delays"] = self.retry
        elif self.model_fields_set & {"delay_time", "max_retry_count"}:
            options["retry_delays"] = RetryPolicy.fixed(
                delay=self.delay_time, count=self.max_retry_count
            )
        return options


class ConsumerServerSettings(Section):
    """How a consumer reads messages and runs handlers."""

    poll_timeout_millis: int = Field(
        default=5_000,
        ge=1,
        le=3_600_000,
        description="How long one read waits for a message, in milliseconds.",
    )
    poll_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Maximum messages held but not started. "
        "Unset: as many as the handlers finish in 50 ms.",
    )
    concurrency: int = Field(
        default=1, ge=1, le=10_000, description="Handlers running in parallel."
    )
    grace: Duration = Field(
        default=GRACE,
        description="Grace period for running handlers when the consumer stops.",
    )
    processes: int = Field(default=1, ge=1, le=1_024, description="Consumer processes to start.")


class RelaySection(Section):
    """The outbox that a relay forwards."""

    database: str | None = Field(
        default=None,
        min_length=1,
        repr=False,
        description="The application's database: `postgresql://USER@HOST/NAME`, `mariadb://`, "
        "`mysql://` or `sqlite:///FILE`, as SQLAlchemy writes it. A password belongs here or in "
        "the environment.",
    )
    outbox: str = Field(default="lisa_outbox", min_length=1, description="The outbox's table.")
    database_schema: str | None = Field(
        default=None, min_length=1, description="The table's schema. Unset: the connection's."
    )
    notify: bool = Field(
        default=False,
        description="Wake at commits of an `Outbox` that has `notify`, too; PostgreSQL with "
        "psycopg. `false`: an idle relay looks every 250 ms.",
    )
    durability: DurabilityField = Field(
        default=None,
        description="When a write in Redis counts as done: `replicas(1)` once one replica has it, "
        "`replicas(1, fsync)` once its disk has it. Unset: once the primary has it.",
    )

    def require_database(self) -> str:
        """The database's URL. Raises ConfigError if there is none."""
        if self.database is None:
            raise ConfigError(
                "no database: give --database, or set relay.database in the configuration or "
                "LISA_RELAY__DATABASE"
            )
        return self.database


class ScheduleSettings(Section):
    """One recurring message. A manager changes only what a manager's file wrote last."""

    name: Annotated[str, AfterValidator(check_name)] = Field(description="The schedule's name.")
    topic: Annotated[str, AfterValidator(check_topic)] = Field(description="The topic.")
    body: Any = Field(default=None, description="The body: any value. Unset: null.")
    cron: str | None = Field(
        default=None, description="Cron pattern, as in `0 9 * * 1-5` or `@daily`."
    )
    every: Duration | None = Field(default=None, description="Interval, at least 1s.")
    tz: str | None = Field(default=None, description="Time zone of the pattern. Unset: UTC.")
    dst: Literal["vixie", "skip"] = Field(
        default="vixie",
        description="When a time that a change of the clock skips fires: right after, or never.",
    )
    start: Any = Field(  # `define` reads it; pydantic takes 2027 for seconds since 1970
        default=None, description="No tick before this time, such as `2026-12-24T09:00`."
    )
    until: Any = Field(default=None, description="No tick after this time.")
    count: int | None = Field(default=None, description="Maximum number of occurrences.")
    jitter: Duration | None = Field(
        default=None, description="Each occurrence is due later by up to this."
    )
    catch_up: str = Field(
        default="one",
        description="Ticks missed while no manager ran: `none`, `one`, `all` or `all(max=20)`.",
    )
    max_late: Duration | None = Field(
        default=None, description="No tick is caught up later; at least 1s."
    )
    overlap: Literal["allow", "skip", "queue_one", "replace_unstarted"] = Field(
        default="allow", description="A tick while an earlier occurrence is unfinished."
    )
    template: bool = Field(
        default=False, description="Fill `${tick}`, `${previous}`, `${count}` into the body."
    )
    headers: dict[str, str] = Field(default_factory=dict, description="Of each occurrence.")
    ttl: Duration | None = Field(default=None, description="Of each occurrence.")
    retry: Policy | None = Field(default=None, description="Retry policy of each occurrence.")
    late: LateField | None = Field(default=None, description="Late policy of each occurrence.")
    key: str | None = Field(default=None, description="Key of each occurrence.")
    cost: int | None = Field(default=None, description="Cost of each occurrence, from 1. Unset: 1.")
    slack: Duration | None = Field(
        default=None, description="How much later each occurrence may start without harm."
    )

    @model_validator(mode="after")
    def _can_be_defined(self) -> Self:
        self.definition()
        return self

    def definition(self) -> ScheduleDefinition:
        """The checked definition. Raises InvalidMessage, a ValueError."""
        given = {name: getattr(self, name) for name in ScheduleOptions.__annotations__}
        return define(self.body, ScheduleOptions(**given))  # type: ignore[typeddict-item]
