"""The gateway's APIs on a sharded topic: clients see one topic."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest

from tests import clusters
from tests.gateway.native_client import pages, pull, send, settle
from tests.gateways import Gateway, new_topic

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

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


def test_a_long_poll_is_woken_from_any_shard(client: httpx.Client, topic: str) -> None:
    for n in range(5):
        sent = send(client, topic, id=f"new{n}", delay_ms=300)
        (one,) = pull(client, topic, wait_ms=20_000)
        assert one["id"] == sent
        settle(client, topic, one, "ack")


@pytest.fixture(scope="module")
def on_cluster() -> Iterator[Gateway]:
    from lisa import Manager

    with clusters.two_nodes() as nodes:
        url = clusters.address(nodes)
        with Manager(url), Gateway(url) as running:
            yield running


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
