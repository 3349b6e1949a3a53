"""Lateness above five minutes, from the consumer to the numbers that users see."""

from __future__ import annotations

from datetime import timedelta

import pytest

from lisa import Consumer, Producer
from lisa.admin import live
from lisa.core.metrics import topics as topic_metrics
from tests.consumers import Bench

pytestmark = pytest.mark.usefixtures("orders_declared")

TOPIC = "orders"
TEN_MINUTES_MS = 600_000


def test_percentiles_do_not_exceed_the_highest_lateness(bench: Bench) -> None:
    before = bench.store.drive(live.look(bench.store, [TOPIC]))
    consumer = Consumer(bench.url)
    with Producer(bench.url) as producer:
        now_ms = bench.store.drive(bench.store.server_time_ms())
        for minutes in (6, 7, 8, 9):
            producer.send(TOPIC, minutes, at_ms=now_ms - minutes * 60_000)
    try:
        *acked, failed = consumer.pull(TOPIC, batch=4, wait=timedelta(seconds=10))
        for one in acked:
            one.ack()
        failed.retry()
    finally:
        consumer.stop()
    after = bench.store.drive(live.look(bench.store, [TOPIC]))
    (found,) = live.activity(before, after)
    highest_ms = after.topics[TOPIC].stats["late_max@lisa"]
    assert 540_000 <= highest_ms < TEN_MINUTES_MS
    assert found.p50_ms is not None
    assert found.p99_ms is not None
    assert 300_000 < found.p50_ms < found.p99_ms <= highest_ms
    numbers = bench.store.drive(topic_metrics.read(bench.store))
    assert numbers["lisa_topic_lateness_max_seconds"][TOPIC, "lisa"] == highest_ms / 1000
