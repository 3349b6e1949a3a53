"""Limits on the size, duration and number of requests, and behaviour in an outage."""

import os
import re
import resource
import select
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from lisa import Manager
from lisa.embedded import EmbeddedServer
from tests.exposition import Exposed
from tests.gateway.native_client import pull, send, settle
from tests.gateways import NO_TLS, Gateway, declared_topic, new_topic
from tests.servers import PATIENCE, wait_until

REQUEST_TIMEOUT_S = 0.5


@pytest.fixture(scope="module")
def narrow(redis_url: str, manager: Manager) -> Iterator[Gateway]:
    limits = {"MAX_BODY_BYTES": "10000", "REQUEST_TIMEOUT": "500ms"}
    env = {f"LISA_GATEWAY_SERVER__{name}": value for name, value in limits.items()}
    with Gateway(redis_url, env=env) as running:
        yield running


def raw(gateway: Gateway, source: str = "127.0.0.1") -> socket.socket:
    """A connection from the loopback address `source`."""
    parts = urlsplit(gateway.url)
    address = (parts.hostname or "", parts.port or 0)
    connection = socket.create_connection(address, source_address=(source, 0))
    connection.settimeout(PATIENCE.total_seconds())
    return connection


def status_of(connection: socket.socket, most: int = 65_536) -> int:
    """The status of a response; reads at most `most` bytes at once."""
    answer = b""
    while len(answer) < 12:
        more = connection.recv(most)
        assert more, "the connection was closed without an answer"
        answer += more
    return int(answer[9:12])


def head(gateway: Gateway, length: str) -> bytes:
    host = urlsplit(gateway.url).netloc
    return (
        f"POST /v1/topics/t/messages HTTP/1.1\r\nHost: {host}\r\n"
        f"Content-Type: application/json\r\n{length}\r\n\r\n"
    ).encode()


def test_a_request_that_is_too_large_is_rejected(narrow: Gateway) -> None:
    """By Content-Length without reading the body; without it, by the bytes received.

    The rest of the body is awaited for a limited time.
    """
    with raw(narrow) as connection:
        begun = time.monotonic()
        connection.sendall(head(narrow, "Content-Length: 999999999"))
        assert status_of(connection) == 413
        rest_of(connection)
        assert time.monotonic() - begun >= REQUEST_TIMEOUT_S
    with raw(narrow) as connection:
        connection.sendall(head(narrow, "Transfer-Encoding: chunked"))
        for _ in range(3):
            connection.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        assert status_of(connection) == 413
    path, body = f"/v1/topics/{new_topic()}/messages", {"body": "x" * 9_000}
    assert narrow.client.post(path, json=body).status_code == 201


@pytest.mark.parametrize("length", ["Content-Length: 20000000", "Transfer-Encoding: chunked"])
@pytest.mark.parametrize("more", ["", "\r\nConnection: close"])
def test_a_client_that_sends_before_it_reads_gets_the_rejection(
    gateway: Gateway, length: str, more: str
) -> None:
    body = b"x" * 20_000_000
    if "chunked" in length:
        body = b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)
    with raw(gateway) as connection:
        connection.sendall(head(gateway, length + more) + body)
        assert status_of(connection) == 413
        rest_of(connection)


def test_a_request_that_arrives_too_slowly_is_rejected(narrow: Gateway) -> None:
    """A connection without a request is closed; an endless head is cut off."""
    with raw(narrow) as connection:
        begun = time.monotonic()
        connection.sendall(head(narrow, "Content-Length: 100") + b'{"body"')
        assert status_of(connection) == 408
        assert time.monotonic() - begun >= REQUEST_TIMEOUT_S
    with raw(narrow) as connection:
        assert rest_of(connection) == b""
    with raw(narrow) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nX-Long: ")
        with suppress(OSError):
            for _ in range(100):
                connection.sendall(b"x" * 65_536)
        said = rest_of(connection)
    assert not said or said.startswith(b"HTTP/1.1 431 ")  # a reset may discard it


def test_what_arrives_and_what_is_not_read_counts_as_buffered(
    redis_url: str, manager: Manager
) -> None:
    """Partial bodies, and responses to pulls, which may exceed the limit. Health checks pass.

    One client takes half.
    """
    env = {"LISA_GATEWAY_SERVER__MAX_BUFFERED_BYTES": "1048576"}
    with Gateway(redis_url, env=env) as gateway, ExitStack() as stack:
        client, topic = gateway.client, declared_topic(gateway.client)
        partial_body = head(gateway, "Content-Length: 300001") + b"x" * 300_000
        crowd(gateway, stack, partial_body, 1, "127.0.0.3")
        wait_until(lambda: gauge(gateway, "buffered_bytes") == 300_000)
        whole_body = b'{"body":"%s"}' % (b"x" * 120_000)  # counts four times
        whole = head(gateway, f"Content-Length: {len(whole_body)}") + whole_body
        assert asked(gateway, whole, "127.0.0.3") == 503
        assert asked(gateway, whole, "127.0.0.2") == 201
        for source in ("127.0.0.4", "127.0.0.5"):
            crowd(gateway, stack, partial_body, 1, source)
        wait_until(lambda: gauge(gateway, "buffered_bytes") >= 900_000)
        path, body = f"/v1/topics/{topic}/messages", {"body": "x" * 300_000}
        assert client.post(path, json=body).status_code == 503
        assert client.post(path, json={"body": "x"}).status_code == 201
        stack.close()
        wait_until(lambda: gauge(gateway, "buffered_bytes") == 0)
        for _ in range(13):
            assert client.post(path, json={"body": "x" * 1_000_000}).status_code == 201
        wait_until(lambda: client.get(f"/v1/topics/{topic}").json()["ready"] == 14)
        connection = stack.enter_context(raw(gateway))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        pull = head(gateway, "Content-Length: 11").replace(b"/messages ", b"/pull ")
        connection.sendall(pull.replace(b"/t/", f"/{topic}/".encode()) + b'{"max": 14}')
        wait_until(lambda: client.get("/v1/topics").status_code == 503)
        assert client.get("/healthz").status_code == 200


@pytest.mark.full
def test_responses_that_wait_for_their_clients_count_as_buffered(redis_url: str) -> None:
    """Until they are written. Beyond the limit, the gateway refuses large responses only."""
    limit, path = 16 * 2**20, f"/v1/topics/{new_topic()}/messages"
    limits = {"MAX_BUFFERED_BYTES": str(limit), "CLIENT_SHARE": "1"}
    env = {f"LISA_GATEWAY_SERVER__{name}": limits[name] for name in limits}
    with Gateway(redis_url, env=env) as gateway, ExitStack() as stack:

        def refused() -> float:
            page = Exposed(gateway.client.get("/metrics").text)
            return page.total("lisa_gateway_refused_total", reason="bytes")

        def waits_or_refuses(readers: int) -> bool:
            return gauge(gateway, "requests_stalled") == readers or refused() > 0

        large = {"id": "large", "body": "x" * 1_000_000, "delay_ms": 3_600_000}
        assert gateway.client.post(path, json=large).status_code == 201
        assert len(gateway.client.get(f"{path}/large").content) > 1_000_000
        one = f"GET {path}/large HTTP/1.1\r\nHost: localhost\r\n\r\n"
        for number in range(1, 41):  # the kernel takes some responses of each
            stack.enter_context(raw(gateway)).sendall(one.encode() * 10)
            wait_until(partial(waits_or_refuses, number))
        assert limit / 2 < gauge(gateway, "buffered_bytes") <= limit
        # The connections' next responses are refused as well, which leaves room for a moment.
        wait_until(lambda: gateway.client.get(f"{path}/large").status_code == 503)
        assert gateway.client.get("/v1/topics").status_code == 200
        stack.close()
        wait_until(lambda: gauge(gateway, "buffered_bytes") == 0)
        assert gateway.client.get(f"{path}/large").status_code == 200


@pytest.mark.full
def test_while_redis_hangs_memory_and_waiting_are_bounded() -> None:
    """Each call of the script carries one of these bodies, and fails after `patience`."""
    sends, limit, patience_s = 80, 32 * 2**20, 1
    body = {"body": "x" * 1_000_000}
    limits = {
        "MAX_BUFFERED_BYTES": str(limit),
        "CLIENT_SHARE": "1",
        "PATIENCE": f"{patience_s}s",
    }
    with (
        EmbeddedServer() as server,
        Gateway(
            server.url, env={f"LISA_GATEWAY_SERVER__{name}": limits[name] for name in limits}
        ) as gateway,
        ThreadPoolExecutor(sends) as threads,
    ):
        path, status = f"/v1/topics/{new_topic()}/messages", f"/proc/{gateway.process.pid}/status"

        def most_memory() -> int:
            """The most memory that the gateway's process has used, in bytes."""
            text = Path(status).read_text(encoding="ascii")
            (kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE)
            return int(kib) * 1024

        assert gateway.client.post(path, json=body).status_code == 201
        before, began = most_memory(), time.monotonic()
        os.kill(server.pid, signal.SIGSTOP)
        try:
            found = list(threads.map(lambda _: gateway.client.post(path, json=body), range(sends)))
        finally:
            os.kill(server.pid, signal.SIGCONT)
        assert {answer.status_code for answer in found} == {503}
        reasons = [answer.json()["type"].rpartition(":")[2] for answer in found]
        assert set(reasons) == {"crowded", "server-unavailable"}
        # None waited for the calls before its own.
        assert time.monotonic() - began < reasons.count("server-unavailable") * patience_s
        assert most_memory() - before < 2 * limit
        assert 1 <= len([line for line in gateway.said if "Redis is unavailable" in line]) <= 3
        wait_until(lambda: gateway.client.post(path, json={"body": 2}).status_code == 201)


def gauge(gateway: Gateway, name: str) -> float:
    page = Exposed(gateway.client.get("/metrics").text)
    return page.value(f"lisa_gateway_{name}") or 0.0


def rest_of(connection: socket.socket) -> bytes:
    """The data received until the gateway closes the connection."""
    said = b""
    with suppress(ConnectionResetError):
        while more := connection.recv(65_536):
            said += more
    return said


@pytest.mark.parametrize("first", [b"", b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_a_slow_request_head_is_rejected(narrow: Gateway, first: bytes) -> None:
    """Also that of a second request on a connection after a valid one."""
    with raw(narrow) as connection:
        connection.sendall(first)
        answer = b""
        while first and not answer.endswith(b"}\n"):
            answer += connection.recv(65_536)
        connection.sendall(b"GET /")
        connection.settimeout(0.02)
        said = b""
        while not said:
            connection.sendall(b"a")
            with suppress(TimeoutError):
                said = connection.recv(65_536)
    assert (answer[:13], said[:13]) == (b"HTTP/1.1 200 " if first else b"", b"HTTP/1.1 408 ")


def test_excess_requests_and_polls_get_503_and_retry_after(
    redis_url: str, manager: Manager
) -> None:
    """They are rejected immediately. Health checks pass."""
    sources, topic = count(2), new_topic()
    limits = {"MAX_REQUESTS": "3", "MAX_POLLS": "5", "CLIENT_SHARE": "1"}
    env = {f"LISA_GATEWAY_SERVER__{name}": value for name, value in limits.items()}
    with (
        Gateway(redis_url, env=env) as gateway,
        ExitStack() as stack,
        ThreadPoolExecutor(5) as threads,
    ):
        client = gateway.client

        def is_full() -> bool:
            """Begin one more request unless full; this check occupies a place, too."""
            if client.get("/v1/topics").status_code == 503:
                return True
            connection = stack.enter_context(raw(gateway, f"127.0.0.{next(sources)}"))
            connection.sendall(head(gateway, "Content-Length: 100") + b"{")
            return False

        wait_until(is_full)
        refused = client.get("/v1/topics")
        assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (503, True)
        assert client.get("/healthz").status_code == 200
        stack.close()
        wait_until(lambda: client.get("/v1/topics").status_code == 200)

        path, body = f"/v1/topics/{topic}/pull", {"wait_ms": 25_000, "group": "lisa"}
        polls = []
        for number in range(1, 6):  # together, they could exceed the limit on requests
            polls.append(threads.submit(client.post, path, json=body, timeout=60))
            wait_until(partial(has_pulls, gateway, number))
        refused = client.post(path, json=body)
        assert (refused.status_code, int(refused.headers["retry-after"]) >= 1) == (503, True)
        assert refused.json()["type"].endswith(":crowded")
        for number in range(5):
            send(client, topic, body=number)
        assert [poll.result().status_code for poll in polls] == [200] * 5


def has_pulls(gateway: Gateway, count: int) -> bool:
    return bool(gateway.client.get("/healthz").json()["pulls"] == count)


def slow_reader(gateway: Gateway, stack: ExitStack) -> socket.socket:
    """A connection that pipelines requests for large responses and reads none."""
    connection = stack.enter_context(raw(gateway))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host = urlsplit(gateway.url).netloc
    connection.sendall(f"GET /v1/openapi.json HTTP/1.1\r\nHost: {host}\r\n\r\n".encode() * 400)
    return connection


def is_reset(connection: socket.socket) -> bool:
    """Whether the peer has closed the connection, found without reading from it."""
    try:
        connection.send(b"x", socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return False


def is_stalled(gateway: Gateway, count: int) -> bool:
    return gauge(gateway, "requests_stalled") == count


def test_clients_that_read_nothing_do_not_block_others(redis_url: str) -> None:
    """Their responses hold no slot, and cost one line in the log when the gateway stops."""
    limits = {"LISA_GATEWAY_SERVER__MAX_REQUESTS": "3", "LISA_GATEWAY_SERVER__GRACE": "1s"}
    with Gateway(redis_url, env=limits) as gateway, ExitStack() as stack:
        for number in range(1, 11):
            slow_reader(gateway, stack)
            wait_until(partial(is_stalled, gateway, number))
        assert gateway.client.get("/healthz").status_code == 200
        assert gateway.client.get("/v1/topics").status_code == 200
        before = len(gateway.said)
        assert gateway.stop() == 0
        said = "\n".join(gateway.said[before:])
        assert not re.findall("Traceback|ERROR", said)
        assert said.count("10 requests were still running or not read") == 1


def test_clients_that_read_nothing_are_disconnected(narrow: Gateway) -> None:
    """After `request-timeout`, without a traceback in the log."""
    with ExitStack() as stack:
        connections = [slow_reader(narrow, stack) for _ in range(10)]
        wait_until(lambda: all(map(is_reset, connections)))
    wait_until(lambda: gauge(narrow, "requests_stalled") == 0)
    assert "Traceback" not in "\n".join(narrow.said)


def test_clients_without_a_token_have_less(redis_url: str) -> None:
    """A lower limit on bodies, and, for each address, a quarter of the slots."""
    env = {"LISA_GATEWAY_SERVER__TOKEN": "t" * 32, "LISA_GATEWAY_SERVER__MAX_REQUESTS": "8"}
    known = {"Authorization": f"Bearer {'t' * 32}"}
    with (
        Gateway(redis_url, env=env, headers=known) as gateway,
        httpx.Client(base_url=gateway.url, verify=NO_TLS) as stranger,
        ExitStack() as stack,
    ):
        path, body = f"/v1/topics/{new_topic()}/messages", {"body": "x" * 100_000}
        assert stranger.post(path, json=body).status_code == 413
        assert stranger.post(path, json={"body": "x"}).status_code == 401
        assert gateway.client.post(path, json=body).status_code == 201

        def is_full() -> bool:
            """Begin one more request unless the share is used up."""
            if stranger.get("/login").status_code == 503:
                return True
            stack.enter_context(raw(gateway)).sendall(head(gateway, "Content-Length: 100") + b"{")
            return False

        wait_until(is_full)
        assert gateway.client.get("/v1/topics").status_code == 200
        assert stranger.get("/healthz").status_code == 200
        stack.close()
        wait_until(lambda: stranger.get("/login").status_code == 200)


TWO_TOKENS = """
tokens:
  - {name: shop, token: shop-0123456789abcdef}
  - {name: mail, token: mail-0123456789abcdef}
"""


def crowd(
    gateway: Gateway, stack: ExitStack, request: bytes, count: int, source: str = "127.0.0.1"
) -> list[socket.socket]:
    """Connections that have sent a request and neither read nor close."""
    found = []
    for _ in range(count):
        found.append(stack.enter_context(raw(gateway, source)))
        found[-1].sendall(request)
    return found


def asked(gateway: Gateway, request: bytes, source: str = "127.0.0.1") -> int:
    """The status of a request on a connection of its own."""
    with raw(gateway, source) as connection:
        connection.sendall(request)
        return status_of(connection)


def statuses(connections: list[socket.socket]) -> list[int]:
    """The statuses of the connections that were answered since the last call; removes them.

    The rest of an answer may still arrive.
    """
    readable, _, _ = select.select(connections, [], [], 0)
    for one in readable:
        connections.remove(one)
    return [status_of(one) for one in readable]


@pytest.mark.parametrize("is_open", [False, True], ids=["tokens", "open"])
def test_one_client_takes_half_of_the_requests_and_polls(
    redis_url: str, manager: Manager, *, is_open: bool
) -> None:
    """Per token, or per address if none is needed."""
    tokens, topic = "" if is_open else TWO_TOKENS, new_topic()
    limits = {"MAX_REQUESTS": "8", "MAX_POLLS": "8"}
    env = {f"LISA_GATEWAY_SERVER__{name}": value for name, value in limits.items()}
    with Gateway(redis_url, tokens=tokens, env=env) as gateway, ExitStack() as stack:

        def post(token: str, operation: str, body: bytes, *, missing: int = 0) -> bytes:
            bearer = f"Authorization: Bearer {token}-0123456789abcdef"
            start = head(gateway, f"{bearer}\r\nContent-Length: {len(body) + missing}")
            return start.replace(b"t/messages", f"{topic}/{operation}".encode()) + body

        other = "127.0.0.2" if is_open else "127.0.0.1"
        crowd(gateway, stack, post("shop", "messages", b"{", missing=9), 8)
        send = b'{"body":1}'
        wait_until(lambda: asked(gateway, post("shop", "messages", send)) == 503)
        assert asked(gateway, post("mail", "messages", send), other) == 201
        assert asked(gateway, b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") == 200
        stack.close()
        wait_until(lambda: asked(gateway, post("shop", "messages", send)) == 201)

        topic = new_topic()
        polls = crowd(gateway, stack, post("shop", "pull", b'{"group":"x","wait_ms":60000}'), 8)
        refused: list[int] = []

        def are_refused() -> bool:
            refused.extend(statuses(polls))
            return len(refused) >= 4

        wait_until(are_refused)
        assert (refused, has_pulls(gateway, 4)) == ([503] * 4, True)
        pull = post("mail", "pull", b'{"group":"lisa","wait_ms":1}')
        assert asked(gateway, pull, other) == 200
        assert asked(gateway, post("shop", "messages", send)) == 201


def test_half_open_connections_of_one_address_shut_out_nobody(redis_url: str) -> None:
    """Beyond its share, an address's new connection replaces its oldest one that waits."""
    get = b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with Gateway(redis_url, ulimit="-n 400") as gateway, ExitStack() as stack:  # 300 connections
        heads = crowd(gateway, stack, b"GET / HTTP/1.1\r\nHost: ", 400, "127.0.0.3")
        assert asked(gateway, get, "127.0.0.2") == 200
        assert asked(gateway, get, "127.0.0.3") == 200
        gone = statuses(heads)
        assert (set(gone), len(gone) >= 250) == ({503}, True)
        stack.close()
        # Connections that wait for an answer stay; there is a limit on them, too.
        polls = crowd(gateway, stack, get[:-2] + b"Content-Length: 9\r\n\r\n", 150, "127.0.0.3")
        assert asked(gateway, get, "127.0.0.3") == 503
        assert asked(gateway, get.replace(b"/v1/topics", b"/healthz"), "127.0.0.3") == 200
        assert not statuses(polls)
        assert asked(gateway, get, "127.0.0.2") == 200


@pytest.mark.parametrize("trusted", ["", "127.0.0.0/8"])
def test_behind_a_trusted_proxy_each_client_has_a_share(redis_url: str, trusted: str) -> None:
    """The last untrusted address of X-Forwarded-For; from others, the header means nothing."""
    limits = {"MAX_REQUESTS": "8", "TOKEN": "t" * 32, "TRUSTED_PROXIES": trusted}
    env = {f"LISA_GATEWAY_SERVER__{name}": value for name, value in limits.items()}
    with Gateway(redis_url, env=env) as gateway, ExitStack() as stack:

        def request(client: str, end: str = "") -> bytes:
            proxied = f"X-Forwarded-For: 10.9.9.9, {client}\r\nAuthorization: Bearer wrong\r\n"
            return f"GET /login HTTP/1.1\r\nHost: localhost\r\n{proxied}{end}\r\n".encode()

        crowd(gateway, stack, request("198.51.100.7", "Content-Length: 9\r\n"), 4)
        wait_until(lambda: asked(gateway, request("198.51.100.7")) == 503)
        assert asked(gateway, request("198.51.100.8")) == (200 if trusted else 503)
        shown = "198.51.100.7" if trusted else "127.0.0.1"
        refused = f"token from {shown} refused"
        wait_until(lambda: any(refused in line for line in gateway.said))


def test_polls_outlast_an_outage(tmp_path: Path) -> None:
    topic = new_topic()
    with (
        EmbeddedServer(directory=tmp_path, appendonly=True) as server,
        Manager(server.url, groups={topic: ["lisa"]}),
        Gateway(server.url, env={"LISA_GATEWAY_SERVER__PATIENCE": "500ms"}) as gateway,
        ThreadPoolExecutor(1) as threads,
    ):
        client = gateway.client
        send(client, topic, body="before")
        (found,) = pull(client, topic)
        assert settle(client, topic, found, "ack").status_code == 200
        held = threads.submit(pull, client, topic, wait_ms=25_000)
        wait_until(lambda: client.get("/healthz").json()["pulls"] == 1)
        server.kill()
        path, after = f"/v1/topics/{topic}/messages", {"body": "after", "id": "after"}
        answer = client.post(path, json={"body": "during", "id": "during"})
        assert (answer.status_code, server.url in answer.text) == (503, False)
        assert not held.done()
        server.restart()
        wait_until(lambda: client.post(path, json=after).is_success)
        (found,) = held.result()
        assert found["body"] in ("during", "after")


def test_the_limit_on_open_files_is_raised(redis_url: str) -> None:
    with Gateway(redis_url, ulimit="-Sn 128") as gateway:
        soft, hard = resource.prlimit(gateway.process.pid, resource.RLIMIT_NOFILE)
        assert soft == hard > 128


@pytest.mark.full
def test_too_few_open_files_cause_a_warning_and_503(redis_url: str) -> None:
    """Connections beyond the limit get a response instead of a reset; health checks pass."""
    with Gateway(redis_url, ulimit="-n 140") as gateway, ExitStack() as stack:
        assert any("max-polls + max-requests" in line for line in gateway.said)
        for number in range(50):  # of two addresses, which each have half
            stack.enter_context(raw(gateway, f"127.0.0.{2 + number % 2}"))
        with raw(gateway) as connection:
            connection.sendall(b"GET /v1/topics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert status_of(connection) == 503
        assert gateway.client.get("/healthz").status_code == 200


def test_malformed_requests_are_counted_and_not_logged(narrow: Gateway) -> None:
    def counted() -> float | None:
        return Exposed(narrow.client.get("/metrics").text).value("lisa_gateway_malformed_total")

    lines, before = len(narrow.said), counted() or 0
    for _ in range(5):
        with raw(narrow) as connection:
            connection.sendall(b"NOT HTTP\r\n\r\n")
            assert status_of(connection) == 400
    assert counted() == before + 5
    assert narrow.said[lines:] == []


@pytest.mark.parametrize(
    ("line", "status"),
    [
        ("HTTP/1.1\r\nHost: localhost", 200),
        ("HTTP/1.0", 200),
        ("HTTP/1.1", 400),
        ("HTTP/1.1\r\nHost: localhost\r\nHost: localhost", 400),
        ("HTTP/1.0\r\nHost: localhost\r\nHost: other", 400),
        ("HTTP/1.1\r\nHost: local host", 400),
        ("HTTP/1.1\r\nHost: user@localhost/path", 400),
    ],
)
def test_a_request_needs_one_valid_host_header(narrow: Gateway, line: str, status: int) -> None:
    """As RFC 9112, section 3.2, requires; a proxy and the gateway may read two differently."""
    for path in ("/healthz", "/v1/topics", "/"):
        assert asked(narrow, f"GET {path} {line}\r\n\r\n".encode()) == status


@pytest.mark.timeout(60)
def test_long_cookies_do_not_block_the_gateway(narrow: Gateway) -> None:
    """Some versions of Python take seconds to unquote one of them."""
    cookie = 'lisa_session="' + r"\"" * 30_000 + '"'
    for _ in range(20):
        assert narrow.client.get("/", headers={"Cookie": cookie}).status_code == 200
