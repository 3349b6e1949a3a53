"""Requests whose end proxies and servers may see in different places are refused."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

import pytest

from tests.gateways import Gateway

HIDDEN = b"GET /hidden HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
BODY = b'{"body": 1}'
CHUNKED = b"b\r\n" + BODY + b"\r\n0\r\n\r\n"
AMBIGUOUS = {
    "a length and chunks": (b"Content-Length: 5\r\nTransfer-Encoding: chunked", CHUNKED),
    "chunks and a length": (b"Transfer-Encoding: chunked\r\nContent-Length: 5", CHUNKED),
    "two lengths": (b"Content-Length: 11\r\nContent-Length: 5", BODY),
    "a list of lengths": (b"Content-Length: 11, 5", BODY),
    "a signed length": (b"Content-Length: +11", BODY),
    "an unknown encoding": (b"Transfer-Encoding: xchunked", CHUNKED),
    "an encoding after chunks": (b"Transfer-Encoding: chunked, identity", CHUNKED),
    "a space before the colon": (b"Transfer-Encoding : chunked", CHUNKED),
    "a size in words": (b"Transfer-Encoding: chunked", b"0xb\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "a size beyond 64 bits": (b"Transfer-Encoding: chunked", b"1" * 17 + b"\r\n" + BODY),
    "a bare line feed in a header": (b"X: 1\nContent-Length: 11", BODY),
}


def answers(gateway: Gateway, sent: bytes) -> bytes:
    """All that the gateway answers until it closes the connection."""
    parts = urlsplit(gateway.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as one:
        one.sendall(sent)
        found = b""
        while more := one.recv(65_536):
            found += more
    return found


@pytest.mark.parametrize("framing", AMBIGUOUS)
def test_an_ambiguous_request_hides_no_other(gateway: Gateway, framing: str) -> None:
    headers, body = AMBIGUOUS[framing]
    start = b"POST /v1/topics/smuggled/messages HTTP/1.1\r\nHost: localhost\r\n"
    found = answers(gateway, start + headers + b"\r\n\r\n" + body + HIDDEN)
    assert b"/hidden" not in found
    assert found.count(b"HTTP/1.1 ") == 1
    assert found.startswith(b"HTTP/1.1 400 ")


def test_what_follows_a_clear_request_is_another(gateway: Gateway) -> None:
    start = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    found = answers(gateway, start + HIDDEN)
    assert found.count(b"HTTP/1.1 200 ") == 1
    assert found.count(b"HTTP/1.1 404 ") == 1
