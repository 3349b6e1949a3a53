"""Camellia's API: parameters, responses, defaults and message states."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import httpx
import pytest
from redis import Redis

from lisa import Consumer, Manager, Producer
from lisa.core.settings import GatewaySettings
from lisa.core.transitions.enqueue import OnDuplicate, SendOutcome, Sent
from lisa.core.transitions.inspect import Inspection
from lisa.gateway.compat.camellia import queue as camellia_queue
from lisa.gateway.compat.camellia.monitor import MonitorData, RequestStats, exposition
from lisa.gateway.compat.camellia.queue import band_edges
from lisa.producer import Outgoing
from tests.gateway.camellia_client import (
    HEALTH,
    QUEUE,
    Queue,
)
from tests.gateways import NO_TLS, Gateway, new_topic, stored
from tests.servers import connect, wait_until

FIELDS = ["topic", "msgId", "msg", "produceTime", "triggerTime", "expireTime"]
FIELDS += ["maxRetry", "retry", "status"]
HOUR_MS = 3_600_000


def test_the_life_cycle_of_a_message(queue: Queue) -> None:
    sent = queue.send("héllo 你好 &=%+", delay_ms=50, ttlMillis=20_000, maxRetry=3)
    assert list(sent) == FIELDS
    assert (sent["topic"], sent["msg"]) == (queue.topic, "héllo 你好 &=%+")
    assert (len(sent["msgId"]), int(sent["msgId"], 16) > 0) == (32, True)
    assert sent["triggerTime"] == sent["produceTime"] + 50
    assert sent["expireTime"] == sent["triggerTime"] + 20_000
    assert (sent["maxRetry"], sent["retry"], sent["status"]) == (3, 0, 1)
    (pulled,) = queue.poll()
    assert pulled == queue.get(sent["msgId"]) == {**sent, "retry": 1, "status": 3}
    assert queue.settle(sent["msgId"], ack=True) == 200
    assert queue.pull() == []
    kept = {name: sent[name] for name in ("topic", "msgId", "triggerTime")}
    assert queue.get(sent["msgId"]) == {**dict.fromkeys(FIELDS), **kept, "retry": 1, "status": 4}


def test_defaults(client: httpx.Client, server: Redis, producer: Producer) -> None:
    """They include options of topics that the API creates; those of others are kept."""
    queue, native = Queue(client, new_topic()), Queue(client, new_topic())
    sent, explicit = queue.send(delay_ms=-5), queue.send(ttlMillis=0, maxRetry=-1)
    for message in (sent, explicit):
        assert message["triggerTime"] == message["produceTime"]
        assert message["expireTime"] == message["triggerTime"] + HOUR_MS
        assert (message["maxRetry"], message["status"]) == (10, 2)
    assert len(queue.poll(batch=-1)) == 1  # and not both
    assert queue.send(maxRetry=(1 << 31) - 1)["maxRetry"] == 1000
    producer.send(native.topic, "native")
    native.send()
    options = server.hgetall(f"lisa:{{{queue.topic}}}:options")
    assert b"ack_timeout" not in server.hgetall(f"lisa:{{{native.topic}}}:options")
    assert (options[b"ack_timeout"], options[b"retention"]) == (b"30000", b"300000")


def test_response_fields(client: httpx.Client, queue: Queue) -> None:
    sent = queue.send()
    assert queue.post("getMsg", msgId="absent") == {"code": 404, "msg": None, "delayMsg": None}
    assert queue.post("deleteMsg", msgId="absent") == {"code": 404, "msg": None}
    assert queue.post("ackMsg", msgId="absent", ack="true") == {"code": 404, "msg": None}
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
    query, form = {"topic": queue.topic, "msg": "query"}, {"msg": "form", "delayMillis": " 0x10 "}
    sent = client.post(f"{QUEUE}/sendMsg", params=query, data=form).json()["delayMsg"]
    assert (sent["msg"], sent["triggerTime"]) == ("query", sent["produceTime"] + 16)


SEND = {"topic": "t", "msg": "m", "delayMillis": 0}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("sendMsg", {"msg": "m", "delayMillis": 0}),
        ("sendMsg", {"topic": "t", "msg": "m"}),
        ("sendMsg", SEND | {"delayMillis": "soon"}),
        ("sendMsg", SEND | {"delayMillis": 1 << 63}),
        ("sendMsg", SEND | {"ttlMillis": "1.5"}),
        ("pullMsg", {}),
        ("ackMsg", {"topic": "t", "msgId": "i"}),
        ("ackMsg", {"topic": "t", "msgId": "i", "ack": "maybe"}),
        ("getMsg", {"topic": "t"}),
        ("deleteMsg", {"topic": "t"}),
    ],
)
def test_a_missing_or_ill_typed_parameter_is_http_400(
    client: httpx.Client, name: str, form: dict[str, object]
) -> None:
    answer = client.post(f"{QUEUE}/{name}", data=form)
    assert answer.status_code == 400
    expected = {"status": 400, "error": "Bad Request", "path": f"{QUEUE}/{name}"}
    assert answer.json().items() >= expected.items()


def test_queue_errors_are_code_400_without_msg(client: httpx.Client) -> None:
    for name, form in (
        ("sendMsg", SEND | {"topic": ""}),
        ("sendMsg", SEND | {"msg": ""}),
        ("sendMsg", SEND | {"msgId": "i" * 257}),
        ("sendMsg", SEND | {"msg": "m" * (1 << 20 | 1)}),
        ("ackMsg", {"msgId": "", "ack": "true"}),
        ("getMsg", {"msgId": ""}),
    ):
        body = Queue(client, "t").post(name, **form)
        assert (body["code"], body.get("msg")) == (400, None)


def test_only_the_original_methods(client: httpx.Client) -> None:
    assert client.get(f"{QUEUE}/pullMsg", params={"topic": "t"}).status_code == 405
    assert client.post(f"{QUEUE}/getTopicInfo", data={"topic": "t"}).status_code == 405


def test_the_id_of_an_ended_message_is_sent_anew(queue: Queue) -> None:
    for end, status in (("acked", 4), ("garbage", 6), ("deleted", 7)):
        queue.send("first", delay_ms=HOUR_MS if end == "deleted" else 0, msgId=end, maxRetry=0)
        if end == "deleted":
            assert queue.delete(end) == 200
        else:
            assert [one["msg"] for one in queue.poll()] == ["first"]
            assert queue.settle(end, ack=end == "acked") == 200
        assert queue.status(end) == status
        assert queue.send("second", msgId=end)["status"] == 2
        (pulled,) = queue.poll()
        assert (pulled["msgId"], pulled["msg"], pulled["retry"]) == (end, "second", 1)


def test_expired_after_an_attempt_is_status_6(queue: Queue, server: Redis) -> None:
    sent = queue.send(ttlMillis=700, maxRetry=5)
    (pulled,) = queue.pull()

    def is_past() -> bool:
        seconds, micros = server.time()
        return bool(seconds * 1000 + micros // 1000 > sent["expireTime"])

    wait_until(is_past)
    assert queue.settle(pulled["msgId"], ack=False) == 200
    wait_until(lambda: queue.status(sent["msgId"]) == 6)
    assert queue.pull() == []


NATIVE = {"text": "text", '{"order":42}': {"order": 42}, "AP8=": b"\x00\xff", "null": None}


@pytest.mark.parametrize("text", NATIVE)
def test_messages_of_native_producers(queue: Queue, producer: Producer, text: str) -> None:
    message_id = producer.send(queue.topic, NATIVE[text])
    (pulled,) = queue.poll()
    assert (pulled["msg"], pulled["msgId"]) == (text, message_id)
    assert (pulled["retry"], pulled["status"], pulled["triggerTime"] > 0) == (1, 3, True)
    assert "produceTime" not in pulled  # a poll omits null fields
    assert queue.get(message_id) == {**dict.fromkeys(FIELDS), **pulled}


def test_camellia_messages_read_and_fired_through_the_native_api(
    queue: Queue, producer: Producer
) -> None:
    sent = queue.send("body", delay_ms=60_000, ttlMillis=5000, maxRetry=2)
    found = stored(producer, queue.topic, sent["msgId"])
    assert (found.body, found.due_ms) == ("body", sent["triggerTime"])
    assert found.headers == {"camellia": f"{sent['produceTime']},{sent['triggerTime']},5000,2"}
    producer.fire_now(queue.topic, sent["msgId"])
    (pulled,) = queue.poll()
    assert pulled["triggerTime"] < sent["triggerTime"]
    assert pulled["expireTime"] == pulled["triggerTime"] + 5000


CONFIGURED = new_topic()
CONFIG = f"""
lisa-delay-queue:
  groups: [{{topic: {CONFIGURED}, group: mine}}]
  camellia: {{retry-delays: "300ms,600ms", max-retry: 3, ttl: 1m, long-polling-timeout: 50ms}}
"""


@pytest.fixture(scope="module")
def configured(redis_url: str, manager: Manager) -> Iterator[httpx.Client]:
    """A client of a gateway with a group and defaults of its own."""
    with Gateway(redis_url, config=CONFIG) as running:
        yield running.client


def test_several_groups(configured: httpx.Client, redis_url: str) -> None:
    """The wire format has one queue: the configured group. Deletes apply to all groups or none."""
    queue = Queue(configured, CONFIGURED)
    with Consumer(redis_url, group="other") as consumer:
        assert queue.post("longPollingMsg") == {"code": 200, "delayMsgList": []}
        assert list(consumer.pull(CONFIGURED)) == []
        both, partly = queue.send("both"), queue.send("partly")
        theirs = {one.message.body: one for one in consumer.pull(CONFIGURED, batch=2)}
        assert len(theirs) == len(queue.pull(batch=2)) == 2
        theirs["partly"].ack()
        assert queue.delete(both["msgId"]) == 200  # in flight in both
        assert queue.status(both["msgId"]) == 7
        assert queue.delete(partly["msgId"]) == 404
        assert queue.status(partly["msgId"]) == 3
        assert queue.settle(partly["msgId"], ack=True) == 200
        assert queue.status(partly["msgId"]) == 4


def test_pulls_name_the_reason_if_a_topic_has_several_groups(client: httpx.Client) -> None:
    topic = new_topic()
    for group in ("one", "two"):
        client.post(f"/v1/topics/{topic}/groups", json={"group": group})
    reason = f"topic '{topic}' has several groups: name one under groups in the gateway's YAML"
    for pull in ("pullMsg", "longPollingMsg"):
        answer = Queue(client, topic).post(pull)
        assert (answer["code"], answer["msg"]) == (500, reason)


# Defects of Camellia by number --------------------------------------------------------------------


AN_HOUR_AHEAD = """
import time

_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + 3600
time.time_ns = lambda: _time_ns() + 3_600_000_000_000
"""


def now_ms(server: Redis) -> int:
    seconds, micros = server.time()
    return int(seconds) * 1000 + int(micros) // 1000


def body_key(topic: str, message_id: str) -> str:
    return f"lisa:{{{topic}}}:body:{message_id}"


def test_c01_a_send_is_atomic(redis_url: str, manager: Manager) -> None:
    """Body, place and topic were written separately: a crash in between lost the message, because
    a repeated send was then rejected as a duplicate."""
    topic, sent = new_topic(), list[str]()
    ids = [f"m{i}" for i in range(2_000)]

    def send_until_it_dies(url: str) -> None:
        with httpx.Client(base_url=url, verify=NO_TLS) as client, suppress(httpx.TransportError):
            for message_id in ids:
                Queue(client, topic).send(message_id, msgId=message_id)
                sent.append(message_id)

    with Gateway(redis_url) as gateway, ThreadPoolExecutor(1) as pool:
        pool.submit(send_until_it_dies, gateway.url)
        wait_until(lambda: len(sent) > 50)
        gateway.process.kill()
    assert 50 < len(sent) < len(ids)
    with Gateway(redis_url) as gateway:
        queue = Queue(gateway.client, topic)
        again = ids[: len(sent) + 1]  # the last reply was lost, or the request never arrived
        for message_id in again:
            queue.send(message_id, msgId=message_id)
        got: list[str] = []
        while found := queue.poll(wait_ms=500, batch=200):
            got += [message["msg"] for message in found]
            for message in found:
                assert queue.settle(message["msgId"], ack=True) == 200
        assert sorted(got) == sorted(again)


def test_c02_sends_of_one_id_make_one_message(queue: Queue) -> None:
    """Two repeated sends of an ended message were both queued; all empty ids were the same."""

    def at_once(message_id: str) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(lambda i: queue.send(f"m{i}", msgId=message_id), range(16)))

    first = at_once("same")
    assert len({one["msg"] for one in first}) == 1
    (pulled,) = queue.poll(batch=10)
    assert queue.settle("same", ack=True) == 200
    assert pulled["retry"] == 1
    assert len({one["msg"] for one in at_once("same")}) == 1  # the id was free again, for one send
    (pulled,) = queue.poll(batch=10)
    assert (pulled["retry"], queue.pull(batch=10)) == (1, [])
    assert len({one["msgId"] for one in at_once("")}) == 16
    assert len(queue.pull(batch=20)) == 16


def test_c02_an_id_whose_tombstone_expires_meanwhile_is_sent() -> None:
    """A send of a known id that expired before its lookup queued an id without a message, and
    reported success."""
    outcomes = [Sent.DUPLICATE, Sent.ACCEPTED]

    async def offer(_topic: str, message: Outgoing, _mode: OnDuplicate) -> SendOutcome:
        return SendOutcome(message.id or "", outcomes.pop(0))

    context: Any = SimpleNamespace(
        settings=GatewaySettings(),
        groups={},
        sender=SimpleNamespace(offer=offer),
        settler=SimpleNamespace(look=AsyncMock(return_value=Inspection(b"", None, None, None, []))),
        clock=SimpleNamespace(now_us=AsyncMock(return_value=1_000_000)),
    )
    options: Any = {"delay_ms": 0, "ttl_ms": -1, "max_retry": -1, "trace": {}}
    queue = camellia_queue.Queue(context)
    sent = asyncio.run(queue.send("topic", "text", message_id="mine", **options))
    assert (sent.msg_id, sent.msg, sent.status) == ("mine", "text", 2)
    assert not outcomes


def test_c02_an_id_without_a_state_gets_a_response(queue: Queue, server: Redis) -> None:
    """A message has no state while its only group is being removed."""
    queue.send(delay_ms=60_000, msgId="lone")
    server.zrem(f"lisa:{{{queue.topic}}}:waiting", "lone")
    body = queue.post("sendMsg", msg="text", delayMillis=0, msgId="lone")
    assert body == {"code": 500, "msg": None, "delayMsg": None}
    server.delete(body_key(queue.topic, "lone"))
    assert queue.send(msgId="lone")["status"] == 2


def test_c04_acks_and_nacks_count_for_deliveries_only(queue: Queue, server: Redis) -> None:
    """A nack put any id into the ready queue, even a waiting one (early) or a ready one (twice);
    an ack ended messages that were not delivered, or did not exist."""
    assert queue.settle("absent", ack=True) == 404
    assert queue.settle("absent", ack=False) == 404
    waiting = queue.send(delay_ms=400)["msgId"]
    for ack in (True, False):
        assert queue.settle(waiting, ack=ack) == 404
        assert queue.status(waiting) == 1
    (pulled,) = queue.poll(batch=10)
    assert now_ms(server) >= pulled["triggerTime"]
    assert pulled["retry"] == 1
    assert queue.settle(waiting, ack=True) == 200
    ready = queue.send()["msgId"]
    for ack in (True, False):
        assert queue.settle(ready, ack=ack) == 404
    assert [one["msgId"] for one in queue.pull(batch=10)] == [ready]
    assert queue.settle(ready, ack=True) == 200
    assert queue.settle(ready, ack=False) == 404
    assert queue.status(ready) == 4


def test_settling_after_the_ack_timeout(queue: Queue, redis_url: str) -> None:
    """An ack counts also by another gateway, which has no receipt; a nack adds nothing (C04: the
    message was in the ready queue twice)."""
    acked, nacked = queue.send()["msgId"], queue.send()["msgId"]
    assert len(queue.pull(ackTimeoutMillis=100, batch=2)) == 2
    wait_until(lambda: queue.status(acked) == queue.status(nacked) == 2)
    assert queue.settle(nacked, ack=False) == 404
    with Gateway(redis_url) as other:
        assert Queue(other.client, queue.topic).settle(acked, ack=True) == 200
    assert queue.status(acked) == 4
    found = queue.poll(batch=10)  # it may not have been promoted yet
    assert [(one["msgId"], one["retry"]) for one in found] == [(nacked, 2)]
    assert queue.pull(batch=10) == []


def test_c06_redelivered_messages_wake_a_poll(queue: Queue) -> None:
    """Nacks and ack timeouts woke no poll: it slept to its end with a message ready."""
    one = queue.send()["msgId"]
    assert queue.pull()
    with ThreadPoolExecutor(1) as pool:
        for come_back in (lambda: queue.settle(one, ack=False), lambda: None):
            began = time.monotonic()
            poll = pool.submit(queue.poll, 20_000)
            wait_until(lambda: queue.client.get("/healthz").json()["pulls"])
            come_back()
            (found,) = poll.result()
            assert time.monotonic() - began < 20
            assert found["msgId"] == one


def test_c07_no_wake_up_is_missed(queue: Queue) -> None:
    """A message sent between a poll's first check and its sleep did not wake it."""
    with ThreadPoolExecutor(1) as pool:
        for i in range(100):
            poll = pool.submit(queue.poll, 20_000)
            sent = queue.send(f"m{i}")
            (found,) = poll.result(10)  # half of its sleep
            assert found["msgId"] == sent["msgId"]
            assert queue.settle(found["msgId"], ack=True) == 200


def test_c08_never_early(queue: Queue, server: Redis) -> None:
    """Messages were up to 100 ms early, those with delays up to 100 ms immediate."""
    for delay_ms in (1, 5, 50, 100, 101, 250):
        queue.send(delay_ms=delay_ms)
    for _ in range(6):
        (found,) = queue.poll()
        assert now_ms(server) >= found["triggerTime"]


def test_c09_the_status_is_correct(queue: Queue) -> None:
    """It remained 1 when a message was due, and 3 after a nack or an ack timeout."""
    assert queue.status(queue.send(delay_ms=60_000)["msgId"]) == 1
    one = queue.send(delay_ms=100)["msgId"]
    wait_until(lambda: queue.status(one) == 2)
    for attempt, timeout_ms in ((1, 60_000), (2, 300)):
        (pulled,) = queue.poll(ackTimeoutMillis=timeout_ms)  # it may not have been promoted yet
        assert (pulled["retry"], pulled["status"]) == (attempt, 3)
        if attempt == 1:
            assert queue.status(one) == 3
            assert queue.settle(one, ack=False) == 200
        wait_until(lambda: queue.status(one) == 2)
        assert (queue.get(one) or {})["retry"] == attempt


def test_c10_dead_messages_are_kept(queue: Queue, producer: Producer, server: Redis) -> None:
    """The message was dropped, and its body deleted five minutes later."""
    dead = queue.send("precious", maxRetry=0)["msgId"]
    assert queue.pull()
    assert queue.settle(dead, ack=False) == 200
    found, kept = queue.get(dead) or {}, stored(producer, queue.topic, dead)
    assert (found["status"], found["msg"], queue.delete(dead)) == (6, "precious", 404)
    assert (kept.state, kept.body, kept.reason) == ("garbage", "precious", "ackMsg with ack=false")
    assert server.ttl(body_key(queue.topic, dead)) == -1


def test_c11_retries_can_have_delays(configured: httpx.Client, server: Redis) -> None:
    """All retries were used up within milliseconds. The last delay repeats."""
    queue = Queue(configured, new_topic())
    defaults = queue.send(delay_ms=HOUR_MS)
    assert defaults["expireTime"] == defaults["triggerTime"] + 60_000
    policy = server.hget(f"lisa:{{{queue.topic}}}:policy", defaults["msgId"])
    assert policy == b"300,600,600"
    one = queue.send(maxRetry=2)["msgId"]
    for pause_ms in (300, 600):
        assert queue.poll()
        before = now_ms(server)
        assert queue.settle(one, ack=False) == 200
        assert queue.status(one) == 1  # it is waiting
        assert queue.pull() == []
        wait_until(lambda: queue.status(one) == 2)
        assert now_ms(server) >= before + pause_ms
    assert queue.poll()
    assert queue.settle(one, ack=False) == 200
    assert queue.status(one) == 6


def test_c13_metric_names_and_escaping() -> None:
    """HELP and TYPE lacked the prefix of their samples; labels were not escaped."""
    data = MonitorData([RequestStats('a"\\\n', trigger_msg_ready=3)])
    lines = exposition("camellia_", data, [], 0.5).splitlines()
    assert r'camellia_request{topic="a\"\\\n",type="triggerMsgReady"} 3' in lines
    for line in lines:
        assert line.removeprefix("# HELP ").removeprefix("# TYPE ").startswith("camellia_")


def test_c15_topic_names_do_not_collide(client: httpx.Client) -> None:
    """Topic and id were joined by a bar; a brace in a topic moved its hash tag."""
    stem = new_topic()
    for topic in (f"{stem}|b", f"{stem}}}", f"{{{stem}", f"{stem} x"):
        body = Queue(client, topic).post("sendMsg", msg="m", delayMillis=0, msgId="c")
        assert body["code"] == 400
    names = ((stem, "b|c"), (stem, "b:c"), (stem, "}{"), (f"{stem}:b", "c"))
    for topic, message_id in names:
        Queue(client, topic).send(f"{topic} {message_id}", delay_ms=60_000, msgId=message_id)
    for topic, message_id in names:
        found = Queue(client, topic).get(message_id) or {}
        assert found["msg"] == f"{topic} {message_id}"


@pytest.mark.parametrize("release", ["true", "false"])
def test_c16_a_deleted_message_disappears_immediately(
    queue: Queue, server: Redis, release: str
) -> None:
    """Its id remained in the waiting or the ack queue until it was due."""
    ids = [queue.send(delay_ms=delay)["msgId"] for delay in (60_000, 0)]
    assert [found["msgId"] for found in queue.pull()] == ids[1:]
    assert queue.info()["ackQueueSize"] == 1
    for message_id in ids:
        assert queue.post("deleteMsg", msgId=message_id, release=release)["code"] == 200
        assert queue.status(message_id) == 7
        assert queue.delete(message_id) == 404  # as in the original: it is not alive
    info = queue.info()
    assert [info[f"{name}QueueSize"] for name in ("waiting", "ready", "ack")] == [0, 0, 0]
    left = {key.decode() for key in server.scan_iter(f"lisa:{{{queue.topic}}}:*")}
    assert not [key for key in left if ":body:" in key or key.endswith((":waiting", ":leases"))]


def test_c18_large_delays_are_rejected_or_exact(queue: Queue) -> None:
    """A delay near the largest long overflowed, and its message was never delivered."""
    body = queue.post("sendMsg", msg="m", delayMillis=(1 << 63) - 1)
    assert body == {"code": 400, "msg": None, "delayMsg": None}
    far = 365 * 86_400_000 * 100
    sent = queue.send(delay_ms=far, ttlMillis=(1 << 63) - 1)
    assert sent["triggerTime"] == sent["produceTime"] + far
    assert sent["expireTime"] > sent["triggerTime"]
    assert queue.get(sent["msgId"]) == sent
    assert queue.info()["waitingQueueInfo"]["sizeOf30dayToInfinite"] == 1


def test_c18_each_delay_is_in_one_band() -> None:
    """A delay on a border was counted in both bands."""
    now = 1_000_000_000_000
    minutes = (1, 10, 30, 60, 6 * 60, 24 * 60, 7 * 24 * 60, 30 * 24 * 60)
    borders = [count * 60_000 for count in minutes]

    edges = band_edges(now)
    assert len(edges) == 9
    for delay in [1, *(border + step for border in borders for step in (-1, 0, 1))]:
        bands = [i for i, edge in enumerate(edges) if edge < now + delay]
        assert bands[-1] == sum(1 for border in borders if delay >= border)


@pytest.mark.full
def test_c19_times_are_from_the_redis_clock(
    redis_url: str, manager: Manager, tmp_path: Path
) -> None:
    """Each server used its own clock, so one that was ahead sent early or late."""
    (tmp_path / "sitecustomize.py").write_text(AN_HOUR_AHEAD, encoding="utf-8")
    with (
        Gateway(redis_url, env={"PYTHONPATH": str(tmp_path)}) as gateway,
        connect(redis_url) as client,
    ):
        queue = Queue(gateway.client, new_topic())
        before = now_ms(client)
        sent = queue.send(delay_ms=300)
        assert before <= sent["produceTime"] <= now_ms(client) + 1
        (found,) = queue.poll()
        assert found["triggerTime"] == sent["triggerTime"] == sent["produceTime"] + 300
        assert sent["triggerTime"] <= now_ms(client) < sent["triggerTime"] + 60_000


def test_c20_cross_site_requests_cannot_take_it_out_of_service(client: httpx.Client) -> None:
    answer = client.get(f"{HEALTH}/offline", headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 403
    assert client.get(f"{HEALTH}/status").status_code == 200
