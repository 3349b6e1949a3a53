"""Leases, due times and garbage when the server's clock is set while it runs."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from lisa import Consumer, Manager, Message
from lisa.core.model.clock import duration_ms
from lisa.core.model.sharding import Shard
from lisa.core.transitions.delivery import Pull
from lisa.core.transitions.journal import ARCHIVE_HOLDS_MS
from lisa.manager.pruner import Pruner
from lisa.manager.server_clock import STEP_S
from tests.roles import Cast, Services
from tests.servers import redis_server, wait_until
from tests.shifted_server import ShiftedServer, missing

HOUR = timedelta(hours=1)
ACK_S = 1.5
OWN_MS = 3_000


@pytest.fixture(params=["valkey", pytest.param("redis", marks=pytest.mark.full)])
def shifted(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ShiftedServer]:
    program = redis_server() if request.param == "redis" else None
    reason = missing()
    if request.param == "redis" and program is None:
        reason = "redis-server is not on PATH (Debian: apt-get install redis-server)"
    if reason:
        pytest.skip(reason)
    with ShiftedServer(tmp_path / "server", program=program) as server:
        yield server


@pytest.fixture
def server(shifted: ShiftedServer) -> str:
    return shifted.url


@pytest.fixture
def cast(cast: Cast) -> Cast:
    """What is lost comes back an hour later, so no test sees it by chance."""
    cast.configure(ack_timeout=f"{ACK_S * 1e3:.0f}", retry_delays="3600000")
    cast.drive(cast.store.register(["orders"]))
    return cast


@pytest.fixture
def managers(cast: Cast) -> Iterator[list[Manager]]:
    """Two managers: each effect of a clock step must happen once."""
    with Manager(cast.url) as first, Manager(cast.url) as second:
        for manager in (first, second):
            wait_until(lambda manager=manager: "orders" in str(manager.health()["topics"]))  # type: ignore[misc]
        yield [first, second]


def pull(cast: Cast, own_ms: int | None = None) -> None:
    """Pull a ready message as a consumer that then dies."""
    cast.store.call(Pull("orders", "g", "dead", 1, own_ms))


class TestReclaimer:
    def test_a_manager_that_missed_the_step_back_finds_future_leases(
        self, shifted: ShiftedServer, cast: Cast
    ) -> None:
        sent = cast.send()
        pull(cast)
        shifted.step(-HOUR)
        late = Services(cast)
        wait_until(lambda: late.reclaimer.step(["orders"]) and cast.state(sent) == "retry")
        assert late.clock.steps == ()

    def test_a_server_that_hangs_is_taken_for_a_step_for_one_look_at_most(
        self, shifted: ShiftedServer, cast: Cast, kit: Services
    ) -> None:
        sent = cast.send()
        pull(cast)
        time.sleep(ACK_S + 0.1)
        os.kill(shifted.pid, signal.SIGSTOP)
        threading.Timer(1.5, os.kill, (shifted.pid, signal.SIGCONT)).start()
        kit.reclaimer.step(["orders"])
        kit.reclaimer.step(["orders"])
        assert kit.clock.steps == ()
        assert cast.state(sent) == "retry"


class TestManager:
    @pytest.mark.parametrize("by", [HOUR, -HOUR], ids=["forward", "back"])
    def test_running_messages_stay_and_abandoned_ones_are_redelivered(
        self, shifted: ShiftedServer, cast: Cast, managers: list[Manager], by: timedelta
    ) -> None:
        dead, own = cast.send(), cast.send()
        pull(cast)
        pulling = time.monotonic()
        pull(cast, OWN_MS)
        consumer, may_end = Consumer(shifted.url, concurrency=2), threading.Event()
        running, handled = list[str](), list[str]()

        @consumer.on("orders")
        def handle(message: Message) -> None:
            running.append(message.id)
            if message.body == "slow":
                may_end.wait(120)
            handled.append(message.id)

        with consumer:
            slow = cast.send("slow")
            wait_until(lambda: slow in running)
            shifted.step(by)
            stepped = time.monotonic()
            wait_until(lambda: cast.states([dead, own]) == ["retry", "retry"])
            assert time.monotonic() - pulling >= OWN_MS / 1e3 - STEP_S
            assert cast.state(slow) == "in_flight"
            quick = cast.send("quick")
            wait_until(lambda: quick in handled)
            wait_until(lambda: time.monotonic() > stepped + 2 * ACK_S)
            may_end.set()
            wait_until(lambda: cast.state(slow) == "acked")
        assert running.count(slow) == 1
        assert cast.stats()["reclaimed@g"] == 2
        assert all(manager.health()["status"] == "ok" for manager in managers)

    def test_due_times_follow_the_clock(
        self, shifted: ShiftedServer, cast: Cast, managers: list[Manager]
    ) -> None:
        later = cast.send(delay_ms=3_600_000)
        shifted.step(HOUR)
        wait_until(lambda: cast.state(later) == "ready")
        soon = cast.send(delay_ms=1_500)
        due_s = shifted.now() + 1.5
        shifted.step(timedelta(seconds=-3))
        wait_until(lambda: cast.state(soon) == "ready")
        assert shifted.now() >= due_s - 0.05
        assert managers


class TestSweeper:
    def test_garbage_outlives_a_step_forward(
        self, shifted: ShiftedServer, cast: Cast, kit: Services
    ) -> None:
        """A step of the server's clock does not age garbage."""
        cast.configure(garbage_keep="60000")
        sent = cast.send()
        (entry,) = cast.take()
        cast.discard(entry)
        shifted.step(timedelta(days=100))
        kit.sweeper.step("orders")
        assert cast.state(sent) == "garbage"

    def test_live_consumers_are_not_forgotten_permanently(
        self, shifted: ShiftedServer, cast: Cast, kit: Services
    ) -> None:
        consumer, handled = Consumer(shifted.url), list[str]()
        consumer.subscribe("orders", lambda message: handled.append(message.id))
        with consumer:
            first = cast.send()
            wait_until(lambda: first in handled)
            wait_until(lambda: cast.state(first) == "acked")
            shifted.step(HOUR)
            kit.sweeper.step("orders")
            second = cast.send()
            wait_until(lambda: second in handled)
            wait_until(lambda: cast.ask("HLEN", cast.keys.consumers) == 1)


def test_a_step_forward_prunes_no_event_that_a_nightly_archive_has_not_read(
    shifted: ShiftedServer, cast: Cast, kit: Services
) -> None:
    pruner, events = Pruner(cast.store, kit.clock), cast.keys.events
    for number in range(1, 301):
        cast.ask("XADD", events, f"1-{number}", "n", number)
    cast.configure(journal_max="100")

    def report(at_ms: int) -> None:
        cast.ask("HSET", cast.keys.archived, "nightly", f"1-1 1 {at_ms}")

    report(cast.now_ms())
    shifted.step(timedelta(days=3))
    pruner.step(Shard("orders"))
    assert cast.ask("XLEN", events) == 300
    report(cast.now_ms() - ARCHIVE_HOLDS_MS - duration_ms(timedelta(days=4)))
    pruner.step(Shard("orders"))
    assert cast.ask("XLEN", events) < 300, "an archive that has stopped keeps no events"
