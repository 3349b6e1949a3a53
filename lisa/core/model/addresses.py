"""Checks addresses, for settings and for programs: URLs of servers, and where to listen."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from lisa.core.model.errors import ConfigError

PORTS = {"": 6379, "sentinel": 26379, "cluster": 6379}
"""The kinds of servers, `redis+KIND://`, and their default ports."""

HOST_AND_PORT = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+))(?::([0-9]+)?)?")
KUBERNETES_VARIABLE = r".*(SERVICE_HOST|SERVICE_PORT(_\w+)?|_PORT(_\d+_(TCP|UDP)(_\w+)?)?)"
"""Variables that Kubernetes sets in every container if a service is called lisa-something."""

_SCHEMES = ("redis", "rediss", "unix")
_WITHOUT_SCHEME = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^\s:/@?#]+)(:[0-9]+)?(/[0-9]*)?")


def check_server_url(url: str) -> None:
    """Raise ConfigError unless the text is the URL of a server, with valid ports and database."""
    if not isinstance(url, str):
        raise _unknown(url)
    shown = shown_url(url)
    bare = url.rpartition("@")[2]
    if "://" not in url and _WITHOUT_SCHEME.fullmatch(bare):
        raise ConfigError(f"{bare!r} is missing redis://; write redis://{bare}")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _unknown(shown) from None
    scheme, plus, kind = parts.scheme.partition("+")
    is_known = scheme in _SCHEMES and bool(kind) == bool(plus) and kind in PORTS
    if not is_known or (kind and scheme == "unix"):
        raise _unknown(shown)
    if scheme != "unix":
        _check_ports(shown, parts.netloc.rpartition("@")[2], kind)
        _check_database(shown, parts.path, kind)


def listen_address(value: object) -> str:
    """HOST:PORT to listen on; a port alone means 127.0.0.1. Raises ConfigError."""
    text = str(value).strip() if isinstance(value, (int, str)) else ""
    host, colon, port = text.rpartition(":")
    if not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65_535 or bool(host) != bool(colon):
        raise ConfigError(
            f"not an address: {value!r}; write HOST:PORT, as in 127.0.0.1:8088, or a port"
        )
    return f"{host or '127.0.0.1'}:{port}"


def shown_url(url: str) -> str:
    """The URL without credentials, for logs and errors."""
    try:
        parts = urlsplit(url)
    except ValueError:  # a URL that is refused
        parts = None
    if parts is None or not parts.netloc:
        scheme, mark, rest = url.rpartition("://")
        return f"{scheme}{mark}{rest.rpartition('@')[2].partition('?')[0]}"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _unknown(shown: str) -> ConfigError:
    return ConfigError(
        f"{shown!r} is not a server address: use redis://host:port/db, rediss://, unix://path, "
        "redis+sentinel://host:port/service or redis+cluster://host:port"
    )


def _check_ports(shown: str, netloc: str, kind: str) -> None:
    for entry in (
        netloc.split(",")
        if kind
        else [netloc if netloc[:1] not in ("", ":") else f"localhost{netloc}"]
    ):
        found = HOST_AND_PORT.fullmatch(entry)
        if found is None:
            raise ConfigError(f"{shown!r}: {entry!r} is not host:port")
        if int(found[3] or 0) > 65_535:
            raise ConfigError(f"{shown!r}: the port {found[3]} is not a number from 0 to 65535")
        try:
            (found[2] or "").encode("idna")  # as the resolver does
        except UnicodeError:
            raise ConfigError(f"{shown!r}: {found[2]!r} is not the name of a host") from None


def _check_database(shown: str, path: str, kind: str) -> None:
    segments = [part for part in path.split("/") if part]
    if kind == "sentinel":
        segments = segments[1:]
    if not segments:
        return
    if len(segments) > 1 or not re.fullmatch(r"[0-9]{1,9}", segments[0]):
        found = "/".join(segments)
        raise ConfigError(f"{shown!r}: {found!r} is not the number of a database, such as 0")
    if kind == "cluster" and int(segments[0]):
        raise ConfigError(f"{shown!r}: a cluster has only database 0, not {segments[0]}")
