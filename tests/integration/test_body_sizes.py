"""Bodies of every size, mixed in one batch, through every call that reads or writes bodies.

Each is returned unchanged, once, in the order of sending; no call exceeds the byte budget unless it
has only one message. A relay measures the requests and replies of each role.
"""

from __future__ import annotations

import base64
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from lisa.admin import garbage
from lisa.consumer import Consumer
from lisa.core.model import signals
from lisa.core.model.envelope import HEAD_BYTES, decode_envelope, encode_envelope, new_token
from lisa.core.model.options import BYTES_PER_CALL, TopicOptions
from lisa.core.store.store import portions
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.pull import Pull
from lisa.core.transitions.read import Read
from lisa.core.transitions.restore import Restore, RestoreItem
from lisa.producer import Outgoing
from tests.gateways import Gateway
from tests.meter import Meter
from tests.producers import Either
from tests.roles import Cast, Services
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lisa.core.model.message import Message

LIMIT = TopicOptions().max_body_bytes
WHOLE = BYTES_PER_CALL - HEAD_BYTES
"""The body of one message that fills a call."""

ROOM = 48 * 1024
"""Bytes of a request or a reply that are not bodies: ids and due times of hundreds of messages."""

MIXES = {
    "around the budget": [
        *(0, 1, WHOLE - 1, WHOLE, WHOLE + 1, BYTES_PER_CALL - 1, BYTES_PER_CALL),
        *(BYTES_PER_CALL + 1, LIMIT - 1, LIMIT, 1, 0),
    ],
    "tiny ones and a huge one": [*range(300), LIMIT, *range(300)],
    "alternating": [LIMIT, 0, 90_000, 1] * 4,
    "calls filled to the byte": [BYTES_PER_CALL // 4 - HEAD_BYTES] * 8
    + [BYTES_PER_CALL // 4 - HEAD_BYTES + 1] * 8,
}
Bodies = dict[str, bytes]


@pytest.fixture(params=MIXES)
def bodies(request: pytest.FixtureRequest) -> Bodies:
    """Bodies by id, in the order of sending."""
    return of_sizes(MIXES[request.param])


def of_sizes(sizes: list[int]) -> Bodies:
    return {f"m{n:04}": _body(n, size) for n, size in enumerate(sizes)}


def _body(number: int, size: int) -> bytes:
    return (b"%d:" % number + bytes(range(256)) * (size // 256 + 1))[:size]


@pytest.fixture
def meter(redis_url: str) -> Iterator[Meter]:
    with Meter(redis_url) as meter:
        yield meter
        assert meter.beyond(BYTES_PER_CALL) <= ROOM


@pytest.fixture
def cast(meter: Meter) -> Iterator[Cast]:
    cast = Cast(meter.url).declare(journal="1")
    yield cast
    cast.store.close()


def outgoing(bodies: Bodies) -> list[Outgoing]:
    return [Outgoing(body, id=one) for one, body in bodies.items()]


def send(cast: Cast, bodies: Bodies, **options: Any) -> None:
    producer = Either("sync", cast.store.connection.address.url)
    producer.send_many("orders", outgoing(bodies), **options)
    producer.close()


def pull_all(cast: Cast, bodies: Bodies) -> list[Any]:
    """All deliveries in order of arrival, none twice."""
    found: list[Any] = []
    consumer = Consumer(cast.store.connection.address.url, group=cast.group)
    while some := consumer.pull("orders", batch=500):
        found += some
    assert [one.id for one in found] == list(bodies)
    assert {one.id: one.body for one in found} == bodies
    return found


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("way", ["send", "send_many", "stream", "later"])
def test_producers_send_them_and_handlers_receive_them(
    meter: Meter, cast: Cast, bodies: Bodies, kind: str, way: str
) -> None:
    producer = Either(kind, meter.url)
    if way == "send":
        for one in list(bodies)[:20]:
            producer.send("orders", bodies[one], id=one)
        bodies = dict(list(bodies.items())[:20])
    elif way == "stream":
        producer.stream("orders", outgoing(bodies), len(bodies))
    else:
        due = {"at_ms": cast.now_ms() + 300} if way == "later" else {}
        producer.send_many("orders", outgoing(bodies), **due)
    seen: list[tuple[str, Any]] = []
    consumer = Consumer(meter.url, group=cast.group, concurrency=1)

    @consumer.on("orders")
    def handle(message: Message) -> None:
        seen.append((message.id, message.body))

    with consumer:
        wait_until(
            lambda: cast.store.call(Promote("orders")).moved == 0 and len(seen) >= len(bodies)
        )
        wait_until(lambda: cast.stats().get(f"acked@{cast.group}") == len(bodies))
    assert seen == list(bodies.items())
    assert producer.ask("get", "orders", next(iter(bodies))).state == "acked"
    producer.close()


def test_pulls_hand_them_over(cast: Cast, bodies: Bodies) -> None:
    send(cast, bodies)
    for delivery in pull_all(cast, bodies):
        assert delivery.ack() == "acked"


def test_each_kind_of_handler_receives_them(meter: Meter, cast: Cast, bodies: Bodies) -> None:
    """Event loop, threads, and batches; each kind has a group."""
    seen: dict[str, list[tuple[str, Any]]] = {"loop": [], "threads": [], "batches": []}
    consumers = {name: Consumer(meter.url, group=name, concurrency=4) for name in seen}
    for name in seen:
        cast.on("orders", name).declare()
    send(cast, bodies)

    @consumers["loop"].on("orders")
    async def handle(message: Message) -> None:
        seen["loop"].append((message.id, message.body))

    @consumers["threads"].on("orders")
    def handle_too(message: Message) -> None:
        seen["threads"].append((message.id, message.body))

    @consumers["batches"].on("orders", batch=50, within="20ms")
    def handle_some(messages: list[Message]) -> None:
        seen["batches"].extend((message.id, message.body) for message in messages)

    with consumers["loop"], consumers["threads"], consumers["batches"]:
        wait_until(lambda: all(len(one) >= len(bodies) for one in seen.values()))
    for one in seen.values():
        assert sorted(one) == sorted(bodies.items())


def test_looking_at_them(cast: Cast, meter: Meter, bodies: Bodies) -> None:
    send(cast, bodies)
    found = cast.store.call_by_id(Inspect("orders", list(bodies)))
    assert [decode_envelope(one.envelope or b"").body for one in found] == list(bodies.values())
    producer = Either("async", meter.url)
    for one in list(bodies)[:12]:
        assert producer.ask("get", "orders", one).body == bodies[one]
    producer.close()


def test_the_journal_is_read_both_ways(cast: Cast, bodies: Bodies) -> None:
    send(cast, bodies)
    for backwards in (False, True):
        seen: list[tuple[str, Any]] = []
        start, stop, is_last = ("+" if backwards else "-"), ("-" if backwards else "+"), False
        while not is_last:
            is_last, items = cast.store.call(Read("orders", start, stop, backwards=backwards))
            for _, flat in items:
                fields = dict(zip(flat[::2], flat[1::2], strict=True))
                if b"envelope" in fields:
                    body = decode_envelope(fields[b"envelope"]).body
                    seen.append((fields[b"id"].decode(), body))
            start = f"({items[-1][0].decode()}" if items else start
        assert seen == list(bodies.items())[:: -1 if backwards else 1]


def test_garbage_is_given_a_new_life(cast: Cast, bodies: Bodies) -> None:
    send(cast, bodies)
    for delivery in pull_all(cast, bodies):
        delivery.discard("no")
    found = garbage.listed(cast.store, garbage.GarbageSelection(topic="orders"), limit=1000)
    assert {row.id for row in cast.store.drive(found).rows} == set(bodies)
    done = cast.store.drive(garbage.requeue(cast.store, "orders", cast.group, list(bodies)))
    assert done == [True] * len(bodies)
    while cast.store.call(Promote("orders")).moved:
        pass
    pull_all(cast, bodies)


def test_signals_of_a_manager_carry_them(cast: Cast, bodies: Bodies) -> None:
    """Signals for messages past their ttl, and for those of a dead consumer."""
    heard: dict[str, list[tuple[str, Any]]] = {"expired": [], "dead": []}

    def hear_end(_topic: str, *, message: Message) -> None:
        heard["expired"].append((message.id, message.body))

    def hear_death(_topic: str, *, message: Message) -> None:
        heard["dead"].append((message.id, message.body))

    kit = Services(cast)
    cast.configure(ack_timeout="1", retry_delays="")
    with signals.everywhere.expired.connected_to(hear_end):
        due_ms = cast.now_ms() + 500
        send(cast, bodies, at_ms=due_ms, ttl=timedelta(milliseconds=1))
        wait_until(lambda: cast.now_ms() > due_ms + 5)
        wait_until(lambda: kit.promoter.step(["orders"]) == [None])
        kit.announcer.step()
    with signals.everywhere.dead.connected_to(hear_death):
        again = {f"again-{one}": body for one, body in bodies.items()}
        send(cast, again)
        while cast.store.call(Pull("orders", cast.group, "dead", 500)).entries:
            pass

        def is_all_garbage() -> bool:
            return cast.stats().get(f"garbage@{cast.group}") == len(again)

        wait_until(lambda: kit.reclaimer.step(["orders"]) and is_all_garbage())
        kit.announcer.step()
    assert sorted(heard["expired"]) == sorted(bodies.items())
    assert sorted(heard["dead"]) == sorted(again.items())


def test_a_restore_puts_them_back(cast: Cast, bodies: Bodies) -> None:
    token = new_token()
    items = [
        RestoreItem(one, encode_envelope(token, body), 1 + n)
        for n, (one, body) in enumerate(bodies.items())
    ]
    most = cast.store.batch_size("orders", Restore)
    for some in portions(items, most, lambda item: len(item.envelope)):
        assert set(cast.store.call_by_id(Restore("orders", some))) == {"restored"}
    while cast.store.call(Promote("orders")).moved:
        pass
    pull_all(cast, bodies)


def test_the_gateway_accepts_and_delivers_them(meter: Meter, cast: Cast) -> None:
    with Gateway(meter.url) as gateway:
        for number, sizes in enumerate(MIXES.values()):
            by_gateway(gateway, cast.on(f"orders-{number}").declare(), of_sizes(sizes))


def by_gateway(gateway: Gateway, cast: Cast, bodies: Bodies) -> None:
    client, path = gateway.client, f"/v1/topics/{cast.topic}"
    messages = [
        {"id": one, "body_base64": base64.b64encode(body).decode()} for one, body in bodies.items()
    ]
    for some in portions(messages, 500, lambda one: 4 * len(one["body_base64"])):
        sent = client.post(f"{path}/messages:batch", json={"messages": some})
        assert sent.is_success, sent.text
    for one in list(bodies)[:12]:
        seen = client.get(f"{path}/messages/{one}").json()
        assert base64.b64decode(seen["body_base64"]) == bodies[one]
    found: list[tuple[str, bytes]] = []
    while some := client.post(f"{path}/pull", json={"max": 500}).json()["deliveries"]:
        found += [(one["id"], base64.b64decode(one["body_base64"])) for one in some]
    assert found == list(bodies.items())
    listed = client.get(f"{path}/messages", params={"state": "in_flight", "limit": 500})
    assert len(listed.json()["messages"]) == min(500, len(bodies)), listed.text
    cast.store.close()
