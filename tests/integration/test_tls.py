"""Connections with TLS, on a real server with a certificate of its own."""

from __future__ import annotations

import asyncio
import os
import select
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from lisa import AsyncProducer, Producer
from lisa.core.redis.address import Address
from lisa.core.redis.clients import make_client
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from tests import certificates
from tests.certificates import Certificates
from tests.servers import redis_server, wait_until

pytestmark = pytest.mark.skipif(
    redis_server() is None,
    reason="the embedded Valkey has no TLS, and redis-server is not on PATH",
)
SENDS = 5


@pytest.fixture
def tls(tmp_path: Path) -> Certificates:
    return certificates.make(tmp_path)


@pytest.fixture
def url(tls: Certificates) -> Iterator[str]:
    port = free_port()
    options = ["--tls-port", str(port), *tls.server_options()]
    with EmbeddedServer(binary=redis_server(), extra=options):
        yield f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={quote(str(tls.authority))}"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[ssl.SSLContext]:
    """The TLS contexts that are made during the test."""
    contexts: list[ssl.SSLContext] = []
    make = ssl.create_default_context

    def counted(*arguments: Any, **keywords: Any) -> ssl.SSLContext:
        contexts.append(make(*arguments, **keywords))
        return contexts[-1]

    monkeypatch.setattr(ssl, "create_default_context", counted)
    return contexts


def send(url: str) -> None:
    """Send on a connection of its own."""
    with Producer(url) as producer:
        producer.send("t", "x")


async def send_in_tasks(url: str) -> None:
    """The same on the event loop, on several connections."""
    for _ in range(SENDS):
        async with AsyncProducer(url) as producer:
            await producer.send("t", "x")


def test_connections_share_a_context_until_a_file_changes(
    url: str, tls: Certificates, made: list[ssl.SSLContext]
) -> None:
    for _ in range(SENDS):
        send(url)
    assert len(made) == 1
    asyncio.run(send_in_tasks(url))
    assert len(made) <= 2, "asyncio's connections may have other defaults, but share them"
    before = len(made)
    changed = tls.authority.stat().st_mtime_ns + 1
    os.utime(tls.authority, ns=(changed, changed))
    send(url)
    assert len(made) == before + 1


def test_session_tickets_are_no_reply(url: str) -> None:
    """They arrive soon after the handshake, usually after the first command was sent."""
    connection = make_client(Address.of(url)).connection_pool.make_connection()
    connection.connect()
    wait_until(lambda: select.select([connection._sock], [], [], 0)[0])
    assert not connection.can_read()
    connection.send_command("PING")
    wait_until(connection.can_read)
    assert connection.can_read(), "what was read is kept"
    assert connection.read_response() == b"PONG"
    connection.disconnect()


def test_an_unknown_authority_is_refused(
    url: str, tls: Certificates, tmp_path: Path, made: list[ssl.SSLContext]
) -> None:
    send(url)
    other = certificates.make(tmp_path / "other").authority
    changed = url.replace(quote(str(tls.authority)), quote(str(other)))
    with Producer(changed, patience="200ms") as producer, pytest.raises(Exception, match="CERTIF"):
        producer.send("t", "x")
    assert len(made) == 2
