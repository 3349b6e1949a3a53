"""Bodies of every size, mixed in one batch, through every call that reads or writes bodies.

Each is returned unchanged, once, in the order of sending; no call exceeds the byte budget unless it
has only one message. A relay measures the requests and replies of each role.
"""

import base64
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any

import hiredis
import pytest

from lisa.admin import garbage
from lisa.consumer import Consumer
from lisa.core.model import signals
from lisa.core.model.envelope import HEAD_BYTES, decode_envelope, encode_envelope, new_token
from lisa.core.model.message import Message
from lisa.core.model.options import BYTES_PER_CALL, TopicOptions
from lisa.core.store.store import portions
from lisa.core.transitions.delivery import Pull
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.journal import Read
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.restore import Restore, RestoreItem
from lisa.producer import Outgoing, Producer
from tests.gateways import Gateway
from tests.producers import Either
from tests.proxies import Proxy
from tests.roles import Cast, Services
from tests.servers import wait_until

LIMIT = TopicOptions().max_body_bytes
WHOLE = BYTES_PER_CALL - HEAD_BYTES
"""The body of one message that fills a call."""

ROOM = 48 * 1024
"""Bytes of a request or a reply that are not bodies: ids and due times of hundreds of messages."""

QUARTER = BYTES_PER_CALL // 4 - HEAD_BYTES
SIZES = [
    *(0, 1, WHOLE - 1, WHOLE, WHOLE + 1, BYTES_PER_CALL - 1, BYTES_PER_CALL),
    *(BYTES_PER_CALL + 1, LIMIT - 1, LIMIT, 1, 0),
    *(*range(300), LIMIT, *range(300)),  # tiny ones and a huge one
    *[LIMIT, 0, 90_000, 1] * 2,
    *[QUARTER] * 8,  # fill calls to the byte, and exceed them by one
    *[QUARTER + 1] * 8,
]


BODIES = {
    f"m{number:04}": (b"%d:" % number + bytes(range(256)) * (size // 256 + 1))[:size]
    for number, size in enumerate(SIZES)
}
"""Bodies by id, in the order of sending."""

OUTGOING = [Outgoing(body, id=one) for one, body in BODIES.items()]


def bytes_of(item: Any) -> list[int]:
    """The sizes of all strings in a request or a reply."""
    if isinstance(item, bytes):
        return [len(item)]
    return [size for part in item for size in bytes_of(part)] if isinstance(item, list) else []


class Meter(Proxy):
    """A relay to a server that measures each request and each reply."""

    excess = 0
    """The most bytes beyond the budget, or beyond the longest string if that is longer."""

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        reader = hiredis.Reader(notEnoughData=Ellipsis)
        with source, suppress(OSError):
            while said := source.recv(1 << 18):
                reader.feed(said)
                while (item := reader.gets()) is not Ellipsis:
                    if sizes := bytes_of(item):
                        self.excess = max(self.excess, sum(sizes) - max(BYTES_PER_CALL, *sizes))
                target.sendall(said)
        with suppress(OSError):
            target.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def meter(redis_url: str) -> Iterator[Meter]:
    with Meter(redis_url) as meter:
        yield meter
    assert 0 < meter.excess <= ROOM


@pytest.fixture
def cast(meter: Meter) -> Cast:
    return Cast(meter.url).declare(journal="1")


def send(cast: Cast, **options: Any) -> None:
    with Producer(cast.store.connection.address.url) as producer:
        producer.send_many("orders", OUTGOING, **options)


def pull_all(cast: Cast) -> list[Any]:
    """All deliveries, in the order of sending, none twice."""
    found: list[Any] = []
    consumer = Consumer(cast.store.connection.address.url, group=cast.group)
    while some := consumer.pull("orders", batch=500):
        found += some
    assert [one.id for one in found] == list(BODIES)
    assert {one.id: one.body for one in found} == BODIES
    return found


def promote(cast: Cast) -> int:
    """Promote what is due; returns the number of messages moved."""
    moved = 0
    while now := cast.store.call(Promote("orders")).moved:
        moved += now
    return moved


@pytest.mark.parametrize(
    ("kind", "way"),
    [("sync", "send"), ("async", "send_many"), ("sync", "stream"), ("async", "later")],
)
def test_handlers_receive_what_is_sent(meter: Meter, cast: Cast, kind: str, way: str) -> None:
    producer, expected = Either(kind, meter.url), BODIES
    if way == "send":
        expected = dict(list(BODIES.items())[:12])
        for one, body in expected.items():
            producer.send("orders", body, id=one)
    elif way == "stream":
        producer.stream("orders", OUTGOING, len(BODIES))
    else:
        due = {"at_ms": cast.now_ms() + 300} if way == "later" else {}
        producer.send_many("orders", OUTGOING, **due)
    producer.close()
    seen: list[tuple[str, Any]] = []
    consumer = Consumer(meter.url, group=cast.group, concurrency=1)
    consumer.on("orders", lambda message: seen.append((message.id, message.body)))
    with consumer:
        wait_until(lambda: not promote(cast) and len(seen) >= len(expected))
        wait_until(lambda: cast.stats().get(f"acked@{cast.group}") == len(expected))
    assert seen == list(expected.items())


def test_each_kind_of_handler_receives_them(meter: Meter, cast: Cast) -> None:
    """Event loop, threads, and batches; each kind has a group."""
    seen: dict[str, list[tuple[str, Any]]] = {"loop": [], "threads": [], "batches": []}

    async def handle(message: Message) -> None:
        seen["loop"].append((message.id, message.body))

    def handle_too(message: Message) -> None:
        seen["threads"].append((message.id, message.body))

    def handle_some(messages: list[Message]) -> None:
        seen["batches"].extend((message.id, message.body) for message in messages)

    for name in seen:
        cast.on("orders", name).declare()
    send(cast)
    loop, threads, batches = (Consumer(meter.url, group=name, concurrency=4) for name in seen)
    loop.on("orders", handle)
    threads.on("orders", handle_too)
    batches.on("orders", handle_some, batch=50, within="20ms")
    with loop, threads, batches:
        wait_until(lambda: min(map(len, seen.values())) >= len(BODIES))
    assert [sorted(one) for one in seen.values()] == [sorted(BODIES.items())] * 3


def test_they_are_looked_at_and_the_journal_is_read_both_ways(cast: Cast) -> None:
    send(cast)
    found = cast.store.call_by_id(Inspect("orders", list(BODIES)))
    assert [decode_envelope(one.envelope or b"").body for one in found] == list(BODIES.values())
    for backwards in (False, True):
        start, stop = ("+", "-") if backwards else ("-", "+")
        is_last = False
        seen: list[tuple[str, Any]] = []
        while not is_last:
            is_last, items = cast.store.call(Read("orders", start, stop, backwards=backwards))
            for number, flat in items:
                fields = dict(zip(flat[::2], flat[1::2], strict=True))
                if b"envelope" in fields:
                    read = decode_envelope(fields[b"envelope"]).body
                    seen.append((fields[b"id"].decode(), read))
                start = f"({number.decode()}"
        assert seen == list(BODIES.items())[:: -1 if backwards else 1]


def test_they_are_pulled_die_and_are_given_a_new_life(cast: Cast) -> None:
    send(cast)
    for delivery in pull_all(cast):
        delivery.discard("no")
    found = garbage.listed(cast.store, garbage.GarbageSelection(topic="orders"), limit=1000)
    assert {row.id for row in cast.store.drive(found).rows} == set(BODIES)
    done = cast.store.drive(garbage.requeue(cast.store, "orders", cast.group, list(BODIES)))
    assert done == [True] * len(BODIES)
    promote(cast)
    assert {delivery.ack() for delivery in pull_all(cast)} == {"acked"}


def test_signals_of_a_manager_carry_them(cast: Cast) -> None:
    """Signals for messages past their ttl, and for those of a dead consumer."""
    heard: list[tuple[str, Any]] = []

    def hear(_topic: str, *, message: Message) -> None:
        heard.append((message.id, message.body))

    kit, dead = Services(cast), f"garbage@{cast.group}"
    cast.configure(ack_timeout="1", retry_delays="", retention="0")
    with signals.everywhere.expired.connected_to(hear):
        due_ms = cast.now_ms() + 500
        send(cast, at_ms=due_ms, ttl=timedelta(milliseconds=1))
        wait_until(lambda: cast.now_ms() > due_ms + 5)
        wait_until(lambda: kit.promoter.step(["orders"]) == [None])
        kit.announcer.step()
    assert sorted(heard) == sorted(BODIES.items())
    heard.clear()
    with signals.everywhere.dead.connected_to(hear):
        send(cast)
        while cast.store.call(Pull("orders", cast.group, "dead", 500)).entries:
            pass
        wait_until(lambda: kit.reclaimer.step(["orders"]) and cast.stats().get(dead) == len(BODIES))
        kit.announcer.step()
    assert sorted(heard) == sorted(BODIES.items())


def test_a_restore_puts_them_back(cast: Cast) -> None:
    items = [
        RestoreItem(one, encode_envelope(new_token(), body), 1 + n)
        for n, (one, body) in enumerate(BODIES.items())
    ]
    most = cast.store.batch_size("orders", Restore)
    for some in portions(items, most, lambda item: len(item.envelope)):
        assert set(cast.store.call_by_id(Restore("orders", some))) == {"restored"}
    promote(cast)
    pull_all(cast)


def test_the_gateway_accepts_and_delivers_them(meter: Meter, cast: Cast) -> None:
    def read(document: dict[str, Any]) -> bytes:
        return base64.b64decode(document["body_base64"])

    path = "/v1/topics/orders"
    messages = [
        {"id": one, "body_base64": base64.b64encode(body).decode()} for one, body in BODIES.items()
    ]
    with Gateway(meter.url) as gateway:
        client = gateway.client
        for some in portions(messages, 500, lambda one: 4 * len(one["body_base64"])):
            sent = client.post(f"{path}/messages:batch", json={"messages": some})
            assert sent.is_success, sent.text
        for one in list(BODIES)[:12]:
            assert read(client.get(f"{path}/messages/{one}").json()) == BODIES[one]
        found: list[tuple[str, bytes]] = []
        pull = {"max": 500, "group": cast.group}
        while some := client.post(f"{path}/pull", json=pull).json()["deliveries"]:
            found += [(one["id"], read(one)) for one in some]
        assert found == list(BODIES.items())
        listed = client.get(f"{path}/messages", params={"state": "in_flight", "limit": 500})
        assert len(listed.json()["messages"]) == 500, listed.text
