"""The proxy makes the requested faults and no others."""

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from tests.servers import PATIENCE, wait_until
from tests.torture.proxy import Proxy, Trouble

HANGS_S = 0.3


@pytest.fixture
def proxy(
    valkey_server: EmbeddedServer, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Proxy]:
    """Its first port is taken: only listening shows which one is free."""
    ports = [valkey_server.port, free_port(), free_port()]
    monkeypatch.setattr("tests.torture.proxy.free_port", iter([*ports]).__next__)
    proxy = Proxy(valkey_server.port, ("one", "other"))
    assert proxy.port("one") == ports[1]
    yield proxy
    proxy.close()


def through(proxy: Proxy, door: str, timeout_s: float = PATIENCE.total_seconds()) -> redis.Redis:
    """A client at a door, without retries."""
    retry = Retry(NoBackoff(), 0)
    return redis.Redis.from_url(proxy.url(door), socket_timeout=timeout_s, retry=retry)


@pytest.fixture
def one(proxy: Proxy) -> Iterator[redis.Redis]:
    with through(proxy, "one") as client:
        assert client.ping()
        yield client


def test_a_fault_at_one_door_does_not_affect_the_other(one: redis.Redis, proxy: Proxy) -> None:
    big = b"x" * 3_000_000
    assert one.set("big", big)
    connection = one.connection_pool.get_connection()
    with through(proxy, "other") as other:
        held = other.connection_pool.get_connection()
        proxy.cut("one")
        with pytest.raises(redis.ConnectionError):
            connection.read_response()
        assert one.get("big") == big
        proxy.make(Trouble.REFUSE, "one")
        with pytest.raises(redis.ConnectionError):
            one.ping()
        held.send_command("PING")
        assert held.read_response()
        assert other.ping()
    proxy.make(Trouble.NONE, "one")
    assert one.ping()


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
    proxy: Proxy, client: redis.Redis
) -> None:
    with through(proxy, "one", HANGS_S) as hasty:

        def pings() -> bool:
            """On a busy machine, even a server that does not hang may answer late."""
            with suppress(redis.TimeoutError):
                return bool(hasty.ping())
            return False

        wait_until(pings)
        proxy.make(Trouble.HANG)
        with pytest.raises(redis.TimeoutError):
            hasty.incr("n")
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
