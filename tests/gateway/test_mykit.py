"""mykit-delay's API: its requests and responses, and its defects by number.

Not tested here: M3 (bucket heads) and M5 (locks), which Lisa does not have, and the half of M7
about one thread for all topics (tests/integration/test_manager_daemon.py).
"""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis

from lisa import Consumer, Producer
from lisa.embedded import EmbeddedServer
from tests.gateways import Gateway, new_topic, state, stored
from tests.servers import connect, wait_until

FIELDS = {"success", "data", "message", "code", "includes", "excludes", "onlyData", "callback"}


def ok(answer: httpx.Response) -> Any:
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert set(found) == FIELDS
    assert (found["success"], found["code"], found["message"]) == (True, 200, None), found
    return found["data"]


def refused(answer: httpx.Response, part: str, status: int = 200, code: int = 500) -> None:
    assert answer.status_code == status, answer.text
    found = answer.json()
    assert set(found) == FIELDS
    assert (found["success"], found["code"], found["data"]) == (False, code, None)
    assert part in found["message"]


def push(client: httpx.Client, topic: str, **more: Any) -> str:
    job = {"topic": topic, "delay": 0, "body": "b", **more}
    return str(ok(client.post("/mykit/push", json=job)))


def get(client: httpx.Client, topic: str, timeout: int = 10_000) -> Any:
    return ok(client.get(f"/mykit/get/{topic}", params={"timeout": timeout}))


def finish(client: httpx.Client, message_id: str) -> httpx.Response:
    return client.get("/mykit/finish", params={"jobId": message_id})


def delete(client: httpx.Client, message_id: str, **more: str) -> httpx.Response:
    return client.get("/mykit/delete", params={"jobId": message_id} | more)


def test_a_job_is_pushed_handed_out_and_finished(client: httpx.Client, producer: Producer) -> None:
    topic, created = new_topic(), time.time_ns() // 1_000_000
    job: dict[str, Any] = {"subtopic": "sub", "bizKey": "order-42", "delay": 100, "ttl": 7}
    job |= {"topic": topic, "body": '{"单": 1}', "createTime": created}
    message_id = push(client, **job, status=0)
    assert message_id.startswith(f"{topic}:order-42:")
    found = stored(producer, topic, message_id)
    assert found.due_ms == created + 100
    assert (found.headers["bizKey"], found.headers["subtopic"]) == ("order-42", "sub")
    assert get(client, topic) == job | {"id": message_id, "status": 2, "buckedName": None}
    assert time.time_ns() // 1_000_000 >= created + 100
    for _ in range(2):
        assert ok(finish(client, message_id)) is None
        assert state(producer, topic, message_id) == "acked"


def test_a_job_needs_only_a_topic(client: httpx.Client) -> None:
    topic, before = new_topic(), time.time_ns() // 1_000_000
    message_id = ok(client.post("/mykit/push", json={"topic": topic, "buckedName": "x", "new": 1}))
    nulls = dict.fromkeys(("id", "delay", "ttl", "status", "createTime", "body"))
    assert ok(client.post("/mykit/push", json={"topic": new_topic(), **nulls}))
    assert message_id.startswith(f"{topic}:")
    job = get(client, topic)
    assert abs(job.pop("createTime") - before) < 60_000
    expected = {"body": None, "bizKey": None, "subtopic": None, "delay": 0, "ttl": 0}
    assert job.items() >= expected.items()


@pytest.mark.parametrize("parameter", ["jobId", "id"])
def test_a_job_is_deleted_by_its_id_alone(
    client: httpx.Client, producer: Producer, parameter: str
) -> None:
    topic = new_topic() + ":with:colons"
    ids = [push(client, topic, delay=60_000, **own) for own in ({}, {"id": f"own-{topic}"})]
    for message_id in ids:
        assert ok(client.get("/mykit/delete", params={parameter: message_id})) is None
        assert state(producer, topic, message_id) == "cancelled"


def test_an_id_in_two_topics_is_rejected(client: httpx.Client, producer: Producer) -> None:
    one, two = new_topic("one"), new_topic("two")
    message_id = f"same-{one}"
    for topic in (one, two):
        push(client, topic, id=message_id, delay=60_000)
    refused(delete(client, message_id), "exists in several topics")
    ok(delete(client, message_id, topic=two))
    states = [state(producer, topic, message_id) for topic in (one, two)]
    assert states == ["waiting", "cancelled"]


def test_messages_from_other_apis_are_no_jobs_but_delivered(
    client: httpx.Client, producer: Producer
) -> None:
    topic = new_topic()
    message_id = producer.send(topic, {"n": 1}, id=f"{topic}:x", delay=timedelta(minutes=1))
    refused(delete(client, message_id), "there is no job")
    assert state(producer, topic, message_id) == "waiting"
    producer.send(topic, {"n": 1}, headers={"bizKey": "k"})
    job = get(client, topic)
    assert (job["body"], job["bizKey"], job["status"]) == ('{"n":1}', "k", 2)
    assert ok(finish(client, job["id"])) is None
    assert state(producer, topic, job["id"]) == "acked"


def test_a_message_held_by_a_consumer_cannot_be_finished(
    client: httpx.Client, producer: Producer, redis_url: str
) -> None:
    topic = new_topic()
    with Consumer(redis_url) as consumer:
        message_id = producer.send(topic, 1)
        (held,) = consumer.pull(topic, wait=timedelta(seconds=10))
        refused(finish(client, message_id), "there is no job")
        done = client.post("/delay-queue/finish", data={"id": message_id}).json()
        assert "exception" not in done, "the original knows no id that cannot be finished"
        assert state(producer, topic, message_id) == "in_flight"
        held.ack()


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"topic": None}, "topic"),
        ({"topic": "a b"}, "not allowed"),
        ({"status": 3}, "status must be 0 or 5"),
        ({"delay": -1}, "delay"),
        ({"delay": 10**15}, "9999"),
        ({"body": {"a": 1}}, "not a job"),
        ({"id": "x" * 300}, "256"),
        ({"body": "x" * 1_100_000}, "max_body_bytes"),
    ],
)
def test_an_invalid_push_is_rejected_with_the_reason(
    client: httpx.Client, change: dict[str, Any], part: str
) -> None:
    refused(client.post("/mykit/push", json={"topic": new_topic(), "body": "b", **change}), part)


def test_invalid_json_and_calls_without_an_id_are_rejected(client: httpx.Client) -> None:
    for content in (b"", b"{", b"[]", b"\xff", b"null", b'{"x":' + b"[" * 5000):
        refused(client.post("/mykit/push", content=content), "not a job")
    for path in ("delete", "finish", "reStoreJob"):
        refused(client.get(f"/mykit/{path}"), "jobId")


def test_status_5_is_accepted(client: httpx.Client, producer: Producer) -> None:
    topic, created = new_topic(), time.time_ns() // 1_000_000 - 60_000
    message_id = push(client, topic, id="r", status=5, createTime=created, delay=1_000)
    assert get(client, topic)["createTime"] == created
    assert state(producer, topic, message_id) == "in_flight"


def test_m1_deleting_a_job_keeps_the_others(client: httpx.Client, producer: Producer) -> None:
    """There the oldest ready job was popped, and the named one remained."""
    topic = new_topic()
    get(client, topic, timeout=0)
    ids = [push(client, topic, id=f"{topic}:{i}") for i in range(3)]
    wait_until(lambda: state(producer, topic, ids[2]) == "ready")
    ok(delete(client, ids[2]))
    assert [get(client, topic)["id"] for _ in range(2)] == ids[:2]
    assert get(client, topic, timeout=0) is None


def test_m2_an_unfinished_job_is_redelivered(
    client: httpx.Client, producer: Producer, server: Redis
) -> None:
    """There it was marked as finished when the delivery failed."""
    topic = new_topic()
    mapping: Any = {"ack_timeout": "300", "retry_delays": "0"}
    server.hset(f"lisa:{{{topic}}}:options", mapping=mapping)
    message_id = push(client, topic)
    for _ in range(2):
        assert get(client, topic)["id"] == message_id
    wait_until(lambda: state(producer, topic, message_id) == "garbage")
    ok(client.get("/mykit/reStoreJob", params={"jobId": message_id}))  # reads no archive
    assert get(client, topic)["id"] == message_id


def test_m4_the_same_id_is_one_job_until_that_has_ended(client: httpx.Client) -> None:
    """There a second push was put into another bucket, and both were delivered."""
    topic = new_topic()
    job = f"{topic}:1"
    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(lambda _: push(client, topic, id=job), range(8))) == {job}
    assert get(client, topic)["id"] == job
    assert get(client, topic, timeout=0) is None
    ok(finish(client, job))
    push(client, topic, id=job)
    ok(delete(client, job))
    push(client, topic, id=job)
    assert get(client, topic)["id"] == job


def test_m6_only_waiting_jobs_are_deleted_and_those_in_flight_finished(
    client: httpx.Client,
) -> None:
    topic = new_topic()
    refused(delete(client, "nothing:1"), "there is no job")
    refused(finish(client, "nothing:1"), "there is no job")
    refused(finish(client, push(client, topic, delay=60_000)), "not in flight")
    push(client, topic)
    refused(delete(client, get(client, topic)["id"]), "in_flight")


def test_m6_cross_site_requests_are_rejected(client: httpx.Client) -> None:
    for path in ("delete?jobId=1", "finish?jobId=1", "clearAll", "reStore", "get/t"):
        for headers in ({"sec-fetch-site": "cross-site"}, {"origin": "https://evil.example"}):
            answer = client.get(f"/mykit/{path}", headers=headers)
            refused(answer, "cross-site request", 403, 403)


def test_m6_restore_and_clear_all_need_the_scope_operate(
    redis_url: str, producer: Producer
) -> None:
    tokens = (
        "tokens:\n"
        "  - {name: ops, token: ops-0123456789abcdef}\n"
        "  - {name: app, token: app-0123456789abcdef, scopes: [produce, consume]}\n"
    )
    env = {"LISA_GATEWAY_SERVER__MYKIT_CLEAR_ALL": "true"}
    ops, app = ({"authorization": f"Bearer {name}-0123456789abcdef"} for name in ("ops", "app"))
    with Gateway(redis_url, tokens=tokens, env=env) as gateway:
        client, topic = gateway.client, new_topic()
        for path in ("clearAll", "reStore", "reStoreJob?jobId=a:b"):
            refused(client.get(f"/mykit/{path}"), "token", 401, 401)
            refused(client.get(f"/mykit/{path}", headers=app), "operate", 403, 403)
        job = {"topic": topic, "delay": 60_000}
        mine = [ok(client.post("/mykit/push", json=job, headers=app)) for _ in range(3)]
        other = producer.send(topic, 1, delay=timedelta(minutes=1))
        said = ok(client.get("/mykit/clearAll", headers=ops))
    assert (said.startswith("花费了"), said.endswith("行数据")) == (True, True)
    assert {state(producer, topic, message_id) for message_id in mine} == {"cancelled"}
    assert state(producer, topic, other) == "waiting"


def test_m8_without_create_time_the_server_clock_is_used(
    client: httpx.Client, producer: Producer, server: Redis
) -> None:
    """There the client's clock decided; here it does so only with `createTime`."""
    topic = new_topic()
    before, micros_before = server.time()
    message_id = push(client, topic, delay=60_000)
    after, micros_after = server.time()
    found = stored(producer, topic, message_id)
    pushed_ms = (found.due_ms or 0) - 60_000
    assert before * 1000 + micros_before // 1000 <= pushed_ms
    assert pushed_ms <= after * 1000 + micros_after // 1000 + 1


def test_clear_all_and_restores_are_disabled_by_default(client: httpx.Client) -> None:
    refused(client.get("/mykit/clearAll"), "mykit-clear-all")
    refused(client.get("/mykit/reStore?expire=perhaps"), "expire")
    for path in ("reStore", "reStoreJob?jobId=a:b", "reStoreJob?id=a:b", "reStore/a:b"):
        refused(client.get(f"/mykit/{path}"), "no archive is configured")


DOUBLE = """#!{python}
import json, os, sys, time
assert sys.argv[1:4] == ["-P", "-m", "lisa.cli.main"], sys.argv
with open({log!r}, "a") as log:
    log.write(json.dumps([sys.argv[4:], os.environ["LISA_REDIS_URL"]]) + "\\n")
while os.path.exists({hold!r}):
    time.sleep(0.01)
if os.path.exists({fail!r}):
    sys.exit("a line\\nlisa: there is no Java here")
print(json.dumps({{"dry_run": False, "counts": {{"restored": 3, "live": 1}}, "by_topic": {{}}}}))
"""


def test_restores_run_as_a_process_one_at_a_time(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uses a double of Python that restores nothing."""
    log, hold, fail = (tmp_path / name for name in ("log", "hold", "fail"))
    double = tmp_path / "python"
    paths = {"log": str(log), "hold": str(hold), "fail": str(fail)}
    double.write_text(DOUBLE.format(python=sys.executable, **paths))
    double.chmod(0o755)
    program = (
        "from lisa.core.daemon import processes;"
        f"processes.sys = type('', (), {{'executable': {str(double)!r}}});"
        "from lisa.cli.gateway import main; main()"
    )
    original = subprocess.Popen
    monkeypatch.setattr(
        "tests.gateways.subprocess.Popen",
        lambda words, **more: original([words[0], "-c", program, *words[3:]], **more),
    )
    gateway = Gateway(redis_url, "--archive", str(tmp_path))
    monkeypatch.undo()
    with gateway, ThreadPoolExecutor(1) as pool:
        client = gateway.client
        assert "恢复 3 行数据" in ok(client.get("/mykit/reStore"))
        ok(client.get("/mykit/reStore?expire=false"))
        ok(client.get("/mykit/reStore/a:b"))
        hold.touch()
        first = pool.submit(client.get, "/mykit/reStore")
        wait_until(lambda: len(log.read_text().splitlines()) == 4)
        refused(client.get("/mykit/reStore"), "already running", 503)
        hold.unlink()
        ok(first.result())
        fail.touch()
        refused(client.get("/mykit/reStore"), "the restore failed: lisa: there is no Java here")
    said = "\n".join(gateway.said)
    assert said.count("lisa.gateway.audit: token 'everyone' from 127.0.0.1: mykit.reStore ") == 3
    assert "mykit.reStore done=3" in said
    assert "mykit.reStoreJob id='a:b'" in said
    runs = [json.loads(line) for line in log.read_text().splitlines()]
    for words, url in runs:
        assert url == redis_url
        assert redis_url not in words  # where everyone on the machine could read its password
        assert words[words.index("--archive") + 1] == str(tmp_path)
    expiring, keeping, single = (words for words, _ in runs[:3])
    assert ("--expire" in expiring, "--expire" in keeping) == (True, False)
    assert single[single.index("--id") + 1] == "a:b"


@pytest.mark.slow
def test_jobs_of_an_emptied_server_are_restored(own_server: EmbeddedServer, tmp_path: Path) -> None:
    """With Spark: an archive is written, the server loses all, and everything is restored."""
    url, where, topic = own_server.url, str(tmp_path / "archive"), new_topic()
    archive = ("--redis", url, "pipeline", "archive", "--to", where, "--once")
    with Gateway(url, "--archive", where) as gateway, connect(url) as server:
        server.hset(f"lisa:{{{topic}}}:options", "journal", "1")
        client = gateway.client
        client.timeout = 600.0
        jobs = [push(client, topic, delay=600_000, bizKey=f"k{i}", body=str(i)) for i in range(3)]
        ok(delete(client, jobs[0]))
        command = [sys.executable, "-m", "lisa.cli.main", *archive]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        server.flushall()
        ok(client.get("/mykit/reStoreJob", params={"jobId": jobs[1]}))
        with Producer(url) as producer:
            assert [state(producer, topic, one) for one in jobs] == [None, "waiting", None]
            assert "恢复 1 行数据" in ok(client.get("/mykit/reStore"))
            found = stored(producer, topic, jobs[2])
        assert (found.state, found.body, found.headers["bizKey"]) == ("waiting", "2", "k2")
