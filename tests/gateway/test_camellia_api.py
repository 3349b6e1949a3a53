"""Camellia's API: parameters, responses, defaults and message states."""

from __future__ import annotations

import base64
import time
from functools import partial
from typing import TYPE_CHECKING

import pytest

from lisa import Consumer, Manager, Producer
from lisa.embedded import EmbeddedServer
from lisa.gateway.compat.camellia.endpoints import FIRST_PULL_S
from tests.gateway.camellia_client import QUEUE, Queue
from tests.gateways import Gateway, new_topic
from tests.servers import connect, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    import httpx

FIELDS = [
    "topic",
    "msgId",
    "msg",
    "produceTime",
    "triggerTime",
    "expireTime",
    "maxRetry",
    "retry",
    "status",
]
HOUR_MS = 3_600_000


def test_the_life_cycle_of_a_message(queue: Queue) -> None:
    sent = queue.send("héllo 你好 &=%+", delay_ms=50, ttlMillis=20_000, maxRetry=3)
    assert list(sent) == FIELDS
    assert sent["topic"] == queue.topic
    assert sent["msg"] == "héllo 你好 &=%+"
    assert len(sent["msgId"]) == 32
    assert int(sent["msgId"], 16)
    assert sent["triggerTime"] == sent["produceTime"] + 50
    assert sent["expireTime"] == sent["triggerTime"] + 20_000
    assert (sent["maxRetry"], sent["retry"], sent["status"]) == (3, 0, 1)
    (pulled,) = queue.poll()
    assert pulled == {**sent, "retry": 1, "status": 3}
    assert queue.get(sent["msgId"]) == pulled
    assert queue.settle(sent["msgId"], ack=True) == 200
    assert queue.pull() == []
    assert queue.get(sent["msgId"]) == {
        **dict.fromkeys(FIELDS),
        "topic": queue.topic,
        "msgId": sent["msgId"],
        "triggerTime": sent["triggerTime"],
        "retry": 1,
        "status": 4,
    }


def test_defaults(client: httpx.Client, redis_url: str) -> None:
    queue = Queue(client, new_topic())
    sent = queue.send(delay_ms=-5)
    assert sent["triggerTime"] == sent["produceTime"]
    assert sent["expireTime"] == sent["triggerTime"] + HOUR_MS
    assert (sent["maxRetry"], sent["status"]) == (10, 2)
    explicit = queue.send(ttlMillis=0, maxRetry=-1)
    assert explicit["expireTime"] == explicit["triggerTime"] + HOUR_MS
    assert explicit["maxRetry"] == 10
    assert len(queue.poll(batch=-1)) == 1  # and not both
    with connect(redis_url) as redis:
        options = redis.hgetall(f"lisa:{{{queue.topic}}}:options")
    assert options[b"ack_timeout"] == b"30000"
    assert options[b"retention"] == b"300000"


def test_options_of_an_existing_topic_are_kept(
    client: httpx.Client, redis_url: str, producer: Producer
) -> None:
    queue = Queue(client, new_topic())
    producer.send(queue.topic, "native")
    queue.send()
    with connect(redis_url) as redis:
        assert b"ack_timeout" not in redis.hgetall(f"lisa:{{{queue.topic}}}:options")


def test_response_fields(client: httpx.Client, queue: Queue) -> None:
    sent = queue.send()
    assert queue.post("getMsg", msgId="nobody") == {"code": 404, "msg": None, "delayMsg": None}
    assert queue.post("deleteMsg", msgId="nobody") == {"code": 404, "msg": None}
    assert queue.post("ackMsg", msgId="nobody", ack="true") == {"code": 404, "msg": None}
    form = {"topic": queue.topic}
    short = client.post(f"{QUEUE}/pullMsg", data=form)
    assert short.headers["content-type"] == "application/json"
    assert list(short.json()) == ["code", "msg", "delayMsgList"]
    queue.send("second")
    long = client.post(f"{QUEUE}/longPollingMsg", data=form)
    assert long.headers["content-type"] == "text/plain;charset=UTF-8"
    assert long.text.startswith('{"code":200,"delayMsgList":[{"expireTime":')
    assert queue.post("deleteMsg", msgId=sent["msgId"]) == {"code": 200, "msg": "success"}


def test_query_parameters_take_precedence_over_form_parameters(
    client: httpx.Client, queue: Queue
) -> None:
    answer = client.post(
        f"{QUEUE}/sendMsg",
        params={"topic": queue.topic, "msg": "query"},
        data={"msg": "form", "delayMillis": " 0x10 "},
    )
    sent = answer.json()["delayMsg"]
    assert sent["msg"] == "query"
    assert sent["triggerTime"] == sent["produceTime"] + 16


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("sendMsg", {"msg": "m", "delayMillis": 0}),
        ("sendMsg", {"topic": "t", "delayMillis": 0}),
        ("sendMsg", {"topic": "t", "msg": "m"}),
        ("sendMsg", {"topic": "t", "msg": "m", "delayMillis": ""}),
        ("sendMsg", {"topic": "t", "msg": "m", "delayMillis": "soon"}),
        ("sendMsg", {"topic": "t", "msg": "m", "delayMillis": 1 << 63}),
        ("sendMsg", {"topic": "t", "msg": "m", "delayMillis": 0, "maxRetry": 1 << 31}),
        ("sendMsg", {"topic": "t", "msg": "m", "delayMillis": 0, "ttlMillis": "1.5"}),
        ("pullMsg", {}),
        ("pullMsg", {"topic": "t", "batch": "all"}),
        ("longPollingMsg", {"topic": "t", "longPollingTimeoutMillis": "x"}),
        ("ackMsg", {"topic": "t", "msgId": "i"}),
        ("ackMsg", {"topic": "t", "msgId": "i", "ack": "maybe"}),
        ("ackMsg", {"topic": "t", "ack": "true"}),
        ("getMsg", {"topic": "t"}),
        ("deleteMsg", {"topic": "t", "msgId": "i", "release": "perhaps"}),
        ("deleteMsg", {"topic": "t"}),
    ],
)
def test_a_missing_or_ill_typed_parameter_is_http_400(
    client: httpx.Client, name: str, form: dict[str, object]
) -> None:
    answer = client.post(f"{QUEUE}/{name}", data=form)
    assert answer.status_code == 400
    body = answer.json()
    assert (body["status"], body["error"]) == (400, "Bad Request")
    assert body["path"] == f"{QUEUE}/{name}"


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("sendMsg", {"topic": "", "msg": "m", "delayMillis": 0}),
        ("sendMsg", {"topic": "t", "msg": "", "delayMillis": 0}),
        ("sendMsg", {"topic": "t", "msg": "m", "delayMillis": 0, "msgId": "i" * 257}),
        ("sendMsg", {"topic": "t", "msg": "m" * (1 << 20 | 1), "delayMillis": 0}),
        ("pullMsg", {"topic": ""}),
        ("longPollingMsg", {"topic": ""}),
        ("ackMsg", {"topic": "t", "msgId": "", "ack": "true"}),
        ("getMsg", {"topic": "t", "msgId": ""}),
        ("deleteMsg", {"topic": "t", "msgId": ""}),
    ],
)
def test_queue_errors_are_code_400_without_msg(
    client: httpx.Client, name: str, form: dict[str, object]
) -> None:
    answer = client.post(f"{QUEUE}/{name}", data=form)
    assert answer.status_code == 200
    body = answer.json()
    assert body["code"] == 400
    assert body.get("msg") is None


def test_only_the_original_methods(client: httpx.Client) -> None:
    assert client.get(f"{QUEUE}/pullMsg", params={"topic": "t"}).status_code == 405
    assert client.post(f"{QUEUE}/getTopicInfo", data={"topic": "t"}).status_code == 405


def test_a_full_topic_is_code_500(queue: Queue, redis_url: str) -> None:
    queue.send(delay_ms=60_000)
    with connect(redis_url) as redis:
        redis.hset(f"lisa:{{{queue.topic}}}:options", "capacity", "1")
    body = queue.post("sendMsg", msg="m", delayMillis=0)
    assert body == {"code": 500, "msg": None, "delayMsg": None}


def test_a_nack_redelivers_immediately_until_retries_are_used_up(queue: Queue) -> None:
    sent = queue.send(maxRetry=2)
    for attempt in (1, 2, 3):
        (pulled,) = queue.poll()
        assert pulled == {**sent, "retry": attempt, "status": 3}
        assert queue.settle(sent["msgId"], ack=False) == 200
    dead = queue.get(sent["msgId"])
    assert dead == {**sent, "retry": 3, "status": 6}
    assert queue.pull() == []


def test_a_batch_keeps_the_order(queue: Queue) -> None:
    ids = [queue.send(f"m{i}")["msgId"] for i in range(20)]
    some = queue.pull(batch=15)
    rest = queue.pull(batch=15)
    assert [len(some), len(rest)] == [15, 5]
    assert [one["msgId"] for one in some + rest] == ids
    assert {queue.settle(one, ack=True) for one in ids} == {200}


@pytest.mark.parametrize("end", ["acked", "deleted", "garbage"])
def test_the_id_of_an_ended_message_is_sent_anew(queue: Queue, end: str) -> None:
    queue.send("first", delay_ms=HOUR_MS if end == "deleted" else 0, msgId="order-1", maxRetry=0)
    if end == "deleted":
        assert queue.delete("order-1") == 200
    else:
        assert [one["msg"] for one in queue.poll()] == ["first"]
        assert queue.settle("order-1", ack=end == "acked") == 200
    assert queue.status("order-1") == {"acked": 4, "deleted": 7, "garbage": 6}[end]
    assert queue.send("second", msgId="order-1")["status"] == 2
    (pulled,) = queue.poll()
    assert (pulled["msg"], pulled["retry"]) == ("second", 1)


def test_expired_after_an_attempt_is_status_6(queue: Queue, redis_url: str) -> None:
    sent = queue.send(ttlMillis=700, maxRetry=5)
    (pulled,) = queue.pull()
    with connect(redis_url) as redis:

        def is_past() -> bool:
            seconds, micros = redis.time()
            return bool(seconds * 1000 + micros // 1000 > sent["expireTime"])

        wait_until(is_past)
    assert queue.settle(pulled["msgId"], ack=False) == 200
    wait_until(lambda: queue.status(sent["msgId"]) == 6)
    assert queue.pull() == []


@pytest.mark.parametrize(
    ("body", "text"),
    [("text", "text"), ({"order": 42}, '{"order":42}'), (b"\x00\xff", "AP8="), (None, "null")],
)
def test_messages_of_native_producers(
    queue: Queue, producer: Producer, body: object, text: str
) -> None:
    message_id = producer.send(queue.topic, body)
    (pulled,) = queue.poll()
    assert pulled["msg"] == text
    assert (pulled["msgId"], pulled["retry"], pulled["status"]) == (message_id, 1, 3)
    assert pulled["triggerTime"] > 0
    assert "produceTime" not in pulled  # a poll omits null fields
    found = queue.get(message_id)
    assert found == {**dict.fromkeys(FIELDS), **pulled}
    if isinstance(body, bytes):
        assert base64.b64decode(text) == body


def test_camellia_messages_read_through_the_native_api(queue: Queue, producer: Producer) -> None:
    sent = queue.send("body", delay_ms=60_000, ttlMillis=5000, maxRetry=2)
    found = producer.get(queue.topic, sent["msgId"])
    assert found is not None
    assert found.body == "body"
    assert found.due_ms == sent["triggerTime"]
    times = f"{sent['produceTime']},{sent['triggerTime']}"
    assert found.headers == {"camellia": f"{times},5000,2"}


def test_a_new_due_time_is_the_trigger_time(queue: Queue, producer: Producer) -> None:
    sent = queue.send(delay_ms=60_000)
    producer.fire_now(queue.topic, sent["msgId"])
    (pulled,) = queue.poll()
    assert pulled["triggerTime"] < sent["triggerTime"]
    assert pulled["expireTime"] == pulled["triggerTime"] + HOUR_MS


def test_an_excessive_retry_count_is_reported_as_truncated(queue: Queue) -> None:
    assert queue.send(maxRetry=(1 << 31) - 1)["maxRetry"] == 1000


def test_several_groups(redis_url: str, manager: Manager, tmp_path: Path) -> None:
    """The wire format has one queue: the configured group. Deletes apply to all groups or none."""
    topic = new_topic()
    config = f"lisa-delay-queue: {{groups: [{{topic: {topic}, group: mine}}]}}"
    with (
        Gateway(redis_url, config=config, directory=tmp_path) as gateway,
        Consumer(redis_url, group="other") as consumer,
    ):
        queue = Queue(gateway.client, topic)
        assert queue.poll(wait_ms=1) == []
        assert list(consumer.pull(topic)) == []
        both, partly = queue.send("both"), queue.send("partly")
        theirs = {one.message.body: one for one in consumer.pull(topic, batch=2)}
        assert len(theirs) == len(queue.pull(batch=2)) == 2
        theirs["partly"].ack()
        assert queue.delete(both["msgId"]) == 200  # in flight in both
        assert queue.status(both["msgId"]) == 7
        assert queue.delete(partly["msgId"]) == 404
        assert queue.status(partly["msgId"]) == 3
        assert queue.settle(partly["msgId"], ack=True) == 200
        assert queue.status(partly["msgId"]) == 4


def test_pulls_name_the_reason_if_a_topic_has_several_groups(gateway: Gateway) -> None:
    topic = new_topic()
    for group in ("one", "two"):
        gateway.client.post(f"/v1/topics/{topic}/groups", json={"group": group})
    for pull in ("pullMsg", "longPollingMsg"):
        answer = gateway.client.post(f"{QUEUE}/{pull}", data={"topic": topic}).json()
        assert answer["code"] == 500
        assert answer["msg"] == (
            f"topic '{topic}' has several groups: name one under groups in the gateway's YAML"
        )


def test_configured_defaults_and_groups(redis_url: str, manager: Manager, tmp_path: Path) -> None:
    """Retry delays (the last one repeats), and a topic with two groups."""
    topic = new_topic()
    config = f"""
lisa-delay-queue:
  groups:
    - {{topic: {topic}, group: mine}}
  camellia:
    retry-delays: 0,400ms
    max-retry: 3
    ttl: 1m
    long-polling-timeout: 50ms
"""
    with Gateway(redis_url, config=config, directory=tmp_path) as gateway:
        queue = Queue(gateway.client, topic)
        assert gateway.client.post(f"{QUEUE}/longPollingMsg", data={"topic": topic}).json() == {
            "code": 200,
            "delayMsgList": [],
        }
        with connect(redis_url) as redis:
            assert redis.hkeys(f"lisa:{{{topic}}}:groups") == [b"mine"]
            sent = queue.send()
            assert sent["expireTime"] == sent["triggerTime"] + 60_000
            policy = redis.hget(f"lisa:{{{topic}}}:policy", sent["msgId"])
            assert policy == b"0,400,400"


def test_a_message_is_settled_through_another_gateway(
    queue: Queue, redis_url: str, manager: Manager
) -> None:
    """It has no receipt. A late ack counts until the message is handed out again."""
    with Gateway(redis_url) as other:
        elsewhere = Queue(other.client, queue.topic)
        first, second = queue.send("a"), queue.send("b")
        assert len(queue.pull(batch=2)) == 2
        assert elsewhere.settle(first["msgId"], ack=True) == 200
        assert elsewhere.settle(second["msgId"], ack=False) == 200
        assert queue.settle(first["msgId"], ack=True) == 200  # repeated: it is already acked
        (again,) = elsewhere.poll()
        assert (again["msgId"], again["retry"]) == (second["msgId"], 2)
        assert queue.settle(second["msgId"], ack=True) == 200
        for here in (queue, elsewhere):
            sent = queue.send()["msgId"]
            assert queue.pull(ackTimeoutMillis=100)
            wait_until(partial(has_status, queue, sent, 2))
            assert here.settle(sent, ack=True) == 200
            assert (queue.status(sent), queue.pull()) == (4, [])


def has_status(queue: Queue, message_id: str, status: int) -> bool:
    return queue.status(message_id) == status


def test_a_client_may_start_before_any_manager() -> None:
    """No group is declared yet: only the first pull waits for one. Messages are delivered later."""
    with EmbeddedServer() as server, Gateway(server.url) as gateway:
        queue = Queue(gateway.client, new_topic())

        def pull_s() -> float:
            began = time.monotonic()
            assert queue.pull() == []
            return time.monotonic() - began

        first_s = pull_s()
        assert first_s > FIRST_PULL_S
        assert min(pull_s() for _ in range(5)) < first_s / 2
        assert queue.poll(wait_ms=50) == []
        sent = queue.send(delay_ms=10)
        with Manager(server.url):
            (pulled,) = queue.poll()
            assert pulled["msgId"] == sent["msgId"]
