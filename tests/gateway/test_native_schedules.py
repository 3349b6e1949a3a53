"""The native API: schedules of recurring messages."""

import time
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import httpx
import pytest
from redis import Redis

from tests.gateway.native_client import answer_in_turns, pull
from tests.gateways import declared_topic, new_topic

DAILY = {"body": {"kind": "daily"}, "cron": "0 9 * * *", "tz": "Asia/Tokyo"}
HOUR_MS = 3_600_000


def put(client: httpx.Client, topic: str, name: str, **definition: Any) -> httpx.Response:
    return client.put(f"/v1/topics/{topic}/schedules/{name}", json=definition)


def waiting(client: httpx.Client, topic: str) -> list[str]:
    found = client.get(f"/v1/topics/{topic}/messages").json()["messages"]
    return [one["id"] for one in found]


def test_a_schedule_is_created_changed_and_removed(client: httpx.Client) -> None:
    topic = new_topic()
    path = f"/v1/topics/{topic}/schedules/daily"
    for changed in (True, False):
        answer = put(client, topic, "daily", **DAILY)
        assert (answer.status_code, answer.json()) == (200, {"name": "daily", "changed": changed})
    found = client.get(path).json()
    assert (found["cron"], found["tz"], found["body"]) == ("0 9 * * *", "Asia/Tokyo", DAILY["body"])
    assert (found["version"], found["paused"]) == (1, False)
    at = datetime.fromtimestamp(found["next_ms"] / 1000, UTC)
    assert (at.hour, at.minute) == (0, 0)
    assert waiting(client, topic) == [f"daily@{found['next_ms']}"]
    assert put(client, topic, "daily", **DAILY | {"cron": "@hourly"}).json()["changed"]
    (moved,) = waiting(client, topic)
    assert moved == f"daily@{client.get(path).json()['next_ms']}"
    assert client.delete(path).json() == {"name": "daily", "changed": True}
    assert waiting(client, topic) == []
    assert client.get(path).status_code == 404


def test_an_unreadable_schedule_is_removed(client: httpx.Client, server: Redis) -> None:
    topic = declared_topic(client)
    server.hset(f"lisa:{{{topic}}}:schedules", "bad", "junk")
    path = f"/v1/topics/{topic}/schedules/bad"
    assert client.delete(path).json() == {"name": "bad", "changed": True}
    assert client.delete(path).status_code == 404


def test_an_interval_is_a_duration_and_its_messages_arrive(client: httpx.Client) -> None:
    topic = declared_topic(client)
    put(client, topic, "often", every_ms="1s", body="tick", headers={"h": "v"})
    (delivery,) = pull(client, topic, wait_ms="20s")
    tick = delivery["id"].removeprefix("often@")
    assert delivery["body"] == "tick"
    assert delivery["headers"] == {"h": "v", "lisa-schedule": "often", "lisa-tick": tick}
    assert client.delete(f"/v1/topics/{topic}/schedules/often").status_code == 200


def test_occurrences_have_the_late_policy_of_their_schedule(
    client: httpx.Client, server: Redis
) -> None:
    topic = new_topic()
    put(client, topic, "daily", **DAILY, late="collapse after 10m")
    assert client.get(f"/v1/topics/{topic}/schedules/daily").json()["late"] == "collapse after 10m"
    assert server.hvals(f"lisa:{{{topic}}}:policy") == [b"*;600000,collapse"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"until": 20271231}, "a time is text, as in '2026-12-24T09:00'"),
        ({"start": "2026-12"}, "write ISO 8601, as in '2026-12-24T09:00'"),
        ({"count": True}, "got `bool`"),
        ({"until": "2020-01-01"}, "would never tick until 2019-12-31T15:00"),
        ({"cron": "*/90 * * * *"}, "use every_ms='90m'"),
        ({"cron": "0 0 0 29 2 ? 2027"}, "never ticks"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    client: httpx.Client, options: dict[str, Any], said: str
) -> None:
    topic = new_topic()
    refused = put(client, topic, "s", **DAILY | options)
    assert (refused.status_code, said in refused.json()["detail"]) == (400, True), refused.text
    assert client.get(f"/v1/topics/{topic}/schedules").json().get("schedules", []) == []


def test_a_version_protects_against_concurrent_edits(client: httpx.Client) -> None:
    topic = new_topic()
    assert put(client, topic, "s", **DAILY, if_version=0).status_code == 200
    for version in (0, 2):
        refused = put(client, topic, "s", **DAILY, if_version=version, template=True)
        assert refused.status_code == 409
        assert refused.json()["type"] == "urn:lisa:problem:schedule-changed"
    assert put(client, topic, "s", **DAILY, if_version=1, template=True).json()["changed"]


def test_a_schedule_is_paused_resumed_run_and_backfilled(client: httpx.Client) -> None:
    topic = new_topic()
    put(client, topic, "hourly", cron="@hourly", body=None)
    path = f"/v1/topics/{topic}/schedules/hourly"
    assert [client.post(f"{path}/pause").json()["changed"] for _ in range(2)] == [True, False]
    assert (client.get(path).json()["paused"], waiting(client, topic)) == (True, [])
    assert client.post(f"{path}/resume").json()["changed"]
    assert len(waiting(client, topic)) == 1
    made = client.post(f"{path}/run").json()["id"]
    assert client.get(f"/v1/topics/{topic}/message", params={"id": made}).json()["state"]
    now_ms = int(time.time() * 1000)
    past = {"from_ms": now_ms - 5 * HOUR_MS, "to_ms": now_ms - HOUR_MS}
    never = dict.fromkeys(past, 253_402_300_799_999)
    first, again, none = (
        client.post(f"{path}/backfill", json=span).json()["created"] for span in (past, past, never)
    )
    assert (first in (4, 5), again, none) == (True, 0, 0)
    swapped = {"from_ms": now_ms, "to_ms": now_ms - 1}
    refused = client.post(f"{path}/backfill", json=swapped)
    assert (refused.status_code, "ends before it begins" in refused.text) == (400, True)
    ticks = client.get(f"{path}/next", params={"count": 3}).json()["ticks_ms"]
    assert [b - a for a, b in pairwise(ticks)] == [HOUR_MS, HOUR_MS]


@pytest.mark.full
def test_a_request_backfills_a_limited_number_of_occurrences(client: httpx.Client) -> None:
    """Other requests have their turn meanwhile."""
    topic = new_topic()
    put(client, topic, "fast", cron="* * * * * *", tz="Europe/Berlin", body=None)
    path = f"/v1/topics/{topic}/schedules/fast"
    assert answer_in_turns(client, "GET", f"{path}/next?count=1000").status_code == 200
    ages = {"from_ms": 0, "to_ms": 1_760_000_000_000}
    refused = answer_in_turns(client, "POST", f"{path}/backfill", json=ages)
    assert (refused.status_code, "more than 10,000 ticks" in refused.text) == (400, True)
    assert client.get(f"/v1/topics/{topic}").json()["counters"]["sent"] < 100
    last_ms = int(time.time()) * 1000 - 1000
    largest = {"from_ms": last_ms - 9_999_000, "to_ms": last_ms}
    assert client.post(f"{path}/backfill", json=largest).json()["created"] == 10_000


def test_schedules_are_listed(client: httpx.Client) -> None:
    topic = new_topic()
    assert client.get(f"/v1/topics/{topic}/schedules").status_code == 404
    for name in ("a", "b/c", "d e"):
        put(client, topic, name.replace("/", "%2F"), **DAILY)
    page = client.get(f"/v1/topics/{topic}/schedules").json()
    assert page["cursor"] is None
    assert sorted(one["name"] for one in page["schedules"]) == ["a", "b/c", "d e"]


def test_the_query_names_a_schedule_that_a_path_cannot_name(client: httpx.Client) -> None:
    path, name = f"/v1/topics/{new_topic()}/schedule", "?name=.."
    assert client.put(path + name, json=DAILY).json() == {"name": "..", "changed": True}
    assert client.post(f"{path}/pause{name}").status_code == 200
    assert client.get(path + name).json()["paused"]
    assert client.get(f"{path}/next{name}&count=2").status_code == 200
    assert client.delete(path + name).json() == {"name": "..", "changed": True}
    assert client.get(path).status_code == 400
