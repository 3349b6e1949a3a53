"""Faults of a manager and its server: kills, restarts, and an address that moves."""

import pytest

from lisa.core.model.stream import Entry
from lisa.core.store.presence import GONE_AFTER_MS
from lisa.embedded import EmbeddedServer
from tests.proxies import MovingProxy
from tests.roles import Cast
from tests.servers import Process, Processes, connect, least, wait_until


@pytest.fixture
def cast(redis_url: str) -> Cast:
    return Cast(redis_url)


def daemon(processes: Processes, url: str) -> Process:
    process = processes.start("-m", "lisa.cli.manager", "--redis", url)
    process.wait_for("is reachable")
    return process


def collect(cast: Cast, count: int) -> list[Entry]:
    """Read, open and ack until `count` messages were delivered."""
    got: list[Entry] = []
    while len(got) < count:
        for entry in cast.await_entries():
            cast.open([entry])
            cast.ack(entry)
            got.append(entry)
    return got


@pytest.mark.full
def test_no_message_is_late_when_one_of_two_managers_dies(
    cast: Cast, redis_url: str, processes: Processes
) -> None:
    cast.declare()
    managers = [daemon(processes, redis_url)]

    def worst_ms() -> float:
        managers.append(daemon(processes, redis_url))
        for number in range(100):
            cast.send(delay_ms=300 + 10 * number)
        late: list[float] = []
        while len(late) < 100:
            entries = cast.await_entries()
            now_us = cast.open(entries).now_us
            late += [now_us / 1e3 - entry.due_ms for entry in entries]
            if len(late) > 30 and len(managers) > 1:
                managers.pop(0).kill()
        assert min(late) >= 0
        return max(late)

    limit_ms = GONE_AFTER_MS / 10  # the other one does not wait until this one counts as gone
    assert least(worst_ms, limit_ms) < limit_ms


def test_kill_9_of_the_server_with_messages_in_every_state(
    own_server: EmbeddedServer, processes: Processes
) -> None:
    cast = Cast(own_server.url).declare(ack_timeout="1000", retry_delays="500")
    manager = daemon(processes, own_server.url)
    garbage = cast.send({"state": "garbage"})
    cast.discard(cast.take()[0])
    # "0" first, so that its one retry is soon after the restart.
    retrying = cast.send({"state": "retry"}, policy="1500,0")
    cast.take()
    wait_until(lambda: cast.state(retrying) == "retry")
    flying = cast.send({"state": "in flight"})
    cast.take()
    ready = cast.send({"state": "ready"})
    waiting = cast.send({"state": "waiting"}, delay_ms=2_000)
    states = cast.states([garbage, retrying, flying, ready, waiting])
    assert states == ["garbage", "retry", "in_flight", "ready", "waiting"]
    own_server.kill()
    manager.wait_for("trying again")
    own_server.restart()
    attempts = {entry.id: entry.attempt for entry in collect(cast, 4)}
    assert attempts == {retrying: 2, flying: 2, ready: 1, waiting: 1}
    assert cast.states([garbage, *attempts]) == ["garbage", *["acked"] * 4]
    wake = cast.store.keys.wake
    wait_until(lambda: cast.store.ask("PUBSUB", "NUMSUB", wake) == [wake.encode(), 1])
    assert manager.stop() == 0


def test_a_server_that_is_not_there_at_start_is_waited_for(
    own_server: EmbeddedServer, processes: Processes
) -> None:
    cast = Cast(own_server.url).declare()
    sent = cast.send(delay_ms=100)
    own_server.kill()
    manager = processes.start("-m", "lisa.cli.manager", "--redis", own_server.url)
    manager.wait_for("trying again")
    own_server.restart()
    assert [entry.id for entry in collect(cast, 1)] == [sent]
    assert manager.output.count("trying again") == 1
    own_server.kill()
    manager.wait_for("trying again", times=2)
    assert manager.stop() == 0  # also while the server is away


def test_an_address_that_moves_to_a_new_primary(
    cast: Cast, valkey_server: EmbeddedServer, own_server: EmbeddedServer, processes: Processes
) -> None:
    """The manager's connections stay at the former primary, which is a replica now."""
    with MovingProxy(own_server.url) as proxy, connect(own_server.url) as former:
        daemon(processes, proxy.url)
        proxy.move(valkey_server.port)
        former.replicaof("127.0.0.1", valkey_server.port)
        sent = cast.declare().send(delay_ms=100)
        assert [entry.id for entry in collect(cast, 1)] == [sent]
