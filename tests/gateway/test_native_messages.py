"""The native API: messages are inspected, cancelled, rescheduled and listed in pages."""

from typing import Any
from urllib.parse import quote

import httpx
import pytest

from lisa import Consumer, Message
from lisa.gateway.api import OPERATIONS
from tests.gateway.native_client import pages, pull, send
from tests.gateways import declared_topic, new_topic
from tests.servers import wait_until

DAY_MS = 86_400_000


ODD_IDS = ["a/b", "fire", "..a", "100%", "a b", "a?b#c", "%2F", "messages:batch", "\\", "x" * 256]
IN_PATH, IN_QUERY = [("path", one) for one in ODD_IDS], [("query", one) for one in ("..", "a&b=c")]


@pytest.mark.parametrize(("place", "message_id"), [*IN_PATH, *IN_QUERY])
def test_an_id_may_hold_any_character(client: httpx.Client, place: str, message_id: str) -> None:
    topic = new_topic()
    path, query = f"/v1/topics/{topic}/messages/{quote(message_id, safe='')}", {}
    if place == "query":
        path, query = f"/v1/topics/{topic}/message", {"id": message_id}
    send(client, topic, id=message_id, delay_ms=DAY_MS)
    assert client.get(path, params=query).json()["id"] == message_id
    for moved in (
        client.patch(path, params=query, json={"delay_ms": "1h"}),
        client.post(f"{path}/fire", params=query),
    ):
        assert moved.json() == {"id": message_id, "outcome": "rescheduled"}
    (delivery,) = pull(client, topic)
    for verb in ("extend", "ack"):
        receipt = {"receipt": delivery["receipt"]}
        answer = client.post(f"{path}/{verb}", params=query, json=receipt)
        assert (answer.status_code, answer.json()["id"]) == (200, message_id)
    assert client.delete(path, params=query).status_code == 409


def test_a_message_says_why_it_is_not_running(client: httpx.Client) -> None:
    topic = new_topic()
    send(client, topic, id="a/b", delay_ms=DAY_MS)
    path = f"/v1/topics/{topic}/messages/{quote('a/b', safe='')}/why"
    (reason,) = client.get(path).json()["reasons"]
    assert (reason["group"], reason["state"]) == (None, "waiting")
    assert reason["sentence"].startswith("It waits until it is due, ")
    assert reason["until_ms"] is not None
    shown = client.get(f"/topics/{topic}/messages/{quote('a/b', safe='')}").text
    assert f"<dt>Why not now</dt><dd>{reason['sentence']}</dd>" in shown
    assert client.get(f"/v1/topics/{topic}/messages/unknown/why").status_code == 404


def test_a_dead_message_is_shown_with_its_traceback(client: httpx.Client, redis_url: str) -> None:
    topic = new_topic()
    path, consumer = f"/v1/topics/{topic}/messages/x", Consumer(redis_url, group="g")

    @consumer.on(topic)
    def fails(message: Message) -> None:
        raise RuntimeError(f"<no stock> for {message.body}")

    with consumer:
        send(client, topic, id="x", retry="")
        wait_until(lambda: client.get(path).json()["state"] == "garbage")
    found = client.get(path).json()
    assert found["reason"] == "RuntimeError: <no stock> for 1"
    (listed,) = client.get(f"/v1/topics/{topic}/garbage").json()["messages"]
    assert found["traceback"] == found["groups"]["g"]["traceback"] == listed["traceback"]
    assert ", in fails\n" in found["traceback"]
    for page in (f"/topics/{topic}/garbage", f"/topics/{topic}/messages/x"):
        shown = client.get(page).text
        assert ", in fails\n" in shown
        assert "<no stock>" not in shown


def test_messages_in_flight_or_done_are_not_changed(client: httpx.Client) -> None:
    topic = new_topic()
    path = f"/v1/topics/{topic}/messages/x"
    send(client, topic, id="x")
    (delivery,) = pull(client, topic)
    for outcome in ("in_flight", "done"):
        moved = client.patch(path, json={"delay_ms": 5})
        for answer in (client.delete(path), client.post(f"{path}/fire"), moved):
            assert (answer.status_code, answer.json()["outcome"]) == (409, outcome)
        client.post(f"{path}/ack", json={"receipt": delivery["receipt"]})


def test_cancelling_twice_has_the_same_outcome(client: httpx.Client) -> None:
    topic = new_topic()
    send(client, topic, id="x", delay_ms=DAY_MS)
    first = client.delete(f"/v1/topics/{topic}/messages/x")
    second = client.delete(f"/v1/topics/{topic}/messages/x")
    assert (first.status_code, first.json()) == (second.status_code, second.json())
    moved = client.patch(f"/v1/topics/{topic}/messages/x", json={"delay_ms": 5})
    assert (moved.status_code, "it has ended" in moved.json()["detail"]) == (409, True)


def test_a_message_is_rescheduled_to_a_local_time_in_its_window(client: httpx.Client) -> None:
    topic = new_topic()
    path = f"/v1/topics/{topic}/messages/x"
    send(client, topic, id="x", delay_ms=DAY_MS, window="10-11", tz="Asia/Tokyo")
    moved = client.patch(path, json={"at_local": "2030-12-24T10:30", "tz": "Asia/Tokyo"})
    assert moved.json() == {"id": "x", "outcome": "rescheduled"}
    assert client.get(path).json()["due_ms"] == 1_924_300_800_000 + 90 * 60_000
    client.patch(path, json={"due_ms": 1_924_300_800_000})
    assert client.get(path).json()["due_ms"] == 1_924_300_800_000 + 60 * 60_000
    business = {"at_local": "10:00", "business_days": 3, "fold": 0}
    assert client.patch(path, json=business).status_code == 200
    assert client.get(path).json()["due_ms"] % DAY_MS == 3_600_000  # ten in Tokyo


def test_pages_hold_each_message_once_during_changes(client: httpx.Client) -> None:
    topic = new_topic()
    path = f"/v1/topics/{topic}/messages"
    messages = [{"body": n, "id": f"é/{n:03}", "delay_ms": DAY_MS + n // 10} for n in range(100)]
    client.post(f"{path}:batch", json={"messages": messages})
    seen: list[str] = []
    cursor = None
    for step in range(100):
        query: dict[str, Any] = {"limit": 7} | ({} if cursor is None else {"cursor": cursor})
        page = client.get(path, params=query).json()
        seen += [one["id"] for one in page["messages"]]
        cursor = page["cursor"]
        if cursor is None:
            break
        # Remove the last one shown, add one before it and one at the end.
        client.delete(f"{path}/{quote(seen[-1], safe='')}")
        send(client, topic, id=f"early-{step}", delay_ms=1_000_000)
    assert [one for one in seen if one.startswith("é")] == [f"é/{n:03}" for n in range(100)]


def test_lists_by_state_and_due_time(client: httpx.Client) -> None:
    topic = declared_topic(client)
    path = f"/v1/topics/{topic}/messages"
    for n in range(5):
        send(client, topic, id=f"now-{n}")
    send(client, topic, id="near", due_ms=4_000_000_000_000)
    send(client, topic, id="far", due_ms=4_000_000_000_001)
    held = pull(client, topic, max=2)

    def ids(**query: Any) -> list[str]:
        return [one["id"] for page in pages(client, path, **query) for one in page]

    assert ids() == ids(state="waiting", limit=1) == ["near", "far"]
    assert ids(due_before_ms=4_000_000_000_001) == ["near"]
    assert ids(state="ready", limit=2) == ["now-2", "now-3", "now-4"]
    assert ids(state="in_flight", limit=1) == [one["id"] for one in held] == ["now-0", "now-1"]
    assert ids(state="in_flight", group="g") == ["now-0", "now-1"]
    assert ids(state="retry") == ids(state="garbage") == []
    row = client.get(path, params={"state": "in_flight"}).json()["messages"][0]
    assert (row["group"], row["state"], row["attempts"]) == ("g", "in_flight", 0)


def test_the_index_links_to_everything(client: httpx.Client) -> None:
    for path in ("/v1", "/v1/"):
        index = client.get(path).json()
        assert {one["name"] for one in index["operations"]} == {one.name for one in OPERATIONS}
        for link in index["links"].values():
            assert client.get(link).status_code == 200


def test_unknown_paths_and_methods_are_rejected(client: httpx.Client) -> None:
    path = f"/v1/topics/{declared_topic(client)}"
    assert client.get("/v1/nowhere").status_code == 404
    assert client.get("/v1/topics//messages").status_code == 404
    answer = client.put(f"{path}/messages", json={})
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, POST")
    assert client.head(f"{path}/messages").status_code == 200
    # Operations without a body accept an empty object.
    for answer in (client.post(f"{path}/pause"), client.post(f"{path}/pause", json={})):
        assert answer.status_code == 200


def test_words_of_a_path_may_be_percent_encoded(client: httpx.Client) -> None:
    path = f"/v1/topics/{declared_topic(client)}"
    batch = client.post(f"{path}/messages%3Abatch", json={"messages": [{"body": 1, "id": "a/b"}]})
    assert batch.json()["accepted"] == 1
    assert client.get(f"{path.replace('topics', '%74opics')}/messages/a%2Fb").json()["id"] == "a/b"
    assert client.get(f"{path}/messages/a/b").status_code == 404
    answer = client.get("/v1/topics/%FF")
    assert (answer.status_code, answer.json()["type"]) == (400, "urn:lisa:problem:invalid")
