"""Checks addresses, for settings and for programs: URLs of servers, and where to listen."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Self
from urllib.parse import quote, unquote

from lisa.core.model.errors import ConfigError

PORTS = {"": 6379, "sentinel": 26379, "cluster": 6379}
"""The kinds of servers, `redis+KIND://`, and their default ports."""

KUBERNETES_VARIABLE = r".*(SERVICE_HOST|SERVICE_PORT(_\w+)?|_PORT(_\d+_(TCP|UDP)(_\w+)?)?)"
"""Variables that Kubernetes sets in every container if a service is called lisa-something."""

_SCHEMES = ("redis", "rediss", "unix")
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/?#]*)([^?#]*)(?:\?([^#]*))?(#.*)?", re.DOTALL)
_WITHOUT_SCHEME = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@?#]+)(:[0-9]+)?(/[0-9]*)?")
_HOST_AND_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]]*))(?::(.*))?", re.DOTALL)
_USER_INFO = "!$&'()*+,;=-._~"
"""Characters that need no percent-encoding in a user and a password."""


@dataclass(frozen=True, slots=True)
class ServerUrl:
    """The parts of a server's URL. The only parser of such URLs; `str` gives the URL again.

    urllib is not used: it takes the text after `#` or `/` in a password for something else, and
    newer versions refuse several hosts of which one is an IPv6 address.
    """

    scheme: str
    kind: str
    user: str = field(repr=False)
    password: str = field(repr=False)
    hosts: str
    path: str
    query: str = field(repr=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Check a URL, except for its options. Raises ConfigError, without user or password."""
        if not isinstance(text, str):
            raise _unknown(f"a {type(text).__name__}")  # not its text, which may have a password
        return cls(*_parsed(text.strip()))

    @property
    def shown(self) -> str:
        """The URL without credentials and options, for logs and errors."""
        kind = f"+{self.kind}" if self.kind else ""
        return f"{self.scheme}{kind}://{self.hosts}{self.path}"

    @property
    def has_tls(self) -> bool:
        """Whether connections use TLS."""
        return self.scheme == "rediss"

    @property
    def has_password(self) -> bool:
        """Whether the URL, or an option of it, has a password."""
        return bool(self.password) or "password=" in self.query

    def __str__(self) -> str:
        user, password = (quote(part, safe=_USER_INFO) for part in (self.user, self.password))
        given = f"{user}:{password}@" if password else f"{user}@" if user else ""
        scheme, _, rest = self.shown.partition("://")
        return f"{scheme}://{given}{rest}" + (f"?{self.query}" if self.query else "")

    @property
    def nodes(self) -> list[tuple[str, int]]:
        """Host and port of each server; a single server's host may be omitted."""
        return [_host_and_port(entry, self) for entry in self.hosts.split(",")]

    @property
    def segments(self) -> list[str]:
        """The parts of the path: the service, for sentinels, and the database."""
        return [part for part in self.path.split("/") if part]

    @property
    def database(self) -> str:
        """The number of the database in the path; empty if there is none."""
        before = 1 if self.kind == "sentinel" else 0
        return "" if self.scheme == "unix" else "/".join(self.segments[before:])

    def of_node(self, name: str) -> Self:
        """The URL of one node of this cluster; `name` is its host:port."""
        host, _, port = name.rpartition(":")
        return replace(self, kind="", hosts=f"[{host}]:{port}" if ":" in host else name, path="/0")


@lru_cache(maxsize=64)
def _parsed(text: str) -> tuple[str, ...]:
    found = _URL.fullmatch(text)
    if found is None:
        bare = text.rpartition("@")[2]
        if _WITHOUT_SCHEME.fullmatch(bare):
            raise ConfigError(f"{bare!r} is missing redis://; write redis://{bare}")
        raise _unknown(repr(text) if text.isidentifier() else "this text")
    scheme, plus, kind = found[1].lower().partition("+")
    userinfo, _, hosts = found[2].rpartition("@")
    path, query, fragment = found[3], found[4] or "", found[5]
    is_unix = scheme == "unix"
    if is_unix and (hosts or not path.strip("/")):
        raise ConfigError("unix:// is followed by a path from the root: unix:///run/redis.sock")
    if fragment or "@" in query or ("@" in path and not is_unix):
        raise ConfigError(
            f"an address that begins with {found[1]}:// has @, /, ? or # in the wrong place: "
            "percent-encode the password (@ as %40, / as %2F, ? as %3F, # as %23)"
        )
    is_known = scheme in _SCHEMES and bool(kind) == bool(plus) and kind in PORTS
    if not is_known or (kind and is_unix):
        raise _unknown(f"'{found[1]}://...'")
    user, _, password = userinfo.partition(":")
    parts = (scheme, kind, unquote(user), unquote(password), hosts, path, query)
    url = ServerUrl(*parts)
    if not is_unix:
        _check_hosts(url)
        _check_path(url)
    return parts


def listen_address(value: object) -> str:
    """HOST:PORT to listen on; a port alone means 127.0.0.1. Raises ConfigError."""
    is_text = isinstance(value, (int, str)) and not isinstance(value, bool)
    text = str(value).strip() if is_text else ""
    host, colon, port = text.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65_535 or bool(host) != bool(colon):
        raise ConfigError(
            f"not an address: {value!r}; write HOST:PORT, as in 127.0.0.1:8088, or a port"
        )
    return f"{host or '127.0.0.1'}:{port}"


def _unknown(shown: str) -> ConfigError:
    return ConfigError(
        f"{shown} is not a server address: use redis://host:port/db, rediss://, unix:///path, "
        "redis+sentinel://host:port/service or redis+cluster://host:port"
    )


def _host_and_port(entry: str, url: ServerUrl) -> tuple[str, int]:
    """One host of a URL. Raises ConfigError, which shows no port: it may be a password."""
    found = _HOST_AND_PORT.fullmatch(entry)
    host = found and (found[1] or found[2] or ("" if url.kind else "localhost"))
    if not found or not host:
        raise ConfigError(f"an address that begins with {_begin(url)} lacks host:port")
    port = found[3] or str(PORTS[url.kind])
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65_535:
        raise ConfigError(
            f"{_begin(url)}: the port of {host!r} is not a number from 1 to 65535 (IPv6 addresses "
            "are written in brackets)"
        )
    return host, int(port)


def _begin(url: ServerUrl) -> str:
    return f"{url.shown.partition('://')[0]}://"


def _check_hosts(url: ServerUrl) -> None:
    if not url.kind and "," in url.hosts:
        raise ConfigError(
            f"several hosts need redis+sentinel:// or redis+cluster://, not {_begin(url)}"
        )
    for host, _ in url.nodes:
        try:
            host.encode("idna")  # as the resolver does
        except UnicodeError:
            raise ConfigError(f"{url.shown!r}: {host!r} is not the name of a host") from None


def _check_path(url: ServerUrl) -> None:
    if url.kind == "sentinel" and not url.segments:
        raise ConfigError(f"{url.shown!r} names no service: end it with /NAME, e.g. /mymaster")
    found = url.database
    if found and not re.fullmatch(r"[0-9]{1,9}", found):
        raise ConfigError(f"{url.shown!r}: {found!r} is not the number of a database, such as 0")
    if url.kind == "cluster" and int(found or 0):
        raise ConfigError(f"{url.shown!r}: a cluster has only database 0, not {found}")
