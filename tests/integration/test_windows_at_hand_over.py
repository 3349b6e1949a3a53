"""Nothing is handed over outside its window, by Redis's clock, on any path."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from lisa import Consumer, Manager, Producer
from lisa.core.model.clock import datetime_ms
from tests.roles import Cast
from tests.servers import flush, wait_until
from tests.shifted_server import ShiftedServer, missing

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]

TOPIC = "orders"
CLOSES_MS = datetime_ms(datetime(2031, 6, 3, 21, tzinfo=UTC))
OPENS_MS = CLOSES_MS + 12 * 3_600_000


class Evening:
    """A topic that is open from 9 to 21, on a server whose clock shows an evening."""

    def __init__(self, server: ShiftedServer, lead_s: float) -> None:
        flush(server.url)
        self.server = server
        self.set_clock(CLOSES_MS / 1000 - lead_s)
        self.cast = Cast(server.url).declare()
        self.seen: list[tuple[str, int, float]] = []
        self.slow_s = 0.002
        self.busy_until = 0.0
        self._lock = threading.Lock()

    def set_clock(self, seconds: float) -> None:
        self.server.step(timedelta(seconds=seconds - self.server.now()))

    def pause_s(self, count: int) -> float:
        """How long a handler takes for so many messages."""
        return max(self.slow_s * count, self.busy_until - self.server.now())

    def handle(self, message: Any) -> None:
        with self._lock:
            self.seen.append((message.id, message.attempt, self.server.now()))

    def wait_for(self, number: Callable[[], int], count: int) -> None:
        """Wait until that number is reached, for as long as it grows."""
        while (reached := number()) < count:
            wait_until(lambda before=reached: number() > before)  # type: ignore[misc]
        assert number() == count

    def delivered(self) -> int:
        """The number of deliveries that are not settled."""
        return int(self.cast.store.ask("XPENDING", self.cast.own.ready, "g")[0])

    def deferred_count(self) -> int:
        return int(self.cast.store.ask("ZCARD", self.cast.own.retry))

    def deferred(self) -> list[int]:
        """When the messages of the group's retry are due."""
        pairs = self.cast.store.ask("ZRANGE", self.cast.own.retry, 0, -1, "WITHSCORES")
        return [int(score) for score in pairs[1::2]]

    def delivered_ms(self) -> list[int]:
        """The times of deliveries in the journal, by Redis's clock."""
        events = self.cast.store.ask("XRANGE", self.cast.keys.events, "-", "+")
        return [
            int(number.split(b"-")[0])
            for number, fields in events
            if b"in_flight" in fields[fields.index(b"state") + 1]
        ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ShiftedServer]:
    with ShiftedServer(tmp_path_factory.mktemp("server")) as server:
        yield server


SLOTS = 4


def consumer_of(evening: Evening, kind: str) -> Consumer:
    consumer = Consumer(evening.server.url, group="g", concurrency=SLOTS)

    async def on_message(message: Any) -> None:
        evening.handle(message)
        await asyncio.sleep(evening.pause_s(1))

    def on_messages(given: Any) -> None:
        messages = given if kind == "batch" else [given]
        for message in messages:
            evening.handle(message)
        time.sleep(evening.pause_s(len(messages)))

    handler = on_message if kind == "async" else on_messages
    consumer.on(TOPIC, handler, batch=50 if kind == "batch" else None)
    return consumer


EARLY_MS = 400
"""How long before the end of the window the messages are due."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("threads", 1_500),
        pytest.param("async", 1_500, marks=pytest.mark.full),
        pytest.param("batch", 1_500, marks=pytest.mark.full),
        pytest.param("threads", 50_000, marks=pytest.mark.slow),
    ],
)
def test_nothing_is_delivered_after_the_window_closes(
    server: ShiftedServer, kind: str, count: int
) -> None:
    """Handle what is possible before the window closes, and the rest when it opens again.

    All roles work before the clock is set to the evening: that takes a busy machine some time.
    """
    evening = Evening(server, 3_600)
    evening.cast.configure(window="9-21", journal="1")
    with Producer(server.url) as producer:
        sent = producer.send_many(TOPIC, range(count), at_ms=CLOSES_MS - EARLY_MS)
        assert sent.accepted == count
        producer.send(TOPIC, "probe")
    with Manager(server.url), consumer_of(evening, kind):
        evening.wait_for(lambda: len(evening.seen), 1)
        evening.seen.clear()
        evening.set_clock((CLOSES_MS - EARLY_MS) / 1000 - 2)
        evening.wait_for(lambda: evening.deferred_count() + len(evening.seen), count)
        assert server.now() > CLOSES_MS / 1000
        before = len(evening.seen)
        assert before < count
        assert max(evening.delivered_ms(), default=0) < CLOSES_MS
        assert set(evening.deferred()) == {OPENS_MS}
        assert not evening.cast.store.ask("HLEN", evening.cast.own.attempts)
        evening.set_clock(OPENS_MS / 1000)
        evening.wait_for(lambda: len(evening.seen), count)
    assert len({message_id for message_id, *_ in evening.seen}) == count
    assert {attempt for _, attempt, _ in evening.seen} == {1}
    assert min(at for *_, at in evening.seen[before:]) >= OPENS_MS / 1000


@pytest.mark.parametrize("kind", ["threads", "async"])
def test_messages_that_wait_for_a_handler_as_the_window_closes_are_deferred(
    server: ShiftedServer, kind: str
) -> None:
    lead_s, waited = 2, 0
    while not waited and lead_s < 60:  # a busy machine may deliver none in so short a time
        waited = check_waiting(server, kind, lead_s)
        lead_s *= 4
    assert waited


def check_waiting(server: ShiftedServer, kind: str, lead_s: int) -> int:
    """Free no handler before the window has closed; returns how many messages waited for one."""
    evening = Evening(server, 3_600)
    evening.cast.configure(window="9-21")
    evening.slow_s = 0.001
    consumer = consumer_of(evening, kind)

    def waiting() -> int:
        """Deliveries that are opened: one that is only read may find the window closed there."""
        return int(consumer.health()["topics"][f"{TOPIC}/g"]["held"]) - SLOTS

    with Producer(server.url) as producer, Manager(server.url), consumer:
        producer.send_many(TOPIC, range(200))  # the consumer learns that it may read ahead
        evening.wait_for(lambda: len(evening.seen), 200)
        wait_until(lambda: evening.delivered() == 0)
        evening.seen.clear()
        evening.busy_until = CLOSES_MS / 1000 + 0.1
        evening.set_clock(CLOSES_MS / 1000 - lead_s)
        producer.send_many(TOPIC, range(60))
        wait_until(lambda: waiting() > 0 or server.now() >= CLOSES_MS / 1000)
        found = waiting()
        evening.wait_for(lambda: evening.deferred_count() + len(evening.seen), 60)
        assert max([at for *_, at in evening.seen], default=0) < CLOSES_MS / 1000
        assert set(evening.deferred()) == {OPENS_MS}
    return max(0, found)


def test_a_reclaimed_delivery_and_a_retry_wait_for_the_window(server: ShiftedServer) -> None:
    """Each has one failed attempt, and being outside the window counts none."""
    evening = Evening(server, 2.5)
    evening.cast.configure(window="9-21", retry_delays="0,0,0,0", ack_timeout="1000")
    with Producer(server.url) as producer, Consumer(server.url, group="g") as consumer:
        ids = [producer.send(TOPIC, body) for body in ("held", "failing", "backlog")]
        with Manager(server.url):
            first = consumer.pull(TOPIC, batch=2, wait="5s")
            assert [one.message.id for one in first] == ids[:2]
            wait_until(lambda: server.now() > CLOSES_MS / 1000)
            first[1].retry(delay="0s", reason="no")
            # The first is reclaimed, the second has failed, the third was never delivered.
            wait_until(
                lambda: consumer.pull(TOPIC, wait="100ms") == [] and len(evening.deferred()) == 3
            )
            assert set(evening.deferred()) == {OPENS_MS}
            evening.set_clock(OPENS_MS / 1000)
            again: dict[str, int] = {}
            while len(again) < 3:
                for delivery in consumer.pull(TOPIC, batch=3, wait="60s"):
                    again[delivery.message.id] = delivery.message.attempt
                    delivery.ack()
    assert [again[one] for one in ids] == [2, 2, 1]
    assert evening.cast.store.ask("HGET", evening.cast.keys.stats, "deferred@g") >= b"3"
