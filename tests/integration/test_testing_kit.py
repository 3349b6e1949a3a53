"""The test kit: a real server whose clock the test controls, and the application's handlers."""

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock, create_autospec
from zoneinfo import ZoneInfo

import msgspec
import pytest
import time_machine

import lisa as library
from lisa import (
    AsyncConsumer,
    AsyncProducer,
    Batch,
    Consumer,
    Defer,
    Discard,
    Limited,
    Message,
    Producer,
    Retry,
    TopicOptions,
)
from lisa.core.model.errors import ConfigError, LisaError, ServerUnavailable
from lisa.core.redis.connection import Connection
from lisa.testing import AsyncLisaTestKit, ClockedServer, LisaTestKit
from tests.servers import connect, no_clock

pytest_plugins = ("pytester",)

pytestmark = pytest.mark.timeout(300)

DAY, HOUR, MINUTE, SECOND = (timedelta(seconds=one) for one in (86_400, 3_600, 60, 1))
BERLIN = ZoneInfo("Europe/Berlin")


@pytest.fixture(scope="module")
def clock() -> Iterator[ClockedServer]:
    if reason := no_clock():
        pytest.skip(reason)
    with ClockedServer() as server:
        yield server


@pytest.fixture
def kit(clock: ClockedServer) -> Iterator[LisaTestKit]:
    with LisaTestKit(clock) as made:
        yield made


@pytest.fixture
async def async_kit(clock: ClockedServer) -> AsyncIterator[AsyncLisaTestKit]:
    async with AsyncLisaTestKit(clock) as made:
        yield made


def attach(kit: LisaTestKit, topic: str, handler: Callable[..., Any], **options: Any) -> Consumer:
    """Handle a topic's messages."""
    consumer = Consumer()
    consumer.on(topic, handler, **options)
    kit.attach(consumer)
    return consumer


def state_of(kit: LisaTestKit, message_id: str, topic: str = "orders") -> str:
    """The state of a known message."""
    found = kit.producer.get(topic, message_id)
    assert found is not None
    return found.state


class TestClock:
    def test_time_expiry_and_idle_times_move_together(self, clock: ClockedServer) -> None:
        start = datetime(2027, 3, 28, 0, 59, 59, 999_000, tzinfo=UTC)
        start_us = int(start.timestamp()) * 1_000_000 + 999_000
        clock.set_time(start_us)
        with connect(clock.url) as client:
            client.set("key", "value", px=3_600_000)
            client.xadd("stream", {"a": "b"})
            client.xgroup_create("stream", "g", "0")
            client.xreadgroup("g", "c", {"stream": ">"})
            clock.set_time(start_us + 3_599_999_000)
            assert client.get("key") == b"value"
            assert client.pttl("key") == 1
            (held,) = client.xpending_range("stream", "g", "-", "+", 1)
            assert held["time_since_delivered"] == 3_599_999
            clock.set_time(start_us + 3_600_001_000)
            assert client.get("key") is None
            seconds, micros = client.time()
            assert seconds * 1000 + micros // 1000 == start_us // 1000 + 3_600_001

    def test_it_stands_still_and_goes_back_only_when_unused(self, kit: LisaTestKit) -> None:
        kit.travel_to(datetime(2026, 3, 28, 12, tzinfo=BERLIN))
        start = kit.now
        assert start == datetime(2026, 3, 28, 11, tzinfo=UTC)
        with connect(kit.url) as client:
            first = client.time()
            time.sleep(0.01)
            last = client.time()
        assert (last[0], last[1] // 1000) == (first[0], first[1] // 1000), "to the millisecond"
        kit.producer.send("orders", 1, delay="2h")
        mistakes: list[tuple[Callable[[], object], str]] = [
            (lambda: kit.travel_to(start - SECOND), "cannot go back"),
            (lambda: kit.advance(-SECOND), "cannot go back by 0:00:01"),
            (lambda: kit.travel_to(datetime(2026, 3, 29)), "names no time zone"),  # noqa: DTZ001  that is the mistake
            (lambda: kit.travel_to(cast("Any", "2026-03-29")), "not '2026-03-29'"),
            (lambda: kit.advance(days=3_000_000), "beyond the year 9999"),
            (lambda: kit.advance(days=float("inf")), "beyond the year 9999"),
            (lambda: kit.advance("10"), "10 has no unit"),
            (lambda: kit.run_until_idle(within="10"), "10 has no unit"),
            (lambda: kit.attach(cast("Any", print)), "takes a Consumer or an AsyncConsumer, not"),
        ]
        for call, said in mistakes:
            with pytest.raises(ConfigError, match=said):
                call()
        with pytest.raises(TypeError, match=r"^LisaTestKit\.advance\(\) got"):
            kit.advance(weeks=1)  # type: ignore[call-arg]
        assert kit.now == start
        with pytest.raises(LisaError, match="not idle after 1h"):
            kit.run_until_idle(within="1h")
        start = kit.now
        kit.advance("1d12h", hours=12)
        assert kit.now - start == 2 * DAY

    def test_followers_see_each_instant(self, kit: LisaTestKit) -> None:
        seen, start = list[datetime](), kit.now
        attach(kit, "orders", lambda _: seen.append(datetime.now(UTC)))
        with time_machine.travel(start, tick=False) as traveller:
            kit.follow(traveller.move_to)
            kit.producer.send("orders", 1, at=datetime.now(UTC) + DAY)
            kit.producer.send("orders", 2, delay=2 * DAY)
            kit.advance(days=3)
            assert datetime.now(UTC) == start + 3 * DAY
        assert seen == [start + DAY, start + 2 * DAY]


class TestDelivery:
    def test_a_month_passes_at_once_and_in_few_calls_to_the_server(
        self, kit: LisaTestKit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        start, counted = kit.now, list[Mock]()
        for name in ("execute", "execute_many", "execute_chain"):
            method = getattr(Connection, name)
            counted.append(create_autospec(method, side_effect=method))
            monkeypatch.setattr(Connection, name, counted[-1])
        kit.producer.send("orders", {"order": 42}, delay=timedelta(days=30), headers={"a": "b"})
        (sent,) = kit.sent("orders")
        assert (sent.body, sent.headers, sent.delay) == ({"order": 42}, {"a": "b"}, 30 * DAY)
        assert sent.due == start + 30 * DAY
        kit.advance(30 * DAY - timedelta(milliseconds=1))
        assert kit.handled() == []
        assert [one.body for one in kit.waiting("orders")] == [{"order": 42}]
        kit.advance(timedelta(milliseconds=1))
        assert [m.body for m in kit.handled("orders")] == [{"order": 42}]
        assert 0 < sum(one.call_count for one in counted) < 100
        assert (kit.waiting(), kit.garbage(), kit.handled("others")) == ([], [], [])
        (attempt,) = kit.attempts()
        assert (attempt.at, attempt.message.due) == (sent.due, sent.due)
        kit.producer.send("orders", "due now")
        assert len(kit.handled()) == 1, "it runs when the test says so"
        kit.advance()
        assert [one.body for one in kit.handled()][1:] == ["due now"]

    def test_events_happen_at_their_own_instants(self, kit: LisaTestKit) -> None:
        """What a handler sends with a delay is due within the same call."""
        start, seen = kit.now, list[tuple[int, timedelta]]()

        def handle(message: Message) -> None:
            seen.append((message.body, kit.now - start))
            kit.producer.send("daily", message.body + 1, delay=DAY)

        attach(kit, "daily", handle)
        kit.producer.send("daily", 1, delay=DAY)
        kit.advance(days=10, hours=12)
        assert seen == [(n, n * DAY) for n in range(1, 11)]
        assert kit.now - start == 10 * DAY + 12 * HOUR

        def receive(topic: str, *, message: Message) -> None:
            if message.body < 3:
                kit.producer.send(topic, message.body + 1, delay=HOUR)

        with library.message_received.connected_to(receive, sender="hourly"):
            kit.producer.send("hourly", 1, delay=HOUR)
            kit.advance(hours=4)
        assert [one.body for one in kit.handled("hourly")] == [1, 2, 3]

    def test_retries_have_their_pauses_and_end_in_garbage(self, kit: LisaTestKit) -> None:
        start, dead = kit.now, list[str | None]()

        def handle(message: Message) -> None:
            if len(kit.attempts()) == 0:
                raise Defer("closed", delay="1m")
            if message.attempt == 1:
                raise Retry("busy", delay=timedelta(minutes=7))
            raise ValueError("bad order")

        async def discard(_: Message) -> None:
            await asyncio.sleep(0)
            raise Discard("no such order")

        async def note(_topic: str, *, message: Message) -> None:
            await asyncio.sleep(0)
            dead.append(message.reason)

        attach(kit, "orders", handle)
        kit.configure("orders", retry_delays="10s,1h")
        kit.producer.send("orders", 1, delay=DAY)
        kit.advance(days=2)
        assert [(one.at - start - DAY, one.outcome, one.reason) for one in kit.attempts()] == [
            (timedelta(0), "deferred", "closed"),
            (MINUTE, "retrying", "busy"),
            (8 * MINUTE, "retrying", "ValueError: bad order"),
            (HOUR + 8 * MINUTE, "dead", "ValueError: bad order"),
        ]
        (garbage,) = kit.garbage("orders")
        assert (garbage.body, garbage.reason) == (1, "ValueError: bad order")
        assert (kit.handled(), kit.waiting()) == ([], [])
        attach(kit, "others", discard).message_dead.connect(note)
        kit.producer.send("others", 1)
        kit.run_until_idle()
        assert [one.outcome for one in kit.attempts("others")] == ["dead"]
        assert [one.reason for one in kit.garbage("others")] == dead == ["no such order"]

    def test_topics_take_turns_and_messages_are_cancelled_and_moved(self, kit: LisaTestKit) -> None:
        for topic, minutes in (("b", 1), ("a", 3), ("c", 2), ("a", 1)):
            kit.producer.send(topic, minutes, delay=minutes * MINUTE)
        kit.run_until_idle()
        seen = [(one.topic, one.body) for one in kit.handled()]
        assert seen == [("a", 1), ("b", 1), ("c", 2), ("a", 3)]
        ids = [kit.producer.send("orders", n, delay=DAY) for n in range(4)]
        start = kit.now
        assert kit.producer.cancel("orders", ids[0]) == "cancelled"
        assert kit.producer.reschedule("orders", ids[1], delay=2 * DAY) == "rescheduled"
        assert kit.producer.fire_now("orders", ids[2]) == "rescheduled"
        kit.producer.send("orders", 4, key="k", id="own", delay=DAY)
        kit.producer.send("orders", 5, key="k", delay=DAY)
        assert {one.outcome for one in kit.producer.reschedule_key("orders", "k", delay=DAY)} == {
            "rescheduled"
        }
        kit.producer.reschedule_key("orders", "k", shift=2 * DAY)
        assert kit.producer.cancel("orders", "k\x1fown") == "cancelled"
        assert [one.key for one in kit.sent("orders")][-2:] == ["k", "k"]
        kit.run_until_idle()
        moved = [(one.message.body, one.at - start) for one in kit.attempts("orders")]
        assert moved == [(2, timedelta(0)), (3, DAY), (1, 2 * DAY), (5, 3 * DAY)]
        kit.configure("shards", shards=3)
        for days in (1, 2):
            kit.producer.send_many("shards", range(30 * days), delay=days * DAY)
        kit.advance(DAY)
        assert sorted(one.body for one in kit.handled("shards")) == list(range(30))
        assert sorted(one.body for one in kit.waiting("shards")) == list(range(60))

    def test_what_happens_to_messages_of_a_paused_topic(self, kit: LisaTestKit) -> None:
        """A ttl ends them; a late policy skips them after the pause."""
        kit.configure("orders", paused=True)
        brief = kit.producer.send("orders", 1, delay=HOUR, ttl=HOUR)
        late = [
            kit.producer.send("orders", n, delay=n * HOUR, late="skip after 90m") for n in (1, 2)
        ]
        kit.advance(hours=1, minutes=59)
        assert brief in {one.id for one in kit.waiting()}
        kit.advance(minutes=2)
        assert state_of(kit, brief) == "expired"
        kit.advance(minutes=59)
        kit.configure("orders", paused=False)
        kit.run_until_idle()
        assert [state_of(kit, one) for one in late] == ["skipped", "acked"]
        assert (len(kit.attempts()), kit.waiting()) == (1, [])
        assert kit.producer.send_one("orders", 1, id=late[1]).outcome == "duplicate"
        kit.advance(TopicOptions().retention + SECOND)
        assert kit.producer.send_one("orders", 1, id=late[1]).outcome == "accepted", "no tombstone"

    def test_a_lease_ends(self, kit: LisaTestKit) -> None:
        """A program that pulls takes the message and dies; then the kit handles it."""
        kit.configure("orders", ack_timeout=5 * MINUTE, retry_delays="1h")
        kit.advance()
        kit.producer.send("orders", 1)
        lease, start = 10 * MINUTE, kit.now
        with Consumer(kit.url) as program:
            (delivery,) = program.pull("orders", ack_timeout=lease)
        kit.advance(lease - SECOND)
        assert state_of(kit, delivery.id) == "in_flight"
        kit.advance(2 * SECOND)
        (left,) = kit.waiting()
        assert (left.state, left.attempts, left.reason) == ("retry", 1, "ack timeout")
        kit.advance(HOUR)
        (attempt,) = kit.attempts()
        assert attempt.message.attempt == 2
        late = attempt.at - start - lease - HOUR
        assert timedelta(0) <= late <= timedelta(milliseconds=2)


class Order(msgspec.Struct):
    """A typed body."""

    order: int


class TestConsumers:
    def test_typed_batch_and_async_handlers(self, kit: LisaTestKit) -> None:
        seen = list[Any]()

        async def typed(message: Message) -> None:
            await asyncio.sleep(0)
            seen.append(message.body)

        def together(batch: Batch) -> None:
            seen.append([message.body for message in batch])
            batch.fail(batch[0], "again")

        consumer = attach(kit, "typed", typed, model=Order)
        consumer.on("batches", together, batch=3)
        kit.configure("batches", retry_delays=[])
        kit.producer.send_many("typed", [{"order": 1}, {"order": "one"}])
        kit.producer.send_many("batches", [1, 2, 3, 4])
        kit.advance()
        assert seen == [[1, 2, 3], [4], Order(1)]
        assert [one.body for one in kit.handled()] == [2, 3, {"order": 1}]
        assert {str(one.body) for one in kit.garbage()} == {"1", "4", "{'order': 'one'}"}

    def test_groups_and_their_consumers(self, kit: LisaTestKit) -> None:
        kit.producer.send("orders", "before any group")
        kit.advance()
        seen = list[str]()
        billing = [{"group": "billing", "topic": "orders"}]
        for consumer in (Consumer.from_config(groups=billing), Consumer(group="mail")):
            consumer.on("orders", lambda one: seen.append(f"{one.group} {one.body}"))
            kit.attach(consumer)
        kit.producer.send("orders", 1, delay=DAY)
        kit.advance(DAY)
        assert sorted(seen) == ["billing 1", "mail 1"]
        attach(kit, "orders", print)
        with pytest.raises(ConfigError, match="several groups"):
            kit.advance()

    @pytest.mark.parametrize("make", [contextmanager, None], ids=["blocking", "asynchronous"])
    def test_lifespans(self, clock: ClockedServer, make: Callable[..., Any] | None) -> None:
        said = list[str]()

        def blocking() -> Iterator[str]:
            said.append("opened")
            yield "state"
            said.append("closed")

        @asynccontextmanager
        async def asynchronous() -> AsyncIterator[str]:
            task = asyncio.current_task()
            said.append("opened")
            yield "state"
            assert asyncio.current_task() is task
            said.append("closed")

        consumer = Consumer(lifespan=make(blocking) if make else asynchronous)
        consumer.on("orders", lambda one: said.append(one.state))
        consumer.on("batches", lambda batch: said.append(batch[0].state), batch=2)
        with LisaTestKit(clock) as kit:
            kit.attach(consumer)
            kit.advance()
            assert said == []
            kit.producer.send("orders", 1)
            kit.producer.send("batches", 1, delay=DAY)
            kit.advance(DAY)
            assert said == ["opened", "state", "state"]
        assert said == ["opened", "state", "state", "closed"]

    def test_lifespans_that_fail(self, clock: ClockedServer) -> None:
        """All are left; one that fails at its start fails the test."""
        kit, left = LisaTestKit(clock), list[str]()
        for topic in ("first", "second", "third"):

            @contextmanager
            def lifespan(topic: str = topic) -> Iterator[None]:
                if topic == "third":
                    raise ConnectionError("no database")
                yield
                left.append(topic)
                raise ConnectionError(topic)

            consumer = Consumer(lifespan=lifespan)
            consumer.on(topic, lambda _: None)
            kit.attach(consumer)
            kit.producer.send(topic, 1)
            if topic != "third":
                kit.advance()
        with pytest.raises(ConnectionError, match="no database"):
            kit.advance()
        with pytest.raises(ConnectionError):
            kit.close()
        assert left == ["second", "first"]

    def test_producers_of_several_servers(self, clock: ClockedServer, redis_url: str) -> None:
        """A producer of the application registers a topic for 20 s; the next test must see it."""
        port = clock.url.rpartition(":")[2].removesuffix("/0")
        urls = [f"redis://127.0.0.1:{port}", f"redis://localhost:{port}/0", clock.url]
        with Producer(redis_url) as other, Producer(clock.url) as producer:
            for _ in range(2):
                with LisaTestKit(clock) as kit:
                    other.send("orders", 1, delay=HOUR)
                    assert (kit.sent(), kit.waiting()) == ([], [])
                    producer.send("orders", clock.url, delay=DAY)
                    for url in urls[:2]:
                        with Producer(url) as one:
                            one.send("orders", url, delay=DAY)
                    assert len(kit.sent("orders")) == 3
                    kit.advance(DAY)
                    assert sorted(one.body for one in kit.handled()) == sorted(urls)


class TestMistakes:
    def test_a_handler_that_moves_the_clock_fails_the_test_or_never_ends(
        self, kit: LisaTestKit, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        attach(kit, "orders", lambda _: kit.advance(DAY))
        kit.producer.send("orders", 1, retry=[])
        kit.advance()
        (dead,) = kit.garbage()
        assert "a handler cannot move the clock" in (dead.reason or "")
        attach(kit, "others", lambda one: pytest.fail(f"must not be handled: {one.body}"))
        kit.producer.send("others", 42)
        with pytest.raises(pytest.fail.Exception, match="must not be handled: 42"):
            kit.advance()
        monkeypatch.setattr("lisa.testing.kit.MOST_AT_ONCE", 10)
        attach(kit, "endless", lambda _: kit.producer.send("endless", 1))
        kit.producer.send("endless", 1)
        with pytest.raises(LisaError, match=r"more than 10 messages .* topic 'endless'"):
            kit.advance()

    async def test_blocking_methods_on_an_event_loop(self, kit: LisaTestKit) -> None:
        async def handle(_: Message) -> None: ...

        attach(kit, "orders", handle)
        kit.producer.send("orders", 1, retry=[])
        with pytest.raises(ConfigError, match="use `async_lisa`"):
            kit.advance()


async def test_handlers_share_the_tests_event_loop(async_kit: AsyncLisaTestKit) -> None:
    @asynccontextmanager
    async def lifespan() -> AsyncIterator[asyncio.AbstractEventLoop]:
        yield asyncio.get_running_loop()

    consumer, seen = AsyncConsumer(lifespan=lifespan), list[int]()
    loop = asyncio.get_running_loop()

    @consumer.on("daily")
    async def handle(message: Message) -> None:
        assert asyncio.get_running_loop() is loop is message.state
        seen.append(message.body)
        if message.body < 5:
            await async_kit.producer.send("daily", message.body + 1, delay=DAY)

    async_kit.attach(consumer)
    async with AsyncProducer(async_kit.url) as own:
        await own.send("daily", 1, delay=DAY)
    await async_kit.advance(days=2)
    assert seen == [1, 2]
    start = async_kit.now
    await async_kit.run_until_idle()
    assert (seen, async_kit.now - start) == ([1, 2, 3, 4, 5], 3 * DAY)
    await async_kit.travel_to(start + 30 * DAY)
    assert [one.body for one in async_kit.handled("daily")] == seen


def test_bursts_end_at_the_tests_time(kit: LisaTestKit) -> None:
    attach(kit, "orders", lambda message: None)
    begun = kit.now
    for n in range(5):
        kit.producer.send("orders", n, key="k", debounce="10s", max_wait="25s")
        kit.advance(seconds=6)
    (attempt,) = kit.attempts("orders")
    assert (attempt.message.body, attempt.at) == (4, begun + timedelta(seconds=25))
    assert [(one.body, one.due) for one in kit.sent("orders")] == [
        (n, begun + min(timedelta(seconds=6 * n + 10), timedelta(seconds=25))) for n in range(5)
    ]


def test_a_throttled_key_at_the_tests_time(kit: LisaTestKit) -> None:
    attach(kit, "orders", lambda message: None)
    begun = kit.now
    for n in range(7):
        kit.producer.send("orders", n, key="k", throttle="10s")
        kit.advance(seconds=3)
    kit.run_until_idle()
    assert [(one.message.body, (one.at - begun).total_seconds()) for one in kit.attempts()] == [
        (0, 0),
        (3, 10),
        (6, 20),
    ]


def test_a_send_during_the_handling_of_a_burst_starts_the_next(kit: LisaTestKit) -> None:
    def handle(message: Message) -> None:
        if message.body == "first":
            kit.producer.send("orders", "second", key="k", latest=True)

    attach(kit, "orders", handle)
    kit.producer.send("orders", "first", key="k", latest=True, delay="1h")
    kit.advance(hours=1)
    assert [message.body for message in kit.handled()] == ["first", "second"]
    assert [message.id for message in kit.handled()] == [one.id for one in kit.sent()]


def test_lanes_open_at_the_tests_time(kit: LisaTestKit) -> None:
    """A rate of the group, a lane that rests, and one whose first message has died."""
    consumer = Consumer()

    @consumer.on("orders")
    def handle(message: Message) -> None:
        if message.body == "limit":
            raise Limited(retry_after="2m")
        if message.body == "die":
            raise Discard

    kit.attach(consumer)
    kit.configure("orders", rate="6/m", order="continue")
    for key, body in (("a", "limit"), ("a", "next"), ("b", "die"), ("b", "follows")):
        kit.producer.send("orders", body, key=key)
    kit.advance()
    assert {message.state for message in kit.waiting("orders")} == {"parked"}
    kit.advance(minutes=1)
    assert [one.outcome for one in kit.attempts("orders")].count("deferred") == 1
    assert [message.body for message in kit.handled("orders")] == ["follows"]
    assert len(kit.garbage("orders")) == 1


def test_windows_and_business_days_count_from_the_tests_clock(kit: LisaTestKit) -> None:
    kit.travel_to(datetime(2030, 1, 4, 20, tzinfo=UTC))  # a Friday
    kit.configure("calls", window="mon-fri 9-17")
    kit.producer.send("calls", 1, delay=HOUR)
    kit.producer.send("calls", 2, delay=HOUR, window="sat 10-12")
    kit.producer.send("calls", 3, at_local="10:00", business_days=1, tz="UTC")
    due = {message.body: message.due for message in kit.waiting("calls")}
    assert due == {
        1: datetime(2030, 1, 7, 9, tzinfo=UTC),
        2: datetime(2030, 1, 5, 10, tzinfo=UTC),
        3: datetime(2030, 1, 7, 10, tzinfo=UTC),
    }


SUITE = """
    from datetime import timedelta

    import lisa as library
    import pytest

    urls = set()

    @pytest.mark.parametrize("n", range(3))
    def test_unpaid_order_is_cancelled(lisa, n):
        urls.add(lisa.url)
        assert lisa.sent() == lisa.waiting() == []
        lisa.producer.send("orders", {"order": n}, delay=timedelta(days=30))
        library.send("others", n, delay="1d")
        lisa.advance(days=30)
        assert [m.body for m in lisa.handled("orders")] == [{"order": n}]
        assert [m.body for m in lisa.handled("others")] == [n]
        lisa.producer.send("orders", "left", delay="1d")

    def test_one_server_serves_all(lisa):
        assert urls == {lisa.url}
"""

ASYNC_SUITE = """
    import pytest

    @pytest.mark.MARK
    async def test_on_the_event_loop(async_lisa):
        await async_lisa.producer.send("orders", 1, delay="30d")
        await async_lisa.advance(days=30)
        assert [m.body for m in async_lisa.handled("orders")] == [1]
"""


class TestPlugin:
    @pytest.fixture(autouse=True)
    def only_what_is_asked_for(self, clock: ClockedServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def run(self, pytester: pytest.Pytester, suite: str, *arguments: str) -> pytest.RunResult:
        pytester.makepyfile(suite)
        return pytester.runpytest_inprocess("-p", "lisa.testing.plugin", *arguments)

    def test_each_test_begins_with_an_empty_server(
        self, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        redis = {"url": "rediss://localhost:1/0", "tls-ca-file": "ca.pem"}
        settings = {"prefix": "shop", "redis": redis, "durability": "replicas(1)"}
        configured = pytester.path / "producer.yml"
        configured.write_text(json.dumps({"lisa-delay-queue": settings}))
        monkeypatch.setenv("LISA_CONFIG", str(configured))
        monkeypatch.setenv("LISA_REDIS__URL", "redis://localhost:1/1")
        self.run(pytester, SUITE, "-W", "error").assert_outcomes(passed=4)

    @pytest.mark.parametrize("runner", ["asyncio", "anyio"])
    def test_asynchronous_tests(self, pytester: pytest.Pytester, runner: str) -> None:
        if runner == "anyio":
            fixture = "import pytest\n@pytest.fixture\ndef anyio_backend():\n    return 'asyncio'"
            pytester.makeconftest(fixture)
        else:
            pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
        suite = ASYNC_SUITE.replace("MARK", runner)
        self.run(pytester, suite, "-p", runner).assert_outcomes(passed=1)


def test_without_its_library_the_server_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("lisa.testing.clocked_server.FOUND_ON_DEBIAN", "none/*")
    monkeypatch.setattr("lisa.testing.clocked_server.MEMORY", tmp_path)
    monkeypatch.setitem(sys.modules, "libfaketime", None)
    with pytest.raises(ServerUnavailable, match=r"pip install 'lisa-delay-queue\[test\]'"):
        ClockedServer().start()
    assert list(tmp_path.iterdir()) == []
