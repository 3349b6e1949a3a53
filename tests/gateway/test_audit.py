"""The audit log of changes through the compatible APIs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.gateways import Gateway, new_topic
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKENS = """
tokens:
  - {name: shop, token: shop-0123456789abcdef, scopes: [produce, consume]}
  - {name: ops, token: ops-0123456789abcdef, scopes: [operate, produce, consume]}
"""


@pytest.fixture(scope="module")
def gateway(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway with tokens and a prefix of its own, since clearAll clears all topics."""
    tokens = tmp_path_factory.mktemp("tokens") / "tokens.yml"
    tokens.write_text(TOKENS)
    env = {"LISA_PREFIX": new_topic("audit"), "LISA_GATEWAY_SERVER__MYKIT_CLEAR_ALL": "true"}
    with Gateway(redis_url, "--tokens-file", str(tokens), env=env) as running:
        yield running


def call(gateway: Gateway, name: str, method: str, path: str, **more: Any) -> Any:
    headers = {"Authorization": f"Bearer {name}-0123456789abcdef"}
    answer = gateway.client.request(method, path, headers=headers, **more)
    assert answer.is_success, answer.text
    return answer.json()


def check_audited(gateway: Gateway, since: int, *expected: str) -> None:
    """Wait for as many records as are expected, since a thread reads the gateway's output."""

    def found() -> list[str]:
        lines = [line.partition("lisa.gateway.audit: ") for line in gateway.said[since:]]
        return [text for _, is_audit, text in lines if is_audit]

    wait_until(lambda: len(found()) >= len(expected))
    assert found() == [*expected]


SHOP, OPS = "token 'shop' from 127.0.0.1:", "token 'ops' from 127.0.0.1:"


def test_deletions_and_health_changes_of_camellia(gateway: Gateway) -> None:
    topic, since = new_topic(), len(gateway.said)
    form = {"topic": topic, "msg": "x", "delayMillis": 60_000, "msgId": "m"}
    queue = "/camellia/delayQueue"
    call(gateway, "shop", "POST", f"{queue}/sendMsg", data=form)
    call(gateway, "shop", "POST", f"{queue}/deleteMsg", data={"topic": topic, "msgId": "m"})
    call(gateway, "shop", "POST", f"{queue}/deleteMsg", data={"topic": topic, "msgId": "m"})
    call(gateway, "ops", "POST", "/camellia/health/online")
    check_audited(
        gateway,
        since,
        f"{SHOP} camellia.deleteMsg topic={topic!r} id='m'",
        f"{OPS} camellia.online",
    )


def test_deletions_of_delay_queue(gateway: Gateway) -> None:
    topic, since = new_topic(), len(gateway.said)
    job = {"topic": topic, "message": "x", "ttrTime": 30, "delayTime": "4102444800000"}
    message_id = call(gateway, "shop", "POST", "/delay-queue/push", data=job)["id"]
    call(gateway, "shop", "POST", "/delay-queue/delete", data={"id": message_id})
    refused = call(gateway, "shop", "POST", "/delay-queue/delete", data={"id": "7"})
    assert refused["code"] == 1
    check_audited(gateway, since, f"{SHOP} delay-queue.delete topic={topic!r} id={message_id!r}")


def test_deletions_restores_and_clears_of_mykit(gateway: Gateway) -> None:
    topic = new_topic()
    call(gateway, "ops", "POST", f"/v1/topics/{topic}/groups", json={"group": "g"})
    since = len(gateway.said)
    deleted, broken, kept, finished = (
        call(gateway, "shop", "POST", "/mykit/push", json=job)["data"]
        for job in (
            {"topic": topic, "delay": 60_000},
            {"topic": topic, "createTime": 0},
            {"topic": topic, "delay": 60_000},
            {"topic": topic, "createTime": 1},
        )
    )
    call(gateway, "shop", "GET", f"/mykit/delete?jobId={deleted}")
    pulled = call(
        gateway, "ops", "POST", f"/v1/topics/{topic}/pull", json={"max": 2, "wait_ms": 9_000}
    )
    receipts = {one["id"]: one["receipt"] for one in pulled["deliveries"]}
    discard = {"receipt": receipts[broken], "discard": True}
    call(gateway, "shop", "POST", f"/v1/topics/{topic}/messages/{broken}/retry", json=discard)
    call(gateway, "shop", "GET", f"/mykit/finish?jobId={finished}")
    assert call(gateway, "ops", "GET", f"/mykit/reStoreJob?jobId={broken}")["success"]
    assert call(gateway, "ops", "GET", f"/mykit/reStoreJob?jobId={kept}")["success"]  # no garbage
    assert call(gateway, "ops", "GET", "/mykit/clearAll")["success"]
    check_audited(
        gateway,
        since,
        f"{SHOP} mykit.delete topic={topic!r} id={deleted!r}",
        f"{OPS} mykit.reStoreJob topic={topic!r} group='g' id={broken!r}",
        f"{OPS} mykit.clearAll done=2",
    )
