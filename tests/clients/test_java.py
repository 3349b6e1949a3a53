"""The gateway's compatible APIs, called by Java programs with the usual HTTP clients of Java.

`OkHttpCamellia` uses OkHttp and fastjson, as camellia's SDK does.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Any

import pytest

from lisa import Manager
from lisa.embedded.server import free_port
from tests.clients.java_programs import Program, build, run
from tests.gateway.camellia_client import shorten_ack_timeout
from tests.gateways import Gateway, new_topic

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lisa.embedded import EmbeddedServer

CAMELLIA = "lisa.CamelliaScenarios"


@pytest.fixture(scope="module")
def class_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build(tmp_path_factory.mktemp("java"))


@pytest.fixture(scope="module")
def redis_url(valkey_server: EmbeddedServer) -> Iterator[str]:
    """URL of the embedded Valkey, with a manager running."""
    with Manager(valkey_server.url):
        yield valkey_server.url


@pytest.fixture(scope="module")
def gateway(redis_url: str) -> Iterator[Gateway]:
    with Gateway(redis_url) as running:
        yield running


@pytest.fixture
def client() -> str:
    return "OkHttpCamellia"


def test_the_calls_of_a_camellia_producer(class_path: str, client: str, gateway: Gateway) -> None:
    found = run(class_path, CAMELLIA, client, "calls", gateway.url, new_topic())
    sent: dict[str, Any] = found["sent"]
    assert (sent["id"], sent["text"], sent["status"]) == ("mine", "文本 &=+%", 1)
    assert (sent["maxRetry"], sent["retry"]) == (0, 0)
    assert sent["expireTime"] - sent["triggerTime"] == 5_000
    assert 59_000 < found["dueIn"] < 120_000
    assert found["sentAgain"] == found["got"] == sent
    assert found["deleted"] == [True, False]
    assert found["statusOfDeleted"] == 7
    assert found["unknown"] is None
    assert found["plain"]["id"]
    assert found["plain"]["maxRetry"] == 10
    assert "400" in found["emptyText"]
    assert "400" in found["badTopic"]


@pytest.mark.parametrize("polls", ["long", "short"])
def test_camellia_listeners_handle_all_and_retry_what_failed(
    class_path: str, client: str, gateway: Gateway, polls: str
) -> None:
    found = run(class_path, CAMELLIA, client, polls, gateway.url, new_topic())
    attempts = [[1, 2], [1, 2, 3], [1]]
    assert found["seen"] == {str(i): attempts[i % 3] for i in range(30)}


def test_the_message_of_a_hung_camellia_listener_is_redelivered(
    class_path: str, client: str, gateway: Gateway, redis_url: str
) -> None:
    topic = new_topic()
    shorten_ack_timeout(redis_url, topic)
    found = run(class_path, CAMELLIA, client, "hung", gateway.url, topic)
    assert found == {"seen": {"text": [1, 2]}, "status": 4}


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_camellia_clients_outlive_a_restart_of_the_gateway(
    class_path: str, client: str, redis_url: str, how: signal.Signals
) -> None:
    topic, port = new_topic(), str(free_port())
    shorten_ack_timeout(redis_url, topic)
    with Gateway(redis_url, "--port", port) as first:
        arguments = (client, "restart", first.url, topic)
        with Program(class_path, CAMELLIA, *arguments) as program:
            assert program.result()["handled"] >= 10
            first.process.send_signal(how)
            first.process.wait(30)
            with Gateway(redis_url, "--port", port):
                program.go_on()
                found = program.result()
    assert found["failures"] > 0
    assert found["sent"] == [f"message-{i}" for i in range(150)]
    assert set(found["seen"]) == set(found["sent"])
