"""A message's life in Camellia's API, by the numbers of the original's defects (C1 to C20).

C14's cost (the whole ready list is read every 100 ms) has no test here: it is in its scheduler, and
Lisa's expirer has its own tests. C17 is in its Java clients; the test of that number covers what a
server can do for them.
"""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from lisa import Manager, Producer
from lisa.core.settings import GatewaySettings
from lisa.core.transitions.enqueue import OnDuplicate, Sent
from lisa.core.transitions.inspect import Inspection
from lisa.embedded import EmbeddedServer
from lisa.gateway.compat.camellia import queue as camellia_queue
from lisa.producer import Outgoing
from lisa.producer.report import SendOutcome
from tests.gateway.camellia_client import (
    HEALTH,
    QUEUE,
    Queue,
    now_ms,
)
from tests.gateways import NO_TLS, Gateway, new_topic
from tests.servers import connect, wait_until

if TYPE_CHECKING:
    from pathlib import Path


AN_HOUR_AHEAD = """
import time

_time, _time_ns = time.time, time.time_ns
time.time = lambda: _time() + 3600
time.time_ns = lambda: _time_ns() + 3_600_000_000_000
"""

TOKENS = """
tokens:
  - {name: sender, token: sender-sender-sender, scopes: [produce], topics: [mine-*]}
  - {name: worker, token: worker-worker-worker, scopes: [consume]}
  - {name: root, token: root-root-root-root}
"""


def body_key(topic: str, message_id: str) -> str:
    return f"lisa:{{{topic}}}:body:{message_id}"


def test_c01_a_send_is_atomic(redis_url: str, manager: Manager) -> None:
    """Body, place and topic were written separately: a crash in between lost the message, because
    a repeated send was then rejected as a duplicate."""
    topic = new_topic()
    ids = [f"m{i}" for i in range(2_000)]
    sent: list[str] = []

    def send_until_it_dies(url: str) -> None:
        with httpx.Client(base_url=url, verify=NO_TLS) as client, suppress(httpx.TransportError):
            for one in ids:
                Queue(client, topic).send(one, msgId=one)
                sent.append(one)

    with Gateway(redis_url) as gateway:
        thread = threading.Thread(target=send_until_it_dies, args=(gateway.url,))
        thread.start()
        wait_until(lambda: len(sent) > 50)
        gateway.process.kill()
        thread.join(30)
        gateway.process.wait()
    assert 50 < len(sent) < len(ids)
    with Gateway(redis_url) as gateway:
        queue = Queue(gateway.client, topic)
        again = ids[: len(sent) + 1]  # the last reply was lost, or the request never arrived
        for one in again:
            queue.send(one, msgId=one)
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

    async def look(_topic: str, _message_id: str) -> Inspection:
        return Inspection(b"", None, None, None, [])

    async def now_us() -> int:
        return 1_000_000

    settings = GatewaySettings()
    hub: Any = SimpleNamespace(
        settings=settings,
        groups={},
        sender=SimpleNamespace(offer=offer),
        settler=SimpleNamespace(look=look),
    )
    clock: Any = SimpleNamespace(now_us=now_us)
    sent = asyncio.run(
        camellia_queue.Queue(hub, clock).send(
            "topic", "text", message_id="mine", delay_ms=0, ttl_ms=-1, max_retry=-1, trace={}
        )
    )
    assert (sent.msg_id, sent.msg, sent.status) == ("mine", "text", 2)
    assert not outcomes


def test_c02_an_id_without_a_state_gets_a_response(queue: Queue, redis_url: str) -> None:
    """A message has no state while its only group is being removed."""
    queue.send(delay_ms=60_000, msgId="lone")
    with connect(redis_url) as redis_:
        redis_.zrem(f"lisa:{{{queue.topic}}}:waiting", "lone")
        body = queue.post("sendMsg", msg="text", delayMillis=0, msgId="lone")
        assert body == {"code": 500, "msg": None, "delayMsg": None}
        redis_.delete(body_key(queue.topic, "lone"))
    assert queue.send(msgId="lone")["status"] == 2


def test_c03_a_deleted_message_is_not_redelivered(queue: Queue) -> None:
    """Status was read, changed and written back, so a pull or ack could undo a delete."""
    ids = [queue.send(msgId=f"m{i}")["msgId"] for i in range(200)]
    pulled: list[str] = []

    def pull_all() -> None:
        while found := queue.pull(batch=3):
            pulled.extend(one["msgId"] for one in found)

    def ack_all() -> list[int]:
        return [queue.settle(one, ack=True) for one in reversed(ids)]

    with ThreadPoolExecutor(3) as pool:
        pulls, acks = pool.submit(pull_all), pool.submit(ack_all)
        deleted = [one for one in ids if queue.delete(one) == 200]
        pulls.result()
        acked = {one for one, code in zip(reversed(ids), acks.result(), strict=True) if code == 200}
    assert deleted
    assert not acked.intersection(deleted)
    assert {queue.status(one) for one in deleted} == {7}
    assert all(queue.settle(one, ack=False) == 404 for one in deleted)
    assert queue.pull() == []


def test_c04_acks_and_nacks_count_for_deliveries_only(queue: Queue, redis_url: str) -> None:
    """A nack put any id into the ready queue, even a waiting one (early) or a ready one (twice);
    an ack ended messages that were not delivered, or did not exist."""
    assert queue.settle("nobody", ack=True) == 404
    assert queue.settle("nobody", ack=False) == 404
    waiting = queue.send(delay_ms=400)["msgId"]
    for ack in (True, False):
        assert queue.settle(waiting, ack=ack) == 404
        assert queue.status(waiting) == 1
    (pulled,) = queue.poll(batch=10)
    with connect(redis_url) as client:
        assert now_ms(client) >= pulled["triggerTime"]
    assert pulled["retry"] == 1
    assert queue.settle(waiting, ack=True) == 200
    ready = queue.send()["msgId"]
    for ack in (True, False):
        assert queue.settle(ready, ack=ack) == 404
    assert [one["msgId"] for one in queue.pull(batch=10)] == [ready]
    assert queue.settle(ready, ack=True) == 200
    assert queue.settle(ready, ack=False) == 404
    assert queue.status(ready) == 4


def test_c04_a_nack_after_the_ack_timeout_adds_nothing(queue: Queue) -> None:
    """It was in the ready queue twice."""
    one = queue.send()["msgId"]
    assert queue.pull(ackTimeoutMillis=100)
    wait_until(lambda: queue.status(one) == 2)
    assert queue.settle(one, ack=False) == 404
    assert [found["retry"] for found in queue.pull(batch=10)] == [2]
    assert queue.pull(batch=10) == []


def test_c05_a_pull_skips_dead_entries(queue: Queue, redis_url: str) -> None:
    """A batch of ids without messages gave an empty response, although more were ready."""
    ids = [queue.send()["msgId"] for _ in range(12)]
    with connect(redis_url) as client:
        client.delete(*[body_key(queue.topic, one) for one in ids[:10]])
    assert [one["msgId"] for one in queue.pull(batch=5)] == ids[10:]


def test_c06_redelivered_messages_wake_a_poll(queue: Queue) -> None:
    """Nacks and ack timeouts woke no poll: it slept to its end with a message ready."""
    one = queue.send()["msgId"]
    assert queue.pull()
    with ThreadPoolExecutor(1) as pool:
        for come_back in (lambda: queue.settle(one, ack=False), lambda: None):
            began = time.monotonic()
            poll = pool.submit(queue.poll, 20_000)
            time.sleep(0.1)  # it is waiting by then; otherwise it finds the message anyway
            come_back()
            (found,) = poll.result()
            # The latter is redelivered by the ack timeout of 2 s, plus one second for the manager.
            assert time.monotonic() - began < 10
            assert found["msgId"] == one


def test_c07_a_poll_of_a_disconnected_client_takes_no_message(
    queue: Queue, client: httpx.Client
) -> None:
    """The message was sent to a dead connection, and with maxRetry 0 it was lost."""
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            client.post(f"{QUEUE}/longPollingMsg", data={"topic": queue.topic}, timeout=0.1)
    sent = queue.send(maxRetry=0)
    (found,) = queue.poll()
    assert found == {**sent, "retry": 1, "status": 3}


def test_c07_no_wake_up_is_missed(queue: Queue) -> None:
    """A message sent between a poll's first check and its sleep did not wake it."""
    with ThreadPoolExecutor(1) as pool:
        for i in range(100):
            poll = pool.submit(queue.poll, 20_000)
            sent = queue.send(f"m{i}")
            (found,) = poll.result(10)  # half of its sleep
            assert found["msgId"] == sent["msgId"]
            assert queue.settle(found["msgId"], ack=True) == 200


def test_c08_never_early(queue: Queue, redis_url: str) -> None:
    """Messages were up to 100 ms early, those with delays up to 100 ms immediate."""
    with connect(redis_url) as client:
        for delay_ms in (1, 5, 50, 100, 101, 250):
            queue.send(delay_ms=delay_ms)
        for _ in range(6):
            (found,) = queue.poll()
            assert now_ms(client) >= found["triggerTime"]
            late_by = now_ms(client) - found["triggerTime"]
            assert late_by < 5_000


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
        found = queue.get(one)
        assert found is not None
        assert found["retry"] == attempt


def test_c10_dead_messages_are_kept(queue: Queue, producer: Producer, redis_url: str) -> None:
    """The message was dropped, and its body deleted five minutes later."""
    one = queue.send("precious", maxRetry=0)["msgId"]
    assert queue.pull()
    assert queue.settle(one, ack=False) == 200
    found = queue.get(one)
    assert found is not None
    assert (found["status"], found["msg"]) == (6, "precious")
    assert queue.delete(one) == 404
    kept = producer.get(queue.topic, one)
    assert kept is not None
    assert (kept.state, kept.body, kept.reason) == ("garbage", "precious", "ackMsg with ack=false")
    with connect(redis_url) as client:
        assert client.ttl(body_key(queue.topic, one)) == -1


def test_c11_retries_can_have_delays(redis_url: str, manager: Manager, tmp_path: Path) -> None:
    """All retries were used up within milliseconds."""
    config = "lisa-delay-queue: {camellia: {retry-delays: '300ms,600ms'}}"
    with (
        Gateway(redis_url, config=config, directory=tmp_path) as gateway,
        connect(redis_url) as client,
    ):
        queue = Queue(gateway.client, new_topic())
        one = queue.send(maxRetry=2)["msgId"]
        for pause_ms in (300, 600):
            assert queue.poll()
            before = now_ms(client)
            assert queue.settle(one, ack=False) == 200
            assert queue.status(one) == 1  # it is waiting
            assert queue.pull() == []
            wait_until(lambda: queue.status(one) == 2)
            assert now_ms(client) >= before + pause_ms
        assert queue.poll()
        assert queue.settle(one, ack=False) == 200
        assert queue.status(one) == 6


def test_c14_expiry_skips_nothing(queue: Queue) -> None:
    """The ready list was walked by position while entries were taken out of it."""
    ids = [queue.send(ttlMillis=1)["msgId"] for _ in range(250)]
    lasting = queue.send()
    wait_until(lambda: queue.status(ids[-1]) == 5)
    assert [one["msgId"] for one in queue.poll(batch=500, ackTimeoutMillis=60_000)] == [
        lasting["msgId"]
    ]
    assert {queue.status(one) for one in ids} == {5}
    assert queue.info()["readyQueueSize"] == 0


def test_c15_topic_names_do_not_collide(client: httpx.Client) -> None:
    """Topic and id were joined by a bar; a brace in a topic moved its hash tag."""
    stem = new_topic()
    for topic in (f"{stem}|b", f"{stem}}}", f"{{{stem}", f"{stem} x"):
        body = Queue(client, topic).post("sendMsg", msg="m", delayMillis=0, msgId="c")
        assert body["code"] == 400
    plain, other = Queue(client, stem), Queue(client, f"{stem}:b")
    for queue, message_id in ((plain, "b|c"), (plain, "b:c"), (plain, "}{"), (other, "c")):
        queue.send(f"{queue.topic} {message_id}", delay_ms=60_000, msgId=message_id)
    for queue, message_id in ((plain, "b|c"), (plain, "b:c"), (plain, "}{"), (other, "c")):
        found = queue.get(message_id)
        assert found is not None
        assert found["msg"] == f"{queue.topic} {message_id}"


@pytest.mark.parametrize("release", ["true", "false", ""])
def test_c16_a_deleted_message_disappears_immediately(
    queue: Queue, redis_url: str, release: str
) -> None:
    """Its id remained in the waiting or the ack queue until it was due."""
    ids = [queue.send(delay_ms=delay)["msgId"] for delay in (60_000, 0)]
    held = queue.pull()[0]["msgId"]
    assert held == ids[1]
    assert queue.info()["ackQueueSize"] == 1
    for one in ids:
        assert queue.post("deleteMsg", msgId=one, release=release)["code"] == 200
        assert queue.status(one) == 7
        assert queue.delete(one) == 404  # as in the original: it is not alive
    assert queue.pull() == []
    info = queue.info()
    sizes = [info[f"{name}QueueSize"] for name in ("waiting", "ready", "ack")]
    assert sizes == [0, 0, 0]
    with connect(redis_url) as client:
        left = {key.decode() for key in client.scan_iter(f"lisa:{{{queue.topic}}}:*")}
        assert not [key for key in left if ":body:" in key or key.endswith((":waiting", ":leases"))]


def test_c17_in_an_outage_requests_get_503_and_polls_keep_waiting() -> None:
    """Clients looped without a pause while the server failed immediately; polls ended."""
    with EmbeddedServer() as server, Manager(server.url), Gateway(server.url) as gateway:
        queue = Queue(gateway.client, new_topic())
        queue.poll(wait_ms=1)
        with ThreadPoolExecutor(1) as pool:
            poll = pool.submit(queue.poll, 25_000)
            time.sleep(0.2)
            server.kill()
            form = {"topic": queue.topic, "msg": "m", "delayMillis": 0, "msgId": "i"}
            for name in ("sendMsg", "getMsg"):
                began = time.monotonic()
                answer = gateway.client.post(f"{QUEUE}/{name}", data=form)
                took_s = time.monotonic() - began
                assert (answer.status_code, answer.json()) == (503, {"code": 500, "msg": None})
                assert int(answer.headers["retry-after"]) >= 1
                assert 1 < took_s < 5  # the gateway waits for 3 s, the SDK for 5 s
            assert not poll.done()
            server.restart()
            wait_until(lambda: gateway.client.get("/healthz").status_code == 200)
            sent = queue.send()
            assert [one["msgId"] for one in poll.result(30)] == [sent["msgId"]]


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


def test_c20_tokens_guard_every_path(redis_url: str, manager: Manager, tmp_path: Path) -> None:
    """No path required authentication, not even the switch that takes a server out of service."""
    file = tmp_path / "tokens.yml"
    file.write_text(TOKENS, encoding="utf-8")
    topic = f"mine-{new_topic()}"
    form = {
        "topic": topic,
        "msg": "m",
        "delayMillis": 0,
        "msgId": "i",
        "ack": "true",
        "longPollingTimeoutMillis": 1,
    }
    posts = ["sendMsg", "deleteMsg", "pullMsg", "longPollingMsg", "ackMsg", "getMsg"]
    gets = ["getMonitorData", "getTopicInfo", "getTopicInfoList", "getMonitorString", "metrics"]
    with Gateway(redis_url, "--tokens-file", str(file)) as gateway:

        def code(method: str, path: str, name: str | None) -> int:
            headers = {"Authorization": f"Bearer {'-'.join([name] * 3)}"} if name else {}
            if name == "root":
                headers = {"Authorization": "Bearer root-root-root-root"}
            sent = {"data": form} if method == "POST" else {"params": {"topic": topic}}
            answer = gateway.client.request(method, path, headers=headers, **sent)
            if answer.status_code in (401, 403):
                assert answer.json()["code"] == answer.status_code
            return answer.status_code

        for name in posts:
            assert code("POST", f"{QUEUE}/{name}", None) == 401
        for name in gets:
            assert code("GET", f"{QUEUE}/{name}", None) == 401
            assert code("GET", f"{QUEUE}/{name}", "sender") == 200
        for name in ("online", "offline"):
            assert code("GET", f"{HEALTH}/{name}", None) == 401
            assert code("GET", f"{HEALTH}/{name}", "worker") == 403
        assert code("GET", f"{HEALTH}/online", "root") == 200
        assert code("GET", f"{HEALTH}/status", None) == 200
        allowed = {
            "sender": {"sendMsg", "deleteMsg", "getMsg"},
            "worker": {"pullMsg", "longPollingMsg", "ackMsg", "getMsg"},
            "root": set(posts),
        }
        for name, paths in allowed.items():
            for path in posts:
                assert code("POST", f"{QUEUE}/{path}", name) == (200 if path in paths else 403)
        form["topic"] = topic = new_topic()
        assert code("POST", f"{QUEUE}/sendMsg", "sender") == 403  # not one of its topics


def test_c20_compat_auth_none_applies_to_local_clients_only(redis_url: str, tmp_path: Path) -> None:
    """A stock client sends no token."""
    config = """
lisa-delay-queue:
  gateway-server: {token: only-for-the-others, compat-auth: none}
"""
    with Gateway(redis_url, config=config, directory=tmp_path) as gateway:
        assert Queue(gateway.client, new_topic()).send(delay_ms=60_000)["status"] == 1


def test_c20_cross_site_requests_cannot_take_it_out_of_service(client: httpx.Client) -> None:
    answer = client.get(f"{HEALTH}/offline", headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 403
    assert client.get(f"{HEALTH}/status").status_code == 200
