"""The cost of idle topics for a running manager."""

import math
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

import msgspec
import pytest
import redis

from lisa import Manager
from lisa.core.store.presence import ManagerPresence
from lisa.core.transitions.delivery import Pull
from lisa.manager import engine, idle_topics, reclaimer
from tests.roles import Cast
from tests.servers import least, wait_until

TOPICS = [f"idle-{number:03}" for number in range(100)]
TICK_MS = 1_000  # of the schedule `move`


@pytest.fixture
def cast(redis_url: str) -> Cast:
    """The last of many topics, which have a group and a message each, due in an hour."""
    cast = Cast(redis_url)
    for topic in TOPICS:
        cast = cast.on(topic).declare()
        cast.send(delay_ms=3_600_000)
    return cast


def late_ms(cast: Cast) -> float:
    """The lateness of one message."""
    cast.send(delay_ms=150)
    (entry,) = cast.await_entries()
    late = cast.drive(cast.store.server_time_us()) / 1e3 - entry.due_ms
    assert late >= 0
    cast.ack(entry)
    return late


def counts(client: redis.Redis) -> Counter[str]:
    """The number of calls of each command."""
    stats = client.info("commandstats")
    return Counter({name.removeprefix("cmdstat_"): stats[name]["calls"] for name in stats})


@pytest.fixture(autouse=True)
def _idle_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Topics become idle after half a second, and each check covers one idle topic a second.

    A topic is known to have no leases only an ack timeout after its first check.
    """
    monkeypatch.setattr(reclaimer, "ACK_TIMEOUT_MS", 500)
    monkeypatch.setattr(idle_topics, "FEW", len(TOPICS) // 2)
    monkeypatch.setattr(idle_topics, "ACTIVE_S", 0.5)
    monkeypatch.setattr(idle_topics, "PER_S", 1)


@contextmanager
def idle_manager(url: str, **options: str) -> Iterator[Manager]:
    """A manager while no topic is active, nor a scan for expired leases scheduled."""
    with Manager(url, **options) as manager:  # type: ignore[arg-type]
        parts = manager._engine
        groups = parts.reclaimer._groups

        def is_idle() -> bool:
            scans = [group.full_at for group in list(groups.values())]
            return not parts.idle.active() and scans == [math.inf] * len(TOPICS)

        wait_until(lambda: manager.health()["status"] == "ok")
        wait_until(is_idle)
        yield manager


def test_many_idle_topics_are_hardly_read(
    cast: Cast, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks that run every 5 s run each second here, so that a short window has them all."""
    monkeypatch.setattr(engine, "PRUNE", timedelta(seconds=1))
    with idle_manager(cast.url, process_pending="1s"):

        def are_hardly_read() -> bool:
            before, began = counts(client), time.monotonic()
            time.sleep(1.5)  # more than one round of each
            calls, took = counts(client) - before, time.monotonic() - began
            return not calls["evalsha"] and calls.total() / took <= len(TOPICS) / 5

        wait_until(are_hardly_read)  # a check may still be at the topics that were active
        late = least(partial(late_ms, cast), TICK_MS / 2)
        assert late < TICK_MS / 2


@pytest.mark.parametrize("timeout_ms", [None, 300])
def test_leases_expire_in_a_topic_that_was_idle(cast: Cast, timeout_ms: int | None) -> None:
    """By the topic's ack timeout, and by one of the pull's own."""
    cast.configure(ack_timeout="400")
    with idle_manager(cast.url, process_pending="1h", move="1h"):
        sent = cast.send(delay_ms=100)
        if timeout_ms is None:
            assert cast.open(cast.await_entries())
        else:
            wait_until(lambda: cast.state(sent) == "ready")
            time.sleep(3 * idle_topics.ACTIVE_S)  # what is ready keeps the topic active
            assert cast.store.call(Pull(cast.keys.topic, "g", "c1", 1, timeout_ms)).entries
        wait_until(lambda: cast.state(sent) == "retry")


def test_topics_are_active_after_another_manager_died(
    cast: Cast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The dead manager may have been the only one to know what is in flight."""
    with idle_manager(cast.url, sweep="1s") as manager:
        monkeypatch.setattr(idle_topics, "ACTIVE_S", 3_600)
        cast.ask("HSET", cast.own.entries, "m1", "1-1")  # unannounced
        dead = ManagerPresence(name="dead", seen_ms=1)
        cast.ask("HSET", cast.store.keys.managers, "dead", msgspec.json.encode(dead))
        idle = manager._engine.idle
        wait_until(lambda: idle.active() == [cast.keys.topic])
