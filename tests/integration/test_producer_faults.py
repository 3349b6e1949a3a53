"""A producer whose server is away, full, forbidden, or has lost data."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from lisa.core.model.errors import ConfigError, DuplicateMessage, ServerUnavailable
from lisa.core.redis.address import Address
from lisa.core.transitions.configure import Configure
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from lisa.producer import Outgoing, Sent
from tests.producers import Either, Topic
from tests.proxies import LossyProxy, MovingProxy
from tests.servers import connect, failing_disk, wait_until

if TYPE_CHECKING:
    import redis

HOUR = timedelta(hours=1)
PATIENCE = timedelta(seconds=0.4)
MARGIN = timedelta(seconds=5)  # of one socket timeout, on a busy machine


@pytest.fixture(params=["sync", "async"])
def kind(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture
def proxy(redis_url: str) -> Iterator[LossyProxy]:
    with LossyProxy(redis_url) as running:
        yield running


@pytest.fixture
def behind_proxy(kind: str, proxy: LossyProxy) -> Iterator[Either]:
    either = Either(kind, proxy.url)
    yield either
    either.close()


def gives_up(call: Any, patience: timedelta = PATIENCE) -> str:
    """The call raises ServerUnavailable after its patience; returns the error's text."""
    started = time.monotonic()
    with pytest.raises(ServerUnavailable) as caught:
        call()
    took = timedelta(seconds=time.monotonic() - started)
    assert patience <= took < patience + MARGIN
    return str(caught.value)


def test_a_lost_reply_to_send_adds_nothing(
    behind_proxy: Either, proxy: LossyProxy, topic: Topic
) -> None:
    proxy.lose(2)
    message_id = behind_proxy.send("orders", 1, delay=HOUR)
    assert proxy.lost == 2
    assert topic.waiting().keys() == {message_id}
    assert topic.store.drive(topic.store.stats("orders"))["sent"] == 1


def test_a_lost_reply_does_not_make_a_message_its_own_duplicate(
    behind_proxy: Either, proxy: LossyProxy, topic: Topic
) -> None:
    proxy.lose(1)
    assert behind_proxy.send("orders", 1, id="a", delay=HOUR, on_duplicate="reject") == "a"
    assert proxy.lost == 1
    with pytest.raises(DuplicateMessage):
        behind_proxy.send("orders", 1, id="a", delay=HOUR, on_duplicate="reject")
    proxy.lose(1)
    bodies = [Outgoing(2, id="a"), 3]
    report = behind_proxy.send_many("orders", bodies, delay=HOUR, on_duplicate="replace")
    assert proxy.lost == 2
    assert [one.outcome for one in report] == [Sent.REPLACED, Sent.ACCEPTED]
    assert len(topic.waiting()) == 2


def test_a_lost_reply_to_send_many_adds_nothing(
    behind_proxy: Either, proxy: LossyProxy, topic: Topic
) -> None:
    topic.declare("lisa")
    proxy.lose(3)
    report = behind_proxy.send_many("orders", range(1_200))
    assert proxy.lost == 3
    assert report.accepted == 1_200
    taken = [entry.id for _ in range(3) for entry in topic.take("lisa", 500)]
    assert taken == [one.id for one in report]


def test_cancel_and_reschedule_survive_a_lost_reply(
    behind_proxy: Either, proxy: LossyProxy, topic: Topic
) -> None:
    behind_proxy.send("orders", 1, id="a", delay=HOUR)
    proxy.lose(1)
    assert behind_proxy.ask("reschedule", "orders", "a", at_ms=10**13) == "rescheduled"
    proxy.lose(1)
    assert behind_proxy.ask("cancel", "orders", "a") == "cancelled"
    assert proxy.lost == 2
    assert topic.waiting() == {}


def test_server_down_at_start(kind: str) -> None:
    address = f"redis://127.0.0.1:{free_port()}/0"
    either = Either(kind, address, patience=PATIENCE)
    said = gives_up(lambda: either.send("orders", 1))
    assert address in said
    gives_up(lambda: either.ask("get", "orders", "a"))
    either.close()


def test_no_patience_is_a_single_try(kind: str) -> None:
    either = Either(kind, f"redis://127.0.0.1:{free_port()}/0", patience=timedelta(0))
    gives_up(lambda: either.send("orders", 1), timedelta(0))
    either.close()


def test_server_away_in_the_middle(kind: str, own_server: EmbeddedServer) -> None:
    either = Either(kind, own_server.url, patience=PATIENCE)
    first = either.send("orders", 1, delay=HOUR)
    own_server.kill()
    gives_up(lambda: either.send("orders", 2, delay=HOUR))
    bodies = (n for n in range(600))
    with pytest.raises(ServerUnavailable) as caught:
        either.send_many("orders", bodies, delay=HOUR)
    assert caught.value.sent == 0
    own_server.restart()
    second = either.send("orders", 3, delay=HOUR)
    with connect(own_server.url) as client:
        assert set(client.zrange("lisa:{orders}:waiting", 0, -1)) >= {
            first.encode(),
            second.encode(),
        }
    either.close()


def test_a_short_outage_is_not_noticed(kind: str, own_server: EmbeddedServer) -> None:
    either = Either(kind, own_server.url)
    either.send("orders", 1, delay=HOUR)
    own_server.kill()
    back = threading.Timer(0.3, own_server.restart)
    back.start()
    message_id = either.send("orders", 2, delay=HOUR)
    back.join()
    assert either.ask("get", "orders", message_id).state == "waiting"
    either.close()


def test_a_server_that_hangs_is_given_up(kind: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = Address(f"redis://127.0.0.1:{deaf.getsockname()[1]}/0", socket_timeout_s=0.3)
        either = Either(kind, address, patience=PATIENCE)
        gives_up(lambda: either.send("orders", 1))
        either.close()


def test_out_of_memory(kind: str, own_server: EmbeddedServer) -> None:
    either = Either(kind, own_server.url)
    message_id = either.send("orders", 1, delay=HOUR)
    fresh = Either(kind, own_server.url)
    with connect(own_server.url) as client:
        client.config_set("maxmemory", 1)
        with pytest.raises(ServerUnavailable, match="out of memory"):
            either.send("orders", 2)
        with pytest.raises(ServerUnavailable, match="out of memory"):
            fresh.send("orders", 2)
        assert fresh.ask("get", "orders", message_id).state == "waiting"
        assert fresh.ask("cancel", "orders", message_id) == "cancelled"
        client.config_set("maxmemory", 0)
    assert either.send("orders", 3)
    either.close()
    fresh.close()


def test_a_server_that_cannot_save_its_data(kind: str, own_server: EmbeddedServer) -> None:
    either = Either(kind, own_server.url, patience=PATIENCE)
    either.send("orders", 1, delay=HOUR)
    with failing_disk(own_server):
        assert "its disk" in gives_up(lambda: either.send("orders", 2))
    assert either.send("orders", 3)
    either.close()


@pytest.fixture
def quick_sync(client: redis.Redis) -> Iterator[None]:
    """By default a primary waits five seconds for more replicas before it syncs the first."""
    client.config_set("repl-diskless-sync-delay", 0)
    yield
    client.config_set("repl-diskless-sync-delay", 5)


@pytest.mark.usefixtures("quick_sync")
def test_read_only_replica(kind: str, valkey_server: EmbeddedServer, redis_url: str) -> None:
    primary = Either(kind, redis_url)
    message_id = primary.send("orders", 1, delay=HOUR)
    with (
        EmbeddedServer(extra=("--replicaof", f"127.0.0.1 {valkey_server.port}")) as replica,
        connect(replica.url) as client,
    ):
        wait_until(lambda: client.exists("lisa:{orders}:waiting"))
        either = Either(kind, replica.url, patience=PATIENCE)
        said = gives_up(lambda: either.send("orders", 2))
        assert "read-only replica" in said
        assert either.ask("get", "orders", message_id).state == "waiting"
        either.close()
    primary.close()


@pytest.mark.usefixtures("quick_sync")
def test_an_address_that_moves_to_a_new_primary(
    kind: str, valkey_server: EmbeddedServer, own_server: EmbeddedServer
) -> None:
    """Open connections stay at the former primary, which is a replica now."""
    with MovingProxy(own_server.url) as proxy, connect(own_server.url) as former:
        either = Either(kind, proxy.url)
        assert either.send("orders", 1)
        proxy.move(valkey_server.port)
        former.replicaof("127.0.0.1", valkey_server.port)
        assert either.send("orders", 2)
        report = either.send_many("orders", [3, 4])
        assert report.accepted == 2
        either.close()


@pytest.fixture
def limited_user(client: redis.Redis) -> Iterator[None]:
    client.acl_setuser(
        "clerk",
        enabled=True,
        passwords=["+secret"],
        keys=["*"],
        channels=["*"],
        categories=["+@all"],
        commands=["-evalsha"],
    )
    yield
    client.acl_deluser("clerk")


@pytest.mark.usefixtures("limited_user")
def test_a_wrong_password_or_missing_right_is_reported_at_once(kind: str, redis_url: str) -> None:
    for password, said in (("wrong", "user or password"), ("secret", "permit")):
        address = Address(redis_url, username="clerk", password=password)
        either = Either(kind, address)
        started = time.monotonic()
        with pytest.raises(ConfigError, match=said) as caught:
            either.send("orders", 1)
        assert time.monotonic() - started < MARGIN.total_seconds()
        assert password not in str(caught.value)
        either.close()


def test_script_flush_between_calls(kind: str, server: str) -> None:
    either = Either(kind, server)
    with connect(server) as client:
        for n in range(3):
            client.script_flush()
            assert either.send("orders", n, id=f"a{n}", delay=HOUR)
            client.script_flush()
            assert either.ask("reschedule", "orders", f"a{n}", delay=HOUR) == "rescheduled"
            client.script_flush()
            assert either.ask("get", "orders", f"a{n}").state == "waiting"
        client.script_flush()
        assert either.ask("cancel_many", "orders", ["a0", "a1", "a2"]) == ["cancelled"] * 3
    either.close()


def test_an_emptied_server_is_taken_as_it_is(kind: str, redis_url: str) -> None:
    either = Either(kind, redis_url)
    either.send("orders", 1, delay=HOUR)
    with connect(redis_url) as client:
        client.flushall()
        message_id = either.send("orders", 2, delay=HOUR)
        assert client.zrange("lisa:{orders}:waiting", 0, -1) == [message_id.encode()]
    either.close()


def test_a_newer_layout_is_refused(kind: str, redis_url: str, client: redis.Redis) -> None:
    client.set("lisa:schema", 99)
    either = Either(kind, redis_url)
    for call in (lambda: either.send("orders", 1), lambda: either.ask("get", "orders", "a")):
        with pytest.raises(ConfigError, match="schema 99"):
            call()
    assert client.keys() == [b"lisa:schema"]
    either.close()


def test_patience_beyond_half_the_retention_is_refused(
    kind: str, redis_url: str, topic: Topic
) -> None:
    topic.store.call(Configure("orders", {"retention": "50000"}))
    impatient = Either(kind, redis_url, patience=timedelta(seconds=25))
    assert impatient.send("orders", 1)
    impatient.close()
    for patience in (timedelta(seconds=26), timedelta.max):
        patient = Either(kind, redis_url, patience=patience)
        with pytest.raises(ConfigError, match="retention"):
            patient.send("orders", 1)
        patient.close()
