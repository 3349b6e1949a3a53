"""Pushes from a real gateway to a real web hook: requests, and the effect of each response."""

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
from click.testing import CliRunner

from lisa import Manager, Producer
from lisa.admin import groups
from lisa.admin import push as admin
from lisa.cli.main import main
from lisa.core.delivery.pace import DEGRADED_AFTER
from lisa.gateway.compat.mykit import MARK
from lisa.gateway.page import sessions
from lisa.testing import ClockedServer
from tests.exposition import Exposed
from tests.gateway.push_targets import PushTopic, Received, Reply, Target, is_signed
from tests.gateways import NO_TLS, Gateway, stored
from tests.servers import open_store, wait_until

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
def gateway(redis_url: str, manager: Manager) -> Iterator[Gateway]:
    with Gateway(redis_url, config=CONFIG) as running:
        yield running


@pytest.fixture
def topic(producer: Producer, redis_url: str, client: httpx.Client) -> Iterator[PushTopic]:
    """Its push targets are removed after the test."""
    found = PushTopic(redis_url, producer)
    yield found
    client.delete(found.path)


def push_another(client: httpx.Client, topic: PushTopic) -> None:
    """Push a message of another topic: what was to be pushed before it has arrived."""
    other = topic.another()
    with Target() as target:
        other.push_to(client, target.url)
        other.send()
        wait_until(lambda: target.received)
        client.delete(other.path)


def test_a_push_is_signed_and_carries_the_message(
    client: httpx.Client, target: Target, topic: PushTopic
) -> None:
    secret = topic.push_to(client, target.url + "?shop=1")
    headers = {"tenant": "a b", "bad name": "x", "ä": "y", **TRACE}
    sent = topic.send({"order": 42, "text": "grün"}, headers=headers)
    topic.wait_for("acked", sent)
    (request,) = target.received
    assert request.path == "/hook?shop=1"
    assert json.loads(request.body) == {"order": 42, "text": "grün"}
    assert is_signed(request, secret)
    assert not is_signed(request, "whsec_" + "A" * 32)
    assert abs(int(request.headers["webhook-timestamp"]) - request.at) < 60
    assert abs(int(request.headers["lisa-due-ms"]) / 1000 - request.at) < 60
    expected = {
        "content-type": "application/json",
        "webhook-id": sent,
        "lisa-topic": topic.name,
        "lisa-group": "lisa",
        "lisa-attempt": "1",
        **TRACE,
    }
    assert request.headers.items() >= expected.items()
    own = {key: value for key, value in request.headers.items() if key.startswith("lisa-header-")}
    passed_on = {f"lisa-header-{name}": value for name, value in TRACE.items()}
    assert own == {"lisa-header-tenant": "a b", **passed_on}


def test_text_and_bytes_are_sent_unchanged_and_encoded_ids_do_not_collide(
    client: httpx.Client, target: Target, topic: PushTopic
) -> None:
    """A receiver ignores requests with a known id."""
    secret = topic.push_to(client, target.url)
    topic.send("grün", id="text")
    topic.send(b"\x00\xff", id="a id/ü")
    for message_id in ("a b", "a%20b", "100%"):
        topic.send(id=message_id)
    wait_until(lambda: len(target.received) == 5)
    found = {unquote(request.id): request for request in target.received}
    assert found.keys() == {"text", "a id/ü", "a b", "a%20b", "100%"}
    assert found["text"].body == "grün".encode()
    assert found["text"].headers["content-type"] == "text/plain; charset=utf-8"
    assert found["a id/ü"].body == b"\x00\xff"
    assert found["a id/ü"].headers["content-type"] == "application/octet-stream"
    assert all(is_signed(request, secret) for request in target.received)


def test_any_2xx_acks(client: httpx.Client, target: Target, topic: PushTopic) -> None:
    target.replies += [Reply(200), Reply(204), Reply(299)]
    topic.push_to(client, target.url)
    topic.wait_for("acked", *[topic.send() for _ in range(3)])
    assert len(target.received) == 3


def test_other_statuses_follow_the_retry_policy(
    client: httpx.Client, target: Target, topic: PushTopic
) -> None:
    def reply(request: Received) -> Reply:
        body = b"no\x07\n  such order" + b"x" * 50_000
        return Reply(int(request.id), {"location": target.url}, body)

    target.default = reply
    topic.push_to(client, target.url)
    statuses = [topic.send(id=status) for status in ("301", "404", "429", "503")]
    topic.wait_for("garbage", *statuses)
    for status in statuses:
        pushes = [request for request in target.received if request.id == status]
        assert [request.headers["lisa-attempt"] for request in pushes] == ["1", "2", "3"]
        reason = topic.reason(status)
        assert reason.startswith(f"{status} ")
        assert ("redirects are not followed" if status < "400" else "no such order") in reason
        assert len(reason) < 300


@pytest.mark.parametrize(
    ("status", "form"), [(429, "seconds"), pytest.param(503, "date", marks=pytest.mark.full)]
)
def test_retry_after_pauses_the_whole_target(
    client: httpx.Client, target: Target, topic: PushTopic, status: int, form: str
) -> None:
    seconds = 2
    date = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=seconds + 1)
    after = str(seconds) if form == "seconds" else format_datetime(date, usegmt=True)
    target.replies.append(Reply(status, {"retry-after": after}))
    topic.push_to(client, target.url)
    first = topic.send()
    wait_until(lambda: target.received)
    others = [topic.send() for _ in range(3)]
    wait_until(lambda: len(target.received) == 5)
    refused, *later = target.received
    earliest = refused.at + seconds if form == "seconds" else date.timestamp()
    assert min(request.at for request in later) >= earliest - 0.05
    attempts = {request.id: request.headers["lisa-attempt"] for request in later}
    assert attempts == dict.fromkeys([first, *others], "1")


LIMITED = Reply(429, {"retry-after": "3600"})


@pytest.fixture
def lanes(client: httpx.Client, topic: PushTopic) -> PushTopic:
    """The topic, with lanes."""
    path = f"/v1/topics/{topic.name}/options"
    client.patch(path, json={"key_concurrency": 1}).raise_for_status()
    return topic


def test_a_429_rests_the_key_in_a_topic_with_lanes(
    client: httpx.Client, target: Target, lanes: PushTopic
) -> None:
    target.replies.append(LIMITED)
    lanes.push_to(client, target.url)
    first = lanes.send(key="busy")
    lanes.wait_for("parked", first)
    second, quiet = lanes.send(key="busy"), lanes.send(key="quiet")
    lanes.wait_for("acked", quiet)
    lanes.wait_for("parked", first, second)
    assert lanes.reason(first).startswith("429 ")
    assert [unquote(one) for one in target.ids] == [first, quiet]


def test_many_429s_in_a_row_pause_the_whole_target(
    client: httpx.Client, target: Target, lanes: PushTopic
) -> None:
    few, many = [LIMITED] * (DEGRADED_AFTER - 1), [LIMITED] * DEGRADED_AFTER
    target.replies += [*few, Reply(), *many]
    lanes.push_to(client, target.url, concurrency=1)
    for number in range(2 * DEGRADED_AFTER):
        lanes.send(key=str(number))
    wait_until(lambda: len(target.received) == 2 * DEGRADED_AFTER)
    last = lanes.send(key="last")
    lanes.wait_for("ready", last)
    push_another(client, lanes)
    assert len(target.received) == 2 * DEGRADED_AFTER


@pytest.mark.parametrize(("status", "key"), [(503, "k"), (429, None)])
def test_other_answers_pause_the_whole_target_in_a_topic_with_lanes(
    client: httpx.Client, target: Target, lanes: PushTopic, status: int, key: str | None
) -> None:
    target.replies.append(Reply(status, {"retry-after": "3600"}))
    lanes.push_to(client, target.url)
    lanes.wait_for("retry", lanes.send(key=key))
    other = lanes.send(key="other")
    lanes.wait_for("ready", other)
    push_another(client, lanes)
    assert len(target.received) == 1


def test_an_invalid_retry_after_is_ignored(
    client: httpx.Client, target: Target, topic: PushTopic
) -> None:
    invalid = ["soon", "-5", "Mon, 01 Jan 99999999999999999999999 00:00:00 GMT", "0, " * 300]

    def reply(request: Received) -> Reply:
        if request.headers["lisa-attempt"] == "2":
            return Reply()
        return Reply(503, {"retry-after": invalid[int(request.id)]})

    target.default = reply
    topic.push_to(client, target.url)
    topic.wait_for("acked", *[topic.send(id=str(number)) for number in range(len(invalid))])
    assert len(target.received) == 2 * len(invalid)


def test_a_change_takes_effect_at_once_and_responses_of_a_former_url_do_not_count(
    client: httpx.Client, target: Target, topic: PushTopic
) -> None:
    go = threading.Event()
    target.replies.append(Reply(503, {"retry-after": "600"}, wait=go))
    topic.push_to(client, target.url)
    first = topic.send()
    wait_until(lambda: target.received)
    with Target() as other:
        topic.push_to(client, other.url)
        go.set()
        wait_until(lambda: topic.state(first) != "in_flight")
        second = topic.send()
        topic.wait_for("acked", second)
        assert client.delete(topic.path).status_code == 200
        last = topic.send()
        topic.wait_for("ready", last)
        push_another(client, topic)
        assert topic.state(last) == "ready"
        assert (target.ids, other.ids) == ([first], [second])


def test_a_slow_response_may_take_longer_than_the_ack_timeout(
    client: httpx.Client, target: Target, topic: PushTopic
) -> None:
    topic.set(ack_timeout="1000")
    go = threading.Event()
    target.replies.append(Reply(wait=go))
    topic.push_to(client, target.url)
    sent = topic.send()
    wait_until(lambda: target.received)
    began = time.monotonic()
    while time.monotonic() - began < 2.5:  # ack timeouts
        assert topic.state(sent) == "in_flight"
        time.sleep(0.02)
    go.set()
    topic.wait_for("acked", sent)
    assert len(target.received) == 1


def test_a_push_to_a_silent_target_times_out(
    client: httpx.Client, target: Target, topic: PushTopic
) -> None:
    go = threading.Event()
    target.default = Reply(wait=go)
    topic.push_to(client, target.url, timeout_ms=300)
    sent = topic.send()
    topic.wait_for("garbage", sent)
    assert topic.reason(sent) == "no response within 0.3 s"
    go.set()


def test_a_dead_target_gets_its_messages_once_it_is_back(
    client: httpx.Client, topic: PushTopic
) -> None:
    topic.set(retry_delays=",".join(["200"] * 100))
    with Target() as first:
        topic.push_to(client, first.url)
    sent = [topic.send() for _ in range(3)]
    wait_until(lambda: "no response" in topic.reason(sent[0]))
    with Target(first.port) as back:
        topic.wait_for("acked", *sent)
        assert sorted(back.ids) == sorted(sent)


def test_concurrent_pushes_are_limited_per_target(
    client: httpx.Client, target: Target, topic: PushTopic
) -> None:
    go = threading.Event()
    target.default = Reply(wait=go)
    topic.push_to(client, target.url, concurrency=3)
    sent = [topic.send() for _ in range(12)]
    wait_until(lambda: target.at_once == 3)
    states = [topic.state(message_id) for message_id in sent]
    assert (states.count("in_flight"), states.count("ready")) == (3, 9)
    push_another(client, topic)  # a slow target does not block others
    go.set()
    wait_until(lambda: len(target.received) == 12)
    assert target.most_at_once == 3
    assert target.connections < 9  # they are reused


def test_a_paused_topic_is_not_pushed(
    client: httpx.Client, target: Target, topic: PushTopic
) -> None:
    topic.push_to(client, target.url)
    topic.send()
    wait_until(lambda: target.received)
    assert client.post(f"/v1/topics/{topic.name}/pause").is_success
    topic.send()
    push_another(client, topic)
    assert len(target.received) == 1
    assert client.post(f"/v1/topics/{topic.name}/resume").is_success
    wait_until(lambda: len(target.received) == 2)


def test_outcomes_are_counted(client: httpx.Client, target: Target, topic: PushTopic) -> None:
    target.replies += [Reply(500), Reply(429, {"retry-after": "1"})]
    topic.push_to(client, target.url)
    topic.wait_for("acked", topic.send())
    page = Exposed(client.get("/metrics").text)
    samples = page.samples("lisa_gateway_pushes_total")
    counts = {one["outcome"]: count for one, count in samples if one["topic"] == topic.name}
    assert counts == {"done": 1, "later": 1, "failed": 1, "fault": 0}


def test_removing_a_group_removes_its_target(
    client: httpx.Client, target: Target, topic: PushTopic, redis_url: str
) -> None:
    topic.push_to(client, target.url, group="billing")
    topic.send()
    wait_until(lambda: target.received)
    store, other = open_store(redis_url), topic.another()
    store.drive(groups.remove(store, topic.name, "billing"))
    # The gateway finds this target when it next looks for changes.
    store.drive(admin.set_target(store, other.name, target.url))
    sent = other.send()
    wait_until(lambda: sent in target.ids)
    store.drive(admin.remove(store, other.name))
    assert store.drive(store.groups(topic.name)) == ()
    assert client.get(topic.path).json() == {"targets": []}


def test_a_push_waits_for_the_window(
    client: httpx.Client, target: Target, topic: PushTopic
) -> None:
    """The topic's window is closed for hours; the message was sent before it was set."""
    topic.push_to(client, target.url)
    later = topic.send("later", delay="1s")
    hour = datetime.now(UTC).hour
    closed = f"not {hour}-{hour + 3}" if hour < 21 else "3-20"
    options = {"window": closed}
    assert client.patch(f"/v1/topics/{topic.name}/options", json=options).status_code == 200
    always = topic.send("always", window="always", delay="1s")
    topic.wait_for("retry", later)
    topic.wait_for("acked", always)
    assert target.ids == [always]


def test_a_failing_push_is_seen(
    client: httpx.Client, redis_url: str, target: Target, topic: PushTopic
) -> None:
    """Its target, its last error and since when; also while the target asks for no push."""
    target.default = Reply(500, body=b"no database")
    topic.push_to(client, target.url)
    topic.send(retry=[])
    host = target.url.split("/")[2]

    def record() -> dict[str, Any]:
        found = client.get("/v1/consumers", params={"topic": topic.name}).json()["consumers"]
        return found[0] if found else {}

    def push() -> dict[str, Any]:
        (one,) = record().get("pushes") or [{}]
        return {name: one.get(name) for name in ("host", "state", "failed", "error")}

    error = "500 Internal Server Error: no database"
    wanted = {"host": host, "state": "running", "failed": 1, "error": error}
    wait_until(lambda: push() == wanted)
    page = client.get(f"/topics/{topic.name}").text.partition('id="pushes"')[2]
    named = {"topic": topic.name, "name": record()["name"]}
    for seen in (page, client.get("/consumers", params=named).text):
        for shown in (host, "failing", error):
            assert shown in seen
    listed = ["consumers", topic.name, "--redis", redis_url]
    assert " failing " in CliRunner().invoke(main, listed).output
    target.default = Reply(503, {"Retry-After": "3600"})
    topic.send()
    wait_until(lambda: push()["state"] == "waiting")
    seen_ms = record()["seen_ms"]
    wait_until(lambda: record()["seen_ms"] > seen_ms)


@pytest.mark.parametrize("minutes", [-10, 10])
def test_redis_clock_counts_where_the_gateways_own_differs(target: Target, minutes: int) -> None:
    """For signatures, sessions and jobs of mykit-delay."""
    with ClockedServer() as server, Manager(server.url), Producer(server.url) as producer:
        now_ms = time.time_ns() // 1_000_000 + minutes * 60_000
        server.set_time(now_ms * 1_000)
        env = {"LISA_GATEWAY_SERVER__TOKEN": "t" * 32}
        known = {"Authorization": f"Bearer {'t' * 32}"}
        with Gateway(server.url, config=CONFIG, env=env, headers=known) as gateway:
            topic = PushTopic(server.url, producer)
            topic.push_to(gateway.client, target.url)
            topic.send()
            wait_until(lambda: target.received)
            (request,) = target.received
            assert abs(int(request.headers["webhook-timestamp"]) - now_ms / 1000) < 30
            job = {"topic": topic.name, "id": "job", "delay": 60_000, "body": "x"}
            assert gateway.client.post("/mykit/push", json=job).status_code == 200
            found = stored(producer, topic.name, "job")
            assert abs(int(found.headers[MARK]) - now_ms) < 30_000

            def is_logged_in() -> bool:
                return visitor.get("/").status_code == 200

            with httpx.Client(base_url=gateway.url, verify=NO_TLS) as visitor:
                visitor.post("/login", data={"token": "t" * 32})
                assert is_logged_in()
                server.set_time((now_ms + sessions.LASTS_S * 1_000 + 60_000) * 1_000)
                wait_until(lambda: not is_logged_in())
