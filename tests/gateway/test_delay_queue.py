"""delay-queue's API: its requests and responses, and its defects by number.

Tested elsewhere: D3 and D9 (the loops that move jobs: the manager's, see
tests/integration/test_manager_services.py) and D5 (keys: tests/unit). D7 is a handler in the same
process that finished jobs unnoticed; this API has none.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import httpx
import pytest
from redis import Redis

from lisa import Producer
from lisa.gateway.compat.delay_queue import id_of, may_be_of
from tests.gateways import Gateway, new_topic, state, stored
from tests.servers import connect, wait_until

OK = {"code": 0, "msg": "操作成功！"}  # noqa: RUF001  the original's very text
ERROR = "系统异常，请联系管理员"  # noqa: RUF001  as above


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def push(client: httpx.Client, topic: str, **more: Any) -> str:
    form = {"topic": topic, "delayTime": str(now_ms()), "ttrTime": "60", "message": "{}", **more}
    answer = client.post("/delay-queue/push", data=form)
    assert answer.status_code == 200
    found = answer.json()
    assert {**found, "id": None} == {**OK, "id": None}
    return str(found["id"])


def pop(client: httpx.Client, topic: str) -> Any:
    answer = client.get(f"/delay-queue/pop/{topic}").json()
    data = answer.pop("data")
    assert answer == OK
    return data


def popped(client: httpx.Client, topic: str) -> dict[str, Any]:
    """Pop until there is a job."""
    found: list[dict[str, Any]] = []

    def is_popped() -> bool:
        found.extend(filter(None, [pop(client, topic)]))
        return bool(found)

    wait_until(is_popped)
    return found[0]


def finish(client: httpx.Client, message_id: str) -> Any:
    return client.post("/delay-queue/finish", data={"id": message_id}).json()


def delete(client: httpx.Client, message_id: str) -> Any:
    return client.post("/delay-queue/delete", data={"id": message_id}).json()


def refusal(answer: Any, part: str) -> None:
    assert set(answer) == {"code", "msg", "exception"}
    assert (answer["code"], answer["msg"]) == (1, ERROR)
    assert part in answer["exception"]


def test_a_job_is_pushed_popped_and_finished(client: httpx.Client, producer: Producer) -> None:
    topic, due = new_topic(), now_ms() - 5
    message_id = push(client, topic, delayTime=str(due), ttrTime="7", message='{"号": 1}')
    assert message_id.isdigit()
    job = {"topic": topic, "delayTime": due, "ttrTime": 7, "message": '{"号": 1}'}
    assert popped(client, topic) == {"id": message_id, **job}
    assert pop(client, topic) is None
    for _ in range(2):  # the second call repeats one whose response was lost
        assert finish(client, message_id) == OK
        assert state(producer, topic, message_id) == "acked"


def in_parts(content: bytes, name: str = 'name="topic"') -> bytes:
    """A multipart form with one field, and the boundary `x`."""
    head = b"--x\r\nContent-Disposition: form-data; " + name.encode()
    return head + b"\r\n\r\n" + content + b"\r\n--x--\r\n"


def push_parts(client: httpx.Client, body: bytes) -> httpx.Response:
    headers = {"content-type": "multipart/form-data; boundary=x"}
    return client.post("/delay-queue/push", content=body, headers=headers)


def test_a_multipart_form_is_read_like_any_other(client: httpx.Client) -> None:
    """Spring sends one if a value is not text. Uploaded files are ignored."""
    topic, text = new_topic(), "多 parts\r\n--boundary\r\n"
    form = {"topic": topic, "delayTime": str(now_ms()), "ttrTime": "30", "message": text}
    parts: Any = {name: (None, value) for name, value in form.items()}
    parts["message.txt"] = ("message.txt", "a file")
    answer = client.post("/delay-queue/push", files=parts)
    assert (answer.status_code, answer.json()["code"]) == (200, 0)
    assert popped(client, topic)["message"] == text


def test_a_part_of_a_form_is_text_even_if_it_is_multipart_itself(client: httpx.Client) -> None:
    """Reading nested parts would take seconds, and forms are read before the token is checked."""
    nested = "".join(
        f"Content-Type: multipart/mixed; boundary={i:x}\r\n\r\n--{i:x}\r\n" for i in range(3_000)
    )
    answer = push_parts(client, in_parts(b"none", f'name="other"\r\n{nested}'))
    assert answer.status_code == 200
    refusal(answer.json(), "Required request parameter 'topic' is not present")


@pytest.mark.parametrize(
    ("body", "part"),
    [
        (in_parts(b"t", "name*=x''y; name*zz=1"), "'topic' is not present"),
        (in_parts(b"t", "name*=none''topic"), "'delayTime' is not present"),
        (in_parts(b"t", "name=\"topic\"; filename*=none''f"), "'topic' is not present"),
        (in_parts(b"t", "name*0*=utf-8''to; name*=x''y; name*zz=1"), "cannot be parsed"),
        (in_parts(b"t").replace(b"--x", b"--y"), "cannot be parsed"),
        (in_parts(b"t").removesuffix(b"--x--\r\n") * 101, "cannot be parsed"),
        (in_parts(b"t", '"' + ";" * 60_000), "cannot be parsed"),
        (b"", "cannot be parsed"),
    ],
)
def test_a_multipart_form_that_cannot_be_read(client: httpx.Client, body: bytes, part: str) -> None:
    answer = push_parts(client, body)
    assert answer.status_code == 200
    refusal(answer.json(), part)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"topic": "a b"}, "topic"),
        ({"delayTime": "tomorrow"}, "delayTime"),
        ({"delayTime": "2026-02-30 10:00:00"}, "delayTime"),
        ({"delayTime": "99999999999999999"}, "9999"),
        ({"ttrTime": "-1"}, "ttrTime"),
        ({"message": None}, "'message' is not present"),
        ({"message": "x" * 1_100_000}, "max_body_bytes"),
    ],
)
def test_an_invalid_push_is_rejected_with_the_reason(
    client: httpx.Client, change: dict[str, Any], part: str
) -> None:
    form = {"topic": new_topic(), "delayTime": "0", "ttrTime": "5", "message": "m", **change}
    answer = client.post("/delay-queue/push", data={k: v for k, v in form.items() if v is not None})
    assert answer.status_code == 200
    refusal(answer.json(), part)


def test_unknown_ids_are_reported_except_by_finish(client: httpx.Client) -> None:
    """In the original, `finish` deletes without looking, and there is no `delete`."""
    assert finish(client, "123") == OK
    refusal(delete(client, "123"), "there is no job 123")
    refusal(client.post("/delay-queue/finish").json(), "'id' is not present")


@pytest.fixture
def brief(redis_url: str) -> str:
    """A topic with an ack timeout shorter than a job's, because a new manager reclaims nothing
    before that timeout has passed.
    """
    topic = new_topic()
    with connect(redis_url) as server:
        server.hset(f"lisa:{{{topic}}}:options", "ack_timeout", "300")
    return topic


def test_d1_a_job_popped_by_a_dead_client_is_redelivered(client: httpx.Client, brief: str) -> None:
    """There a job was removed from the list before it was recorded as taken."""
    message_id = push(client, brief, ttrTime="1")
    assert popped(client, brief)["id"] == message_id
    began = time.monotonic()
    assert popped(client, brief)["id"] == message_id
    assert time.monotonic() - began >= 0.9  # the ttr


def test_the_first_pop_of_a_new_topic_returns_a_due_job(client: httpx.Client) -> None:
    """Also with a lease of no seconds, which counts as one."""
    topic = new_topic()
    message_id = push(client, topic, ttrTime="0")
    job = pop(client, topic)
    assert (job["id"], job["ttrTime"]) == (message_id, 0)
    assert popped(client, topic)["id"] == message_id


def test_d2_a_finished_job_is_not_redelivered(
    client: httpx.Client, server: Redis, brief: str
) -> None:
    """There `finish` between the steps of `pop` brought the job back to life."""
    ids = [push(client, brief, ttrTime="1") for _ in range(20)]
    with ThreadPoolExecutor(4) as pool:
        finished = pool.map(lambda _: finish(client, popped(client, brief)["id"]), ids)
        assert list(finished) == [OK] * 20
    assert pop(client, brief) is None
    assert not list(server.scan_iter(f"lisa:{{{brief}}}:body:*"))


def test_d4_attempts_are_limited(client: httpx.Client, server: Redis) -> None:
    """There a job was redelivered without limit; the pauses are those planned in its docs."""
    topic = new_topic()
    message_id = push(client, topic)
    policy: Any = server.hget(f"lisa:{{{topic}}}:policy", message_id)
    numbers = policy.decode().replace(";", ",").split(",")
    minutes = [0, 0, 2, 10, 10, 60, 120, 360, 900]
    assert [one * 60_000 for one in minutes] == [int(one) for one in numbers if one.isdigit()]


def test_d6_push_returns_the_id_and_a_job_can_be_deleted(
    client: httpx.Client, producer: Producer
) -> None:
    topic = new_topic()
    message_id = push(client, topic, delayTime=str(now_ms() + 60_000))
    for _ in range(2):
        assert delete(client, message_id) == OK
        assert state(producer, topic, message_id) == "cancelled"
    other = push(client, topic)
    assert popped(client, topic)["id"] == other
    refusal(delete(client, other), "in_flight")


def test_d8_ids_are_unique_without_numbered_machines() -> None:
    now_ms = time.time_ns() // 1_000_000
    ids = {id_of("orders", now_ms + i // 200) for i in range(2_000)}
    # About two hundred per millisecond, of 16,384: after a collision, the send is repeated.
    assert len(ids) > 1_900
    assert all(may_be_of("orders", one) and int(one) < 2**63 for one in ids)
    assert sum(may_be_of(f"topic-{i}", min(ids)) for i in range(500)) < 20


@pytest.mark.parametrize(
    "config", ["", pytest.param("delay-queue-zone: Europe/Berlin", marks=pytest.mark.full)]
)
def test_d10_dates_are_in_the_configured_time_zone(
    redis_url: str, producer: Producer, config: str
) -> None:
    """There the annotation had GMT-8 and the file GMT+8; China's time was meant."""
    text = f"lisa-delay-queue: {{gateway-server: {{{config}}}}}"
    with Gateway(redis_url, config=text) as gateway:
        topic = new_topic()
        message_id = push(gateway.client, topic, delayTime="2031-01-31 10:00:00")
    found = stored(producer, topic, message_id)
    zone = timezone(timedelta(hours=1 if config else 8))
    assert found.due == datetime(2031, 1, 31, 10, tzinfo=zone).astimezone(UTC)


def test_messages_from_other_apis_are_not_jobs_before_they_are_popped(
    client: httpx.Client, producer: Producer
) -> None:
    topic = new_topic()
    waiting = producer.send(
        topic, 1, id=id_of(topic, time.time_ns() // 1_000_000), delay=timedelta(minutes=1)
    )
    assert finish(client, waiting) == OK
    refusal(delete(client, waiting), "there is no job")
    assert state(producer, topic, waiting) == "waiting"
    ready = producer.send(topic, "x")
    assert popped(client, topic)["id"] == ready
    refusal(delete(client, ready), "there is no job")
    assert finish(client, ready) == OK
    assert state(producer, topic, ready) == "acked"


@pytest.mark.parametrize("ttr", ["soon", "999999999"])
def test_an_invalid_ttr_time_header_is_ignored(
    client: httpx.Client, producer: Producer, server: Redis, ttr: str
) -> None:
    """A sender may write any header through another API."""
    topic = new_topic()
    message_id = producer.send(topic, "x", headers={"ttrTime": ttr})
    assert popped(client, topic)["id"] == message_id
    found = stored(producer, topic, message_id)
    assert (found.state, found.attempts) == ("in_flight", 1)
    assert not server.keys(f"lisa:{{{topic}}}:g:*:leases")


def test_head_and_cross_site_requests_pop_no_job(client: httpx.Client) -> None:
    topic = new_topic()
    message_id, path = push(client, topic), f"/delay-queue/pop/{topic}"
    assert client.head(path).status_code == 405
    refused = client.get(path, headers={"sec-fetch-site": "cross-site"})
    assert refused.status_code == 403
    refusal(refused.json(), "another site")
    assert popped(client, topic)["id"] == message_id
