"""The native API in an outage: operations return 503 in time, and long polls continue."""

from __future__ import annotations

import concurrent.futures
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from lisa.core.transitions.ack import Settlement
from lisa.embedded import EmbeddedServer
from lisa.gateway.api import OPERATIONS
from lisa.gateway.receipts import Receipt, encode_receipt
from tests.gateways import Gateway, new_topic
from tests.servers import wait_until

PATIENCE_S = 0.5
CONFIG = "lisa-delay-queue:\n  gateway-server:\n    patience: 500ms\n"
NOBODY = "redis://127.0.0.1:1/0"
RECEIPT = encode_receipt(Receipt("g", "c", Settlement("a", "1-1", "123456789", 1, 1)))
BODIES: dict[str, Any] = {
    "sendMessage": {"body": 1},
    # Several script calls, but one patience.
    "sendMessages": {
        "messages": [{"body": 1}, {"body": 2, "on_duplicate": "replace"}] * 50,
    },
    "rescheduleMessage": {"delay_ms": 5},
    "requeueGarbage": {"all": True},
    "purgeGarbage": {"ids": ["a"]},
    "setOptions": {"capacity": 5},
    "addGroup": {"group": "g"},
    "setSchedule": {"body": 1, "cron": "@daily"},
    "backfillSchedule": {"from_ms": 1, "to_ms": 2},
    "setPushTarget": {"url": "https://hooks.example/a"},
}
for verb in ("ack", "retry", "extend", "release"):
    BODIES[f"{verb}Message"] = {"receipt": RECEIPT}
    BODIES[f"{verb}Messages"] = {"deliveries": [{"receipt": RECEIPT}] * 50}
ASKED = [one for one in OPERATIONS if one.name != "watchTopic"]


@pytest.fixture(scope="module")
def cut_off(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway without a server."""
    directory: Path = tmp_path_factory.mktemp("cut_off")
    with Gateway(NOBODY, config=CONFIG, directory=directory) as running:
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
    assert int(answer.headers["retry-after"]) >= 1
    assert time.monotonic() - began < 10 * PATIENCE_S


def test_camellia_c17_an_outage_is_503(cut_off: Gateway) -> None:
    """Clients looped without a pause while the server failed immediately."""
    form = {"topic": "t", "msg": "m", "delayMillis": 0, "msgId": "i"}
    for name in ("sendMsg", "getMsg"):
        answer = cut_off.client.post(f"/camellia/delayQueue/{name}", data=form)
        assert (answer.status_code, answer.json()) == (503, {"code": 500, "msg": None})
        assert int(answer.headers["retry-after"]) >= 1


def test_a_poll_outlasts_an_outage(own_server: EmbeddedServer, tmp_path: Path) -> None:
    topic = new_topic()
    with Gateway(own_server.url, config=CONFIG, directory=tmp_path) as gateway:
        client = gateway.client
        path = f"{gateway.url}/v1/topics/{topic}"
        client.post(f"{path}/groups", json={"group": "g"}).raise_for_status()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            poll = pool.submit(httpx.post, f"{path}/pull", json={"wait_ms": 60_000}, timeout=90)
            wait_until(lambda: client.get("/healthz").json()["pulls"] == 1)
            own_server.kill()
            wait_until(lambda: client.get("/healthz").status_code == 503)
            assert not poll.done()
            own_server.restart()

            def is_sent() -> bool:
                answer = client.post(f"{path}/messages", json={"body": "after", "id": "x"})
                return answer.status_code in (200, 201)

            wait_until(is_sent)
            deliveries = poll.result(60).json()["deliveries"]
        assert [one["body"] for one in deliveries] == ["after"]


READ_PATIENCE_S = 5.0
READS = ("/v1/topics", "/v1/topics/a", "/v1/topics/a/messages", "/v1/topics/a/messages/b")


class SilentServer:
    """Accepts connections and answers nothing; ends those of the next requests after a time."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0), backlog=512)
        self.url = f"redis://127.0.0.1:{self._listening.getsockname()[1]}/0"
        self.lasts_s: float | None = None
        self._open: list[socket.socket] = []
        self._timers: list[threading.Timer] = []
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
                    self._timers.append(timer)

    def _end(self, connection: socket.socket) -> None:
        self.lasts_s = None  # later connections stay open
        connection.close()

    def close(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._listening.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        for connection in (self._listening, *self._open):
            connection.close()


@pytest.mark.full
def test_a_read_waits_no_longer_than_patience_over_several_connections(tmp_path: Path) -> None:
    """A first connection breaks when most of the time is over; a second one answers nothing."""
    config = f"lisa-delay-queue: {{gateway-server: {{patience: {READ_PATIENCE_S:g}s}}}}"
    with (
        closing(SilentServer()) as server,
        Gateway(server.url, config=config, directory=tmp_path) as gateway,
        concurrent.futures.ThreadPoolExecutor(len(READS)) as threads,
    ):

        def read(path: str) -> tuple[int, float]:
            began = time.monotonic()
            return gateway.client.get(path).status_code, time.monotonic() - began

        server.lasts_s = 0.8 * READ_PATIENCE_S
        found = list(threads.map(read, READS))
    assert {status for status, _ in found} == {503}
    assert max(seconds for _, seconds in found) < 1.6 * READ_PATIENCE_S


def test_a_batch_names_the_messages_that_no_replica_confirmed(
    redis_url: str, client: httpx.Client, tmp_path: Path
) -> None:
    settings = "lisa-delay-queue: {gateway-server: {durability: replicas(1), patience: 2s}}"
    topic = new_topic()
    path = f"/v1/topics/{topic}/messages:batch"
    valid: list[dict[str, Any]] = [{"body": n, "delay_ms": 86_400_000} for n in range(2)]
    with Gateway(redis_url, config=settings, directory=tmp_path) as gateway:
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
