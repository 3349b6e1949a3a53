"""The native API: invalid requests are refused with a reason, and change nothing."""

from typing import Any

import httpx
import pytest

from tests.gateway.native_client import send
from tests.gateways import Gateway, declared_topic

DAY_MS = 86_400_000


@pytest.fixture(scope="module")
def topic(gateway: Gateway) -> str:
    """A topic with the group `g` and a waiting message `x`."""
    name = declared_topic(gateway.client)
    send(gateway.client, name, id="x", delay_ms=DAY_MS)
    return name


def seen(client: httpx.Client, topic: str) -> list[Any]:
    """What a request might have changed."""
    parts = ("", "/options", "/groups", "/messages", "/schedules")
    return [client.get(f"/v1/topics/{topic}{part}").json() for part in parts]


def ask(client: httpx.Client, topic: str, call: str, content: Any) -> httpx.Response:
    """Make a call such as `GET messages?limit=1`."""
    method, path = call.split(" ", 1)
    return client.request(method, f"/v1/topics/{topic}/{path}", json=content)


DAILY = {"body": 1, "cron": "@daily"}
CHRISTMAS = "2030-12-24T09:00"
MANY = "&".join(f"a{n}=1" for n in range(50))
INVALID: list[tuple[str, Any, str]] = [
    ("PATCH options", {"ack_timeout": "1ms"}, "ack_timeout"),
    ("PATCH options", {"capacity": 0}, "capacity"),
    ("PATCH options", {"retention": "5s"}, "retention"),
    ("PATCH options", {"max_ready": 5, "journal_max": -1}, "-1"),
    ("PATCH options", {"capacity": None, "ack_timeout": "soon"}, "ack_timeout"),
    ("PATCH options", [], "object"),
    *(
        (f"POST garbage:{verb}", content, said)
        for verb in ("requeue", "purge")
        for content, said in (
            ({}, "ids"),
            ({"all": True, "ids": ["a"]}, "all"),
            ({"ids": ["a\x00"]}, "control"),
            ({"ids": ["a"] * 1_001}, "ids"),
            ({"ids": ["a"], "reason": "x"}, "all"),
        )
    ),
    ("POST messages:batch-ack", {"deliveries": []}, "deliveries"),
    ("POST messages:batch-ack", {"deliveries": [{"receipt": "x"}] * 1_001}, "deliveries"),
    ("POST messages:batch-ack", {"deliveries": [{}]}, "receipt"),
    ("POST messages:batch-ack", {"deliveries": ["x"]}, "deliveries"),
    ("POST messages:batch-ack", {"deliveries": {}}, "deliveries"),
    ("POST messages:batch", {"messages": []}, "messages"),
    ("POST messages:batch", {"messages": [{"body": 1}] * 1_001}, "messages"),
    ("POST messages:batch", {"messages": [{"body": 1}], "delay_ms": 5}, "delay_ms"),
    ("POST pull", {"max": 501}, "max"),
    ("POST pull", {"wait_ms": 60_001}, "wait_ms"),
    ("POST pull", {"ack_timeout_ms": 99}, "ack_timeout_ms"),
    ("POST pull", {"group": "a b"}, "group"),
    ("POST pull", [], "object"),
    ("PATCH messages/x", {}, "delay_ms"),
    ("PATCH messages/x", {"due_ms": 1, "delay_ms": 1}, "delay_ms"),
    ("PATCH messages/x", {"at": 5}, "at"),
    ("PATCH messages/x", {"at_local": CHRISTMAS}, "tz"),
    ("PATCH messages/x", {"at_local": CHRISTMAS, "tz": "UTC", "due_ms": 1}, "give only one of"),
    ("PATCH messages/x", {"delay_ms": 1, "tz": "UTC"}, "tz"),
    ("GET message", None, "parameter id is missing"),
    ("GET message?id=", None, "parameter id is missing"),
    ("GET message?id=a&id=b", None, "twice"),
    ("GET message?id=a&ids=b", None, "unknown field `ids`"),
    ("GET messages?state=lost", None, "lost"),
    ("GET messages?limit=501", None, "limit"),
    ("GET messages?colour=red", None, "colour"),
    ("GET messages?limit=1&limit=2", None, "twice"),
    ("GET messages?cursor=%%%", None, "cursor"),
    ("GET messages?cursor=YWJj", None, "cursor"),
    ("GET messages?group=a%20b", None, "group"),
    ("GET messages?state=ready&cursor=Zy94OnkK", None, "cursor"),
    ("GET messages?state=ready&cursor=Zy_Zoy3Zow", None, "cursor"),  # digits of another script
    ("GET messages?due_before_ms=-1", None, "due_before_ms"),
    ("GET messages?state=%FF", None, "the query string is not percent-encoded UTF-8"),
    (f"GET messages?{MANY}", None, "more than 32 parameters"),
    ("POST pause", {"why": "?"}, "why"),
    ("GET schedules?cursor=x", None, "cursor"),
    (f"GET schedules?cursor={1 << 64}", None, "cursor"),
    ("PUT schedules/s", {"body": 1}, "exactly one of cron and every_ms"),
    ("PUT schedules/s", DAILY | {"every_ms": "1h"}, "exactly one of cron and every_ms"),
    ("PUT schedules/s", DAILY | {"tz": "Mars/Olympus"}, "Mars/Olympus"),
    ("PUT schedules/s", {"body": 1, "every_ms": "10ms"}, "every_ms=10ms is too short"),
    ("PUT schedules/s", {"cron": "@daily"}, "body is missing"),
    ("PUT schedules/s", DAILY | {"overlap": "perhaps"}, "overlap"),
    ("PUT schedules/s", DAILY | {"body": "$x", "template": True}, "template"),
    ("PUT schedules/s", DAILY | {"start": "tomorrow"}, "ISO 8601"),
    ("PUT schedules/s", DAILY | {"count": 1 << 64}, "count"),
    ("PUT schedules/s", DAILY | {"late": "drop after 10m"}, "run, skip, garbage, collapse"),
]


@pytest.mark.parametrize(("call", "content", "said"), INVALID)
def test_an_invalid_request_is_rejected_with_the_reason(
    client: httpx.Client, topic: str, call: str, content: Any, said: str
) -> None:
    before = seen(client, topic)
    answer = ask(client, topic, call, content)
    assert answer.status_code == 400
    kind = "refused" if call == "PATCH options" and content else "invalid"  # by the topic's rules
    assert answer.json()["type"] == f"urn:lisa:problem:{kind}"
    assert said in answer.json()["detail"]
    assert seen(client, topic) == before


BACKFILL = {"from_ms": 1_760_000_000_000, "to_ms": 1_760_000_000_000}
UNKNOWN: list[tuple[str, Any, str]] = [
    ("GET messages?state=ready&group=absent", None, "unknown-group"),
    ("GET messages?state=waiting&group=absent", None, "unknown-group"),
    ("POST garbage:requeue", {"all": True, "group": "absent"}, "unknown-group"),
    ("POST garbage:purge", {"all": True, "group": "absent"}, "unknown-group"),
    ("GET messages/absent", None, "unknown-message"),
    ("DELETE messages/absent", None, "unknown-message"),
    ("POST messages/absent/fire", None, "unknown-message"),
    ("PATCH messages/absent", {"delay_ms": 5}, "unknown-message"),
    *((f"GET schedules/absent{verb}", None, "unknown-schedule") for verb in ("", "/next")),
    ("POST schedules/absent/pause", None, "unknown-schedule"),
    ("POST schedules/absent/resume", None, "unknown-schedule"),
    ("POST schedules/absent/run", None, "unknown-schedule"),
    ("POST schedules/absent/backfill", BACKFILL, "unknown-schedule"),
]


@pytest.mark.parametrize(("call", "content", "kind"), UNKNOWN)
def test_unknown_groups_messages_and_schedules_are_not_found(
    client: httpx.Client, topic: str, call: str, content: Any, kind: str
) -> None:
    answer = ask(client, topic, call, content)
    assert (answer.status_code, answer.json()["type"]) == (404, f"urn:lisa:problem:{kind}")
    assert "absent" in answer.json()["detail"]
