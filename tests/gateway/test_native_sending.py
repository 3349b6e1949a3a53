"""The native API: messages arrive unchanged and once; invalid ones are rejected with a reason."""

import base64
import gzip
import json
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from redis import Redis

from lisa import Producer
from lisa.core.model.envelope import decode_body
from lisa.core.model.errors import InvalidMessage
from lisa.core.transitions.enqueue import Sent
from lisa.gateway.api.sending import Idempotency
from lisa.gateway.trace_context import trace_context, with_trace
from tests.gateway.native_client import answer_in_turns, pull
from tests.gateways import new_topic, stored

DAY_MS = 86_400_000


def send(client: httpx.Client, topic: str, **message: Any) -> httpx.Response:
    return client.post(f"/v1/topics/{topic}/messages", json=message)


def send_raw(client: httpx.Client, topic: str, content: bytes, **headers: str) -> httpx.Response:
    headers = {"Content-Type": "application/json"} | headers
    return client.post(f"/v1/topics/{topic}/messages", content=content, headers=headers)


def problem(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    found: dict[str, Any] = response.json()
    assert found["type"] == f"urn:lisa:problem:{kind}"
    assert found["status"] == status
    assert found["detail"]
    return found


def test_a_message_is_due_by_a_local_time_in_a_window(
    client: httpx.Client, producer: Producer
) -> None:
    topic, christmas_ms = new_topic(), 1_924_300_800_000  # 09:00 on 2030-12-24 in Tokyo
    tokyo = {"body": 1, "at_local": "2030-12-24T09:00", "tz": "Asia/Tokyo"}
    business = {"body": 1, "at_local": "10:00", "business_days": 3, "tz": "Asia/Tokyo"}
    for message in ({"id": "a", **tokyo}, {"id": "b", **tokyo, "window": "10-11"}):
        assert send(client, topic, **message).status_code == 201
    assert send(client, topic, id="c", **business).status_code == 201
    messages = [{"id": "d", **tokyo}, {**tokyo, "at_local": "noon"}]
    results = batch(client, topic, messages).json()["results"]
    assert results[0] == {"id": "d", "outcome": "accepted"}
    assert "not a local time" in results[1]["problem"]["detail"]
    a, b, c, d = (stored(producer, topic, one).due_ms or 0 for one in "abcd")
    assert (a, b, d) == (christmas_ms, christmas_ms + 3_600_000, christmas_ms)
    assert c % DAY_MS == 3_600_000  # ten in Tokyo


def test_a_message_is_sent_with_all_fields(
    client: httpx.Client, producer: Producer, server: Redis
) -> None:
    topic, shown = new_topic(), {"body": {"order": 42}, "headers": {"trace": "abc"}}
    policy = {"retry": [0, 120_000], "late": {"after": "10m", "then": "skip"}}
    options = {"delay_ms": DAY_MS, "ttl_ms": 5_000, "on_duplicate": "reject"}
    sent = send(client, topic, id="o-42", **shown, **policy, **options)
    assert (sent.status_code, sent.json()) == (201, {"id": "o-42", "outcome": "accepted"})
    found = stored(producer, topic, "o-42")
    assert {"body": found.body, "headers": found.headers} == shown
    assert server.hget(f"lisa:{{{topic}}}:policy", "o-42") == b"0,120000;600000,skip"
    assert server.zscore(f"lisa:{{{topic}}}:expiry", "o-42") == (found.due_ms or 0) + 5_000


NUMBERS = [0, -1, 2**53 + 1, 2**64 + 1, -(2**80), 0.1, 1e308, 1e-320, 5e-324]
TEXTS = ["", "text", "漢字 \U0001f642", "\x00\x1f"]
NESTED: list[Any] = [[], {}, [None], {"a": {"b": [1, 2.5, "x", None]}}, {"": 1}, ["[" * 500]]
BODIES = [None, True, *NUMBERS, *TEXTS, *NESTED]


def test_bodies_pass_undamaged(client: httpx.Client, manager: object) -> None:
    topic = new_topic()
    for number, body in enumerate(BODIES):
        content = json.dumps({"body": body, "id": str(number), "delay_ms": number}).encode()
        assert send_raw(client, topic, content).status_code == 201, body
    got: dict[str, Any] = {}
    while len(got) < len(BODIES):
        deliveries = pull(client, topic, max=100)
        assert deliveries, f"only {len(got)} came"
        got |= {one["id"]: one["body"] for one in deliveries}
    assert [got[str(number)] for number in range(len(BODIES))] == BODIES


def test_bytes_are_base64(client: httpx.Client, producer: Producer) -> None:
    topic, data = new_topic(), bytes(range(256))
    sent = send(client, topic, body_base64=base64.b64encode(data).decode(), id="b")
    assert sent.status_code == 201
    assert stored(producer, topic, "b").body == data
    shown = client.get(f"/v1/topics/{topic}/messages/b").json()
    assert "body" not in shown
    (pulled,) = pull(client, topic)
    assert {base64.b64decode(one["body_base64"]) for one in (shown, pulled)} == {data}


def nested(levels: int) -> bytes:
    return b'{"body":' + b"[" * levels + b"]" * levels + b"}"


def test_nesting_is_limited(client: httpx.Client) -> None:
    wide = json.dumps({"body": [[1]] * 500}).encode()  # many adjacent brackets are not deep
    for content in (nested(100), wide):
        assert send_raw(client, new_topic(), content).status_code == 201
    for levels in (101, 900, 100_000):
        refused = problem(send_raw(client, new_topic(), nested(levels)), 400, "invalid")
        assert "deep" in refused["detail"]


REFUSED: list[tuple[bytes, str]] = [
    (b"", "the body is empty; send JSON"),
    (b"{", "not valid UTF-8 JSON"),
    (b"\xff\xfe", "not valid UTF-8 JSON"),
    (b"[]", "object"),
    (b"{}", "body is missing"),
    (b'{"body":1,"body_base64":"AA=="}', "not both"),
    (b'{"body":1,"colour":"red"}', "colour"),
    (b'{"body":1,"id":5}', "$.id"),
    (b'{"body":1,"id":"a\\u0000b"}', "control"),
    (b'{"body":1,"id":"' + b"\xc3\xa9" * 200 + b'"}', "256 bytes"),
    (b'{"body":1,"id":"\\ud800"}', "\\ud800 is half of a surrogate pair"),
    (b'{"body":1,"delay_ms":1.5}', "$.delay_ms"),
    (b'{"body":1,"delay_ms":"5"}', "delay_ms: 5 has no unit"),
    (b'{"body":1,"delay_ms":' + b"9" * 400 + b"}", "$.delay_ms"),
    (b'{"body":1,"delay_ms":253402300799999}', "a delay of 2932896d 23h ends beyond the year 9999"),
    (b'{"body":1,"due_ms":253402300800000}', "$.due_ms"),
    (b'{"body":1,"delay_ms":1,"due_ms":1}', "give only one of delay_ms, due_ms and at_local"),
    (b'{"body":1,"at_local":"2030-12-24T09:00","tz":"UTC","due_ms":1}', "give only one of"),
    (b'{"body":1,"at_local":"2030-12-24T09:00Z","tz":"UTC"}', "give a fixed instant instead"),
    (b'{"body":1,"delay_ms":1,"tz":"UTC"}', "tz needs at_local or window"),
    (b'{"body":1,"fold":1}', "fold need at_local, such as '10:00'"),
    (b'{"body":1,"ttl_ms":0}', "$.ttl_ms"),
    (b'{"body":1,"headers":{"a":1}}', "$.headers"),
    (b'{"body":1,"headers":{"a":"' + b"x" * 70_000 + b'"}}', "headers take"),
    (b'{"body":1,"retry":"soon"}', "soon"),
    (b'{"body":1,"on_duplicate":"?"}', "use keep, keep_live, replace, update, reject"),
    (b'{"body":1,"at_local":"2030-12-24T09:00","fold":2}', "use 0, 1"),
    (b'{"body":NaN}', "not valid UTF-8 JSON"),
    (b'{"body":1e400}', "does not match the schema"),
    (b'{"body":"\xff"}', "not valid UTF-8 JSON"),
    (b'{"body":"\\ud800"}', "\\ud800 is half of a surrogate pair"),
    (b'{"body":"\\\\\\ud83d\\ude00 \\uDFFF\\ud800"}', "\\uDFFF is half of a surrogate pair"),
    (b'{"body":"\\\\ud800"', "truncated"),
    (b'{"body":' + b"1" * 5_000 + b"}", "does not match the schema"),
    (b'{"body_base64":"***"}', "base64"),
    (b'{"body_base64":"\xc3\xa4"}', "base64"),
]


@pytest.mark.parametrize(("content", "said"), REFUSED)
def test_an_invalid_send_is_rejected_with_the_reason(
    client: httpx.Client, content: bytes, said: str
) -> None:
    topic = new_topic()
    assert said in problem(send_raw(client, topic, content), 400, "invalid")["detail"]
    assert client.get(f"/v1/topics/{topic}").status_code == 404


@pytest.mark.parametrize("field", ["on_duplicate", "retry", "tz"])
def test_an_error_quotes_the_start_of_a_long_value(client: httpx.Client, field: str) -> None:
    message = {"body": 1, "at_local": "2030-12-24T09:00", field: "x" * 30_000}
    detail = problem(send(client, new_topic(), **message), 400, "invalid")["detail"]
    assert 1_000 < len(detail) < 1_100
    advice = {"on_duplicate": "reject", "retry": "as in '1h30m'", "tz": "an offset '+08:00'"}
    assert detail.endswith(advice[field])


def test_content_types_and_encodings(client: httpx.Client) -> None:
    topic, content = new_topic(), b'{"body":1}'
    text = send_raw(client, topic, content, **{"Content-Type": "text/plain"})
    problem(text, 415, "media-type")
    # The last type is the default of `curl -d`.
    kinds = ("json; charset=utf-8", "ld+json", "x-www-form-urlencoded")
    for kind in kinds:
        headers = {"Content-Type": f"application/{kind}", "Content-Encoding": "identity"}
        assert send_raw(client, topic, content, **headers).status_code == 201
    coded = send_raw(client, topic, gzip.compress(content), **{"Content-Encoding": "gzip"})
    assert "without Content-Encoding: gzip" in problem(coded, 415, "media-type")["detail"]
    assert coded.headers["accept-encoding"] == "identity"


def send_with_key(
    client: httpx.Client, topic: str, key: str, path: str = "messages", **content: Any
) -> httpx.Response:
    headers = {"Idempotency-Key": key}
    return client.post(f"/v1/topics/{topic}/{path}", json=content, headers=headers)


def count(client: httpx.Client, topic: str) -> int:
    """How many messages of the topic wait."""
    found: int = client.get(f"/v1/topics/{topic}").json()["waiting"]
    return found


def test_a_repeated_idempotency_key_gets_the_first_response(client: httpx.Client) -> None:
    """Also after the message has ended. Keys belong to their topic."""
    topic = new_topic()
    message: dict[str, Any] = {"body": 1, "delay_ms": DAY_MS}
    first = send_with_key(client, topic, "k-1", **message)
    assert (first.status_code, first.json()["outcome"]) == (201, "accepted")
    for key in ("k-1", '"k-1"'):
        again = send_with_key(client, topic, key, **message)
        assert (again.status_code, again.json()) == (201, first.json())
    reused = send_with_key(client, topic, "k-1", **message | {"body": 2})
    assert problem(reused, 422, "idempotency-key-reused")["id"] == first.json()["id"]
    assert count(client, topic) == 1
    assert send_with_key(client, topic, "k-2", **message).json()["id"] != first.json()["id"]
    assert send_with_key(client, new_topic(), "k-1", **message).status_code == 201
    assert client.delete(f"/v1/topics/{topic}/messages/{first.json()['id']}").status_code == 200
    assert send_with_key(client, topic, "k-1", **message).json() == first.json()
    assert count(client, topic) == 1


def test_sends_of_a_key_are_debounced(client: httpx.Client, server: Redis) -> None:
    topic = new_topic()
    debounced = {"key": "k", "debounce_ms": DAY_MS, "max_wait_ms": 2 * DAY_MS}
    url, idempotent = f"/v1/topics/{topic}/messages", {"Idempotency-Key": "k-1"}
    first = client.post(url, json={"body": 1, **debounced}, headers=idempotent)
    assert (first.status_code, first.json()["outcome"]) == (201, "accepted")
    second = client.post(url, json={"body": 2, **debounced})
    assert (second.status_code, second.json()["outcome"]) == (200, "replaced")
    again = client.post(url, json={"body": 1, **debounced}, headers=idempotent)
    assert again.json() == first.json()
    refused = {"body": 3, "on_duplicate": "keep", **debounced}
    said = client.post(url, json=refused)
    assert "omit on_duplicate" in problem(said, 400, "invalid")["detail"]
    before = server.info("commandstats")["cmdstat_evalsha"]["calls"]
    messages = [{"body": n, "key": f"{n % 10}", "latest": n % 2 == 0} for n in range(100)]
    found = batch(client, topic, messages).json()
    assert (found["accepted"], found["updated"]) == (55, 45)
    # Far fewer than messages; the gateway's other calls count, too.
    assert server.info("commandstats")["cmdstat_evalsha"]["calls"] - before < 50
    found = client.get(f"{url}/{quote(first.json()['id'])}").json()
    assert (found["body"], found["key"]) == (2, "k")


def test_concurrent_sends_with_one_idempotency_key_add_one_message(client: httpx.Client) -> None:
    topic = new_topic()

    def send_one(_: int) -> tuple[int, str]:
        answer = send_with_key(client, topic, "k", body=1, delay_ms=DAY_MS)
        return answer.status_code, answer.json()["id"]

    with ThreadPoolExecutor(20) as pool:
        ((status, _),) = set(pool.map(send_one, range(40)))
    assert (status, count(client, topic)) == (201, 1)


@pytest.mark.parametrize("others", [1, 998])
def test_with_an_idempotency_key_each_id_of_a_batch_occurs_once(
    client: httpx.Client, others: int
) -> None:
    topic = new_topic()
    ids = ["twice", *(f"other-{n}" for n in range(others)), "twice"]
    messages = [
        {"id": one, "body": n, "delay_ms": DAY_MS, "on_duplicate": "replace"}
        for n, one in enumerate(ids)
    ]
    for _ in range(2):
        sent = send_with_key(client, topic, "k", "messages:batch", messages=messages).json()
        assert (sent["accepted"], sent["failed"]) == (1 + others, 1)
        assert "each id may occur once" in sent["results"][-1]["problem"]["detail"]
    assert client.get(f"/v1/topics/{topic}/messages/twice").json()["body"] == 0


def test_an_idempotency_key_works_for_a_batch(client: httpx.Client) -> None:
    topic, path = new_topic(), "messages:batch"
    messages: list[dict[str, Any]] = [{"body": n, "delay_ms": DAY_MS} for n in range(400)]
    messages.append({"id": "own", **messages[0]})
    first, again = (
        send_with_key(client, topic, "k", path, messages=messages).json() for _ in range(2)
    )
    assert first == again
    assert first["accepted"] == count(client, topic) == 401
    other = send_with_key(client, topic, "k", path, messages=messages[:1]).json()
    assert other["results"][0]["problem"]["type"] == "urn:lisa:problem:idempotency-key-reused"
    assert count(client, topic) == 401


@pytest.mark.parametrize("keys", [[""], ['""'], ["x" * 256], ["a\tb"], ["\xe9"], ["a", "b"]])
def test_an_invalid_idempotency_key_is_rejected(client: httpx.Client, keys: list[str]) -> None:
    headers = [(b"Idempotency-Key", key.encode("latin-1")) for key in keys]
    path = f"/v1/topics/{new_topic()}/messages"
    refused = problem(client.post(path, json={"body": 1}, headers=headers), 400, "invalid")
    assert len(keys) == 1 or "send one" in refused["detail"]


def test_an_idempotency_key_belongs_to_one_token() -> None:
    def of(client: str) -> Idempotency:
        return Idempotency("t", client, "k", b"content")

    assert (of("a").id_of(), of("a").token) == (of("a").id_of(), of("a").token)
    assert of("a").id_of() != of("b").id_of()


def test_an_invalid_topic_name_is_rejected(client: httpx.Client) -> None:
    for name in ("a%20b", "%C3%A4", "x" * 129, "%7Ba%7D"):
        problem(client.post(f"/v1/topics/{name}/messages", json={"body": 1}), 400, "invalid")
    problem(client.post("/v1/topics/%FF/messages", json={"body": 1}), 400, "invalid")


def batch(client: httpx.Client, topic: str, messages: Any, **more: Any) -> httpx.Response:
    path = f"/v1/topics/{topic}/messages:batch"
    return client.post(path, json={"messages": messages} | more)


def test_each_message_of_a_batch_has_its_own_result(client: httpx.Client) -> None:
    topic = new_topic()
    client.patch(f"/v1/topics/{topic}/options", json={"max_body_bytes": 100})
    send(client, topic, body="there", id="known", delay_ms=DAY_MS)
    replacing = {"on_duplicate": "replace", "delay_ms": DAY_MS}
    cases: list[tuple[Any, str]] = [
        ({"body": 1, "id": "a", "delay_ms": DAY_MS}, "accepted"),
        ({"body": 1, "id": "known"}, "duplicate"),
        ({"body": 1, "id": "known", "on_duplicate": "reject"}, "rejected"),
        ({"body": 1, "id": "known", **replacing}, "replaced"),
        ({"body": 1, "colour": "red"}, "colour"),
        ("no object", "object"),
        ({"body": "x" * 200, "id": "large"}, "max_body_bytes"),
        ({"body": 1, "id": "c\x00"}, "control"),
        ({"body": None, "id": "z", "delay_ms": DAY_MS}, "accepted"),
    ]
    done = batch(client, topic, [message for message, _ in cases])
    content = done.json()
    results = content.pop("results")
    for (message, said), result in zip(cases, results, strict=True):
        assert said in (result.get("outcome") or result["problem"]["detail"]), message
    problems = {result["problem"]["type"] for result in results if "problem" in result}
    assert problems == {"urn:lisa:problem:invalid"}
    counts = dict.fromkeys([*Sent, "failed"], 0)
    counts |= {"accepted": 2, "duplicate": 1, "replaced": 1, "rejected": 1, "failed": 4}
    assert (done.status_code, content) == (200, counts)
    listed = client.get(f"/v1/topics/{topic}/messages").json()["messages"]
    assert sorted(one["id"] for one in listed) == ["a", "known", "z"]


def test_a_batch_has_a_default_for_duplicates(client: httpx.Client) -> None:
    topic, ids = new_topic(), [str(n) for n in range(1_000)]
    messages = [{"body": 1, "id": one} for one in ids]
    assert batch(client, topic, messages).json()["accepted"] == 1_000
    assert batch(client, topic, messages).json()["duplicate"] == 1_000
    again = batch(client, topic, messages, on_duplicate="replace").json()
    assert again["replaced"] == 1_000
    assert [one["id"] for one in again["results"]] == ids


def test_a_full_topic_rejects_the_rest_of_a_batch(client: httpx.Client) -> None:
    topic = new_topic()
    client.patch(f"/v1/topics/{topic}/options", json={"capacity": 600})
    done = batch(client, topic, [{"body": 1, "delay_ms": DAY_MS}] * 1_000).json()
    assert (done["accepted"], done["failed"]) == (500, 500)
    assert {one["problem"]["status"] for one in done["results"][500:]} == {429}


def test_a_key_with_its_most_messages_takes_no_other(client: httpx.Client) -> None:
    path = f"/v1/topics/{new_topic()}"
    client.patch(f"{path}/options", json={"max_per_key": 1})
    messages = [{"body": n, "key": key, "delay_ms": 60_000} for n, key in enumerate("aab")]
    first, second, other = (client.post(f"{path}/messages", json=one) for one in messages)
    assert [first.status_code, second.status_code, other.status_code] == [201, 429, 201]
    assert second.json()["type"] == "urn:lisa:problem:key-full"
    assert second.headers["Retry-After"] == "1"
    sent = client.post(f"{path}/messages:batch", json={"messages": [{"body": 1}, messages[0]]})
    assert [one["problem"]["status"] for one in sent.json()["results"]] == [429, 429]


def test_concurrent_sends_are_batched_and_answered_separately(client: httpx.Client) -> None:
    topic, ids = new_topic(), [f"m{n % 150}" for n in range(300)]

    def send_one(message_id: str) -> Any:
        return send(client, topic, body=1, id=message_id, delay_ms=DAY_MS).json()

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(send_one, ids))
    assert [one["id"] for one in answers] == ids
    assert Counter(one["outcome"] for one in answers) == {"accepted": 150, "duplicate": 150}


def test_a_body_nested_too_deeply_to_decode_is_an_invalid_message() -> None:
    # Written directly to Redis; its message is moved to garbage with the reason.
    with pytest.raises(InvalidMessage, match="cannot be decoded"):
        decode_body("j", b"[" * 100_000 + b"]" * 100_000)


def test_messages_of_a_batch_that_treat_duplicates_alike_are_sent_together(
    client: httpx.Client, server: Redis
) -> None:
    topic, modes = new_topic(), ("keep", "replace", "reject")
    messages = [
        {"id": str(n), "body": n, "delay_ms": DAY_MS, "on_duplicate": modes[n % 3]}
        for n in range(900)
    ]
    send(client, topic, body=0)  # loads the script
    before = server.info("commandstats")["cmdstat_evalsha"]["calls"]
    sent = batch(client, topic, messages).json()
    assert server.info("commandstats")["cmdstat_evalsha"]["calls"] - before < 100
    assert [one["id"] for one in sent["results"]] == [str(n) for n in range(900)]
    assert sent["accepted"] == 900


def test_messages_of_a_batch_with_the_same_id_are_sent_in_order(client: httpx.Client) -> None:
    topic = new_topic()
    modes = ["keep", "replace", "keep", "reject", "replace", "reject", "keep", "update"]
    messages = [
        {"id": "same", "body": n, "delay_ms": DAY_MS, "on_duplicate": mode}
        for n, mode in enumerate(modes)
    ]
    outcomes = {"keep": "duplicate", "replace": "replaced", "reject": "rejected"}
    outcomes["update"] = "updated"
    found = [one["outcome"] for one in batch(client, topic, messages).json()["results"]]
    assert found == ["accepted", *(outcomes[mode] for mode in modes[1:])]
    assert client.get(f"/v1/topics/{topic}/messages/same").json()["body"] == 7


@pytest.mark.full
def test_other_requests_have_their_turn_while_a_batch_is_read(client: httpx.Client) -> None:
    message = {"body": 1, "at_local": "10:00", "business_days": 250, "tz": "Asia/Tokyo"}
    content = {"messages": [message] * 1_000}
    path = f"/v1/topics/{new_topic()}/messages:batch"
    sent = answer_in_turns(client, "POST", path, json=content)
    assert {one["outcome"] for one in sent.json()["results"]} == {"accepted"}


# Trace context ------------------------------------------------------------------------------------


TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
OTHER = f"00-{'1' * 32}-{SPAN}-01"
REQUEST = {"traceparent": PARENT, "tracestate": "vendor=1"}


def test_a_send_takes_the_context_of_its_request(client: httpx.Client, producer: Producer) -> None:
    topic, body = new_topic(), {"body": 1, "delay_ms": 60_000}
    path, own, other = f"/v1/topics/{topic}/messages", {"x": "y"}, {"traceparent": OTHER}
    client.post(path, json={**body, "id": "a", "headers": own}, headers=REQUEST)
    client.post(path, json={**body, "id": "b", "headers": other}, headers=REQUEST)
    client.post(path, json={**body, "id": "c"})
    messages = [{**body, "id": "d"}, {**body, "id": "e", "headers": own}]
    client.post(f"{path}:batch", json={"messages": messages}, headers=REQUEST)
    expected = {"a": own | REQUEST, "b": other, "c": {}, "d": REQUEST, "e": own | REQUEST}
    assert {one: stored(producer, topic, one).headers for one in "abcde"} == expected


def test_sends_through_the_compatible_apis_take_the_context(
    client: httpx.Client, producer: Producer
) -> None:
    topic, later = new_topic(), str(60_000 + time.time_ns() // 1_000_000)
    camellia = {"topic": topic, "msg": "m", "delayMillis": 60_000}
    mykit = {"topic": topic, "delay": 60_000, "body": "m"}
    delay_queue = {"topic": topic, "delayTime": later, "ttrTime": 60, "message": "m"}
    sent = client.post("/camellia/delayQueue/sendMsg", data=camellia, headers=REQUEST).json()
    pushed = client.post("/mykit/push", json=mykit, headers=REQUEST).json()
    queued = client.post("/delay-queue/push", data=delay_queue, headers=REQUEST).json()
    ids = {"camellia": sent["delayMsg"]["msgId"], "mykit-delay": pushed["data"]}
    for mark, message_id in (ids | {"ttrTime": queued["id"]}).items():
        found = stored(producer, topic, message_id).headers
        assert found.items() >= REQUEST.items()
        assert mark in found


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({}, {}),
        ({"traceparent": PARENT}, {"traceparent": PARENT}),
        ({"traceparent": PARENT, "tracestate": "a=1\n"}, {"traceparent": PARENT}),
        ({"traceparent": PARENT, "tracestate": "a" * 513}, {"traceparent": PARENT}),
        ({"traceparent": f"ff{PARENT[2:]}"}, {}),
        ({"traceparent": f"{PARENT}\n"}, {}),
        ({"traceparent": f"01{PARENT[2:]}-more"}, {"traceparent": f"01{PARENT[2:]}-more"}),
    ],
)
def test_only_valid_context_passes(headers: dict[str, str], found: dict[str, str]) -> None:
    assert trace_context(headers) == found


def test_headers_without_context_stay_as_they_are() -> None:
    own = {"a": "b"}
    assert with_trace(own, {}) is own
    assert with_trace(None, {}) is None
