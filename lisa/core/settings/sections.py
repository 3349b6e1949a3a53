"""The sections that roles share or own: server, groups, manager-server, consumer-server."""

import re
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from lisa.core.clock import parse_duration
from lisa.core.cron import read_schedule
from lisa.core.durability import Replicas, parse_durability
from lisa.core.errors import ConfigError
from lisa.core.keys import check_group, check_topic
from lisa.core.options import check_option
from lisa.core.retry_policy import DEFAULT_DELAY, DEFAULT_RETRIES, MAX_RETRIES, RetryPolicy
from lisa.core.transitions.promote import LARGEST_BATCH
from lisa.core.transitions.reclaim import LARGEST_WINDOW

Duration = Annotated[timedelta, BeforeValidator(parse_duration)]
Millis = Annotated[timedelta, BeforeValidator(partial(parse_duration, bare_ms=True))]
Policy = Annotated[InstanceOf[RetryPolicy], BeforeValidator(RetryPolicy.parse)]


def _durability(value: object) -> Replicas | None:
    try:
        return parse_durability(value)
    except ConfigError as error:
        raise ValueError(str(error)) from None


DurabilityField = Annotated[InstanceOf[Replicas] | None, BeforeValidator(_durability)]
Batch = Annotated[int, Field(ge=1), AfterValidator(partial(min, LARGEST_BATCH))]
Window = Annotated[int, Field(ge=1), AfterValidator(partial(min, LARGEST_WINDOW))]


def listed(value: object) -> object:
    """Several names may be one text with commas, as the environment has to write them."""
    if isinstance(value, str):
        return [name for part in value.split(",") if (name := part.strip())]
    return value


def _check_schedule(text: str) -> str:
    try:
        read_schedule(text)
    except ConfigError as error:
        raise ValueError(str(error)) from None
    return text


_TOPIC_OPTIONS = (
    "max_length",
    "ack_timeout",
    "retry_delays",
    "capacity",
    "retention",
    "dedupe_for",
    "garbage_keep",
    "journal",
    "journal_max",
    "max_body_bytes",
    "shards",
)
Schedule = Annotated[str, AfterValidator(_check_schedule)]


class Section(BaseModel):
    """Frozen; unknown keys are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class RedisSettings(Section):
    """Where the server is, and how to reach it."""

    url: str = Field(
        default="redis://localhost:6379/0",
        repr=False,
        description="The server: `redis://HOST:PORT/DB`, or `rediss://` for TLS. Also "
        "`redis+sentinel://HOST:PORT,HOST:PORT/SERVICE/DB` and `redis+cluster://HOST:PORT,HOST:PORT`.",
    )
    username: str | None = Field(default=None, description="User name, where the URL holds none.")
    password: SecretStr | None = Field(
        default=None, description="Password, where the URL holds none."
    )
    sentinel_username: str | None = Field(
        default=None, description="User name at the sentinels, where they ask for one."
    )
    sentinel_password: SecretStr | None = Field(
        default=None, description="Password at the sentinels, where they ask for one."
    )
    socket_timeout: Duration | None = Field(
        default=None,
        gt=timedelta(0),
        description="How long a reply may take. Unset: each role chooses, always above its polls.",
    )
    tls_ca_file: Path | None = Field(
        default=None, description="Certificates to trust. Unset: the system's."
    )
    tls_cert_file: Path | None = Field(default=None, description="This client's own certificate.")
    tls_key_file: Path | None = Field(default=None, description="The key of that certificate.")
    tls_check_hostname: bool = Field(
        default=True, description="Refuse a server whose certificate names another host."
    )

    @field_validator("url")
    @classmethod
    def _has_scheme(cls, url: str) -> str:
        if not re.match(r"[a-z][a-z0-9+.-]*://", url):
            raise ValueError("not a URL; write redis://HOST:PORT/DB")
        return url

    @model_validator(mode="after")
    def _key_and_certificate(self) -> Self:
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ValueError("tls-cert-file and tls-key-file need each other; give both")
        return self


class GroupSettings(Section):
    """One topic, the group of this deployment, and the topic's options."""

    topic: Annotated[str, AfterValidator(check_topic)] = Field(description="The topic.")
    group: Annotated[str, AfterValidator(check_group)] | None = Field(
        default=None,
        description="The group. A manager declares it; a consumer joins it. "
        "Unset: the topic's only group.",
    )
    consumer: str | None = Field(
        default=None,
        min_length=1,
        description="First part of the consumer's name; host, pid and a random part follow.",
    )
    max_length: int | None = Field(
        default=None,
        description="`max_ready` of the topic: unread entries that a ready stream may hold. "
        "What is due beyond that waits; nothing is dropped.",
    )
    moving_size: Batch | None = Field(
        default=None,
        description=f"Messages per promote call, at most {LARGEST_BATCH}. "
        "Calls follow each other until nothing is due.",
    )
    ack_timeout: Duration | None = Field(
        default=None,
        description="How long a delivery may stay unsettled. Unset: `manager-server.timeout`.",
    )
    retry_delays: Policy | None = Field(
        default=None,
        description="The pause before each retry. Unset: the retries of `manager-server`.",
    )
    capacity: int | None = Field(
        default=None, description="Live messages before a send is refused. Unset: unlimited."
    )
    retention: Duration | None = Field(
        default=None, description="How long settled ids are remembered. Unset: 60s. 0: not at all."
    )
    dedupe_for: Duration | None = Field(
        default=None,
        description="The same for messages that `lisa pipeline schedule` sent. Unset: 1d.",
    )
    garbage_keep: Duration | None = Field(
        default=None, description="How long garbage is kept before it is purged. Unset: 90d."
    )
    journal: bool | None = Field(
        default=None,
        description="Write every transition down in the topic's journal, for `lisa pipeline`. "
        "Unset: no.",
    )
    journal_max: int | None = Field(
        default=None,
        description="Events that the journal keeps where no archive has taken them. "
        "Unset: 1000000.",
    )
    max_body_bytes: int | None = Field(
        default=None, description="The largest encoded body, in bytes. Unset: 1048576."
    )
    shards: int | None = Field(
        default=None,
        description="Places, each with a key tag of its own, that a hot topic is spread over: it "
        "then uses several nodes of a cluster. At most 64. Unset: 1.",
    )

    @field_validator(*_TOPIC_OPTIONS)
    @classmethod
    def _is_topic_option(cls, value: object, info: ValidationInfo) -> object:
        if value is not None:
            check_option(_option_name(str(info.field_name)), value)
        return value

    def options(self) -> dict[str, object]:
        """The topic options that this entry sets itself, by their names in Redis."""
        values = {_option_name(name): getattr(self, name) for name in _TOPIC_OPTIONS}
        return {name: value for name, value in values.items() if value is not None}


def _option_name(field: str) -> str:
    return "max_ready" if field == "max_length" else field


class ManagerServerSettings(Section):
    """When the manager's services run at the latest, and the defaults of its topics."""

    crontab_move_to_ready_queue: Schedule = Field(
        default="0/1 * * * * ?",
        description="When to promote: the safety net beside the promoter, "
        "which wakes at each due time by itself.",
    )
    crontab_clean_stream: Schedule = Field(
        default="0 */1 * * * ?", description="When to trim what is foreign from ready streams."
    )
    crontab_process_pending_message: Schedule = Field(
        default="0/5 * * * * ?",
        description="When to reclaim: the safety net beside the reclaimer, "
        "which wakes when a lease can end.",
    )
    crontab_sweep: Schedule = Field(
        default="0/30 * * * * ?",
        description="When to expire what is past its ttl, and to forget dead consumers "
        "and idle topics.",
    )
    range_start: Literal["-"] = Field(
        default="-",
        description="Kept for files of the original. Every pending message is looked at.",
    )
    range_end: Literal["+"] = Field(default="+", description="As `range-start`.")
    count: Window = Field(
        default=LARGEST_WINDOW,
        description=f"Messages per reclaim call, at most {LARGEST_WINDOW}. "
        "Calls follow each other to the end of the list.",
    )
    timeout: Millis = Field(
        default=timedelta(seconds=10),
        description="`ack_timeout` of each topic listed, in milliseconds or with a unit.",
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
        description="A whole retry policy, instead of `delay-time` and `max-retry-count`: "
        "`0,0,2m,10m`, or a mapping (`fixed`, `exponential`, `delays`).",
    )

    @field_validator("timeout")
    @classmethod
    def _is_ack_timeout(cls, value: timedelta) -> timedelta:
        check_option("ack_timeout", value)
        return value

    @model_validator(mode="after")
    def _one_policy(self) -> Self:
        twice = self.model_fields_set & {"delay_time", "max_retry_count"}
        if self.retry is not None and twice:
            key = min(twice).replace("_", "-")
            raise ValueError(f"retry and {key} contradict each other; remove one")
        return self

    def options(self) -> dict[str, object]:
        """The topic options that this section sets for every topic listed."""
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
    """How a consumer reads and runs handlers."""

    poll_timeout_millis: int = Field(
        default=5_000,
        ge=1,
        le=3_600_000,
        description="How long one read waits for a message, in milliseconds.",
    )
    poll_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="The most messages that a consumer holds unstarted. "
        "Unset: what its handlers finish in 50 ms.",
    )
    concurrency: int = Field(default=1, ge=1, le=10_000, description="Handlers that run at a time.")
    grace: Duration = Field(
        default=timedelta(seconds=10),
        description="How long running handlers may take to finish once the consumer stops.",
    )
    processes: int = Field(default=1, ge=1, le=1_024, description="Consumer processes to start.")
