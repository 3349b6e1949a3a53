"""The gateway's settings sections: gateway-server, grpc and camellia."""

from datetime import timedelta, timezone
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, SecretStr, model_validator

from lisa.core.model.options import GRACE, PRODUCER_RETRY_TIME
from lisa.core.model.retry_policy import MAX_RETRIES
from lisa.core.settings.sections import (
    DurabilityField,
    Duration,
    Names,
    Policy,
    Section,
    Zone,
    check_key_pair,
    topic_option,
)


def _archive(value: str | None) -> str | None:
    scheme, separator, rest = (value or "").partition("://")
    if not separator:
        return value
    if scheme not in {"s3", "s3a"}:
        raise ValueError(
            "the gateway searches a directory or an s3: URL; for others: lisa pipeline search"
        )
    return f"s3://{rest}"


def _networks(entries: tuple[str, ...]) -> tuple[str, ...]:
    for entry in entries:
        try:
            ip_network(entry)
        except ValueError as error:
            raise ValueError(f"{error}; give networks such as 10.0.0.0/8") from None
    return entries


class GatewayServerSettings(Section):
    """Address, access control and limits of the gateway."""

    host: str = Field(
        default="127.0.0.1",
        min_length=1,
        description="The address to listen on. Any address other than loopback requires tokens.",
    )
    port: int = Field(default=8080, ge=0, le=65_535, description="The port; 0 selects a free one.")
    base_path: str = Field(
        default="",
        pattern=r"^(/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)*$",
        description="The path below which a proxy serves the gateway, such as `/lisa`. The proxy "
        "may remove it from requests or pass it on. Unset: the root.",
    )
    workers: int = Field(default=1, ge=1, le=256, description="Processes that share the port.")
    token: SecretStr | None = Field(
        default=None, description="A bearer token with all permissions."
    )
    tokens_file: Path | None = Field(
        default=None,
        description="YAML with scoped tokens: `tokens: [{name, token, scopes, topics}]`. "
        "Without any token the gateway is open, and listens on the loopback interface only.",
    )
    producers_read: bool = Field(
        default=True,
        description="Deprecated: whether tokens with the scope `produce` alone may read topics and "
        "messages. From version 0.3 they may not; add the scope `read` where it is needed, and set "
        "this to false.",
    )
    compat_auth: Literal["token", "none"] = Field(
        default="token",
        description="`none`: the paths of the earlier systems require no token, "
        "and answer only clients on this machine.",
    )
    allow_actions: bool = Field(
        default=False, description="Let the web page requeue, purge, cancel, fire and pause."
    )
    max_body_bytes: int = Field(
        default=4 * 1024 * 1024, ge=1024, description="Maximum size of a request, in bytes."
    )
    max_requests: int = Field(
        default=2_000, ge=1, description="Maximum concurrent requests; beyond it, 503."
    )
    max_polls: int = Field(
        default=10_000, ge=1, description="Maximum pulls waiting at the same time; beyond it, 503."
    )
    client_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="The part of `max-requests`, `max-polls`, `max-buffered-bytes` and the "
        "connections that one client may use: a token, or an address. Without a token where tokens "
        "are needed, half of it.",
    )
    trusted_proxies: Annotated[Names, AfterValidator(_networks)] = Field(
        default=(),
        description="Networks of proxies whose `X-Forwarded-For` names the client's address, such "
        "as `10.0.0.0/8`. Unset: all clients of a proxy count as one address.",
    )
    max_buffered_bytes: int = Field(
        default=256 * 1024 * 1024,
        ge=1024 * 1024,
        description="Maximum memory of each worker for requests and answers, in bytes; beyond it, "
        "503. A body takes about four times its size.",
    )
    request_timeout: Duration = Field(
        default=timedelta(seconds=30),
        gt=timedelta(0),
        description="How long a client may take to send its request, and to read its response.",
    )
    patience: Duration = Field(
        default=timedelta(seconds=3),
        ge=timedelta(0),
        le=PRODUCER_RETRY_TIME,
        description="How long a request waits for an unresponsive Redis before it fails with 503.",
    )
    durability: DurabilityField = Field(
        default=None,
        description="When a message counts as sent or cancelled; see the producer's `durability`.",
    )
    grace: Duration = Field(
        default=GRACE,
        description="Grace period for running requests when the gateway stops.",
    )
    push_allow: Names = Field(
        default=(),
        description="Allowed push targets: host names (`*.example.com`) and networks "
        "(`10.1.0.0/16`). Unset: any public address. Internal addresses must be listed.",
    )
    push_concurrency: int = Field(
        default=16, ge=1, le=1_000, description="Maximum concurrent pushes per target."
    )
    push_timeout: Duration = Field(
        default=timedelta(seconds=10),
        gt=timedelta(0),
        description="How long a push target may take to answer.",
    )
    archive: Annotated[str | None, AfterValidator(_archive)] = Field(
        default=None,
        description="The archive that the web page searches (with the extra `archive`): a "
        "directory, or a URL such as `s3://bucket/lisa`. `/mykit/reStore` restores from a "
        "directory (with the extra `pipeline`).",
    )
    mykit_clear_all: bool = Field(
        default=False, description="Let `/mykit/clearAll` cancel what `/mykit/push` sent."
    )
    delay_queue_zone: Zone = Field(
        default=timezone(timedelta(hours=8)),
        description="Zone of a `delayTime` given as date and time to `/delay-queue/push`.",
    )


class GrpcSettings(Section):
    """The gRPC server, whose host, tokens and limits are those of `gateway-server`."""

    port: int | None = Field(
        default=None,
        ge=0,
        le=65_535,
        description="The port; 0 selects a free one. Unset: no gRPC.",
    )
    tls_cert_file: Path | None = Field(
        default=None,
        description="The server's certificate, with any intermediate ones. Unset: no TLS.",
    )
    tls_key_file: Path | None = Field(default=None, description="The key of the certificate.")

    @model_validator(mode="after")
    def _key_and_certificate(self) -> Self:
        check_key_pair(self.tls_cert_file, self.tls_key_file)
        return self


class CamelliaSettings(Section):
    """Defaults for topics and messages of camellia's delay-queue API."""

    ack_timeout: Annotated[Duration, topic_option("ack_timeout")] = Field(
        default=timedelta(seconds=30), description="Ack timeout of topics created by this API."
    )
    retention: Annotated[Duration, topic_option("retention")] = Field(
        default=timedelta(seconds=300), description="Retention of topics created by this API."
    )
    ttl: Duration = Field(
        default=timedelta(hours=1),
        gt=timedelta(0),
        description="Default `ttlMillis` of a message.",
    )
    max_retry: int = Field(
        default=10, ge=0, le=MAX_RETRIES, description="Default `maxRetry` of a message."
    )
    retry_delays: Policy | None = Field(
        default=None,
        description="The pauses before retries; the last one repeats up to `maxRetry`. "
        "Unset: a nack retries immediately.",
    )
    long_polling_timeout: Duration = Field(
        default=timedelta(seconds=10),
        description="Default `longPollingTimeoutMillis` of a poll.",
    )
    monitor_interval: Duration = Field(
        default=timedelta(seconds=60),
        gt=timedelta(0),
        description="Length of a monitoring interval.",
    )
    metrics_prefix: str = Field(
        default="", description="Prefix of the names at `/camellia/delayQueue/metrics`."
    )
