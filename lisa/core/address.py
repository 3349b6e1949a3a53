"""Where the server is.

`redis://`, `rediss://` (TLS), `unix://`, `redis+sentinel://host:port,host:port/service/db`,
`redis+cluster://host:port,host:port`; the last two also as `rediss+...`. Sentinels are spoken to by
TLS where the servers are; their own user stands in `?sentinel_username=...&sentinel_password=...`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from lisa.core.errors import ConfigError

if TYPE_CHECKING:
    from lisa.core.settings.sections import RedisSettings

__all__ = ["DEFAULT_URL", "Address"]

DEFAULT_URL = "redis://localhost:6379/0"
SOCKET_TIMEOUT_S = 5.0
SENTINEL_TIMEOUT_S = 1.0
_SENTINELS_OWN = ("username", "password")
_SCHEMES = ("redis", "rediss", "unix")
_PORTS = {"sentinel": 26379, "cluster": 6379}


@dataclass(frozen=True, slots=True)
class Address:
    """Where the server is. `options` are keyword arguments of redis-py (TLS files and the like)."""

    url: str = DEFAULT_URL
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    socket_timeout_s: float = SOCKET_TIMEOUT_S
    sentinel_username: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        scheme, _, kind = urlsplit(self.url).scheme.partition("+")
        if scheme not in _SCHEMES or (kind and (kind not in _PORTS or scheme == "unix")):
            raise ConfigError(
                f"{self.shown!r} is no address of a server: use redis://host:port/db, "
                "rediss://, unix://path, redis+sentinel://host:port/service or "
                "redis+cluster://host:port"
            )

    @classmethod
    def of(cls, server: str | Address) -> Address:
        """An address from itself or from its URL."""
        return server if isinstance(server, Address) else cls(server)

    @classmethod
    def from_settings(cls, settings: RedisSettings) -> Address:
        """The address that a role's configuration names."""
        tls = {
            "ssl_ca_certs": settings.tls_ca_file,
            "ssl_certfile": settings.tls_cert_file,
            "ssl_keyfile": settings.tls_key_file,
        }
        options: dict[str, Any] = {name: str(path) for name, path in tls.items() if path}
        if urlsplit(settings.url).scheme.startswith("rediss"):
            options["ssl_check_hostname"] = settings.tls_check_hostname
        timeout = settings.socket_timeout
        return cls(
            settings.url, settings.username,
            settings.password.get_secret_value() if settings.password else None,
            timeout.total_seconds() if timeout else SOCKET_TIMEOUT_S, settings.sentinel_username,
            settings.sentinel_password.get_secret_value() if settings.sentinel_password else None,
            options,
        )  # fmt: skip

    @property
    def kind(self) -> str:
        """'' for one server, else 'sentinel' or 'cluster'."""
        return urlsplit(self.url).scheme.partition("+")[2]

    @property
    def shown(self) -> str:
        """The address without its password, for logs and errors."""
        parts = urlsplit(self.url)
        place = parts.netloc.rpartition("@")[2]
        return f"{parts.scheme}://{place}{parts.path}"

    def blocking_for(self, seconds: float) -> Address:
        """The same for a connection that blocks: its time-out lies above the block."""
        return replace(self, socket_timeout_s=max(self.socket_timeout_s, seconds + 2.0))

    def keywords(self) -> dict[str, Any]:
        """redis-py's keyword arguments, credentials in the URL last."""
        given: dict[str, Any] = {
            "protocol": 2,
            "driver_info": None,  # two commands on each connection, and a right for them
            "socket_timeout": self.socket_timeout_s,
            "socket_connect_timeout": min(self.socket_timeout_s, SOCKET_TIMEOUT_S),
            **self.options,
        }
        if self.username:
            given["username"] = self.username
        if self.password:
            given["password"] = self.password
        return given

    def hosts(self) -> tuple[list[tuple[str, int]], list[str], dict[str, Any]]:
        """Host list, path parts and keyword arguments of a sentinel or cluster address."""
        parts = urlsplit(self.url)
        userinfo, _, places = parts.netloc.rpartition("@")
        hosts = []
        for place in places.split(","):
            host, _, port = place.rpartition(":") if ":" in place else (place, "", "")
            if not host or (port and not port.isdigit()):
                raise ConfigError(f"{self.shown!r}: {place!r} is not host:port")
            hosts.append((host.strip("[]"), int(port or _PORTS[self.kind])))
        keywords = self.keywords() | dict(parse_qsl(parts.query))
        user, _, password = userinfo.partition(":")
        if user:
            keywords["username"] = unquote(user)
        if password:
            keywords["password"] = unquote(password)
        if parts.scheme.startswith("rediss"):
            keywords["ssl"] = True
        return hosts, [part for part in parts.path.split("/") if part], keywords

    def service(self) -> tuple[list[tuple[str, int]], str, dict[str, Any]]:
        """Sentinels, the service's name and keyword arguments, its database among them."""
        hosts, path, keywords = self.hosts()
        for name in _SENTINELS_OWN:
            keywords.pop(f"sentinel_{name}", None)
        if not path:
            raise ConfigError(f"{self.shown!r} names no service: end it with /NAME, e.g. /mymaster")
        if len(path) > 1:
            keywords["db"] = int(path[1])
        return hosts, path[0], keywords

    def sentinel_keywords(self) -> dict[str, Any]:
        """redis-py's keyword arguments for the sentinels themselves."""
        _, _, keywords = self.hosts()
        own = {
            name: keywords.get(f"sentinel_{name}") or getattr(self, f"sentinel_{name}")
            for name in _SENTINELS_OWN
        }
        return {
            "protocol": 2, "driver_info": None, "socket_timeout": SENTINEL_TIMEOUT_S,
            **{name: value for name, value in keywords.items() if name.startswith("ssl")},
            **{name: value for name, value in own.items() if value},
        }  # fmt: skip
