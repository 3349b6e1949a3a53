"""The proxy makes the requested faults and no others."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from lisa.embedded.server import free_port
from tests.servers import wait_until
from tests.torture.proxy import Proxy, Trouble, _Door, _Link

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from lisa.embedded import EmbeddedServer

PATIENCE_S = 0.5


class Sent:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    def is_closing(self) -> bool:
        return False


def test_a_request_keeps_its_order_while_the_connection_opens() -> None:
    link, sent = _Link(_Door(0), 0), Sent()
    link.write(b"1", to_server=True)
    link.server.transport = sent  # type: ignore[assignment]
    link.write(b"2", to_server=True)
    link.pass_on_early()
    link.write(b"3", to_server=True)
    assert sent.data == b"123"


@pytest.fixture
def proxy(valkey_server: EmbeddedServer, redis_url: str) -> Iterator[Proxy]:
    proxy = Proxy(valkey_server.port, ("one", "other"))
    yield proxy
    proxy.close()


@pytest.fixture
def through(proxy: Proxy) -> Iterator[Callable[[str], redis.Redis]]:
    """A client at a door, without retries."""
    made = []

    def at(door: str) -> redis.Redis:
        made.append(
            redis.Redis.from_url(
                proxy.url(door),
                socket_timeout=PATIENCE_S,
                retry=Retry(NoBackoff(), 0),
            )
        )
        return made[-1]

    yield at
    for client in made:
        client.close()


@pytest.fixture
def one(through: Callable[[str], redis.Redis]) -> redis.Redis:
    client = through("one")
    assert client.ping()
    return client


def test_without_a_fault_everything_passes(one: redis.Redis) -> None:
    big = b"x" * 3_000_000
    assert one.set("big", big)
    assert one.get("big") == big


def test_a_cut_ends_connections_and_new_ones_pass(one: redis.Redis, proxy: Proxy) -> None:
    connection = one.connection_pool.get_connection()
    proxy.cut("one")
    with pytest.raises(redis.ConnectionError):
        connection.read_response()
    assert one.ping()


def test_a_fault_at_one_door_does_not_affect_the_other(
    through: Callable[[str], redis.Redis], proxy: Proxy
) -> None:
    proxy.make(Trouble.REFUSE, "one")
    with pytest.raises(redis.ConnectionError):
        through("one").ping()
    assert through("other").ping()
    proxy.make(Trouble.NONE, "one")
    assert through("one").ping()


def test_delayed_data_keeps_its_order(one: redis.Redis, proxy: Proxy) -> None:
    proxy.make(Trouble.DELAY, delay_s=0.1)
    began = time.monotonic()
    one.ping()
    assert time.monotonic() - began >= 0.2  # both directions
    connection = one.connection_pool.get_connection()
    connection.send_command("RPUSH", "list", "1")
    proxy.make(Trouble.NONE)
    for number in "23":
        connection.send_command("RPUSH", "list", number)
    assert [connection.read_response() for _ in range(3)] == [1, 2, 3]
    assert one.lrange("list", 0, -1) == [b"1", b"2", b"3"]


def test_hung_requests_arrive_later_even_if_their_client_left(
    one: redis.Redis, proxy: Proxy, client: redis.Redis
) -> None:
    proxy.make(Trouble.HANG)
    with pytest.raises(redis.TimeoutError):
        one.incr("n")
    one.connection_pool.disconnect()
    assert client.get("n") is None
    proxy.make(Trouble.NONE)
    wait_until(lambda: client.get("n") == b"1")


def test_a_lost_reply_is_that_of_a_request_that_arrived(
    one: redis.Redis, proxy: Proxy, client: redis.Redis
) -> None:
    heard, rounds = 0, 50
    for _ in range(rounds):
        proxy.make(Trouble.NONE)
        one.ping()  # connecting sends a request, too
        proxy.make(Trouble.LOSE)
        with suppress(redis.ConnectionError):
            one.incr("n")
            heard += 1
    assert client.get("n") == b"%d" % rounds
    assert heard == rounds - proxy.lost
    assert 0 < proxy.lost < rounds


def test_a_port_that_was_taken_meanwhile(
    valkey_server: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = [valkey_server.port, free_port()]
    monkeypatch.setattr("tests.torture.proxy.free_port", iter([*ports]).__next__)
    proxy = Proxy(valkey_server.port, ("one",))
    assert proxy.port("one") == ports[1]
    proxy.close()
