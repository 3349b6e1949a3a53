"""The native API: topics, options, groups, garbage, consumers, managers and the event stream."""

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
from lisa.gateway.api.topics import OptionsAnswer, OptionsRequest
from lisa.gateway.shares import MOST_STREAMS
from tests import clusters
from tests.gateway.native_client import pages, pull, send, settle
from tests.gateways import Gateway, declared_topic, new_topic
from tests.servers import wait_until

DAY_MS = 86_400_000


def test_a_topic_is_deleted_after_confirmation(client: httpx.Client) -> None:
    """Unless it has shards."""
    topic = declared_topic(client)
    path, confirmed = f"/v1/topics/{topic}", {"confirm": topic}
    send(client, topic, id="later", delay_ms=DAY_MS)
    send(client, topic, id="due")
    for confirmation in ({}, {"confirm": "yes"}):
        refused = client.delete(path, params=confirmation)
        assert (refused.status_code, refused.json()["type"]) == (400, "urn:lisa:problem:invalid")
        assert f"with 2 messages, repeat the request with confirm={topic}" in refused.text
    deleted = client.delete(path, params=confirmed)
    assert (deleted.status_code, deleted.json()) == (
        200,
        {"topic": topic, "cancelled": 1, "purged": 1},
    )
    assert client.get(path).status_code == 404
    assert client.delete(path, params=confirmed).status_code == 404
    client.post(f"{path}/groups", json={"group": "g"})
    split(client, topic, 2)
    refused = client.delete(path, params=confirmed)
    assert (refused.status_code, refused.json()["type"]) == (409, "urn:lisa:problem:in-use")
    assert client.get(path).status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "content"),
    [
        ("GET", "/topics/{}", None),
        ("DELETE", "/topics/{}?confirm=nothing", None),
        ("GET", "/topics/{}/options", None),
        ("POST", "/topics/{}/pause", None),
        ("GET", "/topics/{}/groups", None),
        ("GET", "/topics/{}/events", None),
        ("GET", "/topics/{}/push", None),
        ("GET", "/topics/{}/messages", None),
        ("GET", "/topics/{}/messages/x", None),
        ("PATCH", "/topics/{}/messages/x", {"delay_ms": 1}),
        ("POST", "/topics/{}/garbage:requeue", {"all": True}),
        ("GET", "/consumers?topic={}", None),
    ],
)
def test_an_unknown_topic_is_not_found(
    client: httpx.Client, method: str, path: str, content: object
) -> None:
    topic = new_topic()
    answer = client.request(method, f"/v1{path.format(topic)}", json=content)
    assert (answer.status_code, answer.json()["type"]) == (404, "urn:lisa:problem:unknown-topic")
    assert topic not in {one["topic"] for one in client.get("/v1/topics").json()["topics"]}


def bury(client: httpx.Client, topic: str, *ids: str, reason: str = "no use") -> None:
    """Send messages and discard them to the garbage of the topic's only group."""
    for message_id in ids:
        send(client, topic, id=message_id)
    left = set(ids)
    while left:
        for delivery in pull(client, topic, max=100):
            answer = settle(client, topic, delivery, "retry", discard=True, reason=reason)
            assert answer.json()["outcome"] == "dead"
            left.discard(delivery["id"])


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
    times = {"ack_timeout": "1500ms", "retention": "90s", "garbage_keep": "2d"}
    changed = times | {"retry_delays": "0s,2m,10m~0.2", "capacity": 5, "journal": True}
    set_ = client.patch(path, json=changed)
    assert set_.status_code == 200
    assert client.get(path).json() == set_.json() == before | changed
    # Options as displayed may be set.
    assert client.patch(path, json=set_.json()).json() == set_.json()
    assert client.patch(path, json=dict.fromkeys(changed)).json() == before
    large, usual, reset = (
        client.patch(path, json={"max_body_bytes": size}) for size in (9_000_000, 8_388_608, None)
    )
    assert large.json()["max_body_bytes"] == 9_000_000
    assert "9000000 bytes" in large.headers["Warning"]
    assert not any("Warning" in answer.headers for answer in (usual, reset))


def test_a_group_has_options_of_its_own(client: httpx.Client) -> None:
    topic = declared_topic(client)
    path = f"/v1/topics/{topic}/options"
    before = client.patch(path, json={"key_rate": "5/s", "order": "hold"}).json()
    (group,) = (one["name"] for one in client.get(f"/v1/topics/{topic}/groups").json()["groups"])
    own = {"key_rate": "10/m, burst 3", "order": "none", "slack": "5m"}
    set_ = client.patch(path, params={"group": group}, json=own)
    assert set_.json() == client.get(path, params={"group": group}).json() == before | own
    assert client.get(path).json() == client.get(path, params={"group": "other"}).json() == before
    reset = client.patch(path, params={"group": group}, json=dict.fromkeys(own))
    assert reset.json() == before
    refused = client.patch(path, params={"group": "other"}, json=own)
    assert (refused.status_code, refused.json()["type"]) == (404, "urn:lisa:problem:unknown-group")
    assert client.patch(path, params={"group": group}, json={"capacity": 1}).status_code == 400


def test_groups_beyond_max_groups_are_rejected(client: httpx.Client) -> None:
    path = f"/v1/topics/{new_topic()}"
    client.patch(f"{path}/options", json={"max_groups": 1})
    added, refused, again = (
        client.post(f"{path}/groups", json={"group": name}) for name in ("g", "h", "g")
    )
    assert [added.status_code, refused.status_code, again.status_code] == [201, 409, 200]
    assert refused.json()["type"] == "urn:lisa:problem:too-many-groups"


def test_the_models_have_all_topic_options() -> None:
    names = tuple(one.name for one in fields(TopicOptions))
    assert OptionsRequest.__struct_fields__ == OptionsAnswer.__struct_fields__ == names


def test_a_paused_topic_delivers_nothing(client: httpx.Client) -> None:
    topic = declared_topic(client)
    path = f"/v1/topics/{topic}"
    for changed in (True, False):
        assert client.post(f"{path}/pause").json() == {"paused": True, "changed": changed}
    send(client, topic)
    assert pull(client, topic, wait_ms=300) == []
    assert client.get(path).json()["paused"] is True
    for changed in (True, False):
        assert client.post(f"{path}/resume").json() == {"paused": False, "changed": changed}
    assert len(pull(client, topic)) == 1


def test_garbage_is_listed_requeued_and_purged(client: httpx.Client) -> None:
    topic = new_topic()
    bury(client, topic, "a", "b", "c")
    assert garbage(client, topic) == garbage(client, topic, limit=1) == ["a", "b", "c"]

    path = f"/v1/topics/{topic}/garbage"
    again = client.post(f"{path}:requeue", json={"ids": ["a", "absent", "a"]})
    assert again.json() == {"done": 1, "missing": ["absent"]}
    assert garbage(client, topic) == ["b", "c"]
    assert [(one["id"], one["attempt"]) for one in pull(client, topic)] == [("a", 1)]

    for wanted in ({"ids": ["b"]}, {"all": True}):
        purged = client.post(f"{path}:purge", json=wanted)
        assert purged.json() == {"done": 1, "missing": []}
    assert client.get(f"/v1/topics/{topic}/messages/b").json()["state"] == "purged"
    assert garbage(client, topic) == []


def test_garbage_is_found_by_reason_and_time(client: httpx.Client) -> None:
    topic = new_topic()
    bury(client, topic, "a", "b", reason="Card refused")
    bury(client, topic, "c", reason="time-out")
    path = f"/v1/topics/{topic}/garbage"
    died = client.get(path).json()["messages"][0]["due_ms"]
    assert garbage(client, topic, reason="CARD") == ["a", "b"]
    assert garbage(client, topic, reason="nothing") == []
    assert garbage(client, topic, died_before_ms=died) == []
    assert garbage(client, topic, group="lisa", died_before_ms=died + DAY_MS) == ["a", "b", "c"]
    for verb, filter_, done in (
        ("purge", {"died_before_ms": died}, 0),
        ("requeue", {"reason": "refused"}, 2),
    ):
        answer = client.post(f"{path}:{verb}", json={"all": True, **filter_})
        assert answer.json()["done"] == done
    assert garbage(client, topic) == ["c"]


def test_consumers_and_managers_are_listed(client: httpx.Client, manager: Manager) -> None:
    topic = declared_topic(client)
    pull(client, topic, wait_ms=0)
    (consumer,) = client.get("/v1/consumers", params={"topic": topic}).json()["consumers"]
    assert consumer["name"].startswith("gateway-")
    assert (consumer["topic"], consumer["group"], consumer["alive"]) == (topic, "g", True)
    send(client, topic, delay_ms=DAY_MS)
    names = [one["name"] for one in client.get("/v1/consumers").json()["consumers"]]
    assert consumer["name"] in names
    (found,) = client.get("/v1/managers").json()["managers"]
    assert (found["alive"], found["silent_ms"] < 30_000) == (True, True)
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
        share = MOST_STREAMS // 2
        assert answers(share + 50) == {b"HTTP/1.1 200 OK": share, full: 50}
        assert answers(1) == {full: 1}
        # Streams do not block other requests.
        assert gateway.client.get("/v1/topics").status_code == 200

    def is_free() -> bool:
        with gateway.client.stream("GET", path) as stream:
            return stream.status_code == 200

    wait_until(is_free)


def test_streams_end_when_the_gateway_stops(redis_url: str) -> None:
    with Gateway(redis_url) as gateway:
        path = f"/v1/topics/{declared_topic(gateway.client)}/events"
        with gateway.client.stream("GET", path) as stream:
            found = events(stream)
            next(found)
            gateway.process.terminate()
            began = time.monotonic()
            assert list(found) == []
            assert gateway.process.wait(30) == 0
            assert time.monotonic() - began < 9  # the grace time is 10 s


# A topic with shards ------------------------------------------------------------------------------


FAR_MS = 4_000_000_000_000
IDS = [f"m{n:02}" for n in range(24)]


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
        for n in range(third, len(IDS), 3):
            send(client, name, id=IDS[n], due_ms=FAR_MS + n)
    return name


def listed(client: httpx.Client, topic: str, state: str) -> list[str]:
    found = pages(client, f"/v1/topics/{topic}/messages", state=state, limit=5)
    return [one["id"] for page in found for one in page]


def fire_all(client: httpx.Client, topic: str) -> None:
    for message_id in IDS:
        client.post(f"/v1/topics/{topic}/messages/{message_id}/fire")


def test_lists_counts_and_ids_cover_all_shards(client: httpx.Client, topic: str) -> None:
    path = f"/v1/topics/{topic}"
    assert listed(client, topic, "waiting") == IDS
    assert client.get(path).json()["waiting"] == len(IDS)
    topics = client.get("/v1/topics", params={"limit": 500}).json()["topics"]
    names = [one["topic"] for one in topics]
    assert (names.count(topic), [name for name in names if "~" in name]) == (1, [])
    for message_id in IDS[:3]:
        message = f"{path}/messages/{message_id}"
        assert client.get(message).json()["state"] == "waiting"
        assert client.post(f"{message}/fire").json()["outcome"] == "rescheduled"
        again = client.post(f"{path}/messages", json={"id": message_id, "body": 1})
        assert again.json()["outcome"] == "duplicate"
    assert client.get(f"{path}/messages/absent").status_code == 404
    for shard in (f"{path}~0of3", f"{path}~0of3/messages/m01"):
        assert client.get(shard).status_code == 400


def test_ready_and_in_flight_messages_are_listed_in_pages(client: httpx.Client, topic: str) -> None:
    fire_all(client, topic)
    wait_until(lambda: client.get(f"/v1/topics/{topic}").json()["ready"] == len(IDS))
    assert sorted(listed(client, topic, "ready")) == IDS
    held: list[str] = []
    while len(held) < len(IDS):
        held += [one["id"] for one in pull(client, topic, max=len(IDS), ack_timeout_ms=60_000)]
    assert sorted(listed(client, topic, "in_flight")) == IDS


def test_deliveries_of_all_shards_are_pulled_and_settled(client: httpx.Client, topic: str) -> None:
    fire_all(client, topic)
    taken: list[dict[str, Any]] = []
    while len(taken) < len(IDS):
        taken += pull(client, topic, max=7)
    assert sorted(one["id"] for one in taken) == IDS
    for one in taken[:6]:
        assert settle(client, topic, one, "extend").status_code == 200
        assert settle(client, topic, one, "ack").json()["outcome"] == "acked"
        assert settle(client, topic, one, "ack").json()["outcome"] == "repeated"
    for one in taken[6:12]:
        assert settle(client, topic, one, "retry", discard=True).status_code == 200
    for one in taken[12:]:
        assert settle(client, topic, one, "release").status_code == 200
    assert len(garbage(client, topic)) == 6
    answer = client.post(f"/v1/topics/{topic}/garbage:requeue", json={"all": True})
    assert answer.json()["done"] == 6
    again: set[str] = set()
    while len(again) < len(IDS) - 6:
        again |= {one["id"] for one in pull(client, topic, max=100)}
    assert again == {one["id"] for one in taken[6:]}


@pytest.mark.full
def test_a_cluster_s_nodes_are_pulled_from_in_turn() -> None:
    topic, taken = new_topic(), set[str]()
    with clusters.two_nodes() as nodes:
        url = clusters.address(nodes)
        with Manager(url), Gateway(url) as gateway:
            client = gateway.client
            client.post(f"/v1/topics/{topic}/groups", json={"group": "lisa"})
            split(client, topic, 4)
            ids = {send(client, topic, delay_ms=200) for _ in range(12)}
            while taken != ids:
                for one in pull(client, topic, max=3):
                    assert settle(client, topic, one, "ack").json()["outcome"] == "acked"
                    taken.add(one["id"])


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
