"""Clients that disconnect while they wait or before the response, and gateways that stop."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import pytest

from lisa import Manager
from lisa.embedded import EmbeddedServer
from lisa.embedded.server import free_port
from lisa.producer import Producer
from tests.gateway.native_client import pull
from tests.gateways import ACK_TIMEOUT_MS, Gateway, RawPull, new_topic
from tests.servers import wait_until

START_S = 60.0


def pulls(gateway: Gateway) -> int:
    waiting: int = gateway.client.get("/healthz").json()["pulls"]
    return waiting


def check_first_attempt(gateway: Gateway, topic: str, message_id: str) -> None:
    """The next pull gets the message as its first attempt."""
    (found,) = pull(gateway.client, topic, wait_ms=10_000, group="lisa")
    assert (found["id"], found["attempt"]) == (message_id, 1)


@pytest.mark.parametrize("hard", [False, True], ids=["fin", "rst"])
def test_a_waiting_client_that_disconnects_takes_no_message(
    gateway: Gateway, producer: Producer, *, hard: bool
) -> None:
    """If it disconnects before the response, it costs no attempt: then, a message arrives and the
    client disconnects while the gateway is suspended.
    """
    topic, before = new_topic(), pulls(gateway)
    with ExitStack() as stack:
        polls = [stack.enter_context(RawPull(gateway, topic)) for _ in range(20)]
        wait_until(lambda: pulls(gateway) == before + 20)
        for poll in polls:
            poll.close(hard=hard)
        wait_until(lambda: pulls(gateway) == before)
        check_first_attempt(gateway, topic, producer.send(topic, "x"))

    with RawPull(gateway, topic) as poll:
        wait_until(lambda: pulls(gateway) == before + 1)
        os.kill(gateway.process.pid, signal.SIGSTOP)
        try:
            sent = producer.send(topic, "x")
            poll.close(hard=hard)
        finally:
            os.kill(gateway.process.pid, signal.SIGCONT)
    begun = time.monotonic()
    check_first_attempt(gateway, topic, sent)
    assert time.monotonic() - begun < ACK_TIMEOUT_MS / 1000


@pytest.mark.parametrize(
    "number", [signal.SIGHUP, pytest.param(signal.SIGTERM, marks=pytest.mark.full)]
)
def test_a_stopping_gateway_answers_polls_and_releases_messages(
    redis_url: str, manager: Manager, producer: Producer, number: signal.Signals
) -> None:
    topic = new_topic()
    with Gateway(redis_url) as ending, Gateway(redis_url) as other:
        with RawPull(ending, topic) as poll:
            wait_until(lambda: pulls(ending) == 1)
            os.kill(ending.process.pid, number)
            answer = poll.answer()
            assert answer.startswith(b"HTTP/1.1 200")
            assert b'"deliveries":[]' in answer
        assert ending.process.wait(20) == 0
        check_first_attempt(other, topic, producer.send(topic, "x"))


def test_a_gateway_stops_in_time_during_an_outage(own_server: EmbeddedServer) -> None:
    """Even with many topics: the gateway does not wait for each of them."""
    patience_s, topics = 2.0, 15
    env = {"LISA_GATEWAY_SERVER__PATIENCE": f"{patience_s}s"}
    with Gateway(own_server.url, env=env) as ending:
        for number in range(topics):
            pull(ending.client, f"t{number}", group="g", wait_ms=0)
        own_server.kill()
        began = time.monotonic()
        assert ending.stop() == 0
        assert time.monotonic() - began < topics * patience_s / 2


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_gateway_stops_while_it_starts(workers: int) -> None:
    """Its server has not responded yet."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        silent.settimeout(START_S)
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        gateway = Gateway(url, "--workers", str(workers))
        try:
            connections = [silent.accept()[0] for _ in range(workers)]
            assert gateway.stop() == 0
            for connection in connections:
                connection.close()
        finally:
            gateway.end()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_gateway_starts_although_its_log_is_on_a_full_disk(redis_url: str) -> None:
    port = str(free_port())
    command = [sys.executable, "-m", "lisa.cli.gateway", "--redis", redis_url, "--port", port]
    with Path("/dev/full").open("w") as full, subprocess.Popen(command, stderr=full) as process:

        def is_up() -> bool:
            assert process.poll() is None
            with suppress(httpx.TransportError):
                return httpx.get(f"http://127.0.0.1:{port}/healthz").status_code == 200
            return False

        try:
            wait_until(is_up)
        finally:
            process.terminate()
    assert process.returncode == 0


def test_a_start_without_the_server_is_logged() -> None:
    with Gateway("redis://127.0.0.1:1/0") as gateway:
        wait_until(lambda: any("gateway" in line and "started" in line for line in gateway.said))
    said = "\n".join(gateway.said)
    assert "starting without the server, trying again: redis://127.0.0.1:1/0" in said
    assert "connected to" not in said
