"""A producer whose server is away, full, forbidden, or has lost data."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import timedelta
from typing import Any

import pytest
import redis

from lisa.core.model.errors import ConfigError, DuplicateMessage, ServerUnavailable
from lisa.core.redis.address import Address
from lisa.core.transitions.topic import Configure
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from lisa.producer import AsyncProducer, Outgoing, Producer, Sent
from tests.producers import Either, Topic
from tests.proxies import ForgetfulProxy, LossyProxy, MovingProxy
from tests.servers import connect, failing_disk

Opened = Callable[..., Either]
HOUR = timedelta(hours=1)
PATIENCE = timedelta(seconds=0.4)
LONG = timedelta(seconds=60)
"""An error that comes much sooner has not waited for the patience."""


@pytest.fixture(params=["sync", "async"])
def opened(request: pytest.FixtureRequest) -> Iterator[Opened]:
    """Opens producers of one kind, and closes them."""
    with ExitStack() as made:
        yield lambda *args, **options: made.enter_context(
            closing(Either(request.param, *args, **options))
        )


def gives_up(call: Any, patience: timedelta = PATIENCE) -> str:
    """The call raises ServerUnavailable after its patience; returns the error's text."""
    started = time.monotonic()
    with pytest.raises(ServerUnavailable) as caught:
        call()
    assert time.monotonic() - started >= patience.total_seconds()
    return str(caught.value)


def test_a_lost_reply_does_not_make_a_message_its_own_duplicate(
    opened: Opened, redis_url: str, topic: Topic
) -> None:
    with LossyProxy(redis_url) as proxy:
        either = opened(proxy.url)
        proxy.lose(1)
        assert either.send("orders", 1, id="a", delay=HOUR, on_duplicate="reject") == "a"
        assert proxy.lost == 1
        with pytest.raises(DuplicateMessage):
            either.send("orders", 1, id="a", delay=HOUR, on_duplicate="reject")
        proxy.lose(1)
        bodies = [Outgoing(2, id="a"), 3]
        report = either.send_many("orders", bodies, delay=HOUR, on_duplicate="replace")
        assert proxy.lost == 2
    assert [one.outcome for one in report] == [Sent.REPLACED, Sent.ACCEPTED]
    assert len(topic.waiting()) == 2


def test_a_server_that_is_away_or_hangs_from_the_start(opened: Opened) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    either = opened(url, patience=PATIENCE)
    assert url in gives_up(lambda: either.send("orders", 1))
    gives_up(lambda: either.get("orders", "a"))
    started = time.monotonic()
    gives_up(lambda: opened(url, patience="0s").send("orders", 1), timedelta(0))
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = Address(f"redis://127.0.0.1:{deaf.getsockname()[1]}/0", socket_timeout_s=0.3)
        gives_up(lambda: opened(address, patience=PATIENCE).send("orders", 1))
    assert time.monotonic() - started < LONG.total_seconds()


def test_a_server_refuses_writes_and_goes_away(opened: Opened, own_server: EmbeddedServer) -> None:
    either = opened(own_server.url, patience=PATIENCE)
    first = either.send("orders", 1, delay=HOUR)
    fresh = opened(own_server.url)
    with connect(own_server.url) as client:
        client.config_set("maxmemory", 1)
        for one in (either, fresh):
            with pytest.raises(ServerUnavailable, match="out of memory"):
                one.send("orders", 2)
        assert fresh.get("orders", first).state == "waiting"
        assert fresh.cancel("orders", first) == "cancelled"
        client.config_set("maxmemory", 0)
    with failing_disk(own_server):
        assert "its disk" in gives_up(lambda: either.send("orders", 2))
    assert either.send("orders", 3)
    own_server.kill()
    gives_up(lambda: either.send("orders", 4))
    with pytest.raises(ServerUnavailable) as caught:
        either.send_many("orders", range(600), delay=HOUR)
    assert caught.value.sent == 0
    back = threading.Timer(0.3, own_server.restart)
    back.start()
    message_id = opened(own_server.url, patience="25s").send("orders", 5, delay=HOUR)
    back.join()
    assert either.get("orders", message_id).state == "waiting"


BUSY = ("BLPOP", "nothing", 1)
"""Keeps a connection busy, so that as many calls at once have as many connections."""


def test_forgotten_connections_cost_a_thread_half_of_its_patience(redis_url: str) -> None:
    """A firewall dropped them silently. The others are not tried in turn."""
    with (
        ForgetfulProxy(redis_url) as proxy,
        closing(Producer(proxy.url, patience=PATIENCE * 10)) as producer,
        ThreadPoolExecutor(8) as threads,
    ):
        link: Any = producer._store.connection
        list(threads.map(link.execute, [BUSY] * 8))
        assert proxy.forget() == 8
        assert list(threads.map(lambda n: producer.send("orders", n), range(8)))


async def test_forgotten_connections_cost_a_task_half_of_its_patience(redis_url: str) -> None:
    with ForgetfulProxy(redis_url) as proxy:
        async with AsyncProducer(proxy.url, patience=PATIENCE * 10) as producer:
            link: Any = producer._store.connection
            await asyncio.gather(*(link.execute(BUSY) for _ in range(8)))
            assert proxy.forget() == 8
            await asyncio.gather(*(producer.send(f"orders-{n}", n) for n in range(8)))


def test_an_address_that_moves_to_a_new_primary(
    opened: Opened,
    client: redis.Redis,
    valkey_server: EmbeddedServer,
    own_server: EmbeddedServer,
) -> None:
    """Open connections stay at the former primary, which is a read-only replica now."""
    # By default a primary waits five seconds for more replicas before it syncs the first.
    client.config_set("repl-diskless-sync-delay", 0)
    with MovingProxy(own_server.url) as proxy, connect(own_server.url) as former:
        either = opened(proxy.url)
        assert either.send("orders", 1)
        proxy.move(valkey_server.port)
        former.replicaof("127.0.0.1", valkey_server.port)
        sent = either.send("orders", 2)
        assert either.send_many("orders", [3, 4]).accepted == 2
        assert either.get("orders", sent).state == "waiting"
        direct = opened(own_server.url, patience=PATIENCE)
        assert "read-only replica" in gives_up(lambda: direct.send("orders", 2))
    client.config_set("repl-diskless-sync-delay", 5)


def test_a_wrong_password_or_missing_right_is_reported_at_once(
    opened: Opened, redis_url: str, client: redis.Redis
) -> None:
    rules = ("on", ">secret", "~*", "&*", "+@all", "-evalsha")
    client.execute_command("ACL", "SETUSER", "clerk", *rules)
    for password, said in (("wrong", "user or password"), ("secret", "permit")):
        either = opened(Address(redis_url, username="clerk", password=password), patience=LONG / 2)
        started = time.monotonic()
        with pytest.raises(ConfigError, match=said) as caught:
            either.send("orders", 1)
        assert time.monotonic() - started < LONG.total_seconds() / 2
        assert password not in str(caught.value)
    client.acl_deluser("clerk")


def test_an_emptied_server_is_used_as_is(opened: Opened, client: redis.Redis, topic: Topic) -> None:
    either = opened(topic.store.connection.address)
    either.send("orders", 1, id="a", delay=HOUR)
    client.flushall()
    for call, answer in (
        (lambda: either.send("orders", 2, id="b", delay=HOUR), "b"),
        (lambda: list(topic.waiting()), ["b"]),
        (lambda: either.reschedule("orders", "b", delay=HOUR), "rescheduled"),
        (lambda: either.cancel("orders", "b"), "cancelled"),
        (lambda: either.get("orders", "b").state, "cancelled"),
    ):
        client.script_flush()
        assert call() == answer


def test_a_newer_layout_is_refused(opened: Opened, redis_url: str, client: redis.Redis) -> None:
    client.set("lisa:schema", 99)
    either = opened(redis_url)
    for method in (either.send, either.get):
        with pytest.raises(ConfigError, match="schema 99"):
            method("orders", "a")
    assert client.keys() == [b"lisa:schema"]


def test_too_much_patience_is_refused(opened: Opened, redis_url: str, topic: Topic) -> None:
    topic.store.call(Configure("orders", {"retention": "50000"}))
    assert opened(redis_url, patience="25s").send("orders", 1)
    for patience in (timedelta(seconds=26), timedelta.max):
        with pytest.raises(ConfigError, match="retention"):
            opened(redis_url, patience=patience).send("orders", 1)
