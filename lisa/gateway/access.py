"""Who may do what: bearer tokens with scopes and topic patterns.

A token's scopes are `produce` (send, cancel, reschedule, fire), `consume` (pull and settle) and
`operate` (options, garbage, pauses, pushes, metrics). Any of them may look at a topic.
"""

from __future__ import annotations

import fnmatch
import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from lisa.core.errors import ConfigError
from lisa.core.settings import GatewayServerSettings

__all__ = [
    "Access",
    "Forbidden",
    "Scope",
    "Token",
    "Unauthorized",
    "is_local_name",
    "is_loopback",
]

_TOPIC_PATTERN = re.compile(r"[A-Za-z0-9_.:*?-]{1,128}\Z")
_SHORTEST = 16
_KEYS = {"name", "token", "token-env", "scopes", "topics"}


class Scope(StrEnum):
    """What a token allows."""

    PRODUCE = "produce"
    CONSUME = "consume"
    OPERATE = "operate"


class Unauthorized(Exception):
    """No token, or one that nobody knows."""


class Forbidden(Exception):
    """A known token that does not allow this."""


@dataclass(frozen=True, slots=True)
class Token:
    """One token: who it belongs to, and what it allows. The secret itself is not kept."""

    name: str
    digest: bytes
    scopes: frozenset[Scope]
    topics: tuple[str, ...] = ("*",)

    @classmethod
    def of(
        cls, name: str, secret: str, scopes: Sequence[Scope], topics: Sequence[str] = ("*",)
    ) -> Token:
        """A token from its secret."""
        return cls(name, _digest(secret), frozenset(scopes), tuple(topics))

    def allows(self, scope: Scope | None, topic: str | None) -> bool:
        """Whether it allows a scope (None: any) on a topic (None: what concerns them all)."""
        if scope is not None and scope not in self.scopes:
            return False
        if topic is None:
            return scope is None or "*" in self.topics
        return self.sees(topic)

    def sees(self, topic: str) -> bool:
        """Whether a topic is one of its own."""
        return any(fnmatch.fnmatchcase(topic, pattern) for pattern in self.topics)


EVERYTHING = Token("everyone", b"", frozenset(Scope))
"""What a gateway without any token grants to all, on the loopback interface."""


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).digest()


class Access:
    """The tokens that a gateway knows."""

    def __init__(self, tokens: Sequence[Token] = (), *, compat_open: bool = False) -> None:
        self._tokens = tuple(tokens)
        self._compat_open = compat_open

    @classmethod
    def of(cls, settings: GatewayServerSettings) -> Access:
        """The tokens of a configuration. Raises ConfigError, also for an address that is open."""
        tokens = []
        if settings.token is not None:
            secret = settings.token.get_secret_value()
            tokens.append(Token.of("token", _strong(secret, "token"), list(Scope)))
        if settings.tokens_file is not None:
            tokens += read_tokens(settings.tokens_file)
            if [token.name for token in tokens].count("token") > 1:
                # A session of the page knows its token by name.
                raise ConfigError(
                    f"{settings.tokens_file}: gateway-server.token has the name 'token' already; "
                    "give the one in the file another"
                )
        if not is_loopback(settings.host):
            if not tokens:
                raise ConfigError(
                    f"gateway-server.host {settings.host} can be reached from elsewhere, so it "
                    "needs tokens: set gateway-server.token or tokens-file, or listen on 127.0.0.1"
                )
            if settings.compat_auth == "none":
                raise ConfigError(
                    "gateway-server.compat-auth: none is for the loopback interface only, not for "
                    f"{settings.host}: use token, or listen on 127.0.0.1"
                )
        return cls(tokens, compat_open=settings.compat_auth == "none")

    @cached_property
    def is_open(self) -> bool:
        """Whether no token is asked for at all."""
        return not self._tokens

    @property
    def is_compat_open(self) -> bool:
        """Whether the earlier systems' paths ask for none."""
        return self.is_open or self._compat_open

    def identify(self, authorization: str | None) -> Token:
        """The token of an Authorization header. Raises Unauthorized.

        Every token is compared, each in constant time, so nothing tells how near a guess came.
        """
        if self.is_open:
            return EVERYTHING
        kind, _, secret = (authorization or "").partition(" ")
        if kind.lower() != "bearer" or not secret.strip():
            raise Unauthorized("send a token: Authorization: Bearer ...")
        found = self.by_secret(secret.strip())
        if found is None:
            raise Unauthorized("the token is not known here")
        return found

    def by_secret(self, secret: str) -> Token | None:
        """The token that a secret belongs to, if any."""
        digest, found = _digest(secret), None
        for token in self._tokens:
            if hmac.compare_digest(token.digest, digest):
                found = token
        return found

    def by_name(self, name: str) -> Token | None:
        """The token of a name, if any."""
        return next((token for token in self._tokens if token.name == name), None)


def is_loopback(host: str) -> bool:
    """Whether an address to listen on, or a client's, is of this machine alone."""
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
    """Whether a Host header calls this machine by a name that no page from elsewhere can have.

    Such a page can have its own name lead here (DNS rebinding). A browser always sends a header.
    """
    try:
        name = urlsplit(f"//{host}").hostname if host else None
    except ValueError:
        return False
    return name is None or is_loopback(name)


def read_tokens(path: Path) -> list[Token]:
    """The tokens of a YAML file. Raises ConfigError that names file, entry and cure."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}".splitlines()[0]) from None
    entries = content.get("tokens") if isinstance(content, Mapping) else None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path}: write a list, tokens: [{{name: ..., token: ...}}]")
    tokens = [_read_token(f"{path}: token {i}", entry) for i, entry in enumerate(entries, 1)]
    names = [token.name for token in tokens]
    if len(set(names)) < len(names):
        raise ConfigError(f"{path}: two tokens have one name; give each its own")
    return tokens


def _read_token(where: str, entry: Any) -> Token:
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where}: write name, token, scopes and topics")
    fields = {str(key).replace("_", "-"): value for key, value in entry.items()}
    unknown = fields.keys() - _KEYS
    if unknown:
        raise ConfigError(f"{where}: {min(unknown)!r} is no key; there are {sorted(_KEYS)}")
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: name is missing")
    where = f"{where} ({name})"
    secret = fields.get("token")
    if secret is None and "token-env" in fields:
        secret = os.environ.get(str(fields["token-env"]))
        if not secret:
            raise ConfigError(f"{where}: the environment has no {fields['token-env']}")
    if not isinstance(secret, str):
        raise ConfigError(f"{where}: token (text) or token-env is missing")
    scopes = _texts(where, "scopes", fields.get("scopes", [str(one) for one in Scope]))
    known = {str(one) for one in Scope}
    if not scopes or not set(scopes) <= known:
        raise ConfigError(f"{where}: scopes are some of {', '.join(sorted(known))}")
    topics = _texts(where, "topics", fields.get("topics", ["*"]))
    if not topics or not all(map(_TOPIC_PATTERN.match, topics)):
        raise ConfigError(f"{where}: topics are names or patterns such as 'orders.*'")
    return Token.of(name, _strong(secret, where), [Scope(one) for one in scopes], topics)


def _texts(where: str, key: str, value: Any) -> list[str]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"{where}: {key} is a list of texts")
    return items


def _strong(secret: str, where: str) -> str:
    if len(secret) < _SHORTEST:
        raise ConfigError(f"{where}: a token has at least {_SHORTEST} characters")
    if not secret.isascii() or any(one.isspace() for one in secret):
        raise ConfigError(f"{where}: a token has no spaces and only ASCII characters")
    return secret
