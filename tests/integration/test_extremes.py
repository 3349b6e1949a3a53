"""Extreme values through every interface: bodies, ids in any script, times of any age.

Every interface returns accepted values unchanged, and refuses all others before calling the
server.
"""

import json
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lisa.admin import garbage, story
from lisa.admin.fsck import check as fsck
from lisa.admin.messages import LiveState, list_messages
from lisa.consumer import Consumer
from lisa.core.model.clock import MAX_DUE_MS, OLDEST_DUE_MS
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.options import TopicOptions
from lisa.core.transitions.promote import Promote
from lisa.embedded import EmbeddedServer
from lisa.producer import Outgoing, Producer
from tests.gateways import Gateway, new_topic
from tests.roles import Cast
from tests.servers import flush, wait_until

LIMIT = TopicOptions().max_body_bytes
LATER = timedelta(days=1)


@pytest.fixture(scope="module")
def redis_url(valkey_server: EmbeddedServer) -> str:
    """URL of the embedded Valkey; emptied once for this file."""
    return flush(valkey_server.url)


@pytest.fixture(scope="module")
def gateway(redis_url: str) -> Iterator[Gateway]:
    with Gateway(redis_url) as running:
        yield running


@pytest.fixture(scope="module")
def producer(redis_url: str) -> Iterator[Producer]:
    with Producer(redis_url) as made:
        yield made


class TopicBench(Cast):
    """A new topic with a journal, and its clients."""

    def __init__(self, url: str) -> None:
        super().__init__(url, new_topic("ends"))
        self.declare(journal="1")
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
        ids, cursor, is_first = list[str](), None, True
        while cursor or is_first:
            listing = list_messages(self.store, self.topic, state, cursor=cursor, limit=limit)
            page = self.store.drive(listing)
            ids += [row.id for row in page.rows]
            cursor, is_first = page.cursor, False
        return ids


@pytest.fixture
def bench(redis_url: str) -> Iterator[TopicBench]:
    with closing(TopicBench(redis_url)) as made:
        yield made


TEXT = "x" * LIMIT
DOCUMENT = {"a": "x" * (LIMIT - len('{"a":""}'))}


def test_bodies_around_the_limit(bench: TopicBench, producer: Producer, gateway: Gateway) -> None:
    messages = f"/v1/topics/{bench.topic}/messages"
    bodies: list[Any] = ["", "ü", 7, None, [], TEXT, DOCUMENT]
    for body in bodies:
        producer.send(bench.topic, body)
        assert gateway.client.post(messages, json={"body": body}).is_success
    taken = bench.pull(2 * len(bodies)).values()
    assert [delivery.body for delivery in taken] == [body for body in bodies for _ in range(2)]
    for body in (TEXT + "x", {"aa": DOCUMENT["a"]}, "ü" * (LIMIT // 2) + "x"):
        refused = gateway.client.post(messages, json={"body": body})
        assert (refused.status_code // 100, "max_body_bytes" in refused.text) == (4, True)
        with pytest.raises(InvalidMessage, match="max_body_bytes"):
            producer.send(bench.topic, body)
        with pytest.raises(InvalidMessage, match="max_body_bytes") as caught:
            producer.send_many(bench.topic, ["fine", body, "not reached"])
        assert caught.value.sent == 1
        assert [one.body for one in bench.pull(1).values()] == ["fine"]


LOOKALIKES = [
    *("{x}:body:", "lisa:{orders}:body:a", "}:waiting", "{", "g:lisa:entries", "a/b", "a//b"),
    *("%2F", "?state=waiting", "#", "&", "+", " ", "  a ", "*", "[a-z]?", "\\", "'\"`$(id)"),
    *("<b>&amp;", "-", "0", "1-1", "(1", "+inf", "null", "...", "a" * 256, "ü" * 128, "🧨" * 64),
]
SCRIPTS = [
    *("שלום", "مرحبا", "नमस्ते", "你好", "こんにちは", "안녕", "Ελλάδα", "Україна", "ไทย", "𐤀𐤁"),
    *("\U0001d518\U0001d52b", "\U0001f9d1\u200d\U0001f680", "a\u0300\u0301\u0302", "\u2028"),
    *("e\u0301", "\u00e9", "E\u0301", "e", " e", "e "),  # look alike, and are different ids
    *("\u202eright-to-left", "\u200bzero\u200dwidth", "\ufeff", "\ue000", "\U0010ffff"),
]
any_id = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), min_size=1).filter(
    lambda one: len(one.encode()) <= 256 and one not in (".", "..")
)


@settings(max_examples=10, deadline=None, derandomize=True)
@given(ids=st.lists(any_id, min_size=1, max_size=20, unique=True))
@example(ids=LOOKALIKES)
@example(ids=SCRIPTS)
def test_any_id_can_be_in_every_state(
    redis_url: str, producer: Producer, gateway: Gateway, ids: list[str]
) -> None:
    bench = TopicBench(redis_url)
    topic, store = bench.topic, bench.store
    last = f"/v1/topics/{topic}/messages/{quote(ids[-1], safe='')}"
    # Send each by `send`, find it, and cancel all but the last by the producer.
    assert [producer.send(topic, one, id=one, delay=LATER) for one in ids] == ids
    assert sorted(bench.listed(LiveState.WAITING)) == sorted(ids)
    found = [producer.get(topic, one) for one in ids]
    assert [message.body for message in found if message] == ids
    assert gateway.client.get(last).json()["id"] == ids[-1]
    assert set(producer.cancel_many(topic, ids[:-1])) <= {"cancelled"}
    assert gateway.client.delete(last).json() == {"id": ids[-1], "outcome": "cancelled"}
    assert bench.listed(LiveState.WAITING) == []
    # Send all by `send_many`, discard, requeue and ack them; the last by the gateway.
    report = producer.send_many(topic, [Outgoing(x, id=x) for x in ids], on_duplicate="replace")
    assert [one.id for one in report] == ids
    taken = bench.pull(len(ids))
    assert {one: delivery.body for one, delivery in taken.items()} == {one: one for one in ids}
    assert {delivery.discard("of no use") for delivery in taken.values()} == {"dead"}
    assert sorted(bench.listed(LiveState.GARBAGE)) == sorted(ids)
    chosen = garbage.GarbageSelection(topic=topic, reason="no use")
    rows = store.drive(garbage.listed(store, chosen)).rows
    assert sorted(row.id for row in rows) == sorted(ids)
    assert all(store.drive(garbage.requeue(store, topic, bench.group, ids)))
    again = bench.pull(len(ids))
    assert set(again) == set(ids)
    assert again.pop(ids[-1]).release()
    assert {delivery.ack() for delivery in again.values()} <= {"acked"}
    (left,) = gateway.client.post(f"/v1/topics/{topic}/pull", json={}).json()["deliveries"]
    answer = gateway.client.post(f"{last}/ack", json={"receipt": left["receipt"]})
    assert answer.json() == {"id": ids[-1], "outcome": "acked"}
    for one in ids:
        told = [event.state for event in store.drive(story.read_back(store, topic, one)).events]
        assert (told[:2], told[-1]) == (["sent", "cancelled"], "acked")
    assert store.drive(fsck(store, [topic])).findings == []
    bench.close()


BAD_IDS = ("", "a\nb", "\r", "\x00", "a\tb", "\x7f", "\x85", "a" * 257, "ü" * 128 + "x", "\ud800")


def test_invalid_ids_and_times_are_refused_by_every_interface(
    bench: TopicBench, producer: Producer, gateway: Gateway
) -> None:
    topic, path = bench.topic, f"/v1/topics/{bench.topic}/messages"
    bad: Any
    for bad in (*BAD_IDS, 7, b"x"):
        outgoing = [Outgoing("x", id="fine"), Outgoing("x", id=bad)]
        for call in (
            partial(producer.send, topic, "x", id=bad),
            partial(producer.send_many, topic, outgoing),
            partial(producer.cancel_many, topic, ["fine", bad]),
            *(partial(one, topic, bad) for one in (producer.cancel, producer.get)),
            partial(producer.fire_now, topic, bad),
        ):
            with pytest.raises(InvalidMessage, match="id"):
                call()
        if not isinstance(bad, bytes):
            content = json.dumps({"body": "x", "id": bad})
            types = {"Content-Type": "application/json"}
            sent = gateway.client.post(path, content=content, headers=types)
            assert sent.status_code in (400, 422), sent.text
    assert bench.store.ask("KEYS", bench.keys.root + "body:*") == []
    waiting = producer.send(topic, 1, id="x", delay=LATER)
    refused: list[tuple[dict[str, Any], str]] = [
        *(({"at": datetime(year, 1, 1, tzinfo=UTC)}, "ten years ago") for year in (1, 1970, 1999)),
        ({"at_ms": MAX_DUE_MS + 1}, "9999"),
        ({"at_ms": 2**63}, "9999"),
        ({"delay": timedelta.max}, "9999"),
        ({"at": datetime.max.replace(tzinfo=UTC)}, "9999"),  # rounded up, it is in the year 10,000
    ]
    for options, said in refused:
        for send in (
            lambda given: producer.send(topic, 1, **given),
            lambda given: producer.send_many(topic, [Outgoing(1, **given)]),
            lambda given: producer.reschedule(topic, waiting, **given),
        ):
            with pytest.raises(InvalidMessage, match=said):
                send(options)
    for due_ms in (-1, MAX_DUE_MS + 1, 2**63, 2**64):
        sent = gateway.client.post(path, json={"body": 1, "due_ms": due_ms})
        moved = gateway.client.patch(f"{path}/x", json={"due_ms": due_ms})
        assert {sent.status_code, moved.status_code} <= {400, 422}, (sent.text, moved.text)
    assert bench.listed(LiveState.WAITING) == ["x"]


FUTURE = (2**31 * 1000, 2**42, 99_999_999_999_999, MAX_DUE_MS - 1, MAX_DUE_MS)


def test_times_until_9999_wait(bench: TopicBench, producer: Producer, gateway: Gateway) -> None:
    def due(message_id: str) -> int:
        found = producer.get(topic, message_id)
        assert found is not None
        return found.due_ms or 0

    topic, whole = bench.topic, datetime.max.replace(microsecond=999_000, tzinfo=UTC)
    sent = {producer.send(topic, at, at_ms=at): at for at in FUTURE}
    report = producer.send_many(topic, [Outgoing(at, at_ms=at, ttl=LATER) for at in FUTURE])
    sent |= {one.id: at for one, at in zip(report, FUTURE, strict=True)}
    sent |= {producer.send(topic, MAX_DUE_MS, at=whole): MAX_DUE_MS}
    assert [sent[one] for one in bench.listed(LiveState.WAITING, limit=3)] == sorted(sent.values())
    for one, at in sent.items():
        answer = gateway.client.get(f"/v1/topics/{topic}/messages/{one}").json()
        assert due(one) == answer["due_ms"] == at
    promoted = bench.store.call(Promote(topic))
    assert (promoted.moved, promoted.next_due_ms) == (0, FUTURE[0])
    last = max(sent, key=lambda one: sent[one])
    assert producer.reschedule(topic, last, at_ms=OLDEST_DUE_MS) == "rescheduled"
    assert bench.pull(1)[last].due_ms == OLDEST_DUE_MS
    days_ms, before_ms = 365_000 * 86_400_000, bench.now_ms()
    found_ms = due(producer.send(topic, 1, delay=timedelta(days=365_000)))
    assert before_ms <= found_ms - days_ms <= bench.now_ms() + 1, "to the millisecond"
