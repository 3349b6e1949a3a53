"""Access control: bearer tokens with scopes and topic patterns.

The scopes are `read` (topics and messages), `produce` (send, cancel, reschedule, fire), `consume`
(pull and settle) and `operate` (options, garbage, pausing, pushes, metrics). `consume` and
`operate` include `read`.
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml
from starlette.datastructures import Headers
from starlette.requests import HTTPConnection

from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import check_topic
from lisa.core.settings import GatewayServerSettings
from lisa.core.settings.file import read_yaml

_TOPIC_PATTERN = re.compile(r"[A-Za-z0-9_.:*?-]{1,128}\Z")
_SHORTEST = 16
_KEYS = {"name", "token", "token-env", "scopes", "topics"}


class Scope(StrEnum):
    """A kind of access that a token may grant."""

    READ = "read"
    PRODUCE = "produce"
    CONSUME = "consume"
    OPERATE = "operate"


READERS = frozenset((Scope.READ, Scope.CONSUME, Scope.OPERATE))
"""The scopes that include `read`."""


class Unauthorized(Exception):
    """The request has no token or an unknown token."""


class Forbidden(Exception):
    """The token does not allow the request."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token's name, scopes and topic patterns, with a digest instead of its secret."""

    name: str
    digest: bytes
    scopes: frozenset[Scope]
    topics: tuple[str, ...] = ("*",)

    @classmethod
    def of(
        cls, name: str, secret: str, scopes: Sequence[Scope], topics: Sequence[str] = ("*",)
    ) -> Token:
        """A token with the digest of `secret`."""
        return cls(name, _digest(secret), frozenset(scopes), tuple(topics))

    def grants(self, scope: Scope) -> bool:
        """Whether the token has a scope, or one that includes it."""
        return scope in self.scopes or (scope is Scope.READ and not READERS.isdisjoint(self.scopes))

    def allows(self, scope: Scope | None, topic: str | None) -> bool:
        """Whether the token allows a scope (None: any) on a topic (None: all topics).

        With `read` on all topics, the token sees those that match its patterns (see `sees`).
        """
        if scope is not None and not self.grants(scope):
            return False
        if topic is None:
            return scope in (None, Scope.READ) or "*" in self.topics
        return self.sees(topic)

    def require(self, scope: Scope | None, topic: str | None) -> None:
        """Raises Forbidden unless the token allows a scope on a topic, as in `allows`."""
        if not self.allows(scope, topic):
            of = f" on topic {topic!r}" if topic else ""
            wanted = f"scope {scope}{of}" if scope else f"topic {topic!r}"
            raise Forbidden(f"token {self.name!r} does not allow {wanted}")

    def sees(self, topic: str) -> bool:
        """Whether a topic matches the token's patterns."""
        return "*" in self.topics or any(
            fnmatch.fnmatchcase(topic, pattern) for pattern in self.topics
        )

    def allowed_topic(self, topic: str) -> str:
        """A topic that the token may see. Raises InvalidMessage or Forbidden."""
        self.require(None, check_topic(topic))
        return topic


EVERYTHING = Token("everyone", b"", frozenset(Scope))
"""The token of every client of a gateway without tokens, which listens on loopback only."""


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


class Access:
    """The configured tokens of a gateway."""

    def __init__(
        self,
        tokens: Sequence[Token] = (),
        *,
        compat_open: bool = False,
        producers_read: bool = False,
    ) -> None:
        self.reading_producers = [
            token.name for token in tokens if producers_read and not token.grants(Scope.READ)
        ]
        """The names of tokens that may read only because of `producers-read`."""
        self._tokens = tuple(
            replace(token, scopes=token.scopes | {Scope.READ}) if producers_read else token
            for token in tokens
        )
        self.is_compat_open = compat_open
        """Whether the compatible APIs require no token from local clients."""

    @classmethod
    def of(cls, settings: GatewayServerSettings) -> Access:
        """Read the tokens. Raises ConfigError if invalid, or if a public address has no tokens."""
        tokens = []
        if settings.token is not None:
            secret = settings.token.get_secret_value()
            tokens.append(Token.of("token", _checked_secret(secret, "token"), list(Scope)))
        if settings.tokens_file is not None:
            tokens += read_tokens(settings.tokens_file)
            if [token.name for token in tokens].count("token") > 1:
                # Sessions of the web page refer to tokens by name.
                raise ConfigError(
                    f"{settings.tokens_file}: the name 'token' belongs to gateway-server.token; "
                    "rename the token in the file"
                )
            if len({token.digest for token in tokens}) < len(tokens):
                raise ConfigError(
                    f"{settings.tokens_file}: two tokens have the same secret, one of them perhaps "
                    "gateway-server.token; secrets must be unique"
                )
        if not is_loopback(settings.host):
            if not tokens:
                raise ConfigError(
                    f"gateway-server.host {settings.host} is not a loopback address, so it needs "
                    "tokens: set gateway-server.token or tokens-file, or listen on 127.0.0.1"
                )
            if settings.compat_auth == "none":
                raise ConfigError(
                    "gateway-server.compat-auth: none requires a loopback address, not "
                    f"{settings.host}: use token, or listen on 127.0.0.1"
                )
        return cls(
            tokens,
            compat_open=settings.compat_auth == "none",
            producers_read=settings.producers_read,
        )

    @cached_property
    def is_open(self) -> bool:
        """Whether no token is required."""
        return not self._tokens

    def identify(self, authorization: str | None) -> Token:
        """The token of an Authorization header. Raises Unauthorized.

        Compares all tokens, each in constant time, so that timing reveals nothing about a guess.
        """
        if self.is_open:
            return EVERYTHING
        kind, _, secret = (authorization or "").partition(" ")
        if kind.lower() != "bearer" or not secret.strip():
            raise Unauthorized("a token is required: Authorization: Bearer ...")
        found = self.by_secret(secret.strip())
        if found is None:
            raise Unauthorized("the token is unknown")
        return found

    def by_secret(self, secret: str) -> Token | None:
        """The token with this secret, or None."""
        digest, found = _digest(secret), None
        for token in self._tokens:
            if hmac.compare_digest(token.digest, digest):
                found = token
        return found

    def by_name(self, name: str) -> Token | None:
        """The token with this name, or None."""
        return next((token for token in self._tokens if token.name == name), None)


def client_of(connection: HTTPConnection) -> str:
    """The address that the connection comes from, which may be a proxy's."""
    return connection.client.host if connection.client else "unknown"


def is_loopback(host: str) -> bool:
    """Whether a listen address or client address is a loopback address."""
    if host == "localhost":
        return True
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


@lru_cache(maxsize=1_024)
def is_local_name(host: str) -> bool:
    """Whether a Host header is missing or names a loopback address.

    Protects against DNS rebinding, where another site's host name resolves to this machine.
    Browsers always send the header.
    """
    try:
        name = urlsplit(f"//{host}").hostname if host else None
    except ValueError:
        return False
    return name is None or is_loopback(name)


def is_local(connection: HTTPConnection) -> bool:
    """Whether a request comes from this machine, and not from a proxy or a page of another site."""
    client, host = connection.client, connection.headers.get("host", "")
    is_here = (client is None or is_loopback(client.host)) and is_local_name(host)
    return is_here and not is_forwarded(connection.headers)


def is_forwarded(headers: Headers) -> bool:
    """Whether headers show that a proxy passed the request on, so that its client may be remote.

    The proxy's own address and the Host header that it sets are local ones.
    """
    return _FORWARDING.search("\n".join(headers.keys())) is not None


_FORWARDING = re.compile(r"^(forwarded$|via$|x-real-ip$|x-forwarded-)", re.MULTILINE)


def read_tokens(path: Path) -> list[Token]:
    """The tokens in a YAML file. Raises ConfigError naming the file, the entry and the fix."""
    try:
        content = read_yaml(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: not readable as YAML: {error}".splitlines()[0]) from None
    entries = content.get("tokens") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: expected a list, tokens: [{{name: ..., token: ...}}]")
    tokens = [_read_token(f"{path}: token {i}", entry) for i, entry in enumerate(entries, 1)]
    names = [token.name for token in tokens]
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}: two tokens have the same name; names must be unique")
    return tokens


def _read_token(where: str, entry: Any) -> Token:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: expected a mapping with name, token, scopes and topics")
    fields = {str(key).replace("_", "-"): value for key, value in entry.items()}
    unknown = fields.keys() - _KEYS
    if unknown:
        raise ConfigError(f"{where}: unknown key {min(unknown)!r}; allowed are {sorted(_KEYS)}")
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: name is missing")
    where = f"{where} ({name})"
    secret = fields.get("token")
    if secret is None and "token-env" in fields:
        secret = os.environ.get(str(fields["token-env"]))
        if not secret:
            raise ConfigError(f"{where}: the environment variable {fields['token-env']} is not set")
    if not isinstance(secret, str):
        raise ConfigError(f"{where}: token (text) or token-env is missing")
    scopes = _texts(where, "scopes", fields.get("scopes", [str(scope) for scope in Scope]))
    known = {str(scope) for scope in Scope}
    if not scopes or not set(scopes) <= known:
        raise ConfigError(f"{where}: scopes must be some of {', '.join(sorted(known))}")
    topics = _texts(where, "topics", fields.get("topics", ["*"]))
    if not topics or not all(map(_TOPIC_PATTERN.match, topics)):
        raise ConfigError(f"{where}: topics must be names or patterns such as 'orders.*'")
    return Token.of(
        name, _checked_secret(secret, where), [Scope(scope) for scope in scopes], topics
    )


def _texts(where: str, key: str, value: Any) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"{where}: {key} must be a list of strings")
    return items


def _checked_secret(secret: str, where: str) -> str:
    if len(secret) < _SHORTEST:
        raise ConfigError(f"{where}: a token must have at least {_SHORTEST} characters")
    if not secret.isascii() or any(character.isspace() for character in secret):
        raise ConfigError(f"{where}: a token must be ASCII without spaces")
    return secret
