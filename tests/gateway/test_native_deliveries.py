"""The native API: deliveries are pulled, and settled with their receipts."""

import re
import time
from base64 import urlsafe_b64encode
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from random import Random
from typing import Any

import httpx
import msgspec
import pytest

from lisa import InvalidMessage, Producer
from lisa.core.model.clock import OLDEST_DUE_MS
from lisa.core.transitions.ack import Settlement
from lisa.gateway.settling import Receipt, decode_receipt, encode_receipt
from tests.gateway.native_client import pull, send, settle
from tests.gateways import Gateway, declared_topic, new_topic
from tests.servers import wait_until

DAY_MS = 86_400_000


def settle_many(
    client: httpx.Client, topic: str, verb: str, deliveries: list[dict[str, Any]]
) -> dict[str, Any]:
    path = f"/v1/topics/{topic}/messages:batch-{verb}"
    answer = client.post(path, json={"deliveries": deliveries})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def held(client: httpx.Client, topic: str, count: int) -> list[dict[str, Any]]:
    """Receipts of `count` deliveries on a new topic, in the order of their bodies."""
    client.post(f"/v1/topics/{topic}/groups", json={"group": "g"})
    messages = [{"body": n, "id": str(n)} for n in range(count)]
    client.post(f"/v1/topics/{topic}/messages:batch", json={"messages": messages})
    return [{"receipt": one["receipt"]} for one in pull(client, topic, max=count)]


def test_a_batch_is_acked_with_a_result_for_each_delivery(client: httpx.Client) -> None:
    topic = new_topic()
    receipts = held(client, topic, 300)
    replacing = {"body": "new", "id": "2", "on_duplicate": "replace"}
    assert client.post(f"/v1/topics/{topic}/messages", json=replacing).status_code == 200
    found = settle_many(client, topic, "ack", [*receipts, receipts[1], {"receipt": "no receipt"}])
    results, stale = found["results"], found["results"][2]["problem"]
    acked = {str(n): "acked" for n in range(300) if n != 2}
    assert {one["id"]: one["outcome"] for one in results[:300] if "outcome" in one} == acked
    assert (stale["type"], stale["state"]) == ("urn:lisa:problem:stale", "ready")
    assert results[300] == {"id": "1", "outcome": "repeated"}
    assert results[301]["problem"]["type"] == "urn:lisa:problem:invalid"
    assert (found["succeeded"], found["failed"]) == (300, 2)
    assert [one["id"] for one in pull(client, topic, max=500)] == ["2"]


def test_a_batch_is_retried_deferred_extended_and_released(client: httpx.Client) -> None:
    topic = new_topic()
    receipts = held(client, topic, 5)
    busy = {**receipts.pop(), "delay_ms": 60_000, "reason": "busy"}
    (waits,) = settle_many(client, topic, "defer", [busy])["results"]
    assert waits == {"id": "4", "outcome": "deferred", "due_ms": waits["due_ms"]}
    assert settle_many(client, topic, "defer", [busy])["results"] == [waits]  # a repeated call
    options: list[dict[str, Any]] = [
        {"delay_ms": 60_000},
        {"discard": True, "reason": "bad"},
        {"discard": True, "delay_ms": 1},
    ]
    wanted = [receipt | more for receipt, more in zip(receipts, options, strict=False)]
    later, dead, invalid = settle_many(client, topic, "retry", wanted)["results"]
    assert (later["id"], later["outcome"], later["attempts"]) == ("0", "retrying", 1)
    assert dead == {"id": "1", "outcome": "dead", "due_ms": None, "attempts": 1}
    assert "not both" in invalid["problem"]["detail"]
    wanted = [{**one, "ack_timeout_ms": 60_000} for one in receipts[1:]]
    gone, *kept = settle_many(client, topic, "extend", wanted)["results"]
    assert (gone["problem"]["state"], gone["problem"]["held"]) == ("garbage", False)
    assert kept == [{"id": "2", "held": True}, {"id": "3", "held": True}]
    found = settle_many(client, topic, "release", receipts[2:])
    assert (found["succeeded"], found["failed"]) == (2, 0)
    assert [(one["id"], one["attempt"]) for one in pull(client, topic, max=9)] == [
        ("2", 1),
        ("3", 1),
    ]


def test_a_delivery_has_all_fields(client: httpx.Client) -> None:
    topic = new_topic()
    shown = {"id": "x", "body": {"a": 1}, "headers": {"h": "v"}, "due_ms": OLDEST_DUE_MS + DAY_MS}
    send(client, topic, **shown)
    (delivery,) = pull(client, topic)
    assert delivery.pop("receipt")
    assert delivery == shown | {"attempt": 1}


def test_a_pull_takes_at_most_what_it_wants_and_waits_as_long(client: httpx.Client) -> None:
    topic = new_topic()
    messages = {"messages": [{"body": n} for n in range(5)]}
    client.post(f"/v1/topics/{topic}/groups", json={"group": "g"})
    client.post(f"/v1/topics/{topic}/messages:batch", json=messages)
    assert [one["body"] for one in pull(client, topic, max=2)] == [0, 1]
    assert [one["body"] for one in pull(client, topic, max=500)] == [2, 3, 4]
    assert pull(client, topic, wait_ms=0) == []
    began = time.monotonic()
    assert pull(client, topic, wait_ms=300) == []
    assert time.monotonic() - began >= 0.25


def test_a_message_ends_a_long_poll_when_it_is_due(gateway: Gateway) -> None:
    topic, client = new_topic(), gateway.client
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waiting = pool.submit(pull, client, topic, wait_ms=30_000)
        wait_until(lambda: client.get("/healthz").json()["pulls"] >= 1)
        send(client, topic, id="x", delay_ms=300)
        assert [one["id"] for one in waiting.result()] == ["x"]
        assert time.monotonic() - began < 30


def test_each_group_gets_every_message(client: httpx.Client) -> None:
    topic, groups = new_topic(), ("g1", "g2")
    for group in groups:
        client.post(f"/v1/topics/{topic}/groups", json={"group": group})
    send(client, topic, id="x")
    both = [pull(client, topic, group=group)[0] for group in groups]
    assert [one["id"] for one in both] == ["x", "x"]
    unnamed = client.post(f"/v1/topics/{topic}/pull", json={})
    assert (unnamed.status_code, "g1" in unnamed.json()["detail"]) == (400, True)
    for one in both:
        assert settle(client, topic, one, "ack").json()["outcome"] == "acked"
    assert client.get(f"/v1/topics/{topic}/messages/x").json()["state"] == "acked"


def test_a_deferred_message_comes_again_without_an_attempt(client: httpx.Client) -> None:
    topic = new_topic()
    send(client, topic, id="x", retry="")  # a failure would be final
    for times in (1, 2):
        (delivery,) = pull(client, topic)
        assert delivery["attempt"] == 1
        said = settle(client, topic, delivery, "defer", delay_ms=0, reason="busy")
        assert said.json() == {"id": "x", "outcome": "deferred", "due_ms": said.json()["due_ms"]}
        seen = client.get(f"/v1/topics/{topic}/messages/x").json()
        assert (seen["reason"], seen["deferrals"], seen["attempts"]) == ("busy", times, 0)
    (last,) = pull(client, topic, wait_ms=10_000)
    without = settle(client, topic, last, "defer", reason="busy")
    assert (without.status_code, "delay_ms" in without.json()["detail"]) == (400, True)
    stale = settle(client, topic, delivery, "defer", delay_ms=5)
    assert (stale.status_code, stale.json()["state"]) == (409, "in_flight")
    assert settle(client, topic, last, "defer", delay_ms="1h").json()["outcome"] == "deferred"
    (row,) = client.get(f"/v1/topics/{topic}/messages?state=retry").json()["messages"]
    assert (row["reason"], row["deferrals"]) == ("the client deferred the message", 3)


@pytest.mark.parametrize("path", ["messages/k%1Fa/defer", "messages:batch-defer"])
def test_a_delivery_that_meets_a_limit_rests_its_lane(client: httpx.Client, path: str) -> None:
    topic = declared_topic(client)
    client.patch(f"/v1/topics/{topic}/options", json={"key_concurrency": 1}).raise_for_status()
    for name in ("a", "b"):
        send(client, topic, key="k", id=name)
    (limited,) = pull(client, topic, max=10)
    one: dict[str, Any] = {"receipt": limited["receipt"], "delay_ms": "1h", "rests_lane": True}
    body = {"deliveries": [one]} if "batch" in path else one
    said = client.post(f"/v1/topics/{topic}/{path}", json=body).json()
    (result,) = said.get("results", [said])
    assert result["outcome"] == "deferred"
    send(client, topic, key="other", id="c")
    assert [one["key"] for one in pull(client, topic, max=10)] == ["other"]
    parked = client.get(f"/v1/topics/{topic}/messages?state=parked").json()["messages"]
    assert sorted(one["id"] for one in parked) == ["k\x1fa", "k\x1fb"]
    assert [one["deferrals"] for one in parked if one["id"] == "k\x1fa"] == [1]


def test_a_retry_waits_for_its_delay(client: httpx.Client) -> None:
    topic = new_topic()
    send(client, topic, id="x", retry=[0, 5 * DAY_MS])
    (first,) = pull(client, topic)
    at_once = settle(client, topic, first, "retry").json()
    assert (at_once["outcome"], at_once["attempts"]) == ("retrying", 1)
    (second,) = pull(client, topic)
    assert (second["attempt"], second["due_ms"]) == (2, at_once["due_ms"])
    later = settle(client, topic, second, "retry", delay_ms=DAY_MS, reason="busy").json()
    assert later["due_ms"] - at_once["due_ms"] >= DAY_MS
    assert client.get(f"/v1/topics/{topic}/messages/x").json()["reason"] == "busy"
    client.post(f"/v1/topics/{topic}/messages/x/fire")
    (third,) = pull(client, topic)
    dead = settle(client, topic, third, "retry").json()
    assert (dead["outcome"], dead["due_ms"], dead["attempts"]) == ("dead", None, 3)


def taken_over(client: httpx.Client, topic: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same message delivered twice: the first lease ended."""
    send(client, topic, id="x", retry=[0])
    (first,) = pull(client, topic, ack_timeout_ms=100)
    (second,) = pull(client, topic, wait_ms=20_000)
    assert (second["id"], second["attempt"]) == ("x", 2)
    return first, second


def test_a_stale_receipt_changes_nothing_and_says_so_but_a_late_ack_counts(
    client: httpx.Client,
) -> None:
    topic = new_topic()
    first, second = taken_over(client, topic)
    path = f"/v1/topics/{topic}/messages/x"
    before = client.get(path).json()
    for verb in ("retry", "extend", "release"):
        answer = settle(client, topic, first, verb)
        said = answer.json()
        assert (answer.status_code, said["type"]) == (409, "urn:lisa:problem:stale")
        assert (said["outcome"], said["id"], said["state"]) == ("stale", "x", "in_flight")
        assert said.get("held") is (None if verb == "retry" else False)
        after = client.get(path).json()
        assert {**after, "idle_ms": 0, "groups": 0} == {**before, "idle_ms": 0, "groups": 0}
    assert settle(client, topic, first, "ack").json()["outcome"] == "late"
    assert client.get(path).json()["state"] == "acked"
    assert settle(client, topic, second, "retry").status_code == 409


@pytest.mark.parametrize("verb", ["ack", "retry", "extend", "release"])
def test_mismatched_receipts_are_rejected(client: httpx.Client, verb: str) -> None:
    topic, other = new_topic(), new_topic()
    send(client, topic, id="x")
    (one,) = pull(client, topic)
    path = f"/v1/topics/{topic}/messages"
    foreign = client.post(f"{path}/y/{verb}", json={"receipt": one["receipt"]})
    assert (foreign.status_code, foreign.json()["type"]) == (400, "urn:lisa:problem:invalid")
    for receipt in ("", "x", "ä", "AAAA", one["receipt"][:-8], 5, None):
        wrong = client.post(f"{path}/x/{verb}", json={"receipt": receipt})
        assert wrong.status_code == 400, receipt
    assert client.post(f"{path}/x/{verb}", json={}).status_code == 400
    # The message or the group is unknown.
    client.post(f"/v1/topics/{other}/groups", json={"group": "lisa"})
    assert settle(client, other, one, verb).status_code == 404
    assert settle(client, new_topic(), one, verb).status_code == 404
    assert settle(client, topic, one, "ack").json()["outcome"] == "acked"


def test_receipts_are_valid_at_any_gateway(gateway: Gateway, redis_url: str) -> None:
    topic = new_topic()
    with Gateway(redis_url) as other:
        send(gateway.client, topic, id="x")
        (one,) = pull(gateway.client, topic)
        assert settle(other.client, topic, one, "extend").json()["held"] is True
        assert settle(other.client, topic, one, "ack").json()["outcome"] == "acked"


def test_a_deeply_nested_body_of_another_producer_does_not_stop_the_pulls(
    client: httpx.Client, producer: Producer
) -> None:
    topic, sent = declared_topic(client), 0
    with ThreadPoolExecutor() as pool:  # its stacks are short, so more levels can be encoded
        for depth in range(900, 1_000, 5):
            body: Any = 1
            for _ in range(depth):
                body = [body]
            with suppress(InvalidMessage):
                sent += bool(pool.submit(producer.send, topic, body).result())
    while True:
        pulled = client.post(f"/v1/topics/{topic}/pull", json={})
        assert pulled.status_code == 200, pulled.text
        # The bodies are nested too deeply for this client.
        found = [{"receipt": one} for one in re.findall('"receipt":"([^"]*)"', pulled.text)]
        if not found:
            break
        sent -= settle_many(client, topic, "ack", found)["succeeded"]
    assert len(client.get(f"/v1/topics/{topic}/garbage").json()["messages"]) == sent


# Receipts -----------------------------------------------------------------------------------------


NOW_US = 1_795_000_300_000_000
GOOD = ["lisa", "gateway-h-1-ab", "id", "1-0", "AAAAAAAA-", 5, 1, "a", None]


def written(*fields: object) -> str:
    return urlsafe_b64encode(msgspec.msgpack.encode(fields)).rstrip(b"=").decode()


@pytest.mark.parametrize("timeout", [None, 30_000])
@pytest.mark.parametrize("message_id", ["a", "ü/ +%", "x" * 256])
def test_receipts_round_trip(message_id: str, timeout: int | None) -> None:
    settlement = Settlement(message_id, "1795-7", "abcd_-12+", 1_795_000_000_000, 3, "c")
    receipt = Receipt("group-1", "gateway-host-12-ab", settlement, timeout)
    text = encode_receipt(receipt)
    assert decode_receipt(text, NOW_US) == receipt
    assert text.isascii()
    assert not set(text) & set("/+=?&# ")


DAMAGED: list[tuple[int, object]] = [
    *((0, "no group"), (1, "no name!"), (2, ""), (3, "1-x"), (3, "9" * 40 + "-1")),
    *((4, "short"), (4, "ÄAAAAAAA-"), (5, 1 << 60), (6, 1 << 40), (7, "?"), (8, -1)),
]


@pytest.mark.parametrize(("index", "value"), DAMAGED)
def test_a_damaged_receipt_is_rejected(index: int, value: object) -> None:
    assert decode_receipt(written(*GOOD), NOW_US).settlement.id == "id"
    with pytest.raises(InvalidMessage, match="the receipt is not valid"):
        decode_receipt(written(*GOOD[:index], value, *GOOD[index + 1 :]), NOW_US)


def test_other_text_is_rejected() -> None:
    chosen = Random(5)
    texts = [urlsafe_b64encode(chosen.randbytes(chosen.randrange(60))).decode() for _ in range(500)]
    for text in ("", "x", "\ud800", "====", "a b", *texts):
        with pytest.raises(InvalidMessage):
            decode_receipt(text, NOW_US)
    for text in (written(*GOOD, "more"), "\N{EURO SIGN}"):
        with pytest.raises(InvalidMessage, match=r"not valid; send it as the pull returned it$"):
            decode_receipt(text, NOW_US)
