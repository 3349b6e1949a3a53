"""Push targets: where a gateway POSTs a group's messages, kept with the topic's options.

A target is the field `push:<group>` of the topic's options hash: JSON with the URL, the secret that
signs, and bounds of its own. So every gateway finds it, and it goes with the topic (decision 13).
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
from lisa.core.clock import duration_ms, human
from lisa.core.errors import ConfigError
from lisa.core.flow import Flow
from lisa.core.keys import check_group, check_topic
from lisa.core.options import MIN_ACK_TIMEOUT, TopicOptions
from lisa.core.spread import spread
from lisa.core.store import Store, chunks, pairs
from lisa.core.transitions.base import text
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.declare import Declare

__all__ = [
    "FIELD",
    "MOST_CONCURRENCY",
    "MOST_TIMEOUT",
    "Placed",
    "PushTarget",
    "check_secret",
    "check_url",
    "find",
    "key_of",
    "new_secret",
    "place",
    "remove",
    "targets",
    "targets_of_topics",
]

FIELD = "push:"
SECRET_HEAD = "whsec_"  # noqa: S105 - how Standard Webhooks marks a secret, not one itself
SECRET_BYTES = (24, 64)
"""What Standard Webhooks allows."""

DEFAULT_GROUP = "lisa"
"""The group of a topic that has none yet, as a manager would name it."""

MOST_CONCURRENCY = 1_000
LEAST_TIMEOUT = timedelta(milliseconds=100)
MOST_TIMEOUT = timedelta(hours=1)
MOST_URL = 2_000
TOPICS_PER_STEP = 200


class _Written(msgspec.Struct, omit_defaults=True):
    """The field as it is stored; what later versions add is passed over."""

    url: str
    secret: str
    concurrency: Annotated[int, Meta(ge=1, le=MOST_CONCURRENCY)] | None = None
    timeout_ms: Annotated[int, Meta(ge=100, le=3_600_000)] | None = None


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Written)


@dataclass(frozen=True, kw_only=True, slots=True)
class PushTarget:
    """Where the messages of one group go. None is what the gateway's configuration says."""

    topic: str
    group: str
    url: str
    secret: str = field(repr=False)
    concurrency: int | None = None
    timeout_ms: int | None = None
    ack_timeout_ms: int = 10_000


class Placed(NamedTuple):
    """A target as it is now; whether the group had none; whether its secret was made just now."""

    target: PushTarget
    is_new: bool
    is_new_secret: bool


def check_url(url: str) -> str:
    """The URL itself, or ConfigError: plain http or https, in ASCII, without user or fragment."""
    shown = repr(url[:80])
    if not url.isascii() or not url.isprintable() or any(one in url for one in ' \\"<>'):
        raise ConfigError(
            f"{shown} has characters that a URL has not: percent-encode them, and write the host "
            "in its ASCII form (xn--...)"
        )
    if len(url) > MOST_URL:
        raise ConfigError(f"a push URL has at most {MOST_URL} characters, this one {len(url)}")
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigError(f"{shown} is no URL: {error}") from None
    if parts.scheme not in ("http", "https"):
        raise ConfigError(f"{shown} is neither http:// nor https://; pushes go to one of these")
    if not host or port == 0:
        raise ConfigError(f"{shown} names no host to push to; write https://HOST/PATH")
    if parts.username is not None or parts.password is not None:
        raise ConfigError("a push URL has no user or password; let the target check the signature")
    if "#" in url:
        raise ConfigError(f"{shown} has a fragment, which is never sent; leave out # and the rest")
    return url


def new_secret() -> str:
    """A fresh signing secret."""
    return SECRET_HEAD + base64.b64encode(secrets.token_bytes(32)).decode("ascii")


def key_of(secret: str) -> bytes:
    """The bytes that sign. Raises ConfigError; the secret itself is in no message."""
    low, high = SECRET_BYTES
    try:
        if not secret.startswith(SECRET_HEAD):
            raise ValueError(f"it does not begin with {SECRET_HEAD}")
        key = base64.b64decode(secret[len(SECRET_HEAD) :], validate=True)
        if not low <= len(key) <= high:
            raise ValueError(f"it has {len(key)} bytes, not {low} to {high}")
    except (binascii.Error, ValueError) as error:
        raise ConfigError(
            f"this is no signing secret: {error}; write {SECRET_HEAD} and the base64 of {low} to "
            f"{high} random bytes, or let one be made"
        ) from None
    return key


def check_secret(secret: str) -> str:
    """The secret itself, or ConfigError that says what one looks like."""
    key_of(secret)
    return secret


def targets(store: Store, topic: str) -> Flow[list[PushTarget]]:
    """The targets of one topic, in order of group."""
    stored = yield from store.command("HGETALL", store.keys.topic(topic).options)
    return _read(topic, pairs(stored))


def targets_of_topics(store: Store, topics: Sequence[str]) -> Flow[list[PushTarget]]:
    """The targets of many topics, a round trip for each two hundred of them."""
    found: list[PushTarget] = []
    for some in chunks(topics, TOPICS_PER_STEP):
        commands = [("HGETALL", store.keys.topic(topic).options) for topic in some]
        for topic, stored in zip(some, (yield from ask_all(store, commands)), strict=True):
            found += _read(topic, pairs(stored or []))
    return found


def _read(topic: str, stored: Mapping[bytes, bytes]) -> list[PushTarget]:
    """What a foreign hand made unreadable is no target; the rest is not hidden by it."""
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
            PushTarget(
                topic=topic, group=group, url=one.url, secret=one.secret,
                concurrency=one.concurrency, timeout_ms=one.timeout_ms, ack_timeout_ms=timeout_ms,
            )
        )  # fmt: skip
    return found


def _ack_timeout_ms(raw: bytes | None) -> int:
    try:
        options = TopicOptions.from_hash({b"ack_timeout": raw} if raw else {})
    except ConfigError:
        options = TopicOptions()
    # A lease is renewed in a third of it: shorter than may be set, that would never end.
    return duration_ms(max(options.ack_timeout, MIN_ACK_TIMEOUT))


def find(store: Store, topic: str, group: str) -> Flow[PushTarget | None]:
    """The target of one group as long as the group is declared, else None."""
    keys = store.keys.topic(topic)
    stored, timeout, declared = yield from store.commands([
        ("HGET", keys.options, FIELD + group), ("HGET", keys.options, "ack_timeout"),
        ("HEXISTS", keys.groups, group),
    ])  # fmt: skip
    if stored is None or not declared:
        return None
    read = _read(topic, {(FIELD + group).encode(): stored, b"ack_timeout": timeout or b""})
    return read[0] if read else None


def place(
    store: Store,
    topic: str,
    url: str,
    *,
    group: str | None = None,
    concurrency: int | None = None,
    timeout: timedelta | None = None,
    secret: str | None = None,
    renew_secret: bool = False,
) -> Flow[Placed]:
    """Push a group's messages to a URL from now on, in place of where they went before.

    Without `group` the topic's only one, which is declared where there is none. Without `secret`
    the target keeps the one that it has, unless `renew_secret`; a new target gets a fresh one.
    Raises ConfigError, InvalidMessage.
    """
    check_url(check_topic(topic) and url)
    written = _Written(url, "" if secret is None else check_secret(secret), concurrency)
    if concurrency is not None and not 1 <= concurrency <= MOST_CONCURRENCY:
        raise ConfigError(f"concurrency is 1 to {MOST_CONCURRENCY}, not {concurrency}")
    if timeout is not None:
        if not LEAST_TIMEOUT <= timeout <= MOST_TIMEOUT:
            low, high = human(duration_ms(LEAST_TIMEOUT)), human(duration_ms(MOST_TIMEOUT))
            raise ConfigError(f"a push's timeout is {low} to {high}, not {timeout}")
        written.timeout_ms = duration_ms(timeout)
    yield from store.check_schema()
    name = check_group(group) if group else (yield from _only_group(store, topic))
    known = {one.group: one for one in (yield from targets(store, topic))}
    had = known.get(name)
    is_new_secret = not written.secret and (had is None or renew_secret)
    if not written.secret:
        written.secret = new_secret() if is_new_secret or had is None else had.secret
    yield from store.register([topic])
    yield from store.run(Declare(topic, name))
    yield from spread(store, topic)
    yield from store.run(Configure(topic, {FIELD + name: _encoder.encode(written).decode()}))
    target = PushTarget(
        topic=topic, group=name, url=url, secret=written.secret,
        concurrency=concurrency, timeout_ms=written.timeout_ms,
    )  # fmt: skip
    return Placed(target, had is None, is_new_secret)


def _only_group(store: Store, topic: str) -> Flow[str]:
    groups = yield from store.groups(topic)
    if len(groups) > 1:
        raise ConfigError(
            f"topic {topic!r} has several groups ({', '.join(groups)}): say which one is pushed"
        )
    return groups[0] if groups else DEFAULT_GROUP


def remove(store: Store, topic: str, group: str | None = None) -> Flow[list[str]]:
    """Push no more: one group, or all of a topic; the groups that were pushed before.

    The groups stay, and keep what they owe for other consumers.
    """
    stored = yield from store.command("HKEYS", store.keys.topic(topic).options)
    names = [text(name)[len(FIELD) :] for name in stored if text(name).startswith(FIELD)]
    gone = sorted(name for name in names if group in (None, name))
    if gone:
        yield from store.run(Configure(topic, {FIELD + name: None for name in gone}))
    return gone
