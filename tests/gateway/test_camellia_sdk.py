"""A double of Camellia's Java SDK against real gateways."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from lisa import Manager
from tests.gateway.camellia_client import Message, Sdk, SdkError, shorten_ack_timeout
from tests.gateways import Gateway, new_topic
from tests.servers import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def sdk(gateway: Gateway) -> Iterator[Sdk]:
    """An SDK with one server."""
    with Sdk([gateway.url]) as running:
        yield running


@pytest.mark.parametrize("poll_ms", [1_000, None], ids=["long", "short"])
def test_listeners_handle_all_and_retry_what_failed(sdk: Sdk, poll_ms: int | None) -> None:
    """The listener starts before the topic exists; false and an exception are nacks."""
    topic = new_topic()
    seen: dict[str, list[Message]] = {}
    lock = threading.Lock()

    def on_msg(message: Message) -> bool:
        with lock:
            seen.setdefault(message["msg"], []).append(message)
        number, attempts = int(message["msg"]), len(seen[message["msg"]])
        if number % 3 == 0 and attempts == 1:
            return False
        if number % 3 == 1 and attempts < 3:
            raise ValueError("it fails twice")
        return True

    for _ in range(3):
        sdk.listen(topic, on_msg, batch=4, poll_ms=poll_ms, interval_s=0.02)
    ids = [sdk.send(topic, str(i), 10 * i)["msgId"] for i in range(30)]
    wait_until(lambda: all((found := sdk.get(topic, one)) and found["status"] == 4 for one in ids))
    assert not sdk.errors
    expected = {str(i): (2, 3, 1)[i % 3] for i in range(30)}
    assert {msg: len(found) for msg, found in seen.items()} == expected
    for found in seen.values():
        assert [one["retry"] for one in found] == list(range(1, len(found) + 1))


def test_the_calls_of_a_producer(sdk: Sdk) -> None:
    topic = new_topic()
    sent = sdk.send(topic, "text", 60_000, msg_id="mine", ttl_ms=5_000, max_retry=0)
    assert sdk.send(topic, "again", 1, msg_id="mine") == sent
    assert sdk.get(topic, "mine") == sent
    assert sdk.delete(topic, "mine") is True
    assert sdk.delete(topic, "mine") is False
    assert sdk.get(topic, "nobody") is None
    with pytest.raises(SdkError, match="400"):
        sdk.send(topic, "", 0)
    with pytest.raises(SdkError, match="400"):
        sdk.send("a|b", "text", 0)


def test_the_message_of_a_hung_listener_is_redelivered(sdk: Sdk, redis_url: str) -> None:
    topic = new_topic()
    shorten_ack_timeout(redis_url, topic)
    stuck, got = threading.Event(), threading.Event()
    calls: list[int] = []

    def on_msg(message: Message) -> bool:
        calls.append(message["retry"])
        if message["retry"] == 1:
            stuck.wait(20)
            return True
        got.set()
        return True

    for _ in range(2):
        sdk.listen(topic, on_msg, ack_timeout_ms=300, poll_ms=500)
    message_id = sdk.send(topic, "text", 0)["msgId"]
    assert got.wait(20)
    wait_until(lambda: (found := sdk.get(topic, message_id)) and found["status"] == 4)
    stuck.set()  # its late ack changes nothing
    assert calls == [1, 2]


def test_the_sdk_fails_over_from_a_dead_server(redis_url: str, manager: Manager) -> None:
    topic = new_topic()
    shorten_ack_timeout(redis_url, topic)
    handled: list[str] = []

    def on_msg(message: Message) -> bool:
        handled.append(message["msg"])
        return True

    with Gateway(redis_url) as first, Gateway(redis_url) as second, Sdk([]) as sdk:
        sdk.servers += [first.url, second.url]
        # Messages that the dead one had just delivered are redelivered by the ack timeout.
        sdk.listen(topic, on_msg, poll_ms=500, ack_timeout_ms=1_000)
        sent = [sdk.send(topic, f"before {i}", 0)["msg"] for i in range(10)]
        first.process.kill()
        first.process.wait()
        for i in range(20):
            try:
                sent.append(sdk.send(topic, f"after {i}", 0)["msg"])
            except Exception as error:  # noqa: BLE001  of any kind: the SDK repeats nothing
                sdk.errors.append(error)
        wait_until(lambda: set(sent) <= set(handled))
        assert len(sent) >= 28  # each of the two threads called the dead server at most once
