"""Server addresses.

`redis://`, `rediss://` (TLS), `unix://`, `redis+sentinel://host:port,host:port/service/db`,
`redis+cluster://host:port,host:port`; the last two also as `rediss+...`. With `rediss+sentinel`,
connections to the sentinels use TLS, too. Credentials for the sentinels are given as
`?sentinel_username=...&sentinel_password=...`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from ssl import TLSVersion
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import parse_qsl, urlencode

from redis.connection import URL_QUERY_ARGUMENT_PARSERS

from lisa.core.model.addresses import ServerUrl
from lisa.core.model.errors import ConfigError

if TYPE_CHECKING:
    from datetime import timedelta
    from pathlib import Path

    from pydantic import SecretStr

    class AddressSettings(Protocol):
        """The settings section that configures a server."""

        url: str
        username: str | None
        password: SecretStr | None
        sentinel_username: str | None
        sentinel_password: SecretStr | None
        socket_timeout: timedelta | None
        tls_ca_file: Path | None
        tls_cert_file: Path | None
        tls_key_file: Path | None
        tls_check_hostname: bool


DEFAULT_URL = "redis://localhost:6379/0"
SOCKET_TIMEOUT_S = 5.0
SENTINEL_TIMEOUT_S = 1.0
SHORTEST_REPLY_S = 0.5
"""Minimum socket timeout, even if a caller's patience is shorter."""
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""In seconds, and probes: firewalls forget idle connections after minutes."""
NO_LIMIT = 2**31
"""The most connections of a client whose callers are threads, or block; redis-py's default, which
applies to the calls of tasks, is 100."""
_SENTINEL_CREDENTIALS = ("username", "password")


MOST_S = 2_147_483
"""The longest timeout; Python's sockets count milliseconds in 32 bits."""


def _seconds(text: str) -> float:
    """A timeout. Raises ValueError."""
    found = float(text)
    if not 0 < found <= MOST_S:
        raise ValueError
    return found


def _integer(least: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        found = int(text)
        if found < least:
            raise ValueError
        return found

    return parse


def _one_of(*allowed: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in allowed:
            raise ValueError
        return text

    return parse


_TEXT = (
    "client_name",
    "lib_name",
    "lib_version",
    "password",
    "sentinel_password",
    "sentinel_username",
    "ssl_ca_certs",
    "ssl_ca_data",
    "ssl_ca_path",
    "ssl_certfile",
    "ssl_ciphers",
    "ssl_keyfile",
    "ssl_ocsp_expected_cert",
    "ssl_password",
    "ssl_validate_ocsp",
    "ssl_validate_ocsp_stapled",
    "username",
)
_AS_IN_REDIS_PY = (
    "legacy_responses",
    "retry_on_timeout",
    "socket_keepalive",
    "ssl_check_hostname",
    "ssl_exclude_verify_flags",
    "ssl_include_verify_flags",
)
_of_redis_py: Mapping[str, Any] = URL_QUERY_ARGUMENT_PARSERS

_PARSERS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(_TEXT, str),
    **{name: _of_redis_py[name] for name in _AS_IN_REDIS_PY},
    "db": _integer(0),
    "encoding": _one_of("utf-8"),  # keys and scripts have no other
    "health_check_interval": _integer(0),
    "max_connections": _integer(1),
    "protocol": lambda text: int(_one_of("2", "3")(text)),
    "socket_connect_timeout": _seconds,
    "socket_read_size": _integer(1),
    "ssl_cert_reqs": _one_of("none", "optional", "required"),
    "ssl_min_version": lambda text: TLSVersion(int(text)),
}
"""Options of redis-py that the query of an address may contain, each with its parser, which raises
ValueError. redis-py checks few of them, and reports mistakes when it connects.
"""


def chosen_url(url: str | None) -> str:
    """The given URL; else that of LISA_REDIS_URL; else localhost. Every role uses this rule."""
    if url is not None:
        return url
    found = (os.environ.get(name, "").strip() for name in ("LISA_REDIS_URL", "LISA_REDIS__URL"))
    return next(filter(None, found), DEFAULT_URL)


@dataclass(frozen=True, slots=True)
class Address:
    """A server address. `options` are keyword arguments of redis-py (such as TLS files)."""

    url: str = field(default=DEFAULT_URL, repr=False)
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    socket_timeout_s: float = SOCKET_TIMEOUT_S
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    parts: ServerUrl = field(init=False, compare=False)

    def __post_init__(self) -> None:
        self._set(ServerUrl.parse(self.url))
        self._adopt_socket_timeout()
        self._query_options()

    def _set(self, parts: ServerUrl) -> None:
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "url", str(parts))

    def _adopt_socket_timeout(self) -> None:
        """Move `socket_timeout` from the URL to its field, which blocking reads may exceed."""
        query = parse_qsl(self.parts.query, keep_blank_values=True)
        given = [value for name, value in query if name == "socket_timeout"]
        if not given:
            return
        try:
            timeout_s = _seconds(given[-1])
        except ValueError:
            raise ConfigError(
                f"{self.shown!r}: socket_timeout={given[-1]!r} is not a number of seconds above 0"
            ) from None
        rest = urlencode([pair for pair in query if pair[0] != "socket_timeout"])
        self._set(replace(self.parts, query=rest))
        object.__setattr__(self, "socket_timeout_s", timeout_s)

    def _query_options(self) -> dict[str, Any]:
        """redis-py's keyword arguments in the URL's query. Raises ConfigError."""
        found: dict[str, Any] = {}
        if not self.parts.query:
            return found
        for name, value in parse_qsl(self.parts.query, keep_blank_values=True):
            if name not in _PARSERS:
                raise ConfigError(f"{self.shown!r}: unknown option {name!r}")
            if name in found or (name == "db" and self.parts.database):
                raise ConfigError(f"{self.shown!r}: {name} is given twice; remove one")
            if name.startswith("ssl_") and not self.parts.has_tls:
                raise ConfigError(f"{self.shown!r}: the option {name!r} needs rediss://")
            if name.startswith("sentinel_") and self.kind != "sentinel":
                raise ConfigError(f"{self.shown!r}: the option {name!r} needs redis+sentinel://")
            try:
                found[name] = _PARSERS[name](value)
            except ValueError:
                raise ConfigError(f"{self.shown!r}: {name}={value!r} is not allowed") from None
        return found

    @classmethod
    def of(cls, server: str | Address | None) -> Address:
        """Return an address, or parse a URL; None means LISA_REDIS_URL, or else localhost.

        Raises ConfigError.
        """
        return server if isinstance(server, Address) else cls(chosen_url(server))

    @classmethod
    def from_settings(cls, settings: AddressSettings) -> Address:
        """Create an address from a role's settings."""
        tls = {
            "ssl_ca_certs": settings.tls_ca_file,
            "ssl_certfile": settings.tls_cert_file,
            "ssl_keyfile": settings.tls_key_file,
        }
        options: dict[str, Any] = {name: str(path) for name, path in tls.items() if path}
        if ServerUrl.parse(settings.url).has_tls:
            options["ssl_check_hostname"] = settings.tls_check_hostname
        timeout = settings.socket_timeout
        return cls(
            settings.url,
            settings.username,
            settings.password.get_secret_value() if settings.password else None,
            timeout.total_seconds() if timeout else SOCKET_TIMEOUT_S,
            settings.sentinel_username,
            settings.sentinel_password.get_secret_value() if settings.sentinel_password else None,
            options,
        )

    @property
    def kind(self) -> str:
        """'' for one server, else 'sentinel' or 'cluster'."""
        return self.parts.kind

    @property
    def identity(self) -> tuple[object, ...]:
        """Address, credentials and options: equal for connections that can share a topology."""
        options = sorted(
            (name, repr(value))
            for name, value in self.options.items()
            if name not in {"redis_connect_func", "max_connections"}
        )
        return (
            self.url,
            self.username,
            self.password,
            self.sentinel_username,
            self.sentinel_password,
            *options,
        )

    @property
    def shown(self) -> str:
        """The address without credentials, for logs and errors."""
        return self.parts.shown

    def blocking_for(self, seconds: float) -> Address:
        """A copy for calls that block, each on its own connection, for up to `seconds`."""
        timeout_s = max(self.socket_timeout_s, seconds + 2.0)
        options = {"max_connections": NO_LIMIT, **self.options}
        return replace(self, socket_timeout_s=timeout_s, options=options)

    def answering_within(self, patience_s: float) -> Address:
        """A copy for calls that are repeated for `patience_s`, on another connection if one fails.

        One connection that a firewall dropped silently takes at most half of that time.
        """
        within_s = min(self.socket_timeout_s, max(patience_s / 2, SHORTEST_REPLY_S))
        return replace(self, socket_timeout_s=within_s)

    def keywords(self) -> dict[str, Any]:
        """Keyword arguments for redis-py; for a single server, besides its URL as `shown`."""
        given: dict[str, Any] = {
            "protocol": 2,
            "driver_info": None,  # avoids two commands per connection and their permission
            "socket_timeout": self.socket_timeout_s,
            "socket_connect_timeout": min(self.socket_timeout_s, SOCKET_TIMEOUT_S),
            **self._keepalive(),
            **self.options,
            **({"username": self.username} if self.username else {}),
            **({"password": self.password} if self.password else {}),
            **self._query_options(),
            **({"username": self.parts.user} if self.parts.user else {}),
            **({"password": self.parts.password} if self.parts.password else {}),
        }
        if self.kind and self.parts.has_tls:
            given["ssl"] = True
        return given

    def _keepalive(self) -> dict[str, Any]:
        if self.parts.scheme == "unix":
            return {}
        known = {getattr(socket, name): n for name, n in KEEPALIVE.items() if hasattr(socket, name)}
        return {"socket_keepalive": True, "socket_keepalive_options": known}

    def node(self, name: str) -> Address:
        """The address of one node of this cluster; `name` is its host:port."""
        return replace(self, url=str(self.parts.of_node(name)))

    def service(self) -> tuple[list[tuple[str, int]], str, dict[str, Any]]:
        """Sentinels, service name, and keyword arguments including the database."""
        keywords = self.keywords()
        for credential in _SENTINEL_CREDENTIALS:
            keywords.pop(f"sentinel_{credential}", None)
        if self.parts.database:
            keywords["db"] = int(self.parts.database)
        return self.parts.nodes, self.parts.segments[0], keywords

    def sentinel_keywords(self) -> dict[str, Any]:
        """Keyword arguments for redis-py's connections to the sentinels."""
        keywords = self.keywords()
        own = {
            name: keywords.get(f"sentinel_{name}") or getattr(self, f"sentinel_{name}")
            for name in _SENTINEL_CREDENTIALS
        }
        return {
            "protocol": 2,
            "driver_info": None,
            "socket_timeout": SENTINEL_TIMEOUT_S,
            **{name: value for name, value in keywords.items() if name.startswith("ssl")},
            **{name: value for name, value in own.items() if value},
        }
