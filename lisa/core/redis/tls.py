"""Shares TLS contexts between the connections of a process, and tells session tickets from replies.

redis-py creates a context for each connection, and reads the system's certificates each time: 27 ms
of CPU time, during which an event loop is blocked. A process that opens twenty connections after
a failover would exceed its timeouts.

After the handshake of TLS 1.3 servers send session tickets. On a connection that has not read a
reply yet, redis-py takes them for one, and closes the connection.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from ssl import SSLContext
from typing import Any

from redis._parsers import _HiredisParser
from redis.asyncio import connection as asyncio_connection
from redis.connection import SSLConnection

Context = asyncio_connection.RedisSSLContext

_FILES = ("keyfile", "certfile", "ca_certs", "ca_path")
_SETTINGS = tuple(name for name in Context.__slots__ if name != "context")
_contexts: dict[tuple[str, ...], tuple[tuple[int, ...], SSLContext]] = {}


def _shared(settings: Context) -> SSLContext:
    """The context for these settings; a new one if a file has changed, such as a certificate."""
    key = tuple(repr(getattr(settings, name)) for name in _SETTINGS)
    paths = [getattr(settings, name) for name in _FILES]
    changed = tuple(Path(path).stat().st_mtime_ns for path in paths if path)
    found = _contexts.get(key)
    if found is None or found[0] != changed:
        found = _contexts[key] = (changed, settings.get())
    return found[1]


def _wrap(connection: Any, sock: Any) -> Any:
    """Replaces `SSLConnection._wrap_socket_with_ssl`."""
    if connection.ssl_validate_ocsp or connection.ssl_validate_ocsp_stapled:
        return SSLConnection._wrap_socket_with_ssl(connection, sock)  # noqa: SLF001
    settings = Context(
        keyfile=connection.keyfile,
        certfile=connection.certfile,
        cert_reqs=connection.cert_reqs,
        include_verify_flags=connection.ssl_include_verify_flags,
        exclude_verify_flags=connection.ssl_exclude_verify_flags,
        ca_certs=connection.ca_certs,
        ca_data=connection.ca_data,
        ca_path=connection.ca_path,
        check_hostname=connection.check_hostname,
        min_version=connection.ssl_min_version,
        ciphers=connection.ssl_ciphers,
        password=connection.certificate_password,
    )
    return _shared(settings).wrap_socket(sock, server_hostname=connection.host)


def _can_read(connection: Any, timeout: float = 0) -> bool:
    """Replaces `SSLConnection.can_read`, which only sees that the socket received something."""
    if not SSLConnection.can_read(connection, timeout):
        return False
    parser = connection._parser  # noqa: SLF001
    if not isinstance(parser, _HiredisParser) or parser._reader.has_data():  # noqa: SLF001
        return True
    return bool(parser.read_from_socket(timeout=0, raise_on_timeout=False))  # keeps what it reads


def _arguments(connection: Any) -> Any:
    """Replaces `_connection_arguments` of asyncio's SSLConnection."""
    connection.ssl_context.context = _shared(connection.ssl_context)
    return asyncio_connection.SSLConnection._connection_arguments(connection)  # noqa: SLF001


@cache
def _sharing(kind: type) -> type:
    """A subclass of a connection class that shares its TLS contexts; `kind` itself without TLS."""
    if issubclass(kind, SSLConnection):
        replaced = {"_wrap_socket_with_ssl": _wrap, "can_read": _can_read}
        return type(kind.__name__, (kind,), replaced)
    if issubclass(kind, asyncio_connection.SSLConnection):
        return type(kind.__name__, (kind,), {"_connection_arguments": _arguments})
    return kind


def share_contexts(client: Any) -> Any:
    """Make a client's connections share their TLS contexts. Call this before it connects."""
    pool = client.connection_pool
    pool.connection_class = _sharing(pool.connection_class)
    return client
