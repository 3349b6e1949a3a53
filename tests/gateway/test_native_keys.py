"""The native API: messages with a key are sent, settled and changed, alone and together."""

import asyncio
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from lisa.core.model.errors import ServerUnavailable
from lisa.core.store.keyed import KeyOutcome
from lisa.core.transitions.change import Cancelled
from lisa.gateway.api.keyed import cancel_key
from lisa.gateway.problems import ErrorResponse
from tests.gateway.native_client import pages, pull, send, settle
from tests.gateways import declared_topic, new_topic

DAY_MS = 86_400_000
US = "\x1f"

ODD_KEYS = ["a/b", "fire", "a b", "*", "{a}", "%1F", "ключ", "k" * 256, "é" * 128]


def key_path(topic: str, key: str) -> str:
    return f"/v1/topics/{topic}/keys/{quote(key, safe='')}"


def message_path(topic: str, message_id: str) -> str:
    return f"/v1/topics/{topic}/messages/{quote(message_id, safe='')}"


@pytest.mark.parametrize("key", ODD_KEYS)
def test_a_key_may_hold_any_character(client: httpx.Client, key: str) -> None:
    topic = new_topic()
    message_id = f"{key}{US}x/y"
    sent = client.post(
        f"/v1/topics/{topic}/messages",
        json={"body": 1, "key": key, "id": "x/y", "delay_ms": DAY_MS},
    )
    assert sent.json() == {"id": message_id, "key": key, "outcome": "accepted"}
    own = message_path(topic, message_id)
    found = client.get(own).json()
    assert (found["id"], found["key"], found["state"]) == (message_id, key, "waiting")
    moved = client.patch(own, json={"delay_ms": "1h"}).json()
    assert moved == {"id": message_id, "key": key, "outcome": "rescheduled"}
    (listed,) = client.get(key_path(topic, key)).json()["messages"]
    assert (listed["id"], listed["key"]) == (message_id, key)
    fired = client.post(f"{key_path(topic, key)}/fire").json()
    assert fired["results"] == [{"id": message_id, "key": key, "outcome": "rescheduled"}]
    (delivery,) = pull(client, topic)
    assert (delivery["id"], delivery["key"]) == (message_id, key)
    receipt = {"receipt": delivery["receipt"]}
    held = client.post(f"{own}/extend", json=receipt).json()
    assert held == {"id": message_id, "key": key, "held": True}
    acked = client.post(f"{own}/ack", json=receipt).json()
    assert acked == {"id": message_id, "key": key, "outcome": "acked"}
    assert client.get(key_path(topic, key)).json()["count"] == 0


def test_a_key_may_stand_in_the_query(client: httpx.Client) -> None:
    topic = declared_topic(client)
    for key in ("..", "a&b=c"):
        send(client, topic, key=key, id="..", delay_ms=DAY_MS)
        by_query: dict[str, Any] = {"params": {"key": key}}
        assert client.get(f"/v1/topics/{topic}/key", **by_query).json()["count"] == 1
        fired = client.post(f"/v1/topics/{topic}/key/fire", **by_query).json()
        assert (fired["key"], fired["changed"]) == (key, 1)
        assert client.delete(f"/v1/topics/{topic}/key", **by_query).json()["changed"] == 1
        one = client.get(f"/v1/topics/{topic}/message", params={"id": f"{key}{US}.."}).json()
        assert one["state"] == "cancelled"


def test_all_messages_of_a_key_are_changed_and_only_those(client: httpx.Client) -> None:
    topic = declared_topic(client)
    path = key_path(topic, "order-1")
    send(client, topic, key="order-1", id="now")
    (held,) = pull(client, topic)
    for number in range(2):
        for key in ("order-1", "order-10"):
            send(client, topic, key=key, id=f"m{number}", due_ms=4_000_000_000_000 + number)
    send(client, topic, id="m0", due_ms=4_000_000_000_000)
    mine = [f"order-1{US}{own}" for own in ("m0", "m1")]

    def outcomes(answer: httpx.Response) -> dict[str, str]:
        assert answer.status_code == 200, answer.text
        content = answer.json()
        assert (content["topic"], content["key"]) == (topic, "order-1")
        found = {one["id"]: one["outcome"] for one in content["results"]}
        done = ("cancelled", "rescheduled")
        assert content["changed"] == sum(outcome in done for outcome in found.values())
        return found

    listed = client.get(path).json()
    assert (listed["topic"], listed["key"], listed["count"]) == (topic, "order-1", 3)
    states = [(one["id"], one["state"]) for one in listed["messages"]]
    assert states == [
        (held["id"], "in_flight"),
        (mine[0], "waiting"),
        (mine[1], "waiting"),
    ]
    assert listed["messages"][0]["groups"]["g"]["state"] == "in_flight"
    in_flight = {held["id"]: "in_flight"}
    rescheduled = dict.fromkeys(mine, "rescheduled")
    assert outcomes(client.patch(path, json={"shift_ms": "-1m"})) == rescheduled | in_flight
    assert client.get(message_path(topic, mine[1])).json()["due_ms"] == 4_000_000_000_001 - 60_000
    assert outcomes(client.patch(path, json={"shift_ms": 60_000})) == rescheduled | in_flight
    assert client.get(message_path(topic, mine[1])).json()["due_ms"] == 4_000_000_000_001
    later = client.patch(path, json={"due_ms": 5_000_000_000_000})
    assert outcomes(later) == rescheduled | in_flight
    assert outcomes(client.delete(path)) == dict.fromkeys(mine, "cancelled") | in_flight
    for other in (f"order-10{US}m0", "m0"):
        assert client.get(message_path(topic, other)).json()["due_ms"] == 4_000_000_000_000
    assert settle(client, topic, held, "ack").status_code == 200
    assert outcomes(client.delete(path)) == {}


def test_the_messages_of_a_key_come_in_pages(client: httpx.Client) -> None:
    topic = new_topic()
    messages = [
        {"body": n, "key": "k", "id": f"m{n:03}", "delay_ms": DAY_MS + n} for n in range(300)
    ]
    client.post(f"/v1/topics/{topic}/messages:batch", json={"messages": messages})
    path = key_path(topic, "k")
    for limit in (7, 64, 500):
        found = pages(client, path, limit=limit)
        ids = [one["id"] for page in found for one in page]
        assert len(set(ids)) == len(ids) == 300
        assert all(len(page) <= limit for page in found)
    first = client.get(path, params={"limit": 1}).json()
    assert (len(first["messages"]), first["count"]) == (1, 300)
    assert client.get(path, params={"cursor": "x"}).status_code == 400
    assert client.delete(path).json()["changed"] == 300


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"delay_ms": 1, "shift_ms": 1},
        {"delay_ms": "-1m"},
        {"shift_ms": "soon"},
        {"shift_ms": 1e18},
        {"at_local": "2030-12-24T09:00"},
    ],
)
def test_invalid_changes_are_refused(client: httpx.Client, given: dict[str, Any]) -> None:
    topic = new_topic()
    send(client, topic, key="k", id="a", due_ms=4_000_000_000_000)
    assert client.patch(key_path(topic, "k"), json=given).status_code == 400
    found = client.get(message_path(topic, f"k{US}a")).json()
    assert found["due_ms"] == 4_000_000_000_000


def test_an_outage_says_how_many_messages_were_handled() -> None:
    class Failing:
        async def cancel_key(self, _topic: str, key: str) -> None:
            error = ServerUnavailable("gone")
            error.outcomes = [KeyOutcome(f"{key}{US}{n}", Cancelled.CANCELLED) for n in range(2)]
            raise error

    call: Any = SimpleNamespace(
        gateway=SimpleNamespace(sender=Failing()), topic="orders", key="k", path={}
    )
    with pytest.raises(ErrorResponse) as caught:
        asyncio.run(cancel_key(call))
    assert (caught.value.status, caught.value.kind) == (503, "server-unavailable")
    assert caught.value.detail.endswith("handled before: 2")


def test_a_key_of_an_unknown_topic_is_unknown(client: httpx.Client) -> None:
    path = key_path(new_topic(), "k")
    for method, body in (("GET", None), ("DELETE", None), ("PATCH", {"delay_ms": 1})):
        answer = client.request(method, path, json=body)
        assert (answer.status_code, answer.json()["type"]) == (
            404,
            "urn:lisa:problem:unknown-topic",
        )
    invalid = client.get(f"/v1/topics/{declared_topic(client)}/keys/a%1Fb")
    assert invalid.status_code == 400


def test_problems_name_the_key(client: httpx.Client) -> None:
    topic = new_topic()
    message_id = send(client, topic, key="k", id="a")
    (delivery,) = pull(client, topic)
    refused = client.delete(message_path(topic, message_id)).json()
    assert (refused["id"], refused["key"], refused["outcome"]) == (message_id, "k", "in_flight")
    assert "'k / a'" in refused["detail"]
    settle(client, topic, delivery, "ack")
    repeated = {"body": 2, "key": "k", "id": "a", "on_duplicate": "reject"}
    known = client.post(f"/v1/topics/{topic}/messages", json=repeated).json()
    assert (known["id"], known["key"]) == (message_id, "k")
    assert client.post(f"/v1/topics/{topic}/messages", json=repeated | {"key": "j"}).is_success
    for wrong in ({"key": ""}, {"key": "a\u001fb"}, {"key": "x" * 257}, {"id": message_id}):
        answer = client.post(f"/v1/topics/{topic}/messages", json={"body": 1} | wrong)
        assert answer.status_code == 400, wrong


def test_a_batch_sends_the_same_id_with_two_keys(client: httpx.Client) -> None:
    topic = declared_topic(client)
    path = f"/v1/topics/{topic}/messages:batch"
    messages = [{"body": key, "id": "a"} | ({"key": key} if key else {}) for key in ("", "k", "j")]
    headers = {"Idempotency-Key": "once"}
    for _ in range(2):
        answer = client.post(path, json={"messages": messages}, headers=headers).json()
        assert answer["accepted"] == 3
        assert answer["results"] == [
            {"id": "a", "outcome": "accepted"},
            {"id": f"k{US}a", "key": "k", "outcome": "accepted"},
            {"id": f"j{US}a", "key": "j", "outcome": "accepted"},
        ]
    held = pull(client, topic, max=10)
    receipts = [{"receipt": one["receipt"]} for one in held]
    acked = client.post(f"/v1/topics/{topic}/messages:batch-ack", json={"deliveries": receipts})
    assert {one.get("key") for one in acked.json()["results"]} == {None, "k", "j"}


def test_dead_messages_of_a_key_are_requeued_and_purged(client: httpx.Client) -> None:
    topic = declared_topic(client)
    message_id = send(client, topic, key="k/1", id="a")
    (delivery,) = pull(client, topic)
    receipt = {"receipt": delivery["receipt"], "discard": True}
    dead = client.post(f"{message_path(topic, message_id)}/retry", json=receipt).json()
    assert (dead["key"], dead["outcome"]) == ("k/1", "dead")
    (row,) = client.get(f"/v1/topics/{topic}/garbage").json()["messages"]
    assert (row["id"], row["key"]) == (message_id, "k/1")
    for verb, missing in (("requeue", []), ("requeue", [message_id])):
        answer = client.post(f"/v1/topics/{topic}/garbage:{verb}", json={"ids": [message_id]})
        assert answer.json()["missing"] == missing
    (row,) = client.get(f"/v1/topics/{topic}/messages?state=ready").json()["messages"]
    assert row["key"] == "k/1"


def test_sends_of_a_key_are_coalesced(client: httpx.Client) -> None:
    topic = declared_topic(client)
    path = f"/v1/topics/{topic}/messages"

    def offer(body: int, **options: Any) -> httpx.Response:
        return client.post(path, json={"body": body, "key": "k"} | options)

    first = offer(1, debounce_ms="10m", max_wait_ms="1h")
    assert (first.status_code, first.json()["id"]) == (201, f"k{US}~1")
    second = offer(2, debounce_ms="1m").json()
    assert second == {"id": f"k{US}~1", "key": "k", "outcome": "replaced"}
    (waiting,) = client.get(key_path(topic, "k")).json()["messages"]
    assert client.get(message_path(topic, waiting["id"])).json()["body"] == 2
    headers = {"Idempotency-Key": "once"}
    batch = {"messages": [{"body": n, "key": f"b{n % 2}", "latest": True} for n in range(4)]}
    sent = client.post(f"{path}:batch", json=batch, headers=headers).json()
    assert [one["outcome"] for one in sent["results"]] == [*["accepted"] * 2, *["updated"] * 2]
    assert client.post(f"{path}:batch", json=batch, headers=headers).json() == sent
    now = offer(5, key="t", throttle_ms="1h")
    assert now.json() == {"id": f"t{US}~1", "key": "t", "outcome": "accepted"}
    bodies = {one["id"]: one["body"] for one in pull(client, topic, max=10)}
    wrong: list[dict[str, Any]] = [
        {"debounce_ms": "1m", "id": "own"},
        {"debounce_ms": "1m", "key": None},
        {"debounce_ms": "1m", "throttle_ms": "1m"},
        {"debounce_ms": "1m", "delay_ms": 5},
        {"max_wait_ms": "1m"},
        {"id": "~1"},
        {"cost": 0},
        {"slack_ms": -1},
    ]
    for options in wrong:
        assert offer(9, **options).status_code == 400, options
    assert bodies.items() <= {f"b0{US}~1": 2, f"b1{US}~1": 3, f"t{US}~1": 5}.items()


def test_a_schedule_has_a_key(client: httpx.Client) -> None:
    topic = new_topic()
    path = f"/v1/topics/{topic}/schedules/daily"
    lane = {"cost": 5, "slack_ms": 30_000}
    client.put(path, json={"body": 1, "every_ms": "1d", "key": "k", **lane})
    found = client.get(path).json()
    assert found["key"] == "k"
    assert lane.items() <= found.items()
    made = client.post(f"{path}/run").json()
    assert (made["key"], made["id"].startswith(f"k{US}daily")) == ("k", True)


@pytest.mark.parametrize("key", ["k", "a/b", "limits", "ключ"])
def test_limits_of_keys_are_set_listed_and_removed(client: httpx.Client, key: str) -> None:
    topic = declared_topic(client)
    path = f"{key_path(topic, key)}/limits"
    none: dict[str, Any] = dict.fromkeys(("rate", "concurrency", "weight"))
    nothing = {"key": key, "group": None} | none
    assert client.get(path).json() == nothing
    limits = {"rate": "5 per 90s, burst 3", "weight": 2}
    for is_first in (True, False):
        answer = client.put(path, json=limits).json()
        assert answer == nothing | limits | {"changed": is_first}
    of_group: dict[str, Any] = {"params": {"group": "g"}}
    assert client.put(path, json={"concurrency": 4}, **of_group).json()["changed"] is True
    of_all = nothing | limits
    of_g = {"key": key, "group": "g", **none, "concurrency": 4}
    assert (client.get(path).json(), client.get(path, **of_group).json()) == (of_all, of_g)
    by_query = client.get(f"/v1/topics/{topic}/key/limits", params={"key": key, "group": "g"})
    assert by_query.json() == of_g
    listing = f"/v1/topics/{topic}/limits"
    first = client.get(listing, params={"limit": 1}).json()
    assert (first["topic"], first["keys"]) == (topic, [of_all])
    rest = client.get(listing, params={"cursor": first["cursor"]}).json()
    assert (rest["keys"], rest["cursor"]) == ([of_g], None)
    for is_first in (True, False):
        assert client.delete(path).json() == nothing | {"changed": is_first}
    assert client.get(listing).json()["keys"] == [of_g]


def test_invalid_limits_are_refused(client: httpx.Client) -> None:
    topic = declared_topic(client)
    path = f"{key_path(topic, 'k')}/limits"
    wrong: list[dict[str, Any]] = [
        {},
        {"rate": "fast"},
        {"rate": "0/s"},
        {"concurrency": 0},
        {"weight": 1_001},
        {"key_rate": "1/s"},
    ]
    for limits in wrong:
        assert client.put(path, json=limits).status_code == 400, limits
    unknown_group: dict[str, Any] = {"params": {"group": "nobody"}}
    assert client.put(path, json={"weight": 2}, **unknown_group).status_code == 404
    assert client.get(f"/v1/topics/{topic}/limits").json()["keys"] == []
    unknown = new_topic()
    for method in ("GET", "PUT", "DELETE"):
        body = {"weight": 2} if method == "PUT" else None
        answer = client.request(method, f"{key_path(unknown, 'k')}/limits", json=body)
        assert answer.json()["type"] == "urn:lisa:problem:unknown-topic"
    assert client.get(f"/v1/topics/{unknown}/limits").status_code == 404
