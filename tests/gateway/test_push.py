"""Pushes from a real gateway to a real web hook: requests, and the effect of each response."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from lisa import Manager, Producer
from lisa.admin import groups
from lisa.admin import push as admin
from tests.gateway.push_targets import Reply, Target, is_signed
from tests.gateways import Gateway, new_topic, state
from tests.servers import connect, open_store, wait_until

CONFIG = """
lisa-delay-queue:
  gateway-server:
    push-allow: ["127.0.0.0/8"]
    push-timeout: 5s
    push-concurrency: 4
"""
TRACE = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    "tracestate": "vendor=1",
}


@pytest.fixture(scope="module")
def pusher(
    redis_url: str, manager: Manager, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateway]:
    directory = tmp_path_factory.mktemp("push")
    with Gateway(redis_url, config=CONFIG, directory=directory) as running:
        yield running


@pytest.fixture
def api(pusher: Gateway) -> httpx.Client:
    return pusher.client


@pytest.fixture
def topic(producer: Producer, redis_url: str, api: httpx.Client) -> Iterator[str]:
    """A topic with short retries; its push targets are removed after the test."""
    name = new_topic("push")
    with connect(redis_url) as client:
        client.hset(f"lisa:{{{name}}}:options", mapping={"retry_delays": "50,50"})
    yield name
    api.delete(f"/v1/topics/{name}/push")


def push(api: httpx.Client, topic: str, url: str, **more: Any) -> dict[str, Any]:
    answer = api.put(f"/v1/topics/{topic}/push", json={"url": url, **more})
    assert answer.status_code in (200, 201), answer.text
    found: dict[str, Any] = answer.json()
    return found


def push_another(api: httpx.Client, producer: Producer) -> None:
    """Push a message of another topic: what was to be pushed before it has arrived."""
    name = new_topic("push")
    with Target() as other:
        push(api, name, other.url)
        producer.send(name, 1)
        wait_until(lambda: other.received)
        api.delete(f"/v1/topics/{name}/push")


def test_a_push_is_signed_and_carries_the_message(
    api: httpx.Client, producer: Producer, target: Target, topic: str
) -> None:
    secret = push(api, topic, target.url + "?shop=1")["secret"]
    sent = producer.send(
        topic,
        {"order": 42, "text": "grün"},
        headers={"tenant": "a b", "bad name": "x", "ä": "y", **TRACE},
    )
    wait_until(lambda: state(producer, topic, sent) == "acked")
    (one,) = target.received
    assert one.path == "/hook?shop=1"
    assert json.loads(one.body) == {"order": 42, "text": "grün"}
    assert is_signed(one, secret)
    assert not is_signed(one, "whsec_" + "A" * 32)
    assert abs(int(one.headers["webhook-timestamp"]) - one.at) < 60
    assert one.headers["content-type"] == "application/json"
    assert one.id == sent
    assert one.headers["lisa-topic"] == topic
    assert one.headers["lisa-group"] == "lisa"
    assert one.headers["lisa-attempt"] == "1"
    assert abs(int(one.headers["lisa-due-ms"]) / 1000 - one.at) < 60
    own = {name: value for name, value in one.headers.items() if name.startswith("lisa-header-")}
    assert own == {
        "lisa-header-tenant": "a b",
        **{f"lisa-header-{name}": value for name, value in TRACE.items()},
    }
    assert {name: one.headers[name] for name in TRACE} == TRACE


def test_text_and_bytes_are_sent_unchanged(
    api: httpx.Client, producer: Producer, target: Target, topic: str
) -> None:
    secret = push(api, topic, target.url)["secret"]
    producer.send(topic, "grün", id="text")
    producer.send(topic, b"\x00\xff", id="a id/ü")
    wait_until(lambda: len(target.received) == 2)
    found = {one.id: one for one in target.received}
    assert found["text"].body == "grün".encode()
    assert found["text"].headers["content-type"] == "text/plain; charset=utf-8"
    other = found["a%20id%2F%C3%BC"]
    assert other.body == b"\x00\xff"
    assert other.headers["content-type"] == "application/octet-stream"
    assert all(is_signed(one, secret) for one in target.received)


@pytest.mark.parametrize("status", [200, 204, 299])
def test_any_2xx_acks(
    api: httpx.Client, producer: Producer, target: Target, topic: str, status: int
) -> None:
    target.default = Reply(status)
    push(api, topic, target.url)
    sent = producer.send(topic, 1)
    wait_until(lambda: state(producer, topic, sent) == "acked")
    assert len(target.received) == 1


@pytest.mark.parametrize("status", [301, 404, 429, 503])
def test_other_statuses_follow_the_retry_policy(
    api: httpx.Client, producer: Producer, target: Target, topic: str, status: int
) -> None:
    target.default = Reply(
        status, {"location": target.url}, b"no\x07\n  such order" + b"x" * 50_000
    )
    push(api, topic, target.url)
    sent = producer.send(topic, 1)
    wait_until(lambda: state(producer, topic, sent) == "garbage")
    assert [one.headers["lisa-attempt"] for one in target.received] == ["1", "2", "3"]
    found = producer.get(topic, sent)
    assert found is not None
    assert found.reason is not None
    assert found.reason.startswith(f"{status} ")
    wanted = "redirects are not followed" if status < 400 else "no such order"
    assert wanted in found.reason
    assert len(found.reason) < 300


@pytest.mark.parametrize(
    ("status", "form"), [(429, "seconds"), pytest.param(503, "date", marks=pytest.mark.full)]
)
def test_retry_after_pauses_the_whole_target(  # noqa: PLR0917  fixtures
    api: httpx.Client, producer: Producer, target: Target, topic: str, status: int, form: str
) -> None:
    seconds = 2
    moment = format_datetime(datetime.now(UTC) + timedelta(seconds=seconds + 1), usegmt=True)
    after = str(seconds) if form == "seconds" else moment
    target.replies.append(Reply(status, {"retry-after": after}))
    push(api, topic, target.url)
    first = producer.send(topic, 1)
    wait_until(lambda: target.received)
    others = [producer.send(topic, i) for i in range(3)]
    wait_until(lambda: len(target.received) == 5)
    # A date has whole seconds, and the response took some time.
    earliest = seconds if form == "seconds" else seconds - 1
    assert min(one.at for one in target.received[1:]) - target.received[0].at >= earliest - 0.05
    assert sorted(target.ids[1:]) == sorted([first, *others])
    attempts = {one.id: one.headers["lisa-attempt"] for one in target.received}
    assert attempts[first] == "2"
    assert {attempts[one] for one in others} == {"1"}


def test_encoded_ids_do_not_collide(
    api: httpx.Client, producer: Producer, target: Target, topic: str
) -> None:
    """A receiver ignores requests with a known id."""
    push(api, topic, target.url)
    for one in ("a b", "a%20b", "100%"):
        producer.send(topic, 1, id=one)
    wait_until(lambda: len(target.ids) == 3)
    assert {unquote(one) for one in target.ids} == {"a b", "a%20b", "100%"}


@pytest.mark.parametrize(
    "after", ["soon", "-5", "Mon, 01 Jan 99999999999999999999999 00:00:00 GMT", "0, " * 300]
)
def test_an_invalid_retry_after_is_ignored(
    api: httpx.Client, producer: Producer, target: Target, topic: str, after: str
) -> None:
    target.replies.append(Reply(503, {"retry-after": after}))
    push(api, topic, target.url)
    sent = producer.send(topic, 1)
    wait_until(lambda: len(target.received) == 2)
    wait_until(lambda: state(producer, topic, sent) == "acked")


def test_responses_of_a_former_url_do_not_slow_the_new_one(
    api: httpx.Client, producer: Producer, target: Target, topic: str
) -> None:
    go = threading.Event()
    target.replies.append(Reply(503, {"retry-after": "600"}, wait=go))
    push(api, topic, target.url)
    first = producer.send(topic, 1)
    wait_until(lambda: target.received)
    with Target() as other:
        push(api, topic, other.url)
        go.set()
        wait_until(lambda: state(producer, topic, first) != "in_flight")
        sent = producer.send(topic, 2)
        wait_until(lambda: sent in other.ids)


def test_a_slow_response_may_take_longer_than_the_ack_timeout(
    api: httpx.Client, producer: Producer, target: Target, topic: str, redis_url: str
) -> None:
    with connect(redis_url) as client:
        client.hset(f"lisa:{{{topic}}}:options", "ack_timeout", "1000")
    go = threading.Event()
    target.replies.append(Reply(wait=go))
    push(api, topic, target.url)
    sent = producer.send(topic, 1)
    wait_until(lambda: target.received)
    began = time.monotonic()
    while time.monotonic() - began < 2.5:  # ack timeouts
        assert state(producer, topic, sent) == "in_flight"
        time.sleep(0.02)
    go.set()
    wait_until(lambda: state(producer, topic, sent) == "acked")
    assert len(target.received) == 1


def test_a_push_to_a_silent_target_times_out(
    api: httpx.Client, producer: Producer, target: Target, topic: str
) -> None:
    go = threading.Event()
    target.default = lambda _: Reply(wait=go)
    push(api, topic, target.url, timeout_ms=300)
    sent = producer.send(topic, 1)
    wait_until(lambda: state(producer, topic, sent) == "garbage")
    found = producer.get(topic, sent)
    assert found is not None
    assert found.reason == "no response within 0.3 s"
    go.set()


def test_a_dead_target_gets_its_messages_once_it_is_back(
    api: httpx.Client, producer: Producer, topic: str, redis_url: str
) -> None:
    with connect(redis_url) as client:
        client.hset(f"lisa:{{{topic}}}:options", "retry_delays", ",".join(["200"] * 100))
    with Target() as first:
        port, url = first.port, first.url
    push(api, topic, url)
    sent = [producer.send(topic, i) for i in range(3)]

    def has_failed() -> bool:
        found = producer.get(topic, sent[0])
        return found is not None and found.reason is not None and "no response" in found.reason

    wait_until(has_failed)
    with Target(port) as back:
        wait_until(lambda: all(state(producer, topic, one) == "acked" for one in sent))
        assert sorted(back.ids) == sorted(sent)


def test_concurrent_pushes_are_limited_per_target(
    api: httpx.Client, producer: Producer, target: Target, topic: str
) -> None:
    go = threading.Event()
    target.default = lambda _: Reply(wait=go)
    push(api, topic, target.url, concurrency=3)
    sent = producer.send_many(topic, list(range(12)))
    wait_until(lambda: target.at_once == 3)
    states = [state(producer, topic, one.id) for one in sent]
    assert (states.count("in_flight"), states.count("ready")) == (3, 9)
    push_another(api, producer)  # a slow target does not block others
    go.set()
    wait_until(lambda: len(target.received) == 12)
    assert target.most_at_once == 3
    assert target.connections < 9  # they are reused


def test_a_paused_topic_is_not_pushed(
    api: httpx.Client, producer: Producer, target: Target, topic: str, redis_url: str
) -> None:
    push(api, topic, target.url)
    producer.send(topic, 0)
    wait_until(lambda: target.received)
    with connect(redis_url) as client:
        client.hset(f"lisa:{{{topic}}}:options", "paused", "1")
        producer.send(topic, 1)
        push_another(api, producer)
        assert len(target.received) == 1
        client.hset(f"lisa:{{{topic}}}:options", "paused", "0")
        client.publish("lisa:wake", topic)
    wait_until(lambda: len(target.received) == 2)


def test_removal_and_change_take_effect_immediately(
    api: httpx.Client, producer: Producer, target: Target, topic: str
) -> None:
    push(api, topic, target.url)
    producer.send(topic, 0)
    wait_until(lambda: len(target.received) == 1)
    with Target() as other:
        push(api, topic, other.url)
        producer.send(topic, 1)
        wait_until(lambda: len(other.received) == 1)
        assert api.delete(f"/v1/topics/{topic}/push").status_code == 200
        sent = producer.send(topic, 2)
        wait_until(lambda: state(producer, topic, sent) == "ready")
        push_another(api, producer)
        assert state(producer, topic, sent) == "ready"
        assert (len(target.received), len(other.received)) == (1, 1)


def test_outcomes_are_counted(
    api: httpx.Client, producer: Producer, target: Target, topic: str
) -> None:
    def counts() -> dict[str, float]:
        lines = api.get("/metrics").text.splitlines()
        found = [
            line.rpartition(" ") for line in lines if line.startswith("lisa_gateway_pushes_total{")
        ]
        return {
            name.partition('outcome="')[2].partition('"')[0]: float(value)
            for name, _, value in found
            if f'topic="{topic}"' in name
        }

    target.replies += [Reply(500), Reply(429, {"retry-after": "1"})]
    push(api, topic, target.url)
    sent = producer.send(topic, 1)
    wait_until(lambda: state(producer, topic, sent) == "acked")
    assert counts() == {"done": 1, "later": 1, "failed": 1}


def test_removing_a_group_removes_its_target(
    api: httpx.Client, producer: Producer, target: Target, topic: str, redis_url: str
) -> None:
    push(api, topic, target.url, group="billing")
    producer.send(topic, 1)
    wait_until(lambda: target.received)
    store = open_store(redis_url)
    try:
        store.drive(groups.remove(store, topic, "billing"))
        # The gateway finds this target when it next looks for changes.
        found = new_topic("push")
        store.drive(admin.set_target(store, found, target.url))
        sent = producer.send(found, 1)
        wait_until(lambda: sent in target.ids)
        store.drive(admin.remove(store, found))
        assert store.drive(store.groups(topic)) == ()
    finally:
        store.close()
    assert api.get(f"/v1/topics/{topic}/push").json() == {"targets": []}


def test_a_push_waits_for_the_window(
    api: httpx.Client, producer: Producer, target: Target, topic: str
) -> None:
    """The topic's window is closed for hours; the message was sent before it was set."""
    push(api, topic, target.url)
    later = producer.send(topic, "later", delay="1s")
    hour = datetime.now(UTC).hour
    closed = f"not {hour}-{hour + 3}" if hour < 21 else "3-20"
    assert api.patch(f"/v1/topics/{topic}/options", json={"window": closed}).status_code == 200
    always = producer.send(topic, "always", window="always", delay="1s")
    wait_until(lambda: state(producer, topic, later) == "retry")
    wait_until(lambda: state(producer, topic, always) == "acked")
    assert target.ids == [always]
