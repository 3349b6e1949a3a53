"""The native API: each operation requires its scope, and tokens are limited to their topics."""

import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lisa.gateway.access import Scope
from lisa.gateway.api import OPERATIONS
from tests.gateways import NO_TLS, Gateway, new_topic
from tests.servers import wait_until

TOKENS = """
tokens:
  - {name: all, token: all-0123456789abcdef}
  - {name: read, token: read-0123456789abcdef, scopes: [read]}
  - {name: produce, token: produce-0123456789abcdef, scopes: [produce]}
  - {name: consume, token: consume-0123456789abcdef, scopes: [consume]}
  - {name: operate, token: operate-0123456789abcdef, scopes: [operate]}
  - {name: mine, token: mine-0123456789abcdef, topics: ["mine.*"]}
"""
SECRET = "whsec_" + "c2VjcmV0" * 4
NAMES = [one.name for one in OPERATIONS]


@pytest.fixture(scope="module")
def guarded(redis_url: str, manager: object) -> Iterator[Gateway]:
    env = {"LISA_GATEWAY_SERVER__PRODUCERS_READ": "false"}
    with Gateway(redis_url, tokens=TOKENS, headers=bearer("all"), env=env) as running:
        yield running


def bearer(name: str | None) -> dict[str, str]:
    return {} if name is None else {"Authorization": f"Bearer {name}-0123456789abcdef"}


def ask(guarded: Gateway, method: str, path: str, name: str | None, **more: Any) -> httpx.Response:
    with httpx.Client(
        base_url=guarded.url, headers=bearer(name), timeout=30, verify=NO_TLS
    ) as client:
        if "/events" in path:
            with client.stream(method, path) as answer:
                if answer.status_code != 200:
                    answer.read()
                return answer
        return client.request(method, path, **more)


@pytest.mark.parametrize("operation", OPERATIONS, ids=NAMES)
def test_each_operation_requires_its_scope(guarded: Gateway, operation: object) -> None:
    one = next(each for each in OPERATIONS if each is operation)
    path = re.sub(r"\{\w+\}", "mine.a", one.path)

    def status(name: str | None) -> int:
        answer = ask(guarded, one.method, path, name)
        if answer.status_code in (401, 403):
            assert answer.headers["content-type"] == "application/problem+json"
        return answer.status_code

    assert status(None) == status("guessed") == 401
    for scope in Scope:
        allowed = scope is one.scope or (one.scope is Scope.READ and scope is not Scope.PRODUCE)
        assert (status(scope) == 403) is not allowed, scope
    if "{topic}" in one.path:
        assert status("mine") != 403
        foreign = re.sub(r"\{\w+\}", "other", one.path)
        assert ask(guarded, one.method, foreign, "mine").status_code == 403


CAMELLIA, HEALTH = "/camellia/delayQueue", "/camellia/health"
READS = ["getMonitorData", "getTopicInfo", "getTopicInfoList", "getMonitorString", "metrics"]
TAKES = ["pullMsg", "longPollingMsg", "ackMsg"]
SENDS = ["sendMsg", "deleteMsg"]
COMPATIBLE = {
    Scope.READ: [f"POST {CAMELLIA}/getMsg", *(f"GET {CAMELLIA}/{name}" for name in READS)],
    Scope.PRODUCE: ["POST /delay-queue/push", *(f"POST {CAMELLIA}/{name}" for name in SENDS)],
    Scope.CONSUME: ["POST /delay-queue/finish", *(f"POST {CAMELLIA}/{name}" for name in TAKES)],
    Scope.OPERATE: [f"GET {HEALTH}/online"],
}


def test_c20_compatible_paths_require_their_scope(guarded: Gateway) -> None:
    """No path of the originals did, not even the switch that takes a server out of service."""
    mine, other = f"mine.{new_topic()}", new_topic("other")
    guarded.client.post(f"/v1/topics/{mine}/groups", json={"group": "g"})
    form = {"msg": "m", "delayMillis": 0, "msgId": "i", "ack": "true"}
    form |= {"longPollingTimeoutMillis": 1, "delayTime": 0, "ttrTime": 5, "message": "m", "id": 1}

    def status(method: str, path: str, name: str | None, topic: str = mine) -> int:
        sent: dict[str, Any] = {"data" if method == "POST" else "params": {**form, "topic": topic}}
        answer = ask(guarded, method, path, name, **sent)
        if answer.status_code in (401, 403) and path.startswith("/camellia"):
            assert answer.json()["code"] == answer.status_code
        return answer.status_code

    for needed, paths in COMPATIBLE.items():
        for method, path in (one.split() for one in paths):
            assert status(method, path, None) == 401, path
            for scope in Scope:
                allowed = scope is needed or (needed is Scope.READ and scope is not Scope.PRODUCE)
                assert status(method, path, scope) == (200 if allowed else 403), (path, scope)
    assert status("GET", f"{HEALTH}/offline", "consume") == 403
    assert status("GET", f"{HEALTH}/status", None) == 200
    for path in (f"{CAMELLIA}/sendMsg", "/delay-queue/push"):
        assert status("POST", path, "mine") == 200
        assert status("POST", path, "mine", other) == 403
    job = {"topic": other, "delayTime": 0, "ttrTime": 5, "message": "m"}
    pushed = ask(guarded, "POST", "/delay-queue/push", "all", data=job).json()["id"]
    for name, outcome in (("mine", 1), ("all", 0)):  # the first token does not see the job
        deleted = ask(guarded, "POST", "/delay-queue/delete", name, data={"id": pushed})
        assert deleted.json()["code"] == outcome


def test_a_token_sees_its_own_topics_only(guarded: Gateway) -> None:
    mine, other = f"mine.{new_topic()}", new_topic("other")
    for topic in (mine, other):
        guarded.client.post(f"/v1/topics/{topic}/groups", json={"group": "g"})
        guarded.client.post(f"/v1/topics/{topic}/pull", json={})

    def topics(kind: str, name: str) -> set[str]:
        found = ask(guarded, "GET", f"/v1/{kind}", name).json()[kind.partition("?")[0]]
        return {one["topic"] for one in found}

    assert {mine, other} <= topics("topics?limit=500", "all")
    for kind in ("topics?limit=500", "consumers"):
        seen = topics(kind, "mine")
        assert mine in seen
        assert all(topic.startswith("mine.") for topic in seen)
    assert ask(guarded, "GET", f"/v1/consumers?topic={other}", "mine").status_code == 403
    assert ask(guarded, "GET", f"/v1/consumers?topic={mine}", "mine").status_code == 200


def groups(guarded: Gateway, topic: str) -> list[str]:
    found = guarded.client.get(f"/v1/topics/{topic}/groups").json()["groups"]
    return [one["name"] for one in found]


def test_only_an_operator_declares_a_group_by_pulling(guarded: Gateway) -> None:
    topic = f"mine.{new_topic()}"

    def pull(name: str, group: str) -> httpx.Response:
        return ask(guarded, "POST", f"/v1/topics/{topic}/pull", name, json={"group": group})

    for group in ("first", "second"):
        refused = pull("consume", group)
        assert refused.status_code == 404
        assert refused.json()["type"] == "urn:lisa:problem:unknown-group"
        assert "scope operate" in refused.json()["detail"]
    assert guarded.client.get(f"/v1/topics/{topic}").status_code == 404
    assert pull("mine", "first").status_code == 200
    assert pull("consume", "first").status_code == 200
    assert pull("consume", "second").status_code == 404
    assert groups(guarded, topic) == ["first"]


@pytest.mark.parametrize(
    "path", ["/mykit/get/{}?group=evil&timeout=100", "/delay-queue/pop/{}?group=evil"]
)
def test_nor_does_anyone_else_by_a_compatible_api(guarded: Gateway, path: str) -> None:
    topic = f"mine.{new_topic()}"
    guarded.client.post(f"/v1/topics/{topic}/groups", json={"group": "first"})
    for name, expected in (("consume", ["first"]), ("mine", ["evil", "first"])):
        ask(guarded, "GET", path.format(topic), name)
        assert groups(guarded, topic) == expected


def test_a_topic_without_groups_still_gets_its_first_one_from_a_manager(guarded: Gateway) -> None:
    path, waiting = f"/v1/topics/{new_topic()}", {"wait_ms": 20_000}
    guarded.client.post(f"{path}/messages", json={"body": 1})
    pulled = ask(guarded, "POST", f"{path}/pull", "consume", json=waiting)
    assert [one["body"] for one in pulled.json()["deliveries"]] == [1]


def test_a_token_that_only_produces_reads_nothing(guarded: Gateway) -> None:
    topic, later = new_topic(), {"body": 1, "delay_ms": 60_000}
    path = f"/v1/topics/{topic}/messages"
    sent = ask(guarded, "POST", path, "produce", json=later).json()
    for read in (
        f"{path}/{sent['id']}",
        "/",
        f"/topics/{topic}",
        f"{CAMELLIA}/getTopicInfo?topic={topic}",
        f"{CAMELLIA}/getTopicInfoList",
    ):
        assert ask(guarded, "GET", read, "produce").status_code == 403, read
        assert ask(guarded, "GET", read, "read").status_code == 200, read
    form = {"token": "produce-0123456789abcdef"}
    refused = guarded.client.post("/login", data=form)
    assert (refused.status_code, "lisa_session" in refused.cookies) == (403, False)
    assert "lacks the scope read" in refused.text
    assert ask(guarded, "DELETE", f"{path}/{sent['id']}", "produce").status_code == 200

    # Nor does it see the body of a message whose id it sends again.
    def send(token: str, text: str) -> Any:
        form = {"topic": topic, "msg": text, "msgId": "one", "delayMillis": "60000"}
        return ask(guarded, "POST", f"{CAMELLIA}/sendMsg", token, data=form).json()["delayMsg"]

    assert send("all", "secret")["msg"] == "secret"
    again = send("produce", "other")
    assert (again["msgId"], again["msg"]) == ("one", None)
    assert send("all", "other")["msg"] == "secret"


def test_without_tokens_a_warning_says_so_at_the_start(redis_url: str) -> None:
    with Gateway(redis_url) as gateway:
        assert gateway.client.get("/healthz").status_code == 200
        assert len([one for one in gateway.said if "no tokens are configured" in one]) == 1


@pytest.mark.full
def test_until_it_is_switched_off_producers_read_and_a_warning_says_so(
    redis_url: str,
) -> None:
    with Gateway(redis_url, "--workers", "2", tokens=TOKENS) as gateway:
        assert ask(gateway, "GET", "/v1/topics", "produce").status_code == 200
        warnings = [one for one in gateway.said if "scope produce alone" in one]
    assert len(warnings) == 1
    assert "(produce)" in warnings[0]
    assert "producers-read: false" in warnings[0]


def test_changes_are_audited_without_secrets(guarded: Gateway) -> None:
    topic, since = f"mine.{new_topic()}", len(guarded.said)
    path = f"/v1/topics/{topic}"

    def change(name: str, method: str, where: str, **body: Any) -> None:
        answer = ask(guarded, method, f"{path}/{where}", name, json=body or None)
        assert answer.is_success, answer.text

    change("operate", "POST", "groups", group="g")
    change("operate", "PATCH", "options", capacity=5, ack_timeout=None)
    change("operate", "PUT", "push", url="https://hooks.example/a", secret=SECRET)
    change("operate", "POST", "garbage:purge", group="g", all=True)
    change("operate", "GET", "options")
    change("all", "POST", "messages", id="m", body="b0dy", delay_ms=60_000)
    change("all", "DELETE", "messages/m")
    change("operate", "DELETE", "push?group=g")
    wait_until(lambda: "removePushTarget" in "".join(guarded.said[since:]))
    audited = [
        line.partition("lisa.gateway.audit: ")[2]
        for line in guarded.said[since:]
        if "lisa.gateway.audit" in line and topic in line
    ]
    who = "token 'operate' from 127.0.0.1:"
    assert audited == [
        f"{who} addGroup topic={topic!r} group='g' given='group' new=True",
        f"{who} setOptions topic={topic!r} given='ack_timeout,capacity'",
        f"{who} setPushTarget topic={topic!r} given='secret,url'",
        f"{who} purgeGarbage topic={topic!r} group='g' given='all,group' done=0",
        f"token 'all' from 127.0.0.1: cancelMessage topic={topic!r} id='m' outcome='cancelled'",
        f"{who} removePushTarget topic={topic!r} group='g'",
    ]
    assert SECRET not in "".join(guarded.said)


def test_an_unauthorized_response_has_a_challenge(guarded: Gateway) -> None:
    """The description needs no token."""
    answer = ask(guarded, "GET", "/v1/topics", None)
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.json()["type"] == "urn:lisa:problem:unauthorized"
    narrow = ask(guarded, "POST", "/v1/topics/a/pause", "produce").json()["detail"]
    assert "produce" in narrow
    assert "operate" in narrow
    for path in ("/v1", "/v1/openapi.json", "/v1/docs", "/v1/docs.css"):
        assert ask(guarded, "GET", path, None).status_code == 200
