"""The native API: topics, options, groups, garbage, consumers, managers and the event stream."""

from __future__ import annotations

import json
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from typing import Any

import httpx
import pytest

from lisa import Manager
from lisa.core.model.options import TopicOptions
from lisa.gateway.api.events import MOST_STREAMS
from lisa.gateway.api.models.topics import OptionsAnswer, OptionsRequest
from tests import clusters
from tests.gateway.native_client import pages, pull, send, settle
from tests.gateways import Gateway, declared_topic, new_topic
from tests.servers import wait_until

DAY_MS = 86_400_000


def test_a_topic_is_deleted_after_confirmation(client: httpx.Client) -> None:
    topic = declared_topic(client)
    send(client, topic, id="later", delay_ms=DAY_MS)
    send(client, topic, id="due")
    for confirmation in ({}, {"confirm": "yes"}):
        refused = client.delete(f"/v1/topics/{topic}", params=confirmation)
        assert (refused.status_code, refused.json()["type"]) == (400, "urn:lisa:problem:invalid")
        assert f"with 2 messages, repeat the request with confirm={topic}" in refused.text
    deleted = client.delete(f"/v1/topics/{topic}", params={"confirm": topic})
    assert (deleted.status_code, deleted.json()) == (
        200,
        {"topic": topic, "cancelled": 1, "purged": 1},
    )
    assert client.get(f"/v1/topics/{topic}").status_code == 404
    assert client.delete(f"/v1/topics/{topic}", params={"confirm": topic}).status_code == 404


def test_a_topic_with_shards_is_not_deleted(client: httpx.Client) -> None:
    topic = declared_topic(client)
    client.patch(f"/v1/topics/{topic}/options", json={"shards": 2})
    refused = client.delete(f"/v1/topics/{topic}", params={"confirm": topic})
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:lisa:problem:in-use")
    assert client.get(f"/v1/topics/{topic}").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("GET", "", None),
        ("DELETE", "?confirm=nothing", None),
        ("GET", "/options", None),
        ("POST", "/pause", None),
        ("GET", "/groups", None),
        ("GET", "/events", None),
        ("GET", "/push", None),
        ("GET", "/messages", None),
        ("GET", "/messages/x", None),
        ("PATCH", "/messages/x", {"delay_ms": 1}),
        ("POST", "/garbage:requeue", {"all": True}),
    ],
)
def test_an_unknown_topic_is_not_found(
    client: httpx.Client, method: str, path: str, content: object
) -> None:
    topic = new_topic()
    answer = client.request(method, f"/v1/topics/{topic}{path}", json=content)
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:lisa:problem:unknown-topic")
    assert topic not in {one["topic"] for one in client.get("/v1/topics").json()["topics"]}


def test_the_consumers_of_an_unknown_topic_are_not_found(client: httpx.Client) -> None:
    answer = client.get("/v1/consumers", params={"topic": new_topic()})
    assert answer.json()["type"] == "urn:lisa:problem:unknown-topic"


def bury(client: httpx.Client, topic: str, *ids: str, reason: str = "no use") -> None:
    """Send messages and discard them to the garbage of the topic's only group."""
    for one in ids:
        send(client, topic, id=one)
    left = set(ids)
    while left:
        wanted = {"max": 100, "wait_ms": 5_000}
        for one in client.post(f"/v1/topics/{topic}/pull", json=wanted).json()["deliveries"]:
            answer = client.post(
                f"/v1/topics/{topic}/messages/{one['id']}/retry",
                json={"receipt": one["receipt"], "discard": True, "reason": reason},
            )
            assert answer.json()["outcome"] == "dead"
            left.discard(one["id"])


def garbage(client: httpx.Client, topic: str, **query: Any) -> list[str]:
    found = pages(client, f"/v1/topics/{topic}/garbage", **query)
    return [one["id"] for page in found for one in page]


def test_topics_are_listed_in_pages(client: httpx.Client) -> None:
    stem = new_topic()
    names = [f"{stem}-{n}" for n in range(5)]
    for name in names:
        send(client, name, delay_ms=DAY_MS)
    seen, cursor = [], f"{stem}-"
    while cursor is not None and cursor < f"{stem}.":
        page = client.get("/v1/topics", params={"limit": 2, "cursor": cursor}).json()
        assert len(page["topics"]) <= 2
        seen += [one["topic"] for one in page["topics"] if one["topic"].startswith(stem)]
        cursor = page["cursor"]
    assert seen == names
    first = client.get("/v1/topics", params={"limit": 1, "cursor": f"{stem}-"}).json()["topics"]
    assert (first[0]["topic"], first[0]["waiting"]) == (names[0], 1)


def test_options_are_set_and_reset(client: httpx.Client) -> None:
    path = f"/v1/topics/{declared_topic(client)}/options"
    before = client.get(path).json()
    changed = {
        "ack_timeout": "1500ms",
        "retry_delays": "0s,2m,10m~0.2",
        "capacity": 5,
        "journal": True,
        "retention": "90s",
        "garbage_keep": "2d",
    }
    set_ = client.patch(path, json=changed)
    assert set_.status_code == 200
    assert client.get(path).json() == set_.json() == before | changed
    # Options as displayed may be set.
    assert client.patch(path, json=set_.json()).json() == set_.json()
    assert client.patch(path, json=dict.fromkeys(changed)).json() == before


def test_large_bodies_are_allowed_with_a_warning(client: httpx.Client) -> None:
    path = f"/v1/topics/{new_topic()}/options"
    said = client.patch(path, json={"max_body_bytes": 9_000_000})
    assert said.json()["max_body_bytes"] == 9_000_000
    assert "9000000 bytes" in said.headers["Warning"]
    assert "Warning" not in client.patch(path, json={"max_body_bytes": 8_388_608}).headers
    assert "Warning" not in client.patch(path, json={"max_body_bytes": None}).headers


def test_groups_beyond_max_groups_are_rejected(client: httpx.Client) -> None:
    path = f"/v1/topics/{new_topic()}"
    client.patch(f"{path}/options", json={"max_groups": 1})
    assert client.post(f"{path}/groups", json={"group": "g"}).status_code == 201
    refused = client.post(f"{path}/groups", json={"group": "h"})
    assert (refused.status_code, refused.json()["type"]) == (
        409,
        "urn:lisa:problem:too-many-groups",
    )
    assert client.post(f"{path}/groups", json={"group": "g"}).status_code == 200


def test_the_models_have_all_topic_options() -> None:
    names = tuple(one.name for one in fields(TopicOptions))
    assert OptionsRequest.__struct_fields__ == OptionsAnswer.__struct_fields__ == names


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"ack_timeout": "1ms"}, "ack_timeout"),
        ({"capacity": 0}, "capacity"),
        ({"retention": "5s"}, "retention"),
        ({"max_ready": 5, "journal_max": -1}, "-1"),
        ({"capacity": None, "ack_timeout": "soon"}, "ack_timeout"),
        ([], "object"),
    ],
)
def test_invalid_options_are_rejected(client: httpx.Client, content: Any, said: str) -> None:
    path = f"/v1/topics/{new_topic()}/options"
    before = client.get(path).json()
    answer = client.patch(path, json=content)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["detail"]
    assert client.get(path).json() == before


def test_a_paused_topic_delivers_nothing(client: httpx.Client) -> None:
    topic = declared_topic(client)
    path = f"/v1/topics/{topic}"
    assert client.post(f"{path}/pause").json() == {"paused": True, "changed": True}
    assert client.post(f"{path}/pause").json() == {"paused": True, "changed": False}
    send(client, topic)
    assert client.post(f"{path}/pull", json={"wait_ms": 300}).json()["deliveries"] == []
    assert client.get(path).json()["paused"] is True
    assert client.post(f"{path}/resume").json() == {"paused": False, "changed": True}
    assert client.post(f"{path}/resume").json() == {"paused": False, "changed": False}
    assert len(client.post(f"{path}/pull", json={"wait_ms": 5_000}).json()["deliveries"]) == 1


def test_garbage_is_listed_requeued_and_purged(client: httpx.Client) -> None:
    topic = new_topic()
    bury(client, topic, "a", "b", "c")
    assert garbage(client, topic) == garbage(client, topic, limit=1) == ["a", "b", "c"]

    path = f"/v1/topics/{topic}/garbage"
    again = client.post(f"{path}:requeue", json={"ids": ["a", "nobody", "a"]})
    assert again.json() == {"done": 1, "missing": ["nobody"]}
    assert garbage(client, topic) == ["b", "c"]
    pulled = client.post(f"/v1/topics/{topic}/pull", json={"wait_ms": 5_000}).json()
    assert [(one["id"], one["attempt"]) for one in pulled["deliveries"]] == [("a", 1)]

    assert client.post(f"{path}:purge", json={"ids": ["b"]}).json() == {"done": 1, "missing": []}
    assert client.get(f"/v1/topics/{topic}/messages/b").json()["state"] == "purged"
    assert client.post(f"{path}:purge", json={"all": True}).json() == {"done": 1, "missing": []}
    assert garbage(client, topic) == []


def test_garbage_is_found_by_reason_and_time(client: httpx.Client) -> None:
    topic = new_topic()
    bury(client, topic, "a", "b", reason="Card refused")
    bury(client, topic, "c", reason="time-out")
    died = client.get(f"/v1/topics/{topic}/garbage").json()["messages"][0]["due_ms"]
    assert garbage(client, topic, reason="CARD") == ["a", "b"]
    assert garbage(client, topic, reason="nothing") == []
    assert garbage(client, topic, died_before_ms=died) == []
    assert garbage(client, topic, group="lisa", died_before_ms=died + DAY_MS) == ["a", "b", "c"]
    path = f"/v1/topics/{topic}/garbage"
    none = client.post(f"{path}:purge", json={"all": True, "died_before_ms": died})
    assert none.json()["done"] == 0
    some = client.post(f"{path}:requeue", json={"all": True, "reason": "refused"})
    assert some.json()["done"] == 2
    assert garbage(client, topic) == ["c"]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        ({}, 400),
        ({"all": True, "ids": ["a"]}, 400),
        ({"ids": ["a\x00"]}, 400),
        ({"ids": ["a"] * 1_001}, 400),
        ({"ids": ["a"], "reason": "x"}, 400),
        ({"all": True, "group": "nobody"}, 404),
    ],
)
def test_invalid_garbage_requests_are_rejected(
    client: httpx.Client, content: Any, status: int
) -> None:
    topic = declared_topic(client)
    for verb in ("requeue", "purge"):
        answer = client.post(f"/v1/topics/{topic}/garbage:{verb}", json=content)
        assert answer.status_code == status, answer.text


def test_consumers_and_managers_are_listed(client: httpx.Client, manager: Manager) -> None:
    topic = declared_topic(client)
    client.post(f"/v1/topics/{topic}/pull", json={})
    (consumer,) = client.get("/v1/consumers", params={"topic": topic}).json()["consumers"]
    assert consumer["name"].startswith("gateway-")
    assert (consumer["topic"], consumer["group"], consumer["alive"]) == (topic, "g", True)
    send(client, topic, delay_ms=DAY_MS)
    names = [one["name"] for one in client.get("/v1/consumers").json()["consumers"]]
    assert consumer["name"] in names
    managers = client.get("/v1/managers").json()["managers"]
    assert [one["alive"] for one in managers] == [True]
    assert managers[0]["silent_ms"] < 30_000
    assert client.get("/v1/consumers", params={"topic": "a b"}).status_code == 400


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield json.loads(line.removeprefix("data: "))


def test_events_follow_the_counters(gateway: Gateway) -> None:
    topic, client = declared_topic(gateway.client), gateway.client
    path = f"/v1/topics/{topic}/events"
    with client.stream("GET", path) as one, client.stream("GET", path) as two:
        assert one.headers["content-type"].startswith("text/event-stream")
        first, second = events(one), events(two)
        assert next(first)["waiting"] == next(second)["waiting"] == 0
        for _ in range(5):
            send(client, topic, delay_ms=DAY_MS)
        seen = next(event for event in first if event["waiting"] == 5)
        assert (seen["topic"], seen["in_per_s"] > 0) == (topic, True)
        assert next(event for event in second if event["waiting"] == 5) == seen
        # When activity ends, there is one more event, then none.
        assert next(first)["in_per_s"] == 0


def test_the_number_of_streams_is_limited(gateway: Gateway) -> None:
    path = f"/v1/topics/{declared_topic(gateway.client)}/events"
    port = int(gateway.url.rpartition(":")[2])
    with ExitStack() as stack:

        def watch() -> socket.socket:
            """Ask for one more stream."""
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            return connection

        def answers(count: int) -> Counter[bytes]:
            """The first lines of the responses to requests that are made at once."""
            asked = [watch() for _ in range(count)]
            return Counter(one.recv(1_000).partition(b"\r\n")[0] for one in asked)

        full = b"HTTP/1.1 503 Service Unavailable"
        assert answers(MOST_STREAMS + 50) == {b"HTTP/1.1 200 OK": MOST_STREAMS, full: 50}
        assert answers(1) == {full: 1}
        # Streams do not block other requests.
        assert gateway.client.get("/v1/topics").status_code == 200

    def is_free() -> bool:
        with gateway.client.stream("GET", path) as stream:
            return stream.status_code == 200

    wait_until(is_free)


def test_streams_end_when_the_gateway_stops(redis_url: str) -> None:
    with (
        Gateway(redis_url) as gateway,
        gateway.client.stream(
            "GET", f"/v1/topics/{declared_topic(gateway.client)}/events"
        ) as stream,
    ):
        found = events(stream)
        next(found)
        gateway.process.terminate()
        began = time.monotonic()
        assert list(found) == []
        assert gateway.process.wait(30) == 0
        assert time.monotonic() - began < 9  # the grace time is 10 s


# A topic with shards ------------------------------------------------------------------------------


FAR_MS = 4_000_000_000_000
N = 24


def split(client: httpx.Client, topic: str, shards: int) -> None:
    answer = client.patch(f"/v1/topics/{topic}/options", json={"shards": shards})
    assert answer.status_code == 200, answer.text
    assert answer.json()["shards"] == shards


@pytest.fixture
def topic(client: httpx.Client) -> str:
    """A topic split twice, with a third of the waiting messages in each layout."""
    name = new_topic()
    client.post(f"/v1/topics/{name}/groups", json={"group": "lisa"})
    for third, shards in enumerate((1, 4, 3)):
        if third:
            split(client, name, shards)
        for n in range(third, N, 3):
            send(client, name, id=f"m{n:02}", due_ms=FAR_MS + n)
    return name


def test_lists_counts_and_ids_cover_all_shards(client: httpx.Client, topic: str) -> None:
    found: list[str] = []
    cursor: str | None = ""
    while cursor is not None:
        answer = client.get(
            f"/v1/topics/{topic}/messages",
            params={"state": "waiting", "limit": 5, **({"cursor": cursor} if cursor else {})},
        ).json()
        found += [one["id"] for one in answer["messages"]]
        cursor = answer.get("cursor")
    assert found == [f"m{n:02}" for n in range(N)]
    assert client.get(f"/v1/topics/{topic}").json()["waiting"] == N
    listed = client.get("/v1/topics", params={"limit": 500}).json()["topics"]
    names = [one["topic"] for one in listed]
    assert names.count(topic) == 1
    assert not [one for one in names if "~" in one]
    for n in range(3):
        path = f"/v1/topics/{topic}/messages/m{n:02}"
        assert client.get(path).json()["state"] == "waiting"
        assert client.post(f"{path}/fire").json()["outcome"] == "rescheduled"
        assert (
            client.post(f"/v1/topics/{topic}/messages", json={"id": f"m{n:02}", "body": 1}).json()[
                "outcome"
            ]
            == "duplicate"
        )
    assert client.get(f"/v1/topics/{topic}/messages/nobody").status_code == 404


def test_ready_and_in_flight_messages_are_listed_in_pages(client: httpx.Client, topic: str) -> None:
    ids = [f"m{n:02}" for n in range(N)]
    for one in ids:
        client.post(f"/v1/topics/{topic}/messages/{one}/fire")
    began, path = time.monotonic(), f"/v1/topics/{topic}/messages"
    while client.get(f"/v1/topics/{topic}").json()["ready"] < N and time.monotonic() - began < 20:
        time.sleep(0.01)
    listed = [one["id"] for page in pages(client, path, state="ready", limit=5) for one in page]
    assert sorted(listed) == ids
    held: list[str] = []
    while len(held) < N and time.monotonic() - began < 20:
        held += [one["id"] for one in pull(client, topic, max=N, ack_timeout_ms=60_000)]
    listed = [one["id"] for page in pages(client, path, state="in_flight", limit=5) for one in page]
    assert sorted(listed) == ids


def test_a_shard_name_is_not_a_topic(client: httpx.Client, topic: str) -> None:
    for path in (f"/v1/topics/{topic}~0of3", f"/v1/topics/{topic}~0of3/messages/m01"):
        assert client.get(path).status_code == 400


def test_deliveries_of_all_shards_are_pulled_and_settled(client: httpx.Client, topic: str) -> None:
    for n in range(N):
        client.post(f"/v1/topics/{topic}/messages/m{n:02}/fire")
    taken: list[dict[str, Any]] = []
    began = time.monotonic()
    while len(taken) < N and time.monotonic() - began < 20:
        taken += pull(client, topic, max=7)
    assert sorted(one["id"] for one in taken) == [f"m{n:02}" for n in range(N)]
    for one in taken[:6]:
        assert settle(client, topic, one, "extend").status_code == 200
        assert settle(client, topic, one, "ack").json()["outcome"] == "acked"
        assert settle(client, topic, one, "ack").json()["outcome"] == "repeated"
    for one in taken[6:12]:
        assert settle(client, topic, one, "retry", discard=True).status_code == 200
    for one in taken[12:]:
        assert settle(client, topic, one, "release").status_code == 200
    assert len(client.get(f"/v1/topics/{topic}/garbage").json()["messages"]) == 6
    answer = client.post(f"/v1/topics/{topic}/garbage:requeue", json={"all": True})
    assert answer.json()["done"] == 6
    again: set[str] = set()
    while len(again) < N - 6 and time.monotonic() - began < 20:
        again |= {one["id"] for one in pull(client, topic, max=100)}
    assert again == {one["id"] for one in taken[6:]}


@pytest.fixture(scope="module")
def on_cluster() -> Iterator[Gateway]:
    from lisa import Manager

    with clusters.two_nodes() as nodes:
        url = clusters.address(nodes)
        with Manager(url), Gateway(url) as running:
            yield running


@pytest.mark.full
def test_a_cluster_s_nodes_are_pulled_from_in_turn(on_cluster: Gateway) -> None:
    client, topic = on_cluster.client, new_topic()
    client.post(f"/v1/topics/{topic}/groups", json={"group": "lisa"})
    split(client, topic, 4)
    ids = {send(client, topic, delay_ms=200) for _ in range(12)}
    taken: set[str] = set()
    began = time.monotonic()
    while taken != ids and time.monotonic() - began < 20:
        for one in pull(client, topic, max=3):
            assert settle(client, topic, one, "ack").json()["outcome"] == "acked"
            taken.add(one["id"])
    assert taken == ids


@pytest.mark.parametrize("options", [{"max_body_bytes": 1_024}, {"capacity": 100}])
def test_a_batch_that_some_shards_refuse_is_sent_once(
    client: httpx.Client, options: dict[str, int]
) -> None:
    topic = new_topic()
    split(client, topic, 4)
    client.patch(f"/v1/topics/{topic}/options", json=options)
    # The capacity is 25 for each shard, so at least one of four is full, and not all of them.
    bodies = ["x" * (2_000 if n == 50 else 1) for n in range(101)]
    messages = [{"body": body, "due_ms": FAR_MS} for body in bodies]
    sent = client.post(f"/v1/topics/{topic}/messages:batch", json={"messages": messages}).json()
    waiting = client.get(f"/v1/topics/{topic}").json()["waiting"]
    assert (sent["accepted"], sent["failed"] > 0) == (waiting, True)
    path = f"/v1/topics/{topic}/messages"
    found = {one["id"] for page in pages(client, path, limit=500) for one in page}
    assert found == {one["id"] for one in sent["results"] if "id" in one}
