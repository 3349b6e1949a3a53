"""Connections: replies, forks, interruptions, and TLS on a real server."""

import asyncio
import math
import os
import select
import ssl
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import AsyncMock, Mock
from urllib.parse import quote

import pytest
import redis
import redis.asyncio
import uvloop

from lisa import AsyncProducer, Producer
from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import AsyncConnection, Connection
from lisa.core.redis.flow import Flow, Pause, drive
from lisa.core.store.registration import TopicRegistration
from lisa.core.store.store import AsyncStore
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from tests import certificates
from tests.certificates import Certificates
from tests.servers import redis_server, wait_until


@pytest.fixture
def connection(redis_url: str) -> Iterator[Connection]:
    connection = Connection(Address.of(redis_url))
    yield connection
    connection.close()


def test_replies_come_in_order(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = [("ECHO", "first"), ("NO-SUCH-COMMAND",), ("ECHO", "last")]
    first, fault, last = connection.execute_many(commands)
    assert (first, last) == (b"first", b"last")
    assert isinstance(fault, redis.ResponseError)
    with monkeypatch.context() as patched:
        patched.setattr(redis.Connection, "read_response", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            connection.execute_many(commands)
    assert connection.execute(("ECHO", "another")) == b"another", "not an unread reply"


@pytest.fixture(params=["uvloop", "asyncio"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """The gateway's event loop, and Python's own."""
    factory: Any = uvloop.new_event_loop if request.param == "uvloop" else None
    with asyncio.Runner(loop_factory=factory) as made:
        yield made


def fork(work: Callable[[], object]) -> int:
    """Do this in a forked child, whose exit code is 0 if nothing is raised; returns its id."""
    if (child := os.fork()) == 0:
        with suppress(BaseException):
            work()
            os._exit(0)
        os._exit(1)
    return child


def test_a_forked_child_does_not_use_the_connections_of_its_parent(connection: Connection) -> None:
    def echo(who: bytes) -> None:
        for number in range(200):
            text = b"%s %d" % (who, number)
            assert connection.execute(("ECHO", text)) == text

    echo(b"before")
    child = fork(lambda: echo(b"child"))
    echo(b"parent")
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_repeats_a_hanging_registration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lisa.core.store.registration.AGAIN_S", 0)
    parent, answered = os.getpid(), Event()

    def hang(_: Iterable[str]) -> Flow[None]:
        if os.getpid() == parent:
            answered.wait(60)
        yield from ()

    registration = TopicRegistration("the list of topics", hang)
    assert not drive(registration.add(["orders"]), None)
    child = fork(lambda: wait_until(lambda: drive(registration.add(["orders"]), None)))
    assert os.waitpid(child, 0)[1] == 0
    answered.set()
    wait_until(lambda: not registration.running)


def test_a_call_that_is_interrupted_leaves_no_reply_to_a_later_one(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    for call in (connection.execute, lambda one: connection.execute_many([one])):
        assert connection.execute(("ECHO", "before")) == b"before"
        with monkeypatch.context() as patched:
            patched.setattr(redis.Connection, "read_response", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                call(("ECHO", "interrupted"))
        assert connection.execute(("ECHO", "after")) == b"after"


def test_a_cancelled_call_leaves_no_reply_behind(redis_url: str, runner: asyncio.Runner) -> None:
    connection = AsyncConnection(Address.of(redis_url))

    async def call() -> None:
        assert await connection.execute(("ECHO", "before")) == b"before"
        waiting = asyncio.create_task(connection.execute(("BLPOP", "lisa-test-nothing", 60)))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await connection.execute(("ECHO", "after")) == b"after"
        await connection.close()

    runner.run(call())


def test_a_closed_connection_is_replaced(client: redis.Redis, connection: Connection) -> None:
    for is_check_due in (True, False):
        client.client_kill_filter(_id=connection.execute(("CLIENT", "ID")))
        connection._opened()._check_at = 0.0 if is_check_due else math.inf
        if not is_check_due:
            with pytest.raises(redis.ConnectionError):
                connection.execute(("PING",))
        assert connection.execute(("PING",)) == b"PONG"


async def test_a_cancelled_close_closes_connections(redis_url: str, client: redis.Redis) -> None:
    """The store lists a last topic on a node that hangs, which the caller does not wait for."""
    address = Address.of(f"{redis_url}?client_name=to-be-cancelled")
    store, begun = AsyncStore(AsyncConnection(address), Keys()), asyncio.Event()

    def hang(_topics: Iterable[str]) -> Flow[None]:
        begun.set()
        yield Pause(3600)

    store._registration._add = hang
    store._registration._unlisted["orders"] = None
    await store.drive(store.command("PING"))
    closing = asyncio.ensure_future(store.close())
    await begun.wait()
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    wait_until(lambda: "to-be-cancelled" not in {one["name"] for one in client.client_list()})
    await asyncio.sleep(0)
    assert not store._registration.running


def cut_while_connecting(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Cut each new asyncio connection before its first write; returns those that were cut."""
    cut: list[Any] = []
    connect: Any = redis.asyncio.Connection._connect

    async def connect_and_cut(self: Any) -> None:
        await connect(self)
        cut.append(self)
        self._writer.transport.abort()
        for _ in range(3):
            await asyncio.sleep(0)

    monkeypatch.setattr(redis.asyncio.Connection, "_connect", connect_and_cut)
    return cut


def test_a_connection_that_is_cut_while_it_is_set_up_is_a_lost_one(
    redis_url: str, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection = AsyncConnection(Address.of(redis_url))
    fail = AsyncMock(side_effect=RuntimeError("got Future attached to a different loop"))

    async def call() -> None:
        ping, both = ("PING",), [("PING",), ("TIME",)]
        for execute in (
            partial(connection.execute, ping),
            partial(connection.execute_many, both),
            partial(connection.execute_chain, "k", both),
        ):
            await connection.close()
            with monkeypatch.context() as patched:
                cut = cut_while_connecting(patched)
                with pytest.raises(redis.ConnectionError):
                    await execute()
                assert cut
            assert await execute()
        with monkeypatch.context() as patched:
            patched.setattr(redis.asyncio.Connection, "_send_packed_command", fail)
            with pytest.raises(RuntimeError, match="different loop"):
                await connection.execute(("PING",))
        assert await connection.execute(("PING",)) == b"PONG"
        (one,) = connection._opened()._kept
        waiting = asyncio.create_task(connection.execute(("BLPOP", "lisa-test-nothing", 60)))
        await asyncio.sleep(0.01)
        one._parser._stream = None  # as if another task had disconnected it
        one._reader.feed_data(b"+")
        with pytest.raises(redis.ConnectionError):
            await waiting
        assert await connection.execute(("PING",)) == b"PONG"
        await connection.close()

    runner.run(call())


@pytest.fixture
def tls(tmp_path: Path) -> Certificates:
    return certificates.make(tmp_path)


@pytest.fixture
def tls_url(tls: Certificates) -> Iterator[str]:
    """A server with TLS and a certificate of its own."""
    if (binary := redis_server()) is None:
        pytest.skip("the embedded Valkey has no TLS, and redis-server is not on PATH")
    port = free_port()
    options = ["--tls-port", str(port), *tls.server_options()]
    with EmbeddedServer(binary=binary, extra=options):
        yield f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={quote(str(tls.authority))}"


def test_tls_connections_share_a_context_until_a_file_changes(
    tls_url: str, tls: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Mock(wraps=ssl.create_default_context)

    def send(url: str = tls_url, patience: str = "10s") -> None:
        with Producer(url, patience=patience) as producer:
            producer.send("t", "x")

    async def send_in_tasks() -> None:
        for _ in range(5):
            async with AsyncProducer(tls_url) as producer:
                await producer.send("t", "x")

    monkeypatch.setattr(ssl, "create_default_context", made)
    for _ in range(5):
        send()
    assert made.call_count == 1
    asyncio.run(send_in_tasks())
    assert made.call_count <= 2, "asyncio's connections may have other defaults, but share them"
    before = made.call_count
    changed = tls.authority.stat().st_mtime_ns + 1
    os.utime(tls.authority, ns=(changed, changed))
    send()
    assert made.call_count == before + 1
    unknown = certificates.make(tmp_path / "other").authority
    with pytest.raises(Exception, match="CERTIF"):
        send(tls_url.replace(quote(str(tls.authority)), quote(str(unknown))), patience="200ms")
    assert made.call_count == before + 2


def test_session_tickets_are_no_reply(tls_url: str) -> None:
    """They arrive soon after the handshake, usually after the first command was sent."""
    connection = Connection(Address.of(tls_url))._opened().inner.make_connection()
    connection.connect()
    wait_until(lambda: select.select([connection._sock], [], [], 0)[0])
    assert not connection.can_read()
    connection.send_command("PING")
    wait_until(connection.can_read)
    assert connection.can_read(), "what was read is kept"
    assert connection.read_response() == b"PONG"
    connection.disconnect()
