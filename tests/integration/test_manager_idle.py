"""What topics cost a running manager while nothing is due on them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from lisa import Manager
from lisa.core.transitions.base import text
from lisa.manager.promoter import TICKS
from tests.roles import Cast
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    import redis

TOPICS = [f"idle-{number:03}" for number in range(300)]
WINDOW_S = 6.5  # more than one round of each look that is taken every 5 s


@pytest.fixture
def casts(redis_url: str) -> Iterator[dict[str, Cast]]:
    """Topics with a declared group and one message each that is due in an hour."""
    made = {topic: Cast(redis_url, topic) for topic in TOPICS}
    for cast in made.values():
        cast.declare()
        cast.send(delay_ms=3_600_000)
        cast.store.close()
    yield made
    for cast in made.values():
        cast.store.close()


def counts(client: redis.Redis) -> dict[str, int]:
    told: dict[str, dict[str, int]] = client.info("commandstats")
    return {name.removeprefix("cmdstat_"): one["calls"] for name, one in told.items()}


def test_idle_topics_cost_a_few_plain_reads(
    casts: dict[str, Cast], redis_url: str, client: redis.Redis
) -> None:
    with Manager(redis_url) as manager:
        health = manager.health
        wait_until(lambda: health()["status"] == "ok")
        wait_until(lambda: len(told(health())) == len(TOPICS) and all(told(health()).values()))
        settled = -1
        while settled != (settled := counts(client)["evalsha"]):
            time.sleep(1.5)  # the first looks, which learn what is there
        before, began = counts(client), time.monotonic()
        time.sleep(WINDOW_S)
        after, took = counts(client), time.monotonic() - began
        calls = {name: after[name] - before.get(name, 0) for name in after}
        rates = {name: count / took / len(TOPICS) for name, count in calls.items()}
        assert calls.get("evalsha", 0) == 0
        assert max(rates.values()) <= 1.0
        for topic in TOPICS[:: len(TOPICS) // 5]:
            cast = casts[topic]
            sent = cast.send(delay_ms=150)
            (entry,) = cast.read(block_ms=5_000)
            late_ms = cast.store.drive(cast.store.server_time_us()) / 1e3 - entry.due_ms
            assert entry.id == sent
            assert 0 <= late_ms < 500  # a tick of the cron would come up to a second later
            cast.ack(entry)


def test_a_message_that_nobody_announced_is_found_by_the_cron(
    casts: dict[str, Cast], redis_url: str, client: redis.Redis
) -> None:
    with Manager(redis_url, move="1s") as manager:
        health = manager.health
        wait_until(lambda: len(told(health())) == len(TOPICS) and all(told(health()).values()))
        cast = casts[TOPICS[-1]]
        (sent,) = [text(one) for one in cast.store.ask("ZRANGE", cast.keys.waiting, 0, 0)]
        due_ms = cast.now_ms()
        client.zadd(cast.keys.waiting, {sent: due_ms})
        (entry,) = cast.read(block_ms=20_000)
        assert entry.id == sent
        assert cast.now_ms() - due_ms < (TICKS + 2) * 1_000


def told(health: dict[str, object]) -> dict[str, float | None]:
    """Topics, and when each was looked at with success."""
    topics = health["topics"]
    assert isinstance(topics, dict)
    return {name: one["promoted_s_ago"] for name, one in topics.items()}
