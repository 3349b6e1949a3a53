"""Pulls that wait: woken by the message, in order, and never costing a message an attempt."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from lisa import Manager
from lisa.admin import live
from lisa.admin.roles import consumers
from lisa.admin.topics import counts
from lisa.core.delivery.source import GroupSource
from lisa.core.model.errors import GroupRemoved, ServerUnavailable
from lisa.core.model.sharding import Topic
from lisa.core.redis.flow import Flow
from lisa.core.settings import GatewaySettings
from lisa.core.store import group_removal
from lisa.core.transitions.delivery import Pull, Pulled
from lisa.core.transitions.groups import Declare, Undeclare
from lisa.embedded import EmbeddedServer
from lisa.gateway import pulls
from lisa.gateway.context import GatewayContext
from lisa.gateway.long_poll import hold
from lisa.gateway.page.snapshot import SnapshotCache
from lisa.gateway.pulls import HandedOut
from lisa.producer import Outgoing
from tests.gateways import new_topic
from tests.servers import connect

LONG_S = 60.0
SOON_S = 30.0  # limit for operations that take milliseconds on an idle machine


@asynccontextmanager
async def context_on(url: str, **server: Any) -> AsyncIterator[GatewayContext]:
    settings = GatewaySettings.load(redis=url, gateway_server=server or None)
    context = GatewayContext(settings)
    try:
        yield context
    finally:
        await context.close()


@pytest.fixture
async def context(redis_url: str) -> AsyncIterator[GatewayContext]:
    async with context_on(redis_url) as context:
        yield context


@pytest.fixture
async def topic(context: GatewayContext) -> str:
    """A topic with one group, and without a manager."""
    name = new_topic()
    await context.store.call(Declare(name, "lisa"))
    return name


def begin(context: GatewayContext, topic: str, **wanted: Any) -> asyncio.Task[list[HandedOut]]:
    """A pull that waits."""
    return asyncio.create_task(context.broker.pull(topic, wait_s=LONG_S, **wanted))


async def standing(context: GatewayContext, count: int) -> None:
    """Wait until `count` pulls are queued."""
    async with asyncio.timeout(SOON_S):
        while True:
            lines = context.broker._queues.values()
            watched = all(line._watcher is not None for line in lines)
            if watched and sum(len(line._waiters) for line in lines) == count:
                return
            await asyncio.sleep(0.002)


async def soon(task: asyncio.Task[list[HandedOut]]) -> list[HandedOut]:
    return await asyncio.wait_for(task, SOON_S)


async def none_in_flight(context: GatewayContext, topic: str) -> None:
    """Wait until no message of the topic is in flight."""
    async with asyncio.timeout(SOON_S):
        while True:
            (found,) = await context.store.drive(counts(context.store, [topic]))
            if not any(group.in_flight for group in found.groups):
                return
            await asyncio.sleep(0.002)


async def send(context: GatewayContext, topic: str) -> str:
    """Send a message; returns its id."""
    return (await context.sender.offer(topic, Outgoing("x"))).id


async def check_first_attempt(context: GatewayContext, topic: str, sent: str) -> None:
    """The message is delivered to the next pull as if to the first."""
    (found,) = await context.broker.pull(topic, wait_s=SOON_S)
    assert (found.message.id, found.message.attempt) == (sent, 1)


async def test_a_message_wakes_one_pull_and_the_others_keep_waiting(
    context: GatewayContext, topic: str
) -> None:
    """Pulls are served in order, each with the number that it wants."""
    first, *others = (begin(context, topic, most=most) for most in (5, 2, 3, 1))
    await standing(context, 4)
    sent = await context.sender.offer(topic, Outgoing("hello"))
    (found,) = await soon(first)
    assert (found.message.id, found.message.body, found.message.attempt) == (sent.id, "hello", 1)
    assert not any(pull.done() for pull in others)
    await context.sender.send_many(topic, list(range(6)))
    bodies = [[one.message.body for one in await soon(pull)] for pull in others]
    assert bodies == [[0, 1], [2, 3, 4], [5]]


async def test_messages_of_an_ended_pull_go_to_the_next_pull(
    context: GatewayContext, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pull ends before its messages are handed out, and in another case right after."""
    original = pulls.PullQueue._open
    taken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def slow(self: Any, *given: Any) -> Any:
        found = await original(self, *given)
        if not taken.done():
            taken.set_result(None)
            await asyncio.sleep(0.05)
        return found

    monkeypatch.setattr(pulls.PullQueue, "_open", slow)
    sent = await send(context, topic)
    first, second = begin(context, topic), begin(context, topic)
    await taken
    first.cancel()
    (found,) = await soon(second)
    assert (found.message.id, found.message.attempt) == (sent, 1)
    third = begin(context, topic)
    context.broker.give_back([found])
    (found,) = await soon(third)
    assert (found.message.id, found.message.attempt) == (sent, 1)


async def test_a_task_cancelled_after_its_hand_out_releases_its_messages(
    context: GatewayContext, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull = begin(context, topic)
    await standing(context, 1)
    original = pulls.Waiter.answer

    def answer_and_end(self: Any) -> None:
        original(self)
        pull.cancel()

    monkeypatch.setattr(pulls.Waiter, "answer", answer_and_end)
    sent = await send(context, topic)
    await asyncio.wait([pull])
    assert pull.cancelled()
    monkeypatch.undo()
    await check_first_attempt(context, topic, sent)


async def test_a_pull_gets_as_many_as_it_wants_in_several_calls(
    context: GatewayContext, topic: str
) -> None:
    await context.sender.send_many(topic, range(600))
    for expected in (range(500), range(500, 600)):
        found = await context.broker.pull(topic, most=500, wait_s=SOON_S)
        assert [one.message.body for one in found] == list(expected)


async def test_a_pull_cancelled_between_its_calls_releases_its_messages(
    context: GatewayContext, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = pulls.PullQueue._hand_out

    async def cancel_after(self: Any, taken: Any) -> None:
        await original(self, taken)
        pull.cancel()
        await asyncio.wait([pull])

    monkeypatch.setattr(pulls.PullQueue, "_hand_out", cancel_after)
    await context.sender.send_many(topic, range(400))
    pull = begin(context, topic, most=500)
    await asyncio.wait([pull])
    assert pull.cancelled()
    monkeypatch.undo()
    found: list[HandedOut] = []
    while len(found) < 400:
        found += await context.broker.pull(topic, most=500, wait_s=SOON_S)
    assert {one.message.attempt for one in found} == {1}


async def test_a_request_cancelled_as_its_pull_ends_releases_its_messages(
    context: GatewayContext, topic: str
) -> None:
    """A stopping gateway cancels requests after its grace time."""
    request = Request({"type": "http"}, asyncio.Queue[dict[str, Any]]().get)
    sent = await send(context, topic)
    delivered = await context.broker.pull(topic)
    came = asyncio.Event()

    async def pull() -> list[HandedOut]:
        await came.wait()
        return delivered

    holding = asyncio.create_task(hold(context, request, pull(), lambda _: b""))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    came.set()
    await asyncio.sleep(0)  # the pull ends; its request does not know it yet
    holding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await holding
    await check_first_attempt(context, topic, sent)


async def test_a_pull_that_fails_without_a_reply_costs_no_attempt(
    topic: str, context: GatewayContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its messages are released once the server answers, whether or not another pull waits."""
    real, lost = GroupSource._pull, list[object]()

    def pull(source: GroupSource, call: Pull) -> Flow[Pulled]:
        pulled = yield from real(source, call)
        if pulled.entries and len(lost) < 2:
            lost.append(call)
            raise ServerUnavailable("the reply is lost")
        return pulled

    monkeypatch.setattr(GroupSource, "_pull", pull)
    sent = await send(context, topic)
    with pytest.raises(ServerUnavailable, match="the reply is lost"):
        await context.broker.pull(topic)
    await none_in_flight(context, topic)
    await check_first_attempt(context, topic, sent)


async def test_a_pull_without_a_group_waits_for_a_manager_to_declare_one(
    redis_url: str, context: GatewayContext
) -> None:
    topic = new_topic()
    sent = await send(context, topic)
    assert await context.broker.pull(topic) == []
    pull = begin(context, topic)
    with Manager(redis_url):
        (found,) = await soon(pull)
    assert (found.message.id, found.message.group) == (sent, "lisa")


async def test_a_group_that_is_removed_ends_the_pulls_that_named_it(
    context: GatewayContext, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    beat_s = 0.5
    monkeypatch.setattr(pulls, "BEAT_S", beat_s)
    await context.store.call(Declare(topic, "other"))
    named = begin(context, topic, group="other")
    await standing(context, 1)
    await context.store.call(Undeclare(topic, "other"))
    await context.store.call(Declare(topic, "another"))  # an entry that must not wake a pull
    with pytest.raises(GroupRemoved):
        await asyncio.wait_for(named, 2 * beat_s + SOON_S)


async def test_a_group_that_is_removed_between_two_pulls_stays_removed(
    context: GatewayContext, topic: str
) -> None:
    await context.sender.offer(topic, Outgoing("x"))
    (found,) = await context.broker.pull(topic, group="lisa")
    assert await context.settler.ack(topic, found.receipt) == "acked"
    # As a manager does after the gateway was silent for some time.
    await context.store.drive(
        context.store.command("DEL", context.store.keys.topic(topic).consumers)
    )
    await context.store.drive(group_removal.remove(context.store, Topic(topic), "lisa"))
    with pytest.raises(GroupRemoved):
        await context.broker.pull(topic, group="lisa")
    assert await context.store.drive(context.store.groups(topic)) == ()


@pytest.mark.full
async def test_pulls_outlive_a_server_that_has_lost_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also those of other groups, and after an outage that outlasts the records."""
    monkeypatch.setattr(pulls, "BEAT_S", 0.3)
    topic = new_topic()
    with EmbeddedServer() as server, Manager(server.url):
        async with context_on(server.url, patience="200ms") as context:
            waiting = []
            for group in ("g", "h"):
                waiting.append(begin(context, topic, group=group))
                await standing(context, len(waiting))
            server.kill()
            await asyncio.sleep(2 * pulls.BEAT_S)
            server.restart()
            await asyncio.sleep(4 * pulls.BEAT_S)
            assert not any(pull.done() for pull in waiting)
            await standing(context, len(waiting))
            await send(context, topic)
            assert [len(await soon(pull)) for pull in waiting] == [1, 1]


async def test_a_response_is_limited_in_bytes_and_the_rest_is_released(
    context: GatewayContext, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pulls, "AHEAD_BYTES", 300_000)
    await context.sender.send_many(topic, ["x" * 30_000] * 20)
    found = await context.broker.pull(topic, most=20, wait_s=SOON_S)
    assert len(found) == 16  # two calls of eight
    rest: list[HandedOut] = []
    while len(rest) < 4:
        rest += await context.broker.pull(topic, most=20, wait_s=SOON_S)
    assert {one.message.attempt for one in rest} == {1}
    assert len({one.message.id for one in found + rest}) == 20


async def test_expired_and_undecodable_messages_are_not_handed_out(
    context: GatewayContext, topic: str
) -> None:
    store, keys = context.store, context.store.keys.topic(topic)
    await context.sender.offer(topic, Outgoing("old", id="old", ttl=timedelta(milliseconds=1)))
    await context.sender.offer(topic, Outgoing("broken", id="broken"))
    await store.drive(store.command("SETRANGE", keys.body("broken"), 10, "?"))
    await asyncio.sleep(0.01)
    assert await context.broker.pull(topic, most=10) == []
    failed = await store.drive(store.command("ZRANGE", keys.group("lisa").retry, 0, -1))
    assert failed == [b"broken"], "a newer build may read it"
    assert (await context.sender.get(topic, "old")).state == "expired"  # type: ignore[union-attr]


async def test_a_pull_skips_entries_whose_messages_are_gone(
    context: GatewayContext, topic: str
) -> None:
    sent = [await send(context, topic) for _ in range(5)]
    body = context.store.keys.topic(topic).body
    await context.store.drive(context.store.command("DEL", *map(body, sent[:4])))
    found = await context.broker.pull(topic, most=2)
    assert [one.message.id for one in found] == sent[4:]


async def test_the_gateway_is_a_consumer_while_clients_pull(
    redis_url: str, topic: str, context: GatewayContext
) -> None:
    await context.broker.pull(topic)
    (seen,) = await context.store.drive(consumers(context.store, [topic]))
    assert seen.alive
    assert seen.record.name == context.name
    await context.broker.close()
    async with context_on(redis_url) as other:
        assert await other.store.drive(consumers(other.store, [topic])) == []


async def test_the_gateways_record_names_all_groups_that_clients_pull(
    topic: str, context: GatewayContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the web page reports a group without consumers."""
    await context.store.call(Declare(topic, "audit"))

    async def seen_after_pull(group: str) -> dict[str, int]:
        await context.broker.pull(topic, group=group)
        snapshot = await SnapshotCache(context).current()
        return dict(snapshot.lines[topic].alive)

    assert await seen_after_pull("lisa") == {"lisa": 1}
    assert await seen_after_pull("audit") == {"audit": 1, "lisa": 1}
    monkeypatch.setattr(pulls, "GROUP_KEPT_S", 0.0)
    context.broker.presence.announce_again(topic)
    assert await seen_after_pull("audit") == {"audit": 1}


async def test_the_web_page_has_rates_after_the_clock_was_set_back(
    topic: str, context: GatewayContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, ahead_us = live.look, 3_600_000_000

    def shifted(store: Any, *topics: Any) -> Any:
        found = yield from look(store, *topics)
        return replace(found, at_us=found.at_us + ahead_us)

    monkeypatch.setattr(live, "look", shifted)
    await context.sender.offer(topic, Outgoing("x"))
    cache = SnapshotCache(context)
    await cache.current()
    ahead_us = 0
    for _ in range(2):
        cache.clear()
        snapshot = await cache.current()
    assert snapshot.lines[topic].activity is not None


async def test_a_server_that_is_full_can_be_drained(tmp_path: Path) -> None:
    """No step of a pull is refused for lack of memory, for new and known consumers."""
    topic = new_topic()
    with EmbeddedServer(directory=tmp_path) as server:
        async with context_on(server.url) as first:
            await first.store.call(Declare(topic, "lisa"))
            await first.sender.send_many(topic, ["x" * 100] * 30)
        with connect(server.url) as client:
            client.config_set("maxmemory", 1)
        async with context_on(server.url) as context:
            with pytest.raises(ServerUnavailable, match="out of memory"):
                await context.sender.offer(topic, Outgoing("x"))
            for group in (None, "lisa"):
                found = await context.broker.pull(
                    topic, group=group, most=10, ack_timeout_ms=60_000
                )
                assert len(found) == 10
                acks = [context.settler.ack(topic, one.receipt) for one in found]
                assert await asyncio.gather(*acks) == ["acked"] * 10
            left = await context.broker.pull(topic, most=50)
            context.broker.give_back(left)
            await none_in_flight(context, topic)
            assert len(await context.broker.pull(topic, most=50)) == 10
            with pytest.raises(ServerUnavailable):
                await context.broker.pull(topic, group="another")
