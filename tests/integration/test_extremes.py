"""Extreme values through every interface: bodies, ids in any script, times of any age.

Every interface returns accepted values unchanged, and refuses all others before calling the
server.
"""

from __future__ import annotations

import json
import unicodedata
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lisa.admin import garbage, story
from lisa.admin.fsck import check as fsck
from lisa.admin.messages import LiveState, list_messages
from lisa.consumer import Consumer
from lisa.core.model.clock import MAX_DUE_MS, OLDEST_DUE_MS, ms_datetime
from lisa.core.model.envelope import decode_envelope
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.options import TopicOptions
from lisa.core.transitions.promote import Promote
from lisa.producer import Outgoing, Producer
from tests.gateways import Gateway, new_topic
from tests.roles import Cast
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lisa.core.model.message import Message
    from lisa.embedded import EmbeddedServer

LIMIT = TopicOptions().max_body_bytes
LATER = timedelta(days=1)
WAIT = timedelta(seconds=5)


@pytest.fixture(scope="module")
def url(valkey_server: EmbeddedServer) -> str:
    return valkey_server.url


@pytest.fixture(scope="module")
def gateway(url: str) -> Iterator[Gateway]:
    with Gateway(url) as running:
        yield running


@pytest.fixture(scope="module")
def producer(url: str) -> Iterator[Producer]:
    with Producer(url) as made:
        yield made


class TopicBench:
    """A new topic with a journal, and its clients."""

    def __init__(self, url: str) -> None:
        self.topic = new_topic("ends")
        self.cast = Cast(url, self.topic).declare(journal="1")
        self.store = self.cast.store
        self.consumer = Consumer(url)

    def close(self) -> None:
        self.consumer.stop()
        self.store.close()

    def pull(self, count: int) -> dict[str, Any]:
        """Pull until there are `count` deliveries; by id."""
        found: dict[str, Any] = {}

        def come() -> bool:
            self.store.call(Promote(self.topic))
            found.update({one.id: one for one in self.consumer.pull(self.topic, batch=500)})
            return len(found) >= count

        wait_until(come)
        return found

    def listed(self, state: LiveState, limit: int = 7) -> list[str]:
        """The ids on all pages."""
        ids: list[str] = []
        cursor: str | None = None
        while True:
            page = self.store.drive(
                list_messages(self.store, self.topic, state, cursor=cursor, limit=limit)
            )
            ids += [row.id for row in page.rows]
            cursor = page.cursor
            if cursor is None:
                return ids

    def told(self, message_id: str) -> list[str]:
        """The states of a message in the journal."""
        read = self.store.drive(story.read_back(self.store, self.topic, message_id))
        return [event.state for event in read.events]

    def is_sound(self) -> bool:
        return self.store.drive(fsck(self.store, [self.topic])).findings == []


@pytest.fixture
def bench(url: str) -> Iterator[TopicBench]:
    made = TopicBench(url)
    yield made
    made.close()


# Bodies

SIZES = (1, 2, 4_095, 65_536, LIMIT - 1, LIMIT)
TEXT = "x" * LIMIT
DOCUMENT = {"a": "x" * (LIMIT - len('{"a":""}'))}


def of_size(size: int) -> bytes:
    return bytes(range(256)) * (size // 256) + bytes(range(size % 256))


def test_bodies_up_to_the_limit_are_unchanged(bench: TopicBench, producer: Producer) -> None:
    bodies: list[Any] = [*map(of_size, SIZES), b"", "", "ü", 7, None, [], TEXT, DOCUMENT]
    one_by_one = [producer.send(bench.topic, body) for body in bodies]
    together = [one.id for one in producer.send_many(bench.topic, bodies)]
    taken = bench.pull(2 * len(bodies))
    for ids in (one_by_one, together):
        assert [taken[one].body for one in ids] == bodies
    assert {delivery.ack() for delivery in taken.values()} == {"acked"}
    assert bench.is_sound()


def test_the_journal_holds_bodies_up_to_the_limit(bench: TopicBench, producer: Producer) -> None:
    for size in (1, LIMIT):
        producer.send(bench.topic, of_size(size), delay=LATER)
    entries = bench.store.ask("XRANGE", bench.cast.keys.events, "-", "+")
    fields = [dict(zip(flat[::2], flat[1::2], strict=True)) for _, flat in entries]
    bodies = [decode_envelope(one[b"envelope"]).body for one in fields]
    assert bodies == [of_size(1), of_size(LIMIT)]


def test_handlers_are_given_bodies_up_to_the_limit(url: str, producer: Producer) -> None:
    bench, seen = TopicBench(url), list[Any]()
    consumer = Consumer(url)

    def handle(message: Message) -> None:
        seen.append(message.body)

    consumer.on(bench.topic, handle)
    with consumer:
        producer.send_many(bench.topic, [of_size(size) for size in SIZES])
        wait_until(lambda: len(seen) == len(SIZES))
    assert sorted(map(len, seen)) == sorted(SIZES)
    bench.close()


@pytest.mark.parametrize(
    "body",
    [of_size(LIMIT + 1), TEXT + "x", "ü" * (LIMIT // 2) + "x", {"aa": DOCUMENT["a"]}],
    ids=["bytes", "text", "letters of two bytes", "JSON"],
)
def test_a_body_beyond_the_limit_is_refused(
    bench: TopicBench, producer: Producer, body: object
) -> None:
    with pytest.raises(InvalidMessage, match="max_body_bytes"):
        producer.send(bench.topic, body)
    with pytest.raises(InvalidMessage, match="max_body_bytes") as refused:
        producer.send_many(bench.topic, ["fine", body, "not reached"])
    assert refused.value.sent == len(bench.listed(LiveState.READY)) == 1
    assert [one.body for one in bench.pull(1).values()] == ["fine"]


def test_bodies_by_the_gateway(bench: TopicBench, gateway: Gateway) -> None:
    messages = f"/v1/topics/{bench.topic}/messages"
    for number, body in enumerate([0, "", TEXT, DOCUMENT]):
        assert gateway.client.post(messages, json={"body": body, "id": f"{number}"}).is_success
    for body in (TEXT + "x", {"aa": DOCUMENT["a"]}):
        refused = gateway.client.post(messages, json={"body": body})
        assert refused.status_code // 100 == 4
        assert "max_body_bytes" in refused.text
    pulled = gateway.client.post(f"/v1/topics/{bench.topic}/pull", json={"max": 9}).json()
    assert [one["body"] for one in pulled["deliveries"]] == [0, "", TEXT, DOCUMENT]


# Ids

LOOKALIKES = (
    "{x}:body:",
    "lisa:{orders}:body:a",
    "}:waiting",
    "{",
    "g:lisa:entries",
    "a/b",
    "a//b",
    "%2F",
    "?state=waiting",
    "#",
    "&",
    "+",
    " ",
    "  a ",
    "*",
    "[a-z]?",
    "\\",
    "'\"`$(id)",
    "<b>&amp;",
    "-",
    "0",
    "1-1",
    "(1",
    "+inf",
    "null",
    "...",
    "a" * 256,
    "ü" * 128,
    "🧨" * 64,
)
SCRIPTS = (
    "שלום",
    "مرحبا",
    "नमस्ते",
    "你好",
    "こんにちは",
    "안녕",
    "Ελλάδα",
    "Україна",
    "ไทย",
    "\U0001d518\U0001d52b",
    "\U0001f9d1\u200d\U0001f680",
    "𐤀𐤁",
    "e\u0301",
    "\u00e9",
    "a\u0300\u0301\u0302",
    "\u202eright-to-left",
    "\u200bzero\u200dwidth",
    "\ufeff",
    "\u2028",
    "\ue000",
    "\U0010ffff",
)
any_id = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1).filter(
    lambda one: len(one.encode()) <= 256 and one not in (".", "..")
)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(ids=st.lists(any_id, min_size=1, max_size=20, unique=True))
@example(ids=list(LOOKALIKES))
@example(ids=list(SCRIPTS))
def test_any_id_can_be_in_every_state(
    url: str, producer: Producer, gateway: Gateway, ids: list[str]
) -> None:
    bench = TopicBench(url)
    wait_and_are_taken_back(bench, producer, gateway, ids)
    die_and_live_again(bench, producer, gateway, ids)
    for one in ids:
        assert bench.told(one)[:2] == ["sent", "cancelled"]
        assert bench.told(one)[-1] == "acked"
    assert bench.is_sound()
    bench.close()


def wait_and_are_taken_back(
    bench: TopicBench, producer: Producer, gateway: Gateway, ids: Sequence[str]
) -> None:
    """Send each once by `send`, find each, and cancel all but one by the producer."""
    topic = bench.topic
    assert [producer.send(topic, one, id=one, delay=LATER) for one in ids] == list(ids)
    assert sorted(bench.listed(LiveState.WAITING)) == sorted(ids)
    for one in ids:
        found = producer.get(topic, one)
        assert found is not None
        assert (found.state, found.body) == ("waiting", one)
    last = f"/v1/topics/{topic}/messages/{quote(ids[-1], safe='')}"
    assert gateway.client.get(last).json()["id"] == ids[-1]
    assert set(producer.cancel_many(topic, ids[:-1])) <= {"cancelled"}
    assert gateway.client.delete(last).json() == {"id": ids[-1], "outcome": "cancelled"}
    assert bench.listed(LiveState.WAITING) == []


def die_and_live_again(
    bench: TopicBench, producer: Producer, gateway: Gateway, ids: Sequence[str]
) -> None:
    """Send all by `send_many`, discard, requeue and ack them; the last by the gateway."""
    topic, cast = bench.topic, bench.cast
    outgoing = [Outgoing(one, id=one) for one in ids]
    report = producer.send_many(topic, outgoing, on_duplicate="replace")
    assert [one.id for one in report] == list(ids)
    taken = bench.pull(len(ids))
    assert {one: delivery.body for one, delivery in taken.items()} == {one: one for one in ids}
    assert {delivery.discard("of no use") for delivery in taken.values()} == {"dead"}
    assert sorted(bench.listed(LiveState.GARBAGE)) == sorted(ids)
    chosen = garbage.GarbageSelection(topic=topic, reason="no use")
    rows = bench.store.drive(garbage.listed(bench.store, chosen)).rows
    assert sorted(row.id for row in rows) == sorted(ids)
    assert all(bench.store.drive(garbage.requeue(bench.store, topic, cast.group, ids)))
    again = bench.pull(len(ids))
    assert set(again) == set(ids)
    assert again.pop(ids[-1]).release()
    assert {delivery.ack() for delivery in again.values()} <= {"acked"}
    (left,) = gateway.client.post(f"/v1/topics/{topic}/pull", json={}).json()["deliveries"]
    assert left["id"] == ids[-1]
    path = f"/v1/topics/{topic}/messages/{quote(left['id'], safe='')}/ack"
    answer = gateway.client.post(path, json={"receipt": left["receipt"]})
    assert answer.json() == {"id": left["id"], "outcome": "acked"}


BAD_IDS = ("", "a\nb", "\r", "\x00", "a\tb", "\x7f", "\x85", "a" * 257, "ü" * 128 + "x", "\ud800")


@pytest.mark.parametrize("bad", BAD_IDS, ids=ascii)
def test_invalid_ids_are_refused_by_every_interface(
    bench: TopicBench, producer: Producer, gateway: Gateway, bad: str
) -> None:
    topic = bench.topic
    for call in (
        lambda: producer.send(topic, "x", id=bad),
        lambda: producer.send_many(topic, [Outgoing("x", id="fine"), Outgoing("x", id=bad)]),
        lambda: producer.cancel(topic, bad),
        lambda: producer.get(topic, bad),
        lambda: producer.fire_now(topic, bad),
    ):
        with pytest.raises(InvalidMessage):
            call()
    sent = gateway.client.post(
        f"/v1/topics/{topic}/messages",
        content=json.dumps({"body": "x", "id": bad}),
        headers={"Content-Type": "application/json"},
    )
    assert sent.status_code in (400, 422), sent.text
    assert bench.store.ask("KEYS", bench.cast.keys.root + "body:*") == []


def test_ids_that_look_alike_are_different_messages(bench: TopicBench, producer: Producer) -> None:
    ids = ["e\u0301", "\u00e9", "E\u0301", "e", " e", "e "]
    assert len({unicodedata.normalize("NFC", one) for one in ids}) == len(ids) - 1
    for one in ids:
        producer.send(bench.topic, one, id=one)
    assert {one: delivery.body for one, delivery in bench.pull(6).items()} == {o: o for o in ids}


# Times

PAST = tuple(OLDEST_DUE_MS + day * 86_400_000 for day in (0, 1, 1_000, 3_600))
FUTURE = (2**31 * 1000, 2**42, 99_999_999_999_999, MAX_DUE_MS - 1, MAX_DUE_MS)


@pytest.mark.parametrize("year", [1, 1960, 1970, 1999])
def test_times_of_long_ago_are_refused(producer: Producer, year: int) -> None:
    with pytest.raises(InvalidMessage, match="more than ten years ago"):
        producer.send("orders", 1, at=datetime(year, 1, 1, tzinfo=UTC))


def test_past_times_are_due_now(bench: TopicBench, producer: Producer) -> None:
    sent = {producer.send(bench.topic, at, at_ms=at): at for at in PAST}
    sent |= {producer.send(bench.topic, 0, at=ms_datetime(PAST[0])): PAST[0]}
    several = [Outgoing(at, at_ms=at) for at in PAST]
    report = producer.send_many(bench.topic, several)
    sent |= {one.id: at for one, at in zip(report, PAST, strict=True)}
    taken = bench.pull(len(sent))
    assert {one: delivery.due_ms for one, delivery in taken.items()} == sent
    assert {delivery.message.due for delivery in taken.values()} == {ms_datetime(at) for at in PAST}
    assert {delivery.ack() for delivery in taken.values()} == {"acked"}
    assert not any("early" in name for name in bench.cast.stats())


def test_times_up_to_the_year_9999_wait(
    bench: TopicBench, producer: Producer, gateway: Gateway
) -> None:
    topic = bench.topic
    sent = {producer.send(topic, at, at_ms=at): at for at in FUTURE}
    sent |= {
        one.id: at
        for one, at in zip(
            producer.send_many(topic, [Outgoing(at, at_ms=at, ttl=LATER) for at in FUTURE]),
            FUTURE,
            strict=True,
        )
    }
    assert [sent[one] for one in bench.listed(LiveState.WAITING, limit=3)] == sorted(sent.values())
    for one, at in sent.items():
        found = producer.get(topic, one)
        assert found is not None
        assert (found.due_ms, found.body) == (at, at)
        answer = gateway.client.get(f"/v1/topics/{topic}/messages/{one}").json()
        assert answer["due_ms"] == at
    promoted = bench.store.call(Promote(topic))
    assert (promoted.moved, promoted.next_due_ms) == (0, FUTURE[0])
    last = max(sent, key=lambda one: sent[one])
    assert producer.reschedule(topic, last, at_ms=OLDEST_DUE_MS) == "rescheduled"
    assert bench.pull(1)[last].due_ms == OLDEST_DUE_MS
    assert set(producer.cancel_many(topic, [one for one in sent if one != last])) == {"cancelled"}


def test_the_latest_time_of_a_datetime(bench: TopicBench, producer: Producer) -> None:
    last = datetime.max.replace(tzinfo=UTC)
    with pytest.raises(InvalidMessage):  # rounded up, it is in the year 10,000
        producer.send(bench.topic, 1, at=last)
    whole = last.replace(microsecond=999_000)
    sent = producer.send(bench.topic, 1, at=whole)
    found = producer.get(bench.topic, sent)
    assert found is not None
    assert (found.due_ms, found.due) == (MAX_DUE_MS, whole)


def test_times_out_of_range_are_refused_by_every_interface(
    bench: TopicBench, producer: Producer, gateway: Gateway
) -> None:
    topic, waiting = bench.topic, producer.send(bench.topic, 1, id="x", delay=LATER)
    beyond: list[dict[str, Any]] = [
        {"at_ms": MAX_DUE_MS + 1},
        {"at_ms": 2**63},
        {"delay": timedelta.max},
    ]
    for options in beyond:
        with pytest.raises(InvalidMessage):
            producer.send(topic, 1, **options)
        with pytest.raises(InvalidMessage):
            producer.send_many(topic, [Outgoing(1, **options)])
        with pytest.raises(InvalidMessage):
            producer.reschedule(topic, waiting, **options)
    for due_ms in (-1, MAX_DUE_MS + 1, 2**63, 2**64):
        body = {"body": 1, "due_ms": due_ms}
        sent = gateway.client.post(f"/v1/topics/{topic}/messages", json=body)
        moved = gateway.client.patch(f"/v1/topics/{topic}/messages/x", json={"due_ms": due_ms})
        assert {sent.status_code, moved.status_code} <= {400, 422}, (sent.text, moved.text)
    assert bench.listed(LiveState.WAITING) == ["x"]


def test_a_delay_of_a_thousand_years(bench: TopicBench, producer: Producer) -> None:
    """By the server's clock, to the millisecond; a double can represent it."""
    delay = timedelta(days=365_000)
    before = bench.cast.now_ms()
    found = producer.get(bench.topic, producer.send(bench.topic, 1, delay=delay))
    assert found is not None
    assert found.due_ms is not None
    ms = delay // timedelta(milliseconds=1)
    assert before + ms <= found.due_ms <= bench.cast.now_ms() + ms + 1
