"""Concurrent sends of many tasks share a call, and each gets its own result."""

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import pytest_asyncio
import redis

from lisa.core.model.errors import DuplicateMessage, InvalidMessage, ServerUnavailable, TopicFull
from lisa.core.store.store import caller
from lisa.core.transitions.topic import Configure
from lisa.embedded.server import free_port
from lisa.producer import AsyncProducer, Cancelled
from tests.producers import Topic

HOUR = timedelta(hours=1)


@pytest_asyncio.fixture
async def producer(redis_url: str) -> AsyncIterator[AsyncProducer]:
    async with AsyncProducer(redis_url) as made:
        await made.send("orders", "first", id="first", delay=HOUR)
        yield made


def script_calls(client: redis.Redis) -> int:
    """The script calls since the last time, without those for which a script had to be loaded."""
    both = client.pipeline()  # at once, so that no call is missed
    both.info("commandstats")
    both.config_resetstat()
    stats: Any = both.execute()[0]
    evalsha = stats.get("cmdstat_evalsha", {})
    return int(evalsha.get("calls", 0)) - int(evalsha.get("failed_calls", 0))


def tasks_of(producer: AsyncProducer, bodies: Iterable[object]) -> list[asyncio.Task[str]]:
    """Send each in a task of its own, later."""
    return [asyncio.create_task(producer.send("orders", one, delay=HOUR)) for one in bodies]


async def until(holds: Callable[[], bool]) -> None:
    """Let other tasks run until a condition is true. A blocking condition blocks the loop, so that
    the server's reply is not read before the caller continues."""
    while not holds():  # noqa: ASYNC110  no task here brings it about
        await asyncio.sleep(0)


async def outcomes(*sends: Any) -> list[Any]:
    """Gather results, with errors as values."""
    return await asyncio.gather(*sends, return_exceptions=True)


async def test_sends_on_behalf_of_different_callers_do_not_share_a_call(
    producer: AsyncProducer, topic: Topic, client: redis.Redis
) -> None:
    """A script call has one actor, which the journal records for each of its messages."""
    client.hset("lisa:{orders}:options", "journal", "1")

    async def task(number: int) -> tuple[str, str]:
        caller.set(name := ("ada", "bob", "")[number % 3])
        return await producer.send("orders", number, delay=HOUR), name

    await producer.send("orders", "first", id="first", delay=HOUR)  # learns of the journal
    script_calls(client)
    sent = dict(await asyncio.gather(*map(task, range(60))))
    assert script_calls(client) == 3
    client.xtrim("lisa:{orders}:events", maxlen=60)
    events: Any = client.xrange("lisa:{orders}:events")
    actors = {fields[b"id"].decode(): fields[b"actor"].decode() for _, fields in events}
    process = f"@{socket.gethostname()}:{os.getpid()}"
    names = {one: f"producer/{name}" if name else "producer" for one, name in sent.items()}
    assert actors == {one: f"{name}{process}" for one, name in names.items()}


async def test_a_call_is_bounded_by_number_and_by_bytes(
    producer: AsyncProducer, topic: Topic, client: redis.Redis
) -> None:
    script_calls(client)
    await asyncio.gather(*tasks_of(producer, range(1_001)))
    assert script_calls(client) == 5
    await asyncio.gather(*tasks_of(producer, [b"x" * 100_000] * 5))
    assert script_calls(client) == 3
    topic.declare(*(f"g{n}" for n in range(10)))
    async with AsyncProducer(producer._store.connection.address) as another:
        script_calls(client)
        await asyncio.gather(*tasks_of(another, range(101)))
        assert script_calls(client) == 1, "what is due later concerns no group yet"
        await asyncio.gather(*(another.send("orders", n) for n in range(101)))
        assert script_calls(client) == 3, "76 by ten groups, half if due"


async def test_a_cancelled_task_affects_no_other(producer: AsyncProducer, topic: Topic) -> None:
    tasks = tasks_of(producer, range(10))
    await asyncio.sleep(0)  # all of them have called, nothing is sent yet
    tasks[3].cancel()
    said = await outcomes(*tasks)
    assert isinstance(said.pop(3), asyncio.CancelledError)
    assert topic.waiting().keys() == {"first", *said}
    tasks = tasks_of(producer, range(10))
    before = len(topic.waiting())
    await until(lambda: len(topic.waiting()) > before)
    tasks[0].cancel()
    said = await outcomes(*tasks)
    assert isinstance(said.pop(0), asyncio.CancelledError)
    assert all(isinstance(one, str) for one in said)
    assert len(topic.waiting()) == 20
    # When a refused call is split, a cancelled send is not sent.
    topic.store.call(Configure("orders", {"max_body_bytes": "100"}))
    tasks = tasks_of(producer, ["x" * 101, "a", "b", "c"])
    tasks[0].add_done_callback(lambda _: tasks[2].cancel())
    said = await outcomes(*tasks)
    assert [type(one) for one in said] == [InvalidMessage, str, asyncio.CancelledError, str]
    assert topic.waiting().keys() >= {said[1], said[3]}
    assert len(topic.waiting()) == 22


async def test_closing_sends_what_waits_unless_cancelled(redis_url: str, topic: Topic) -> None:
    producer = AsyncProducer(redis_url)
    tasks = tasks_of(producer, range(5))
    cancels = asyncio.create_task(producer.cancel("orders", "absent"))
    await asyncio.sleep(0)
    await producer.close()
    assert cancels.done()
    assert topic.waiting().keys() == {task.result() for task in tasks}
    connected, ended = asyncio.Event(), asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connected.set()
        await reader.read()
        writer.close()
        ended.set()

    async with await asyncio.start_server(hang, "127.0.0.1", 0) as server:
        producer = AsyncProducer(f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0")
        sends = tasks_of(producer, range(3))
        cancels = asyncio.create_task(producer.cancel("orders", "absent"))
        await connected.wait()
        closing = asyncio.create_task(producer.close())
        await asyncio.sleep(0)
        closing.cancel()
        said = await outcomes(closing, *sends, cancels)
        assert [type(one) for one in said] == [asyncio.CancelledError] * 5
        await ended.wait()


async def test_waiting_sends_without_a_server_or_an_event_loop() -> None:
    """Each caller gets an error of its own, or is cancelled."""
    address = f"redis://127.0.0.1:{free_port()}/0"
    async with AsyncProducer(address, patience="100ms") as producer:
        said = await outcomes(*tasks_of(producer, range(5)))
    assert [type(one) for one in said] == [ServerUnavailable] * 5
    assert len({id(one) for one in said}) == 5
    assert all(one.__cause__ is not None for one in said)

    async def leave() -> asyncio.Task[str]:
        (task,) = tasks_of(AsyncProducer(address), [1])
        await asyncio.sleep(0)
        return task

    ended = await asyncio.to_thread(asyncio.run, leave())
    assert ended.cancelled()


def test_another_event_loop_is_refused_until_the_producer_is_closed(redis_url: str) -> None:
    producer = AsyncProducer(redis_url)

    async def send_and_close() -> None:
        await producer.send("orders", 1, delay=HOUR)
        await producer.close()

    with ThreadPoolExecutor(1) as thread:  # whose loop exists beside this thread's
        for run in (asyncio.run, lambda call: thread.submit(asyncio.run, call).result()):
            run(send_and_close())
    with asyncio.Runner() as first, asyncio.Runner() as second:
        first.run(producer.send("orders", 1, delay=HOUR))
        for call in (producer.send, producer.send_many):
            with pytest.raises(RuntimeError, match="create a producer in each loop"):
                second.run(call("orders", [1], delay=HOUR))
        with pytest.raises(RuntimeError, match="create a producer in each loop"):
            second.run(producer.close())
        first.run(send_and_close())


async def test_no_cancellation_is_lost(redis_url: str) -> None:
    async def look_for_ever(producer: AsyncProducer) -> None:
        while True:
            await producer.get("t", "x")

    async with AsyncProducer(redis_url) as producer:
        await producer.get("t", "x")
        for steps in range(300):
            task = asyncio.create_task(look_for_ever(producer))
            for _ in range(steps % 20):  # cancels at another await each time
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait([task], timeout=60)
            assert task.cancelled(), f"goes on after {steps} steps"


async def test_calls_that_meet_share_a_script_call(
    producer: AsyncProducer, topic: Topic, client: redis.Redis
) -> None:
    async def task(number: int) -> list[str]:
        return [await producer.send("orders", [number, n], delay=HOUR) for n in range(10)]

    script_calls(client)
    sent = await asyncio.gather(*map(task, range(100)))
    assert script_calls(client) == 10  # one per round, with all hundred
    assert topic.waiting().keys() == {"first", *(one for ids in sent for one in ids)}
    assert len(topic.waiting()) == 1_001
    for number, ids in enumerate(sent):
        assert ids == sorted(ids)
        found = await producer.get("orders", ids[-1])
        assert found is not None
        assert found.body == [number, 9]
    script_calls(client)
    (first,) = tasks_of(producer, [0])
    await until(lambda: script_calls(client) > 0)
    await asyncio.gather(first, *tasks_of(producer, range(20)))
    assert script_calls(client) == 1, "those of the meantime go with the next call"
    asked = [*(ids[0] for ids in sent[:80]), "absent"]
    said = await asyncio.gather(*(producer.cancel("orders", one) for one in asked))
    assert script_calls(client) == 1
    assert said == [Cancelled.CANCELLED] * 80 + [Cancelled.UNKNOWN]


async def test_each_send_has_own_options_and_outcome(producer: AsyncProducer, topic: Topic) -> None:
    await producer.send("orders", "old", id="a", delay=HOUR)
    extras: Any = {"delay": HOUR, "headers": {"k": "v"}}
    kept, replaced, other, rejected = await outcomes(
        producer.send("orders", "keep", id="first", delay=HOUR),
        producer.send("orders", "new", id="a", on_duplicate="replace", **extras),
        producer.send("bills", "bill", id="a", delay=2 * HOUR, ttl=HOUR, retry="1s"),
        producer.send("orders", "no", id="a", on_duplicate="reject"),
    )
    assert (kept, replaced, other) == ("first", "a", "a")
    assert isinstance(rejected, DuplicateMessage)
    found = [await producer.get(*one) for one in (("orders", "a"), ("bills", "a"))]
    assert [(one.body, one.headers) for one in found if one] == [("new", {"k": "v"}), ("bill", {})]
    for mode, kinds, last in (
        ("reject", [str, DuplicateMessage, DuplicateMessage], 0),
        ("replace", [str, str, str], 2),
    ):
        options: Any = {"id": "b", "delay": HOUR, "on_duplicate": mode}
        said = await outcomes(*(producer.send("orders", n, **options) for n in range(3)))
        assert [type(one) for one in said] == kinds, "as if sent one after the other"
        seen = await producer.get("orders", "b")
        assert seen is not None
        assert seen.body == last
    topic.declare("lisa")
    ids = await asyncio.gather(*(producer.send("orders", n) for n in range(50)))
    assert [entry.id for entry in topic.take("lisa")] == ids, "in the order of calls"


async def test_a_refused_message_affects_no_other(producer: AsyncProducer, topic: Topic) -> None:
    topic.store.call(Configure("orders", {"max_body_bytes": "10"}))
    bodies: list[Any] = ["fine"] * 40
    bodies[7], bodies[21], bodies[22] = "x" * 11, object(), "y" * 12
    said = await outcomes(*tasks_of(producer, bodies))
    bad = {n: str(one) for n, one in enumerate(said) if isinstance(one, InvalidMessage)}
    assert bad.keys() == {7, 21, 22}
    assert ("has 11 bytes" in bad[7], "JSON" in bad[21], "has 12 bytes" in bad[22]) == (True,) * 3
    assert topic.waiting().keys() == {"first", *(one for one in said if isinstance(one, str))}
    assert len(topic.waiting()) == 38
    topic.store.call(Configure("orders", {"capacity": "45"}))
    known = producer.send("orders", "known", id="first", delay=HOUR)
    said = await outcomes(*tasks_of(producer, range(19)), known)
    assert [type(one) for one in said] == [str] * 7 + [TopicFull] * 12 + [str]
    assert len(topic.waiting()) == 45
