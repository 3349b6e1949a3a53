"""The gateway's own sections: gateway-server and camellia."""

from datetime import timedelta, timezone, tzinfo
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, InstanceOf, SecretStr, ValidationInfo, field_validator

from lisa.core.clock import parse_zone
from lisa.core.options import PRODUCER_RETRY_TIME, check_option
from lisa.core.retry_policy import MAX_RETRIES
from lisa.core.settings.sections import DurabilityField, Duration, Policy, Section, listed


class GatewayServerSettings(Section):
    """Where the gateway listens, whom it lets in, and what it takes on at most."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="The address to listen on. Any but the loopback interface needs tokens.",
    )
    port: int = Field(default=8080, ge=0, le=65_535, description="The port; 0 takes a free one.")
    workers: int = Field(default=1, ge=1, le=256, description="Processes that share the port.")
    token: SecretStr | None = Field(
        default=None, description="A bearer token that may do everything."
    )
    tokens_file: Path | None = Field(
        default=None,
        description="YAML with scoped tokens: `tokens: [{name, token, scopes, topics}]`. "
        "Without any token the gateway is open, and listens on the loopback interface only.",
    )
    compat_auth: Literal["token", "none"] = Field(
        default="token",
        description="`none`: the paths of the earlier systems ask for no token, "
        "and then answer clients on this machine only.",
    )
    allow_actions: bool = Field(
        default=False, description="Let the web page requeue, purge, cancel, fire, pause."
    )
    max_body_bytes: int = Field(
        default=4 * 1024 * 1024, ge=1024, description="The largest request, in bytes."
    )
    max_requests: int = Field(
        default=2_000, ge=1, description="Requests at work at a time; one more is answered 503."
    )
    max_polls: int = Field(
        default=10_000, ge=1, description="Pulls that wait at a time; one more is answered 503."
    )
    max_buffered_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=1024 * 1024,
        description="Bytes of requests and answers held at a time; beyond it 503.",
    )
    request_timeout: Duration = Field(
        default=timedelta(seconds=30),
        gt=timedelta(0),
        description="How long a client may take to send its request.",
    )
    patience: Duration = Field(
        default=timedelta(seconds=3),
        ge=timedelta(0),
        le=PRODUCER_RETRY_TIME,
        description="How long a request waits for a server that does not answer, before its 503.",
    )
    durability: DurabilityField = Field(
        default=None,
        description="When a message counts as sent, or cancelled: as a producer's `durability`.",
    )
    grace: Duration = Field(
        default=timedelta(seconds=10),
        description="How long running requests may take to finish once the gateway stops.",
    )
    push_allow: Annotated[tuple[str, ...], BeforeValidator(listed)] = Field(
        default=(),
        description="Where pushes may go: host names (`*.example.com`) and networks "
        "(`10.1.0.0/16`). Unset: any public address; an internal one only where it is listed.",
    )
    push_concurrency: int = Field(
        default=16, ge=1, le=1_000, description="Pushes under way for one target at a time."
    )
    push_timeout: Duration = Field(
        default=timedelta(seconds=10),
        gt=timedelta(0),
        description="How long a push's target may take to answer.",
    )
    archive: Path | None = Field(
        default=None, description="The archive that `/mykit/reStore` restores from."
    )
    mykit_clear_all: bool = Field(
        default=False, description="Let `/mykit/clearAll` cancel what `/mykit/push` sent."
    )
    delay_queue_zone: Annotated[InstanceOf[tzinfo], BeforeValidator(parse_zone)] = Field(
        default=timezone(timedelta(hours=8)),
        description="Zone of `delayTime` where `/delay-queue/push` gets it as date and time.",
    )


class CamelliaSettings(Section):
    """Defaults of topics and messages that come by the paths of camellia's delay queue."""

    ack_timeout: Duration = Field(
        default=timedelta(seconds=30), description="Ack timeout of topics first seen there."
    )
    retention: Duration = Field(
        default=timedelta(seconds=300), description="Retention of topics first seen there."
    )
    ttl: Duration = Field(
        default=timedelta(hours=1),
        gt=timedelta(0),
        description="`ttlMillis` of messages that name none.",
    )
    max_retry: int = Field(
        default=10, ge=0, le=MAX_RETRIES, description="`maxRetry` of messages that name none."
    )
    retry_delays: Policy | None = Field(
        default=None,
        description="The pauses before retries. Unset: none, a nack retries at once. The last "
        "one stands for all that `maxRetry` allows beyond.",
    )
    long_polling_timeout: Duration = Field(
        default=timedelta(seconds=10),
        description="`longPollingTimeoutMillis` of polls that name none.",
    )
    monitor_interval: Duration = Field(
        default=timedelta(seconds=60),
        gt=timedelta(0),
        description="How long the counts of one monitoring interval are kept.",
    )
    metrics_prefix: str = Field(
        default="", description="First part of the names at `/camellia/delayQueue/metrics`."
    )

    @field_validator("ack_timeout", "retention")
    @classmethod
    def _is_topic_option(cls, value: object, info: ValidationInfo) -> object:
        check_option(str(info.field_name), value)
        return value
