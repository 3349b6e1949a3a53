"""A consumer of several topics, which reads the quiet ones together, on a real server."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import redis
from redis import exceptions

from lisa.admin import groups
from lisa.consumer import Batch, Consumer, shared_reader, subscription
from lisa.consumer.backlog import BUSY_READS
from lisa.consumer.dispatcher import Dispatcher
from lisa.consumer.member import Member, Members
from lisa.consumer.membership import Membership
from lisa.consumer.prefetch import AHEAD_S
from lisa.consumer.shared_reader import MOST_EACH, MOST_TOPICS
from lisa.consumer.shared_reads import Found, SharedReads
from lisa.core.daemon.threads import ServiceThread
from lisa.core.delivery.degradation import DEGRADED_AFTER
from lisa.core.model.message import Message
from lisa.core.model.sharding import Topic
from lisa.core.store import group_removal, presence
from lisa.core.store.store import SyncStore
from lisa.core.transitions.promote import Promote
from tests.consumers import Bench, presences, state_of
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from lisa.consumer.reader import Reader
    from lisa.embedded import EmbeddedServer

TOPICS = ["orders", "mails", "hooks", "bills"]
FIRST, SECOND, THIRD, FOURTH = TOPICS
SOON = timedelta(seconds=20)
SHORT_READ = timedelta(milliseconds=500)
"""Before topics that went back to their own threads are read together, one such read must end."""


class Seen(list[tuple[str, Any]]):
    """The topics and bodies of handled messages."""

    def take(self, message: Message) -> None:
        """A handler."""
        self.append((message.topic, message.body))

    def of(self, topic: str) -> list[Any]:
        """The bodies of one topic."""
        return [body for its, body in list(self) if its == topic]


def readers_of(consumer: Consumer) -> dict[str, Reader]:
    """The consumer's readers by topic."""
    assert consumer._runtime is not None
    return {sub.shard: reader for sub, reader in consumer._runtime.readers.items()}


def is_shared(consumer: Consumer, *topics: str) -> bool:
    """Whether shared readers read exactly these topics."""
    assert consumer._runtime is not None
    shared = list(consumer._runtime._shared._readers)
    members = [one for its in shared if its.reads.is_reading for one in list(its.members.current)]
    return {str(one.sub.shard) for one in members} == set(topics)


def members_of(consumer: Consumer) -> set[Any]:
    """The readers of the topics in the commands of shared readers."""
    assert consumer._runtime is not None
    found = consumer._runtime._shared._readers
    return {one for shared in list(found) for one in list(shared.members.current)}


def declare_all(bench: Bench, topics: list[str] = TOPICS, **options: object) -> None:
    """Declare the group of each topic."""
    for topic in topics:
        bench.declare(topic, "lisa", **options)


def send_all(bench: Bench, bodies: Sequence[object], topics: list[str] = TOPICS) -> None:
    """Send the same bodies to each topic."""
    for topic in topics:
        bench.send(topic, bodies)


def all_acked(bench: Bench, count: int, topics: list[str] = TOPICS) -> Callable[[], bool]:
    """Whether so many messages of each topic are acked."""
    return lambda: all(bench.stat(topic, "acked") == count for topic in topics)


def consumer_of(
    url: str, handler: Callable[[Message], Any], topics: list[str] = TOPICS, **options: Any
) -> Consumer:
    """A consumer with one handler for all topics."""
    consumer = Consumer(url, **options)
    for topic in topics:
        consumer.on(topic, handler)
    return consumer


@contextmanager
def reading(bench: Bench, seen: Seen, topics: list[str], **options: Any) -> Iterator[Consumer]:
    """A consumer that reads topics together, while a manager works."""
    declare_all(bench, topics, retry_delays="0")
    consumer = consumer_of(bench.url, seen.take, topics, **options)
    with consumer, bench.manager(*topics):
        wait_until(lambda: is_shared(consumer, *topics))
        yield consumer


@pytest.mark.parametrize("concurrency", [1, 3])
def test_many_topics_need_few_threads_and_connections(bench: Bench, concurrency: int) -> None:
    topics = [f"topic-{n}" for n in range(MOST_TOPICS + 50)]
    seen = Seen()
    before = threading.active_count()
    with reading(bench, seen, topics, concurrency=concurrency):
        send_all(bench, [1, 2], topics)
        wait_until(all_acked(bench, 2, topics))
        wait_until(lambda: threading.active_count() - before < 8 + concurrency)
        connections = len(bench.ask("CLIENT", "LIST").splitlines())
        assert connections < 20 + concurrency
    assert Counter(seen) == Counter((topic, body) for topic in topics for body in (1, 2))


async def test_async_handlers_take_messages_of_topics_that_are_read_together(bench: Bench) -> None:
    seen = Seen()

    async def handle(message: Message) -> None:
        seen.take(message)

    declare_all(bench)
    with consumer_of(bench.url, handle, concurrency=20), bench.manager(*TOPICS):
        send_all(bench, range(50))
        wait_until(all_acked(bench, 50))
    assert all(sorted(seen.of(topic)) == list(range(50)) for topic in TOPICS)


def test_topics_come_and_go(bench: Bench) -> None:
    seen = Seen()
    with reading(bench, seen, TOPICS[:3]) as consumer, bench.manager(FOURTH):
        bench.declare(FOURTH)
        consumer.subscribe(FOURTH, seen.take)
        wait_until(lambda: is_shared(consumer, *TOPICS))
        bench.send(FOURTH, [1])
        wait_until(lambda: bench.stat(FOURTH, "acked") == 1)

        consumer.unsubscribe(FIRST)
        wait_until(lambda: is_shared(consumer, *TOPICS[1:]))
        left = bench.send(FIRST, [2])
        bench.send(SECOND, [3])
        wait_until(lambda: bench.stat(SECOND, "acked") == 1)
        wait_until(lambda: bench.states(FIRST, left[0]) == ["ready"])

        consumer.subscribe(FIRST, seen.take)
        wait_until(lambda: bench.stat(FIRST, "acked") == 1)
        wait_until(lambda: is_shared(consumer, *TOPICS))
    assert seen == [(FOURTH, 1), (SECOND, 3), (FIRST, 2)]


def test_a_topic_is_paused_here(bench: Bench) -> None:
    seen = Seen()
    with reading(bench, seen, TOPICS) as consumer:
        consumer.pause(FIRST)
        wait_until(lambda: is_shared(consumer, *TOPICS[1:]))
        kept = bench.send(FIRST, [1])
        bench.send(SECOND, [2])
        wait_until(lambda: bench.stat(SECOND, "acked") == 1)
        wait_until(lambda: bench.states(FIRST, kept[0]) == ["ready"])
        consumer.resume(FIRST)
        wait_until(lambda: bench.stat(FIRST, "acked") == 1)
        wait_until(lambda: is_shared(consumer, *TOPICS))
    assert seen == [(SECOND, 2), (FIRST, 1)]


def test_a_removed_group_affects_its_own_topic(bench: Bench) -> None:
    seen = Seen()
    with reading(bench, seen, TOPICS, poll_timeout=SHORT_READ) as consumer:
        bench.store.drive(group_removal.remove(bench.store, Topic(FIRST), "lisa"))
        wait_until(lambda: state_of(consumer, FIRST) == "removed")
        wait_until(lambda: is_shared(consumer, *TOPICS[1:]))
        bench.send(SECOND, [2])
        wait_until(lambda: bench.stat(SECOND, "acked") == 1)
        bench.store.drive(groups.add(bench.store, FIRST, "lisa"))
        wait_until(lambda: is_shared(consumer, *TOPICS))
        bench.send(FIRST, [1])
        wait_until(lambda: bench.stat(FIRST, "acked") == 1)


def test_a_topic_with_many_messages_gets_its_own_thread_until_they_are_handled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, returned = Seen(), list[str]()
    give_back = Members.give_back

    def giving_back(all_members: Members, some: Any, why: Any) -> None:
        some = list(some)
        returned.extend(member.sub.shard for member in some if why.busy)
        give_back(all_members, some, why)

    monkeypatch.setattr(Members, "give_back", giving_back)
    many = 100 * MOST_EACH * BUSY_READS
    with reading(bench, seen, TOPICS) as consumer:
        bench.send(FIRST, range(many))
        wait_until(lambda: returned == [FIRST])
        bench.send(SECOND, [1])
        wait_until(lambda: bench.stat(FIRST, "acked") == many)
        wait_until(lambda: bench.stat(SECOND, "acked") == 1)
        wait_until(lambda: is_shared(consumer, *TOPICS))
    assert sorted(seen.of(FIRST)) == list(range(many))


def test_a_slow_topic_leaves_slots_and_messages_to_the_others(bench: Bench) -> None:
    """With both slots taken by one topic, each topic has at most one message in advance."""
    seen, release = Seen(), threading.Event()

    def wait(message: Message) -> None:
        release.wait(20)
        seen.take(message)

    declare_all(bench)
    consumer = consumer_of(bench.url, wait, concurrency=2)
    send_all(bench, range(10))
    with consumer, bench.manager(*TOPICS):
        wait_until(lambda: consumer.numbers() and len(running(consumer)) == 2)
        held = {topic: len(one.sub.leases.held) for topic, one in readers_of(consumer).items()}
        assert all(count <= 2 for count in held.values()), held
        release.set()
        wait_until(all_acked(bench, 10))
    assert len(seen) == 10 * len(TOPICS)


@pytest.mark.parametrize("concurrency", [1, 2])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_topics_with_slow_handlers_take_turns(
    bench: Bench, concurrency: int, monkeypatch: pytest.MonkeyPatch, *, is_mixed: bool
) -> None:
    """Also if each handler takes so long that the messages of the other topics are released."""
    monkeypatch.setattr(subscription, "START_WITHIN_S", 0.01)
    seen, readers = Seen(), dict[str, "Reader"]()

    def handle(message: Message) -> None:
        seen.take(message)
        wait_until(lambda: not any(one.sub.unstarted for one in readers.values()))

    async def handle_on_loop(message: Message) -> None:
        await asyncio.to_thread(handle, message)

    declare_all(bench, ack_timeout="1s")
    consumer = Consumer(bench.url, concurrency=concurrency)
    for topic in TOPICS:
        consumer.on(topic, handle_on_loop if is_mixed and topic == FIRST else handle)
    with consumer, bench.manager(*TOPICS):
        wait_until(lambda: is_shared(consumer, *TOPICS))
        readers |= readers_of(consumer)
        send_all(bench, range(20))
        wait_until(lambda: len(seen) >= 20)
    assert {topic for topic, _ in seen[:20]} == set(TOPICS), seen[:20]


def test_slow_handlers_leave_a_backlog_to_other_consumers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Topics that are known to have more are read one message at a time, each in its slot."""
    seen, singly = Seen(), list[str]()
    read = SharedReads.read

    def reading_one(
        one: SharedReads, count: int, *, blocks: bool, only: Member | None = None
    ) -> list[Found]:
        if only is not None and count == 1 and not blocks:
            singly.append(only.sub.topic)
        return read(one, count, blocks=blocks, only=only)

    def handle(message: Message) -> None:
        time.sleep(2 * AHEAD_S)  # so that nothing is read ahead
        seen.take(message)

    monkeypatch.setattr(SharedReads, "read", reading_one)
    for topic in TOPICS:
        bench.declare(topic)
        bench.send(topic, range(5))
        bench.store.call(Promote(topic))
    with consumer_of(bench.url, handle):
        wait_until(all_acked(bench, 5))
    assert len(singly) >= len(TOPICS)
    assert len(set(singly)) > 1


def test_many_readers_need_few_reads_for_fast_handlers(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if each reader's share of what handlers finish soon is less than a message."""
    topics, each, seen, reads = [f"topic-{n}" for n in range(60)], 20, Seen(), list[int]()
    read = SharedReads.read

    def counting(one: SharedReads, count: int, **options: Any) -> list[Found]:
        reads.append(count)
        return read(one, count, **options)

    def handle(message: Message) -> None:
        time.sleep(AHEAD_S / len(topics))
        seen.take(message)

    monkeypatch.setattr(SharedReads, "read", counting)
    monkeypatch.setattr(shared_reader, "MOST_TOPICS", 2)
    for topic in topics:
        bench.declare(topic)
        bench.send(topic, range(each))
        bench.store.call(Promote(topic))
    with consumer_of(bench.url, handle, topics):
        wait_until(lambda: len(seen) >= each * len(topics))
    assert len(reads) < len(seen) / 2


def running(consumer: Consumer) -> list[object]:
    """The deliveries in handlers."""
    return [one for reader in readers_of(consumer).values() for one in reader.sub.leases.running()]


def test_a_degraded_topic_is_read_on_its_own(bench: Bench) -> None:
    seen = Seen()

    def fail(message: Message) -> None:
        seen.take(message)
        if message.body != "good":
            raise ValueError(message.body)

    declare_all(bench, retry_delays="1h")
    consumer = consumer_of(bench.url, seen.take, TOPICS[1:])
    consumer.on(FIRST, fail)
    with consumer, bench.manager(*TOPICS):
        wait_until(lambda: is_shared(consumer, *TOPICS))
        bench.send(FIRST, range(DEGRADED_AFTER + 2))
        wait_until(lambda: state_of(consumer, FIRST) == "degraded")
        wait_until(lambda: len(seen.of(FIRST)) > DEGRADED_AFTER)
        wait_until(lambda: is_shared(consumer, *TOPICS[1:]))
        bench.send(SECOND, [1])
        wait_until(lambda: bench.stat(SECOND, "acked") == 1)
        bench.send(FIRST, ["good"])
        wait_until(lambda: is_shared(consumer, *TOPICS))


def test_batch_handlers_and_own_limits_keep_topics_apart(bench: Bench) -> None:
    seen = Seen()
    declare_all(bench)
    consumer = consumer_of(bench.url, seen.take, [THIRD, FOURTH], concurrency=4)

    @consumer.on(FIRST, batch=10, within="100ms")
    def handle(batch: Batch) -> None:
        for message in batch:
            seen.take(message)

    consumer.on(SECOND, seen.take, concurrency=2)
    with consumer, bench.manager(*TOPICS):
        wait_until(lambda: is_shared(consumer, THIRD, FOURTH))
        send_all(bench, range(20))
        wait_until(all_acked(bench, 20))
    assert all(sorted(seen.of(topic)) == list(range(20)) for topic in TOPICS)


def test_groups_are_read_separately(bench: Bench) -> None:
    seen = Seen()
    for group in ("lisa", "audit"):
        for topic in TOPICS:
            bench.declare(topic, group)
    consumer = Consumer(bench.url)
    for topic in TOPICS:
        for group in ("lisa", "audit"):
            consumer.on(topic, partial(lambda g, m: seen.append((g, m.body)), group), group=group)
    with consumer, bench.manager(*TOPICS):
        send_all(bench, range(5))
        pairs = [(topic, group) for topic in TOPICS for group in ("lisa", "audit")]
        wait_until(lambda: all(bench.stat(topic, "acked", group) == 5 for topic, group in pairs))
    assert len(seen.of("lisa")) == len(seen.of("audit")) == 5 * len(TOPICS)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_a_server_that_is_killed_loses_no_message(
    own_server: EmbeddedServer, concurrency: int
) -> None:
    bench, seen = Bench(own_server.url), Seen()
    options = {"concurrency": concurrency, "poll_timeout": timedelta(seconds=1)}
    declare_all(bench, ack_timeout="1s", retry_delays="0,0,0")
    with reading(bench, seen, TOPICS, **options):
        send_all(bench, range(200))
        wait_until(lambda: len(seen) > 50)
        own_server.kill()
        own_server.restart()
        wait_until(all_acked(bench, 200))
    assert all(set(seen.of(topic)) == set(range(200)) for topic in TOPICS)
    bench.store.close()


def test_connections_that_are_cut_are_made_again(bench: Bench) -> None:
    seen, ended = Seen(), threading.Event()

    def cut() -> None:
        while not ended.wait(0.05):
            bench.ask("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    thread = threading.Thread(target=cut)
    declare_all(bench, ack_timeout="1s", retry_delays="0,0,0")
    with reading(bench, seen, TOPICS) as consumer:
        thread.start()
        for start in range(0, 100, 10):
            send_all(bench, range(start, start + 10))
        wait_until(lambda: len(seen) > 100)
        ended.set()
        thread.join()
        wait_until(all_acked(bench, 100))
        wait_until(lambda: is_shared(consumer, *TOPICS))
    assert all(set(seen.of(topic)) == set(range(100)) for topic in TOPICS)


def test_an_error_that_nobody_foresaw_hands_no_message_to_nobody(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The topics' own threads find what the failed round had read, and release it."""
    seen, failures = Seen(), list[str]()
    with reading(bench, seen, TOPICS, poll_timeout=SHORT_READ) as consumer:
        receive = readers_of(consumer)[FIRST].receive

        def failing(*args: Any) -> Any:
            if not failures:
                failures.append("once")
                raise ZeroDivisionError
            return receive(*args)

        monkeypatch.setattr(readers_of(consumer)[FIRST], "receive", failing)
        bench.send(FIRST, [1])
        wait_until(lambda: bench.stat(FIRST, "acked") == 1)
        wait_until(lambda: is_shared(consumer, *TOPICS))
    assert failures == ["once"]
    assert seen == [(FIRST, 1)]
    assert bench.stat(FIRST, "reclaimed") == 0, "it did not wait for its ack timeout"


def test_an_error_for_one_topic_leaves_the_messages_of_no_other_behind(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is raised for the first of three topics whose messages one read has found."""
    seen, submitted, grant = Seen(), list[str](), Dispatcher._grant

    def failing(self: Dispatcher, sub: Any, *args: Any) -> Any:
        submitted.append(sub.topic)
        if len(submitted) == 2:
            raise ZeroDivisionError
        return grant(self, sub, *args)

    for topic in TOPICS:
        bench.declare(topic, ack_timeout="1h")
        bench.store.call(Promote(topic))  # so that the script and the groups are known
    consumer = consumer_of(bench.url, seen.take, concurrency=2)
    with consumer:
        wait_until(lambda: is_shared(consumer, *TOPICS))
        monkeypatch.setattr(Dispatcher, "_grant", failing)
        send_all(bench, [1])
        calls = [bench.store._call_if_known(Promote(topic), "") for topic in TOPICS]
        bench.store.connection.execute_many([("MULTI",), *calls, ("EXEC",)])
        wait_until(all_acked(bench, 1), timeout=SOON)
    assert sorted(topic for topic, _ in seen) == sorted(TOPICS)


def test_topics_leave_together_although_reads_cannot_be_ended(own_server: EmbeddedServer) -> None:
    """If CLIENT UNBLOCK is not permitted, all topics leave once the blocking read times out."""
    bench, seen = Bench(own_server.url), Seen()
    bench.ask("ACL", "SETUSER", "limited", "on", ">secret", "~*", "&*", "+@all", "-client|unblock")
    declare_all(bench)
    consumer = consumer_of(own_server.url.replace("//", "//limited:secret@"), seen.take)
    with consumer:
        wait_until(lambda: len(members_of(consumer)) == len(TOPICS))
        consumer.pause()
        wait_until(lambda: not any(one._holder for one in readers_of(consumer).values()))
        consumer.resume()
        wait_until(lambda: len(members_of(consumer)) == len(TOPICS))
        holders = {one._holder for one in readers_of(consumer).values()}
    threads = [one.thread for one in holders if one is not None]
    assert threads
    wait_until(lambda: not any(one.is_alive() for one in threads))
    bench.store.close()


def test_a_lost_reply_costs_few_calls_until_no_lease_is_left(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader looks for lost entries for as long as the ack timeout, at all topics at once."""
    read, ask, lost, asked = SharedReads.read, SyncStore.ask, list[float](), list[str]()

    def losing(reads: SharedReads, *args: Any, **options: Any) -> Any:
        found = read(reads, *args, **options)
        if found and not lost and found[0].topic.sub.shard == FIRST:
            lost.append(time.monotonic())
            raise exceptions.ConnectionError("the reply is lost")
        return found

    def asking(store: SyncStore, *command: Any) -> Any:
        if command[0] == "XPENDING":
            asked.append(command[1])
        return ask(store, *command)

    declare_all(bench, ack_timeout="1h")
    seen = Seen()
    with reading(bench, seen, TOPICS) as consumer:
        wait_until(
            lambda: all(one.sub.leases.ack_timeout_s == 3600 for one in members_of(consumer))
        )
        monkeypatch.setattr(SharedReads, "read", losing)
        monkeypatch.setattr(SyncStore, "ask", asking)
        bench.send(SECOND, [1])  # for the running read, which loses nothing
        wait_until(lambda: bench.stat(SECOND, "acked") == 1)
        bench.send(FIRST, [1])
        wait_until(lambda: bench.stat(FIRST, "acked") == 1)
        reads = next(iter(members_of(consumer)))._holder.reads
        wait_until(lambda: reads._look_for_lost > lost[0] + 3)
        assert set(asked) == {bench.ready(FIRST)}
    assert seen == [(SECOND, 1), (FIRST, 1)]


def test_a_handler_stops_its_topic_and_its_consumer(bench: Bench) -> None:
    seen = Seen()
    declare_all(bench)
    consumer = consumer_of(bench.url, seen.take, [THIRD, FOURTH])

    def leave(message: Message) -> None:
        seen.take(message)
        consumer.unsubscribe(message.topic)

    def stop(message: Message) -> None:
        seen.take(message)
        consumer.stop()

    consumer.on(FIRST, leave)
    consumer.on(SECOND, stop)
    consumer.start()
    with bench.manager(*TOPICS):
        wait_until(lambda: is_shared(consumer, *TOPICS))
        bench.send(FIRST, [1])
        wait_until(lambda: is_shared(consumer, *TOPICS[1:]))
        bench.send(SECOND, [2])
        wait_until(lambda: consumer._runtime is None)
        wait_until(lambda: bench.stat(SECOND, "acked") == 1)
    assert seen == [(FIRST, 1), (SECOND, 2)]


def test_a_thread_that_cannot_be_started_is_tried_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen()
    with reading(bench, seen, TOPICS) as consumer:
        reader = readers_of(consumer)[FIRST]
        new, refused, is_full = reader._new_thread, list[str](), threading.Event()

        class Refused(threading.Thread):
            def start(self) -> None:
                refused.append("can't start new thread")
                raise RuntimeError(refused[-1])

        is_full.set()
        monkeypatch.setattr(reader, "_new_thread", lambda: Refused() if is_full.is_set() else new())
        consumer.pause(FIRST)
        wait_until(lambda: len(refused) >= 2)
        bench.send(FIRST, [0])
        bench.send(SECOND, [0])
        wait_until(lambda: bench.stat(SECOND, "acked") == 1, timeout=SOON)  # the others go on
        is_full.clear()
        wait_until(lambda: is_shared(consumer, *TOPICS[1:]))
        assert seen == [(SECOND, 0)]
        consumer.resume(FIRST)
        wait_until(lambda: bench.stat(FIRST, "acked") == 1)
        assert consumer.health()["status"] == "ok"


def test_a_topic_whose_start_fails_is_started_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first join fails unexpectedly, and its own thread cannot be started either."""
    join, start, failed = Membership.join, ServiceThread.start, list[str]()

    def joining(member: Membership) -> bool:
        if member.shard == SECOND and "join" not in failed:
            failed.append("join")
            raise ZeroDivisionError
        return join(member)

    def starting(thread: ServiceThread) -> None:
        if thread.name == f"lisa-{SECOND}" and failed.count("start") < 2:
            failed.append("start")
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(Membership, "join", joining)
    monkeypatch.setattr(ServiceThread, "start", starting)
    seen = Seen()
    with reading(bench, seen, TOPICS):
        bench.send(SECOND, [1])
        wait_until(lambda: bench.stat(SECOND, "acked") == 1)
    assert failed[:2] == ["join", "start"]


def test_records_are_renewed_together_and_written_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "BEAT", timedelta(milliseconds=50))
    seen = Seen()
    with reading(bench, seen, TOPICS) as consumer:
        wait_until(lambda: all(running_records(bench, topic) == 1 for topic in TOPICS))
        renewed = {topic: presences(bench, topic)[0].seen_ms for topic in TOPICS}
        wait_until(
            lambda: all(presences(bench, one)[0].seen_ms > was for one, was in renewed.items())
        )
        swept = bench.store.keys.topic(FIRST).consumers
        bench.ask("DEL", swept)
        wait_until(lambda: running_records(bench, FIRST) == 1)
        bench.ask("DEL", swept)
        bench.ask("SET", swept, "a foreign hand's")
        bench.configure(SECOND, ack_timeout="77s")
        sub = readers_of(consumer)[SECOND].sub
        wait_until(lambda: sub.leases.ack_timeout_s == 77)
        bench.ask("DEL", swept)
        wait_until(lambda: running_records(bench, FIRST) == 1)


def running_records(bench: Bench, topic: str) -> int:
    """How many consumers of a topic run, by their records."""
    return sum(one.state == "running" for one in presences(bench, topic))


def test_a_server_that_refuses_reads_of_several_topics_is_not_asked_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, refused = Seen(), list[str]()
    with reading(bench, seen, TOPICS) as consumer:

        def refusing(*_: Any, **__: Any) -> list[Found]:
            refused.append("CROSSSLOT Keys in request don't hash to the same slot")
            raise redis.ResponseError(refused[-1])

        monkeypatch.setattr(SharedReads, "read", refusing)
        wait_until(lambda: is_shared(consumer))
        send_all(bench, [1])
        wait_until(all_acked(bench, 1))
        assert len(refused) == 1
        assert is_shared(consumer)


def test_many_topics_are_paused_and_resumed(bench: Bench) -> None:
    topics = [f"topic-{n}" for n in range(4 * MOST_TOPICS)]
    seen = Seen()
    with reading(bench, seen, topics) as consumer:
        consumer.pause()
        wait_until(lambda: is_shared(consumer))
        consumer.resume()
        wait_until(lambda: is_shared(consumer, *topics))
        send_all(bench, [1], topics)
        wait_until(all_acked(bench, 1, topics))
