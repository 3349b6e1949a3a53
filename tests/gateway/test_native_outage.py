"""The native API in an outage: operations return 503 in time, and long polls continue."""

import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from typing import Any

import httpx
import pytest

from lisa.core.transitions.ack import Settlement
from lisa.gateway.api import OPERATIONS
from lisa.gateway.settling import Receipt, encode_receipt
from tests.gateways import Gateway, new_topic

PATIENCE_S = 0.5
ENV = {"LISA_GATEWAY_SERVER__PATIENCE": f"{PATIENCE_S}s"}
UNREACHABLE = "redis://127.0.0.1:1/0"
RECEIPT = encode_receipt(Receipt("g", "c", Settlement("a", "1-1", "123456789", 1, 1)))
BODIES: dict[str, Any] = {
    "sendMessage": {"body": 1},
    # Several script calls, but one patience.
    "sendMessages": {
        "messages": [{"body": 1}, {"body": 2, "on_duplicate": "replace"}] * 50,
    },
    "rescheduleMessage": {"delay_ms": 5},
    "rescheduleKey": {"delay_ms": 5},
    "setLimits": {"concurrency": 5},
    "requeueGarbage": {"all": True},
    "purgeGarbage": {"ids": ["a"]},
    "setOptions": {"capacity": 5},
    "addGroup": {"group": "g"},
    "setSchedule": {"body": 1, "cron": "@daily"},
    "backfillSchedule": {"from_ms": 1, "to_ms": 2},
    "setPushTarget": {"url": "https://hooks.example/a"},
}
for verb in ("ack", "retry", "defer", "extend", "release"):
    one_delivery = {"receipt": RECEIPT, **({"delay_ms": 1} if verb == "defer" else {})}
    BODIES[f"{verb}Message"] = one_delivery
    BODIES[f"{verb}Messages"] = {"deliveries": [one_delivery] * 50}
ASKED = [one for one in OPERATIONS if one.name != "watchTopic"]


@pytest.fixture(scope="module")
def cut_off() -> Iterator[Gateway]:
    """A gateway without a server."""
    with Gateway(UNREACHABLE, env=ENV) as running:
        yield running


@pytest.mark.parametrize("operation", ASKED, ids=[one.name for one in ASKED])
def test_in_an_outage_every_operation_answers_within_its_patience(
    cut_off: Gateway, operation: object
) -> None:
    one = next(each for each in ASKED if each is operation)
    path = re.sub(r"\{\w+\}", "a", one.path)
    began = time.monotonic()
    answer = cut_off.client.request(one.method, path, json=BODIES.get(one.name))
    assert answer.status_code == 503, answer.text
    assert answer.json()["type"] == "urn:lisa:problem:server-unavailable"
    assert UNREACHABLE not in answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert time.monotonic() - began < 10 * PATIENCE_S


def test_health_reports_an_outage_without_the_server_address(cut_off: Gateway) -> None:
    """No token is required."""
    health = cut_off.client.get("/healthz")
    assert (health.status_code, health.json()["status"]) == (503, "failing")
    assert "127.0.0.1" not in health.text


def test_camellia_c17_an_outage_is_503(cut_off: Gateway) -> None:
    """Clients looped without a pause while the server failed immediately."""
    form = {"topic": "t", "msg": "m", "delayMillis": 0, "msgId": "i"}
    for name in ("sendMsg", "getMsg"):
        answer = cut_off.client.post(f"/camellia/delayQueue/{name}", data=form)
        assert (answer.status_code, answer.json()) == (503, {"code": 500, "msg": None})
        assert int(answer.headers["retry-after"]) >= 1


READ_PATIENCE_S = 5.0
READS = ("/v1/topics", "/v1/topics/a", "/v1/topics/a/messages", "/v1/topics/a/messages/b")


class SilentServer:
    """Accepts connections and answers nothing; ends those of the next requests after a time."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"redis://127.0.0.1:{self._listening.getsockname()[1]}/0"
        self.lasts_s: float | None = None
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                self._open.append(connection)
                if self.lasts_s is not None:
                    timer = threading.Timer(self.lasts_s, self._end, (connection,))
                    timer.daemon = True
                    timer.start()

    def _end(self, connection: socket.socket) -> None:
        self.lasts_s = None  # later connections stay open
        connection.close()

    def close(self) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        for connection in (self._listening, *self._open):
            connection.close()


@pytest.mark.full
def test_a_read_waits_no_longer_than_patience_over_several_connections() -> None:
    """A first connection breaks when most of the time is over; a second one answers nothing."""
    env = {"LISA_GATEWAY_SERVER__PATIENCE": f"{READ_PATIENCE_S}s"}
    with (
        closing(SilentServer()) as server,
        Gateway(server.url, env=env) as gateway,
        ThreadPoolExecutor(len(READS)) as threads,
    ):

        def read(path: str) -> tuple[int, float]:
            began = time.monotonic()
            return gateway.client.get(path).status_code, time.monotonic() - began

        server.lasts_s = 0.8 * READ_PATIENCE_S
        found = list(threads.map(read, READS))
    assert {status for status, _ in found} == {503}
    assert max(seconds for _, seconds in found) < 1.6 * READ_PATIENCE_S


def test_a_batch_names_the_messages_that_no_replica_confirmed(
    redis_url: str, client: httpx.Client
) -> None:
    env = {"LISA_GATEWAY_SERVER__DURABILITY": "replicas(1)", "LISA_GATEWAY_SERVER__PATIENCE": "2s"}
    topic = new_topic()
    path = f"/v1/topics/{topic}/messages:batch"
    valid: list[dict[str, Any]] = [{"body": n, "delay_ms": 86_400_000} for n in range(2)]
    with Gateway(redis_url, env=env) as gateway:
        whole = gateway.client.post(path, json={"messages": valid})
        wanted = [*valid, {"bodi": 1}, valid[0] | {"on_duplicate": "replace", "id": "last"}]
        parts = gateway.client.post(path, json={"messages": wanted}).json()["results"]
    assert (whole.status_code, whole.json()["type"]) == (503, "urn:lisa:problem:not-replicated")
    ids = [one.get("id") for one in parts]
    kinds = [one["problem"]["type"].rpartition(":")[2] for one in parts]
    assert kinds == ["not-replicated", "not-replicated", "invalid", "server-unavailable"]
    assert (ids[2:], None in ids[:2]) == ([None, None], False)
    waiting = client.get(f"/v1/topics/{topic}/messages").json()["messages"]
    assert {one["id"] for one in waiting} == {*whole.json()["ids"], *ids[:2]}
    again = [one | {"id": name} for one, name in zip(valid, ids, strict=False)]
    assert client.post(path, json={"messages": again}).json()["duplicate"] == 2
