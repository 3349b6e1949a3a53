"""A consumer of several topics, which reads the quiet ones together, on a real server."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import redis

from lisa import Message
from lisa.admin import groups
from lisa.consumer import Batch, Consumer, reader, subscription
from lisa.consumer.reader import MOST_TOPICS, Reader
from lisa.consumer.runner import Runner
from lisa.consumer.subscription import Pace
from lisa.core.delivery.pace import DEGRADED_AFTER, FIRST_S
from lisa.core.model.sharding import Topic
from lisa.core.redis.connection import Connection
from lisa.core.redis.flow import Command
from lisa.core.store import group_removal, presence
from lisa.embedded import EmbeddedServer
from tests.consumers import Bench, Blocking, presences, refused_threads, state_of
from tests.servers import wait_until

TOPICS = ["orders", "mails", "hooks", "bills"]
FIRST, SECOND, THIRD, FOURTH = TOPICS
SHORT_READ = timedelta(milliseconds=500)
"""Before topics that went back to their own threads are read together, one such read must end."""


class Seen(list[tuple[str, Any]]):
    """The topics and bodies of handled messages."""

    def take(self, message: Message) -> None:
        """A handler."""
        self.append((message.topic, message.body))

    def of(self, topic: str) -> list[Any]:
        """The bodies of one topic."""
        return [body for name, body in list(self) if name == topic]


def reads(bench: Bench) -> int:
    """The number of blocking reads: one of topics that are read together."""
    clients = bench.ask("CLIENT", "LIST").decode().splitlines()
    return sum("cmd=xreadgroup" in client and "flags=b" in client for client in clients)


def send_all(bench: Bench, bodies: Sequence[object], topics: list[str] = TOPICS) -> None:
    for topic in topics:
        bench.send(topic, bodies)


def consumer_of(
    url: str, handler: Callable[[Message], Any], topics: list[str] = TOPICS, **options: Any
) -> Consumer:
    """A consumer with one handler for all topics."""
    consumer = Consumer(url, **options)
    for topic in topics:
        consumer.on(topic, handler)
    return consumer


@contextmanager
def reading(
    bench: Bench, handler: Callable[[Message], Any], topics: list[str] = TOPICS, **options: Any
) -> Iterator[Consumer]:
    """A consumer that reads topics together."""
    bench.declare_all(*topics, ack_timeout="1h")
    with consumer_of(bench.url, handler, topics, **options) as consumer:
        wait_until(lambda: reads(bench) == -(-len(topics) // MOST_TOPICS))
        yield consumer


def test_many_topics_need_few_threads_and_connections(bench: Bench) -> None:
    topics = [f"topic-{n}" for n in range(4 * MOST_TOPICS)]
    seen = Seen()
    before = threading.active_count()
    with reading(bench, seen.take, topics, concurrency=3) as consumer:
        send_all(bench, [1, 2], topics)
        bench.wait_acked(2, *topics)
        wait_until(lambda: threading.active_count() - before < 15)
        assert len(bench.ask("CLIENT", "LIST").splitlines()) < 30
        consumer.pause()
        wait_until(lambda: reads(bench) == 0)
        consumer.resume()
        wait_until(lambda: reads(bench) == 4)
        send_all(bench, [3], topics)
        bench.wait_acked(3, *topics)
    assert Counter(seen) == Counter((topic, body) for topic in topics for body in (1, 2, 3))


def test_topics_come_and_go_pause_and_lose_their_group_while_the_others_are_read(
    bench: Bench,
) -> None:
    seen = Seen()
    with reading(bench, seen.take, TOPICS[:3], poll_timeout=SHORT_READ) as consumer:
        bench.declare(FOURTH)
        consumer.subscribe(FOURTH, seen.take)
        bench.send(FOURTH, [1])
        bench.wait_acked(1, FOURTH)

        consumer.unsubscribe(FIRST)
        wait_until(lambda: presences(bench, FIRST) == [])
        bench.send(FIRST, [2])
        bench.send(SECOND, [3])
        bench.wait_acked(1, SECOND)
        assert bench.pending(FIRST) == 0
        consumer.subscribe(FIRST, seen.take)
        bench.wait_acked(1, FIRST)

        bench.store.drive(group_removal.remove(bench.store, Topic(THIRD), "lisa"))
        wait_until(lambda: state_of(consumer, THIRD) == "removed")
        bench.send(SECOND, [4])
        bench.wait_acked(2, SECOND)
        bench.store.drive(groups.add(bench.store, THIRD, "lisa"))
        wait_until(lambda: state_of(consumer, THIRD) == "running")
        bench.send(THIRD, [5])
        bench.wait_acked(1, THIRD)

        wait_until(lambda: reads(bench) == 1)
        consumer.pause(FIRST)
        bench.send(SECOND, [6])  # for the read that was running when the topic was paused
        bench.wait_acked(3, SECOND)
        [kept] = bench.send(FIRST, [7])
        bench.send(SECOND, [8])
        bench.wait_acked(4, SECOND)
        assert bench.states(FIRST, kept) == ["ready"]
        assert bench.stat(FIRST, "released") == 0, "it was not read"
        consumer.resume(FIRST)
        bench.wait_acked(2, FIRST)
    before_the_pause = [(FOURTH, 1), (SECOND, 3), (FIRST, 2), (SECOND, 4), (THIRD, 5)]
    assert seen == [*before_the_pause, (SECOND, 6), (SECOND, 8), (FIRST, 7)]


def test_a_topic_that_only_fails_is_degraded_delays_no_other_and_heals(bench: Bench) -> None:
    seen, works, times = Seen(), threading.Event(), list[float]()

    def handle(message: Message) -> None:
        times.append(time.monotonic())
        if not works.is_set():
            raise ValueError("the database is down")

    bench.declare_all(*TOPICS, retry_delays=["0"] * 100)
    consumer = consumer_of(bench.url, seen.take, TOPICS[1:])
    consumer.on(FIRST, handle)
    with consumer, bench.manager(FIRST):
        wait_until(lambda: reads(bench) == 1)
        bench.send(FIRST, ["x"])  # of several, some may be running when it becomes degraded
        wait_until(lambda: state_of(consumer, FIRST) == "degraded")
        bench.send(SECOND, [1])
        bench.wait_acked(1, SECOND)
        wait_until(lambda: len(times) >= DEGRADED_AFTER + 2)
        # Only a lower bound: on a busy machine each takes longer than its pause.
        assert times[DEGRADED_AFTER + 1] - times[DEGRADED_AFTER] > 0.9 * FIRST_S
        works.set()
        bench.wait_acked(1, FIRST)
        assert state_of(consumer, FIRST) == "running"
        wait_until(lambda: reads(bench) == 1)


def test_reads_that_cannot_be_ended_end_at_their_timeout(bench: Bench) -> None:
    """As without permission for CLIENT UNBLOCK."""
    seen, user = Seen(), ("ACL", "SETUSER", "limited", "on", ">secret", "~*", "&*", "+@all")
    bench.ask(*user, "-client|unblock")
    bench.declare_all(*TOPICS)
    limited = bench.url.replace("//", "//limited:secret@")
    try:
        with consumer_of(limited, seen.take, poll_timeout=SHORT_READ) as consumer:
            wait_until(lambda: reads(bench) == 1)
            consumer.pause()
            wait_until(lambda: reads(bench) == 0)
            send_all(bench, [1])
            consumer.resume()
            bench.wait_acked(1, *TOPICS)
    finally:
        bench.ask("ACL", "DELUSER", "limited")
    assert sorted(seen) == sorted((topic, 1) for topic in TOPICS)


def test_a_topic_with_many_messages_leaves_slots_to_the_others(bench: Bench) -> None:
    seen, many = Seen(), 80
    with reading(bench, lambda message: (time.sleep(0.005), seen.take(message))):  # type: ignore[func-returns-value]
        bench.send(FIRST, range(many))
        wait_until(lambda: seen)
        bench.send(SECOND, [1])
        bench.wait_acked(1, SECOND)
        assert len(seen) < many
        bench.wait_acked(many, FIRST)
    assert sorted(seen.of(FIRST)) == list(range(many))


@pytest.mark.parametrize("concurrency", [1, 4])
def test_all_topics_together_hold_a_limited_number_of_bytes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, concurrency: int
) -> None:
    """Handlers are fast, so a read of all topics may find eight messages of each."""
    monkeypatch.setattr(subscription, "AHEAD_BYTES", 1_000_000)
    topics = [f"topic{number}" for number in range(20)]
    bench.declare_all(*topics, ack_timeout="1h")
    held, attempts, sent = list[int](), Counter[int](), threading.Event()

    def handle(message: Message) -> None:
        if isinstance(message.body, bytes):
            sent.wait(60)
            held.append(consumer._runtime._bytes_ahead() if consumer._runtime else 0)
            attempts[message.attempt] += 1

    consumer = consumer_of(
        bench.url, handle, topics, concurrency=concurrency, poll_timeout=SHORT_READ
    )
    with consumer:
        wait_until(lambda: reads(bench) == 1)
        send_all(bench, [1], topics)
        bench.wait_acked(1, *topics)
        send_all(bench, [b"x" * 100_000] * 8, topics)
        sent.set()
        bench.wait_acked(9, *topics)
    assert attempts == {1: 160}
    # Beyond the limit, each thread opens one message that it can start, and the last call 256 KiB.
    assert max(held) <= 1_000_000 + 300_000 + concurrency * 100_000


def test_many_readers_need_few_reads_for_fast_handlers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a reader's share of what is read ahead is less than a message."""
    seen, topics, each = Seen(), [f"topic-{n}" for n in range(60)], 20
    monkeypatch.setattr(reader, "MOST_TOPICS", 2)
    monkeypatch.setattr(Pace, "ahead", lambda *_: 29)  # for 30 readers
    bench.declare_all(*topics)
    send_all(bench, range(each), topics)
    before = bench.calls_of("xreadgroup")
    with consumer_of(bench.url, seen.take, topics):
        bench.wait_acked(each, *topics)
    assert bench.calls_of("xreadgroup") - before < len(seen)


def test_a_blocked_consumer_leaves_the_messages_of_all_topics_to_others(bench: Bench) -> None:
    """Also those that it has read in advance for its blocked handlers."""
    seen, blocking = Seen(), Blocking()
    bench.declare_all(*TOPICS)
    for number, topic in enumerate(TOPICS):
        bench.send(topic, range(10 * number, 10 * number + 10))
    with consumer_of(bench.url, blocking, concurrency=2):
        wait_until(lambda: len(blocking.begun) == 2)
        assert all(bench.pending(topic) <= 2 for topic in TOPICS)
        with consumer_of(bench.url, seen.take):
            wait_until(lambda: len(seen) == 10 * len(TOPICS) - 2)
        blocking.go_on.set()
    assert {body for _, body in seen}.isdisjoint(blocking.begun)


def test_groups_batches_and_own_limits_keep_topics_apart(bench: Bench) -> None:
    seen = Seen()
    bench.declare_all(*TOPICS)
    bench.declare(THIRD, "audit")
    consumer = consumer_of(bench.url, seen.take, [FOURTH], concurrency=4)

    @consumer.on(FIRST, batch=10, within="100ms")
    def handle(batch: Batch) -> None:
        for message in batch:
            seen.take(message)

    async def handle_async(message: Message) -> None:
        seen.take(message)

    consumer.on(SECOND, handle_async, concurrency=2)
    for group in ("lisa", "audit"):
        consumer.on(THIRD, lambda message: seen.append((message.group, message.body)), group=group)
    with consumer:
        send_all(bench, range(20))
        bench.wait_acked(20, *TOPICS)
        wait_until(lambda: bench.stat(THIRD, "acked", "audit") == 20)
    for name in (FIRST, SECOND, "lisa", "audit", FOURTH):
        assert sorted(seen.of(name)) == list(range(20))


def test_a_server_that_is_killed_loses_no_message(own_server: EmbeddedServer) -> None:
    bench, seen = Bench(own_server.url), Seen()
    bench.declare_all(*TOPICS, ack_timeout="1s", retry_delays="0,0,0")
    consumer = consumer_of(bench.url, seen.take, concurrency=4, poll_timeout=timedelta(seconds=1))
    with consumer, bench.manager(*TOPICS):
        send_all(bench, range(200))
        wait_until(lambda: len(seen) > 50)
        own_server.kill()
        own_server.restart()
        bench.wait_acked(200, *TOPICS)
    assert all(set(seen.of(topic)) == set(range(200)) for topic in TOPICS)


@pytest.mark.parametrize(
    ("owner", "name", "nth"),
    [(Reader, "_hand_over", 1), (Reader, "_hand_over", 3), (Runner, "submit", 1)],
    ids=["hand-over", "hand-over-third", "submit"],
)
def test_an_unforeseen_error_strands_no_message(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, nth: int
) -> None:
    """It is raised for one of the messages that a read of several topics has found."""
    seen, called, work = Seen(), list[str](), getattr(owner, name)

    def failing(*args: Any, **options: Any) -> Any:
        called.append(name)
        if len(called) == nth:
            raise ZeroDivisionError
        return work(*args, **options)

    bench.declare_all(*TOPICS, ack_timeout="1h")
    with consumer_of(bench.url, seen.take, concurrency=2, poll_timeout=SHORT_READ):
        wait_until(lambda: reads(bench) == 1)
        monkeypatch.setattr(owner, name, failing)
        send_all(bench, [1])
        bench.wait_acked(1, *TOPICS)
    assert len(called) >= nth
    assert sorted(seen) == sorted((topic, 1) for topic in TOPICS)


def test_a_server_that_refuses_reads_of_several_topics_is_not_asked_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, refused, execute = Seen(), list[str](), Connection.execute_chain

    def refusing(self: Connection, key: str, commands: Sequence[Command]) -> Any:
        if list(commands[0]).count(">") <= 1:
            return execute(self, key, commands)
        refused.append("CROSSSLOT Keys in request don't hash to the same slot")
        raise redis.ResponseError(refused[-1])

    with reading(bench, seen.take, poll_timeout=SHORT_READ):
        monkeypatch.setattr(Connection, "execute_chain", refusing)
        wait_until(lambda: reads(bench) == len(TOPICS))
        send_all(bench, [1])
        bench.wait_acked(1, *TOPICS)
    assert len(refused) == 1


def test_a_topic_whose_thread_cannot_be_started_delays_no_other(bench: Bench) -> None:
    """When a topic gets a batch handler, and needs a reader of its own."""
    seen, batches = Seen(), list[int]()
    with reading(bench, seen.take, poll_timeout=SHORT_READ) as consumer:
        with refused_threads("lisa-reader-2") as refused:
            consumer.on(FIRST, lambda batch: batches.append(len(batch)), batch=2)
            wait_until(lambda: refused)
            send_all(bench, [1, 2], [FIRST, SECOND])
            bench.wait_acked(2, FIRST, SECOND)
        send_all(bench, [3, 4], [FIRST, SECOND])
        bench.wait_acked(4, FIRST, SECOND)
        wait_until(lambda: reads(bench) == 2)
        assert sum(batches) == 4
        wait_until(lambda: consumer.health()["status"] == "ok")


def test_records_are_renewed_together_and_written_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "BEAT", timedelta(milliseconds=50))

    def all_run_since(ms: int) -> bool:
        found = [one for topic in TOPICS for one in presences(bench, topic)]
        return [one.state for one in found if one.seen_ms > ms] == ["running"] * len(TOPICS)

    with reading(bench, Seen().take):
        wait_until(lambda: all_run_since(0))
        renewed_ms = max(presences(bench, topic)[0].seen_ms for topic in TOPICS)
        wait_until(lambda: all_run_since(renewed_ms))
        swept = bench.store.keys.topic(FIRST).consumers
        bench.ask("DEL", swept)
        wait_until(lambda: all_run_since(0))
        bench.ask("DEL", swept)
        bench.ask("SET", swept, "a foreign hand's")
        foreign_ms = presences(bench, SECOND)[0].seen_ms
        wait_until(lambda: presences(bench, SECOND)[0].seen_ms > foreign_ms)
        bench.ask("DEL", swept)
        wait_until(lambda: all_run_since(0))
