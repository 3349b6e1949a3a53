"""The options of redis-py that the query of a server address may contain, and their values.

redis-py checks few of them, and reports mistakes when it connects, as a TypeError or ValueError.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ssl import TLSVersion
from typing import Any

from redis.connection import URL_QUERY_ARGUMENT_PARSERS

MOST_S = 2_147_483
"""The longest timeout; Python's sockets count milliseconds in 32 bits."""


def seconds(text: str) -> float:
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

PARSERS: Mapping[str, Callable[[str], Any]] = {
    **dict.fromkeys(_TEXT, str),
    **{name: _of_redis_py[name] for name in _AS_IN_REDIS_PY},
    "db": _integer(0),
    "encoding": _one_of("utf-8"),  # keys and scripts have no other
    "health_check_interval": _integer(0),
    "max_connections": _integer(1),
    "protocol": lambda text: int(_one_of("2", "3")(text)),
    "socket_connect_timeout": seconds,
    "socket_read_size": _integer(1),
    "ssl_cert_reqs": _one_of("none", "optional", "required"),
    "ssl_min_version": lambda text: TLSVersion(int(text)),
}
"""Name of an option -> the parser of its value, which raises ValueError."""
