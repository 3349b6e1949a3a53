"""Who did what: the audit log of the compatible APIs, and the actors in the journal."""

import asyncio
import re
import socket
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from redis import Redis

from lisa.embedded import EmbeddedServer
from tests.gateway.push_targets import Target
from tests.gateways import NO_TLS, Gateway, new_topic
from tests.rpc_client import Rpc, address
from tests.servers import wait_until

PREFIX = new_topic("audit")
TOKENS = """
tokens:
  - {name: shop, token: shop-0123456789abcdef, scopes: [produce, consume]}
  - {name: ops, token: ops-0123456789abcdef, scopes: [operate, produce, consume]}
  - {name: "buyer@eu", token: buyer@eu-0123456789abcdef, scopes: [produce, consume]}
"""


@pytest.fixture(scope="module")
def gateway(redis_url: str) -> Iterator[Gateway]:
    """A gateway with tokens and a prefix of its own, since clearAll clears all topics."""
    env = {
        "LISA_PREFIX": PREFIX,
        "LISA_GATEWAY_SERVER__MYKIT_CLEAR_ALL": "true",
        "LISA_GATEWAY_SERVER__PUSH_ALLOW": "127.0.0.0/8",
    }
    with Gateway(redis_url, "--allow-actions", tokens=TOKENS, env=env) as running:
        yield running


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {name}-0123456789abcdef"}


def call(gateway: Gateway, name: str, method: str, path: str, **more: Any) -> Any:
    answer = gateway.client.request(method, path, headers=bearer(name), **more)
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


def test_deletions_and_health_changes_of_camellia_and_delay_queue(gateway: Gateway) -> None:
    topic, since, queue = new_topic(), len(gateway.said), "/camellia/delayQueue"
    form = {"topic": topic, "msg": "x", "delayMillis": 60_000, "msgId": "m"}
    call(gateway, "shop", "POST", f"{queue}/sendMsg", data=form)
    for _ in range(2):
        call(gateway, "shop", "POST", f"{queue}/deleteMsg", data={"topic": topic, "msgId": "m"})
    call(gateway, "ops", "POST", "/camellia/health/online")
    job = {"topic": topic, "message": "x", "ttrTime": 30, "delayTime": "4102444800000"}
    message_id = call(gateway, "shop", "POST", "/delay-queue/push", data=job)["id"]
    for deleted, outcome in ((message_id, 0), ("7", 1)):
        answer = call(gateway, "shop", "POST", "/delay-queue/delete", data={"id": deleted})
        assert answer["code"] == outcome
    check_audited(
        gateway,
        since,
        f"{SHOP} camellia.deleteMsg topic={topic!r} id='m'",
        f"{OPS} camellia.online",
        f"{SHOP} delay-queue.delete topic={topic!r} id={message_id!r}",
    )


def test_deletions_restores_and_clears_of_mykit(gateway: Gateway) -> None:
    topic, since = new_topic(), len(gateway.said)
    path = f"/v1/topics/{topic}"
    call(gateway, "ops", "POST", f"{path}/groups", json={"group": "g"})
    later, first, second = {"delay": 60_000}, {"createTime": 0}, {"createTime": 1}
    deleted, broken, kept, finished = (
        call(gateway, "shop", "POST", "/mykit/push", json={"topic": topic, **job})["data"]
        for job in (later, first, later, second)
    )
    call(gateway, "shop", "GET", f"/mykit/delete?jobId={deleted}")
    pulled = call(gateway, "ops", "POST", f"{path}/pull", json={"max": 2, "wait_ms": 9_000})
    receipts = {one["id"]: one["receipt"] for one in pulled["deliveries"]}
    discard = {"receipt": receipts[broken], "discard": True}
    call(gateway, "shop", "POST", f"{path}/messages/{broken}/retry", json=discard)
    call(gateway, "shop", "GET", f"/mykit/finish?jobId={finished}")
    assert call(gateway, "ops", "GET", f"/mykit/reStoreJob?jobId={broken}")["success"]
    assert call(gateway, "ops", "GET", f"/mykit/reStoreJob?jobId={kept}")["success"]  # no garbage
    assert call(gateway, "ops", "GET", "/mykit/clearAll")["success"]
    check_audited(
        gateway,
        since,
        f"{OPS} addGroup topic={topic!r} group='g' given='group' new=True",
        f"{SHOP} mykit.delete topic={topic!r} id={deleted!r}",
        f"{OPS} mykit.reStoreJob topic={topic!r} group='g' id={broken!r}",
        f"{OPS} mykit.clearAll done=2",
    )


@pytest.mark.parametrize("by", ["http", pytest.param("grpc", marks=pytest.mark.full)])
def test_refused_bearer_tokens_are_logged_at_a_bounded_rate(redis_url: str, by: str) -> None:
    env = {"LISA_GATEWAY_SERVER__TOKEN": "t" * 32}
    secret = "Bearer guessed-0123456789"
    with Gateway(redis_url, "--grpc-port", "0", env=env) as gateway:
        assert gateway.client.get("/v1/topics").status_code == 401  # without a token: not logged
        with grpc.insecure_channel(address(gateway)) as channel:
            for _ in range(5):
                if by == "http":
                    answer = gateway.client.get("/v1/topics", headers={"Authorization": secret})
                    assert answer.status_code == 401
                else:
                    Rpc(channel).error("ListTopics", metadata=(("authorization", secret),))
        refused = "bearer token from 127.0.0.1 refused: the token is unknown"
        wait_until(lambda: any(refused in line for line in gateway.said))
        assert gateway.stop() == 0
        assert sum(line.endswith(refused) for line in gateway.said) <= 2  # one and a summary
        assert "guessed" not in "\n".join(gateway.said)


def cancel_form(page: str, message_id: str) -> dict[str, str]:
    """The form of a message's page that cancels the message."""
    key = re.search(r'name="key" value="([0-9a-f]{64})"', page)
    assert key is not None
    return {"do": "cancel", "id": message_id, "sure": "yes", "key": key[1], "back": "/"}


def test_an_operation_that_fails_is_recorded_and_a_refused_one_is_not(
    own_server: EmbeddedServer,
) -> None:
    env = {"LISA_GATEWAY_SERVER__PATIENCE": "500ms"}
    with Gateway(own_server.url, "--allow-actions", env=env) as gateway:
        client, since, topic = gateway.client, len(gateway.said), new_topic()
        path, page = f"/v1/topics/{topic}", f"/topics/{topic}"
        assert client.post(f"{path}/groups", json={"group": "a b"}).status_code == 400
        later = {"id": "one", "body": 1, "delay_ms": 60_000}
        assert client.post(f"{path}/messages", json=later).status_code == 201
        form = cancel_form(client.get(f"{page}/messages/one").text, "one")
        own_server.kill()
        headers = {"Origin": gateway.url}
        assert client.post(f"{page}/act", data=form, headers=headers).status_code == 503
        assert client.post(f"{path}/groups", json={"group": "g"}).status_code == 503
        session = re.compile(r"session='[\w-]+'")
        wait_until(lambda: any(map(session.search, gateway.said[since:])))
        (shown,) = {found[0] for one in gateway.said[since:] if (found := session.search(one))}
        who = "token 'everyone' from 127.0.0.1:"
        check_audited(
            gateway,
            since,
            f"{who} cancel topic={topic!r} id='one' {shown} result='failed'",
            f"{who} addGroup topic={topic!r} group='g' given='group' result='failed'",
        )


class Journal:
    """The events of a topic with a group `g`, and the actors that they name."""

    def __init__(self, gateway: Gateway, client: Redis, prefix: str = PREFIX) -> None:
        self.topic = new_topic("journal")
        self._process = f"@{socket.gethostname()}:{gateway.process.pid}"
        self._client, self._key = client, f"{prefix}:{{{self.topic}}}"
        client.hset(f"{self._key}:options", "journal", "1")
        self.path = f"/v1/topics/{self.topic}"

    def actors(self, state: str) -> dict[str, str]:
        """The actor of each message's last event of a state, without the gateway's process."""
        events: Any = self._client.xrange(f"{self._key}:events")
        found = {}
        for _, fields in events:
            if fields[b"state"].decode() == state:
                actor = fields[b"actor"].decode()
                assert actor.endswith(self._process)
                found[fields[b"id"].decode()] = actor.removesuffix(self._process)
        return found


@pytest.fixture
def journal(gateway: Gateway, server: Redis) -> Journal:
    found = Journal(gateway, server)
    call(gateway, "ops", "POST", f"{found.path}/groups", json={"group": "g"})
    return found


NAMES = ("shop", "ops", "buyer@eu")


async def test_the_journal_names_the_token_of_each_concurrent_call(
    gateway: Gateway, journal: Journal
) -> None:
    limits = httpx.Limits(max_connections=30)
    async with httpx.AsyncClient(
        base_url=gateway.url, limits=limits, timeout=30, verify=NO_TLS
    ) as client:

        async def post(name: str, path: str, **body: object) -> Any:
            url = f"{journal.path}/{path}"
            answer = await client.post(url, headers=bearer(name), json=body)
            assert answer.is_success, answer.text
            return answer.json()

        async def send(number: int) -> None:
            await post(NAMES[number % 3], "messages", id=f"{NAMES[number % 3]}.{number}", body=1)

        async def take(name: str) -> None:
            while len(taken) < 90:
                for one in (await post(name, "pull", group="g", max=7, wait_ms=50))["deliveries"]:
                    taken[one["id"]] = f"gateway/{name}"
                    verb = "ack" if len(taken) % 2 else "retry"
                    path = f"messages/{one['id']}/{verb}"
                    await post(name, path, receipt=one["receipt"], **LATER.get(verb, {}))

        taken: dict[str, str] = {}
        await asyncio.gather(*map(send, range(90)), *map(take, 3 * NAMES))
    sent = journal.actors("sent")
    assert sent == {one: f"gateway/{one.partition('.')[0]}" for one in sent}
    assert len(sent) == 90
    assert journal.actors("in_flight") == taken
    assert journal.actors("acked") | journal.actors("retry") == taken


LATER = {"retry": {"delay_ms": 3_600_000}}


def test_the_journal_names_the_token_of_other_calls(gateway: Gateway, journal: Journal) -> None:
    later = {"body": 1, "delay_ms": 60_000}
    for name, message_id in (("shop", "cancelled"), ("ops", "page"), ("shop", "batch")):
        call(gateway, name, "POST", f"{journal.path}/messages", json={"id": message_id, **later})
    call(gateway, "buyer@eu", "DELETE", f"{journal.path}/messages/cancelled")
    form = {"topic": journal.topic, "msgId": "batch"}
    call(gateway, "shop", "POST", "/camellia/delayQueue/deleteMsg", data=form)
    with httpx.Client(
        base_url=gateway.url, headers={"Origin": gateway.url}, verify=NO_TLS
    ) as browser:
        browser.post("/login", data={"token": "ops-0123456789abcdef", "next": "/"})
        page = browser.get(f"/topics/{journal.topic}/messages/page").text
        done = browser.post(f"/topics/{journal.topic}/act", data=cancel_form(page, "page"))
        assert done.status_code == 303, done.text
    actors = {"cancelled": "gateway/buyer@eu", "batch": "gateway/shop", "page": "gateway/ops"}
    assert journal.actors("cancelled") == actors


def test_the_journal_names_no_token_for_pushes(gateway: Gateway, journal: Journal) -> None:
    """They serve all senders, not the one who set the target."""
    with Target() as target:
        body = {"url": target.url, "group": "g"}
        call(gateway, "ops", "PUT", f"{journal.path}/push", json=body)
        call(gateway, "shop", "POST", f"{journal.path}/messages", json={"id": "m", "body": 1})
        wait_until(lambda: journal.actors("acked") != {})
        call(gateway, "ops", "DELETE", f"{journal.path}/push")
    assert journal.actors("acked") == journal.actors("in_flight") == {"m": "gateway"}


def test_without_tokens_the_journal_names_the_gateway(redis_url: str, server: Redis) -> None:
    with Gateway(redis_url) as gateway:
        journal = Journal(gateway, server, "lisa")
        body = {"id": "m", "body": 1, "delay_ms": 60_000}
        assert gateway.client.post(f"{journal.path}/messages", json=body).is_success
        assert journal.actors("sent") == {"m": "gateway"}
