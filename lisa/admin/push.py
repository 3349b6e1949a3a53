"""Push targets: the URLs to which gateways POST the messages of groups.

A target is the field `push:<group>` of the topic's options hash: JSON with the URL, the signing
secret and limits. Every gateway finds it there, and it is removed with the topic (decision 13).
"""

from __future__ import annotations

import base64
import binascii
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from lisa.admin.reading import ask_all
from lisa.core.model.clock import duration_ms, human
from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import DEFAULT_GROUP, check_group, check_topic
from lisa.core.model.options import MIN_ACK_TIMEOUT, TopicOptions
from lisa.core.model.sharding import Shard, Topic
from lisa.core.redis.flow import Flow
from lisa.core.store import group_removal
from lisa.core.store.replies import pairs
from lisa.core.store.reshard import spread
from lisa.core.store.store import Store, chunks
from lisa.core.transitions.base import text
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.topic import Configure

FIELD = "push:"
SECRET_HEAD = "whsec_"  # noqa: S105 - how Standard Webhooks marks a secret, not one itself
SECRET_BYTES = (24, 64)
"""Lengths of the secret that Standard Webhooks allows."""

MOST_CONCURRENCY = 1_000
LEAST_TIMEOUT = timedelta(milliseconds=100)
MOST_TIMEOUT = timedelta(hours=1)
MOST_URL = 2_000
TOPICS_PER_STEP = 200


class _Record(msgspec.Struct, omit_defaults=True):
    """The stored field; unknown fields of later versions are ignored."""

    url: str
    secret: str
    concurrency: Annotated[int, Meta(ge=1, le=MOST_CONCURRENCY)] | None = None
    timeout_ms: Annotated[int, Meta(ge=100, le=3_600_000)] | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Record)


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredPushTarget:
    """The push target of one group; None means the gateway's configured default.

    uses_lanes: whether the topic does.
    """

    topic: str
    group: str
    url: str
    secret: str = field(repr=False)
    concurrency: int | None = None
    timeout_ms: int | None = None
    ack_timeout_ms: int = 10_000
    uses_lanes: bool = False


class SetTarget(NamedTuple):
    """The result of `set_target`: the target, whether it is new, and whether its secret is new."""

    target: StoredPushTarget
    is_new: bool
    is_new_secret: bool


def check_url(url: str) -> str:
    """Return the URL. Raises ConfigError unless it is http(s), ASCII, without user or fragment."""
    shown = repr(url[:80])
    if (
        not url.isascii()
        or not url.isprintable()
        or any(character in url for character in ' \\"<>')
    ):
        raise ConfigError(
            f"{shown} has characters that are not allowed in a URL: percent-encode them, and write "
            "the host in its ASCII form (xn--...)"
        )
    if len(url) > MOST_URL:
        raise ConfigError(f"a push URL has at most {MOST_URL} characters, this one {len(url)}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{shown} is not a URL: {error}") from None
    if parts.scheme not in ("http", "https"):
        raise ConfigError(f"{shown} is not an http:// or https:// URL")
    if not host:
        raise ConfigError(f"{shown} has no host; write https://HOST/PATH")
    if port == 0:
        raise ConfigError(f"{shown} has the port 0; ports are 1 to 65535")
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            "a push URL must not contain a user or password; let the target check the signature"
        )
    if "#" in url:
        raise ConfigError(
            f"{shown} has a fragment, which is never sent; remove # and the text after it"
        )
    return url


def new_secret() -> str:
    """Generate a signing secret."""
    return SECRET_HEAD + base64.b64encode(secrets.token_bytes(32)).decode("ascii")


def key_of(secret: str) -> bytes:
    """Decode a secret into the signing key. Raises ConfigError, without the secret in it."""
    low, high = SECRET_BYTES
    try:
        if not secret.startswith(SECRET_HEAD):
            raise ValueError(f"it does not start with {SECRET_HEAD}")
        key = base64.b64decode(secret[len(SECRET_HEAD) :], validate=True)
        if not low <= len(key) <= high:
            raise ValueError(f"it has {len(key)} bytes, not {low} to {high}")
    except (binascii.Error, ValueError) as error:
        raise ConfigError(
            f"invalid signing secret: {error}; write {SECRET_HEAD} and the base64 of {low} to "
            f"{high} random bytes, or omit the secret to generate one"
        ) from None
    return key


def targets(store: Store, topic: str) -> Flow[list[StoredPushTarget]]:
    """The targets of one topic, sorted by group."""
    stored = yield from store.command("HGETALL", store.keys.topic(topic).options)
    return _read(topic, pairs(stored))


def targets_of_topics(store: Store, topics: Sequence[str]) -> Flow[list[StoredPushTarget]]:
    """The targets of many topics, with one round trip per 200 topics."""
    found: list[StoredPushTarget] = []
    for part in chunks(topics, TOPICS_PER_STEP):
        commands = [("HGETALL", store.keys.topic(topic).options) for topic in part]
        for topic, stored in zip(part, (yield from ask_all(store, commands)), strict=True):
            found += _read(topic, pairs(stored or []))
    return found


def _read(topic: str, stored: Mapping[bytes, bytes]) -> list[StoredPushTarget]:
    """Parse the targets in an options hash; invalid targets are skipped."""
    fields = {text(name): value for name, value in stored.items()}
    named = sorted(name[len(FIELD) :] for name in fields if name.startswith(FIELD))
    if not named:
        return []
    timeout_ms = _ack_timeout_ms(fields.get("ack_timeout"))
    found = []
    for group in named:
        try:
            one = _decoder.decode(fields[FIELD + group])
            check_url(one.url)
            key_of(one.secret)
            check_group(group)
        except (msgspec.DecodeError, ValueError, ConfigError):
            continue
        found.append(
            StoredPushTarget(
                topic=topic,
                group=group,
                ack_timeout_ms=timeout_ms,
                uses_lanes=fields.get("lanes") == b"1",
                **msgspec.structs.asdict(one),
            )
        )
    return found


def _ack_timeout_ms(raw: bytes | None) -> int:
    try:
        options = TopicOptions.from_hash({b"ack_timeout": raw} if raw else {})
    except ConfigError:
        options = TopicOptions()
    # Leases are renewed every third of the ack timeout; a shorter one would renew constantly.
    return duration_ms(max(options.ack_timeout, MIN_ACK_TIMEOUT))


def find(store: Store, topic: str, group: str) -> Flow[StoredPushTarget | None]:
    """The target of one group; None without a target or if the group is not declared."""
    keys = store.keys.topic(topic)
    stored, declared = yield from store.commands(
        [("HGETALL", keys.options), ("HEXISTS", keys.groups, group)]
    )
    found = {target.group: target for target in _read(topic, pairs(stored))}
    return found.get(group) if declared else None


def set_target(
    store: Store,
    topic: str,
    url: str,
    *,
    group: str | None = None,
    concurrency: int | None = None,
    timeout: timedelta | None = None,
    secret: str | None = None,
    renew_secret: bool = False,
) -> Flow[SetTarget]:
    """Push a group's messages to a URL, replacing the group's previous target.

    Finishes an interrupted removal of the group first.

    group: default is the topic's only group, or a new group if there is none.
    secret: default is the target's current secret, or a generated one for a new target or with
        `renew_secret`.

    Raises ConfigError, and InvalidMessage for invalid names.
    """
    record = _checked(check_topic(topic) and url, secret, concurrency, timeout)
    if secret is not None and renew_secret:
        raise ConfigError("give either a secret or renew_secret, not both")
    yield from store.check_schema()
    name = check_group(group) if group else (yield from _only_group(store, topic))
    known = {target.group: target for target in (yield from targets(store, topic))}
    had = known.get(name)
    is_new_secret = not record.secret and (had is None or renew_secret)
    if not record.secret:
        record.secret = new_secret() if is_new_secret or had is None else had.secret
    yield from store.register([topic])
    yield from group_removal.finish(store, Shard(topic), name)
    yield from store.run(Declare(topic, name))
    yield from spread(store, Topic(topic))
    yield from store.run(Configure(topic, {FIELD + name: _encoder.encode(record).decode()}))
    target = StoredPushTarget(topic=topic, group=name, **msgspec.structs.asdict(record))
    return SetTarget(target, had is None, is_new_secret)


def _checked(
    url: str, secret: str | None, concurrency: int | None, timeout: timedelta | None
) -> _Record:
    record = _Record(check_url(url), secret or "", concurrency)
    if secret is not None:
        key_of(secret)
    if concurrency is not None and not 1 <= concurrency <= MOST_CONCURRENCY:
        raise ConfigError(f"concurrency must be 1 to {MOST_CONCURRENCY}, not {concurrency}")
    if timeout is not None:
        if not LEAST_TIMEOUT <= timeout <= MOST_TIMEOUT:
            low, high = human(duration_ms(LEAST_TIMEOUT)), human(duration_ms(MOST_TIMEOUT))
            raise ConfigError(f"the timeout of a push must be {low} to {high}, not {timeout}")
        record.timeout_ms = duration_ms(timeout)
    return record


def _only_group(store: Store, topic: str) -> Flow[str]:
    groups = yield from store.groups(topic)
    if len(groups) > 1:
        raise ConfigError(
            f"topic {topic!r} has several groups ({', '.join(groups)}): name the group to push"
        )
    return groups[0] if groups else DEFAULT_GROUP


def remove(store: Store, topic: str, group: str | None = None) -> Flow[list[str]]:
    """Remove the push target of one group, or all targets of a topic; returns their groups.

    The groups and their messages remain.
    """
    stored = yield from store.command("HKEYS", store.keys.topic(topic).options)
    names = [text(name)[len(FIELD) :] for name in stored if text(name).startswith(FIELD)]
    gone = sorted(name for name in names if group in (None, name))
    if gone:
        yield from store.run(Configure(topic, {FIELD + name: None for name in gone}))
    return gone
