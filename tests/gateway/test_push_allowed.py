"""The allow-list of pushes; connections use the checked address."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import httpcore
import pytest

from lisa import Producer
from lisa.admin.push import StoredPushTarget, new_secret
from lisa.core.model.errors import ConfigError
from lisa.core.model.message import Message
from lisa.gateway.push.allowed import Allowed, NotAllowed
from lisa.gateway.push.network import GuardedBackend
from lisa.gateway.push.poster import Poster, PushVerdict
from tests.gateway.push_targets import Target
from tests.gateways import Gateway, new_topic
from tests.servers import wait_until

# Addresses grouped by range.
INTERNAL = [
    "127.0.0.1", "127.9.9.9", "0.1.2.3", "10.0.0.1", "172.16.0.1", "172.31.255.255",
    "192.168.1.1", "169.254.169.254", "100.64.0.1", "100.127.255.254", "192.0.0.1", "192.0.2.1",
    "168.63.129.16", "::ffff:168.63.129.16", "2002:a83f:8110::",
    "198.18.0.1", "203.0.113.9", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255",
    "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd12:3456::1", "fec0::1", "ff02::1",
    "ff0e::1", "100::1", "2001::1", "2001:db8::1", "5f00::1",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::10.0.0.1", "::127.0.0.1",
    "2002:7f00:1::", "2002:a00:1::", "2002:a9fe:a9fe::",
    "64:ff9b::127.0.0.1", "64:ff9b::10.0.0.1", "64:ff9b::169.254.169.254", "64:ff9b:1::1",
]  # fmt: skip
PUBLIC = [
    "1.1.1.1",
    "93.184.216.34",
    "172.15.0.1",
    "172.32.0.1",
    "100.63.0.1",
    "100.128.0.1",
    "2606:4700:4700::1111",
    "2a00:1450:4001::1",
    "64:ff9b::1.1.1.1",
    "2002:101:101::",
]


@pytest.mark.parametrize("address", INTERNAL)
def test_internal_addresses_are_forbidden_unless_listed(address: str) -> None:
    with pytest.raises(NotAllowed, match="internal"):
        Allowed.of([]).check("hooks.example.com", address)
    with pytest.raises(NotAllowed, match="internal"):
        Allowed.of(["*"]).check("hooks.example.com", address)  # a name opens no network


@pytest.mark.parametrize("address", PUBLIC)
def test_public_addresses_are_allowed_unless_there_is_a_list(address: str) -> None:
    assert Allowed.of([]).check("hooks.example.com", address)
    with pytest.raises(NotAllowed, match="not in the gateway's push-allow list"):
        Allowed.of(["other.example.com"]).check("hooks.example.com", address)


@pytest.mark.parametrize(
    ("entry", "address"),
    [
        ("10.1.0.0/16", "10.1.2.3"),
        ("10.1.2.3", "10.1.2.3"),
        ("10.1.0.0/16", "::ffff:10.1.2.3"),
        ("fd00::/8", "fd12::1"),
        ("[::1]", "::1"),
        ("127.0.0.0/8", "127.0.0.1"),
    ],
)
def test_a_listed_network_allows_only_its_addresses(entry: str, address: str) -> None:
    allowed = Allowed.of([entry])
    assert allowed.check("any.example.com", address)
    for other in ("10.2.0.1", "169.254.169.254", "1.1.1.1", "::2"):
        with pytest.raises(NotAllowed):
            allowed.check("any.example.com", other)


def test_names_may_be_patterns_in_any_case() -> None:
    allowed = Allowed.of(["*.Example.com", "10.0.0.0/8"])
    assert allowed.check("Hooks.EXAMPLE.com.", "1.1.1.1") == "1.1.1.1"
    assert allowed.check("a.b.example.com", "10.0.0.1") == "10.0.0.1"
    for host in ("example.com", "example.com.evil.org", "evilexample.com"):
        with pytest.raises(NotAllowed):
            allowed.check(host, "1.1.1.1")


@pytest.mark.parametrize("entry", ["10.0.0.0/33", "http://a.example", "a b", "10.0.0.1/8", ""])
def test_an_invalid_allow_list_is_rejected(entry: str) -> None:
    with pytest.raises(ConfigError, match="push-allow"):
        Allowed.of([entry])


class _Network(httpcore.AsyncNetworkBackend):
    """Records the requested address and fails."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def connect_tcp(self, host: str, *_: Any, **__: Any) -> httpcore.AsyncNetworkStream:
        self.asked.append(host)
        raise httpcore.ConnectError("no")


def _names(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Makes lookups of names under `.example` return these results in order."""
    left, asked, really = list(answers), list[str](), socket.getaddrinfo

    def look_up(host: Any, port: int, *more: Any, **options: Any) -> list[Any]:
        if not isinstance(host, str) or not host.endswith(".example"):
            return really(host, port, *more, **options)  # of another thread of this process
        asked.append(host)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (one, port)) for one in left.pop(0)]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return asked


def test_a_connection_uses_the_checked_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name is resolved once, because a second lookup may differ (DNS rebinding)."""
    asked = _names(monkeypatch, ["1.1.1.1"], ["127.0.0.1"])
    network = _Network()

    async def story() -> None:
        backend = GuardedBackend(Allowed.of([]), network)
        with pytest.raises(httpcore.ConnectError):
            await backend.connect_tcp("rebind.example", 80, 1.0)
        assert network.asked == ["1.1.1.1"]
        with pytest.raises(NotAllowed):
            await backend.connect_tcp("rebind.example", 80, 1.0)

    asyncio.run(story())
    assert network.asked == ["1.1.1.1"]
    assert asked == ["rebind.example"] * 2


def test_of_several_addresses_only_allowed_ones_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    _names(monkeypatch, ["10.0.0.1", "1.1.1.1", "127.0.0.1", "1.0.0.1"])
    network = _Network()

    async def story() -> None:
        with pytest.raises(httpcore.ConnectError):
            await GuardedBackend(Allowed.of([]), network).connect_tcp("mixed.example", 80, 1.0)

    asyncio.run(story())
    assert network.asked == ["1.1.1.1", "1.0.0.1"]


def test_pushes_to_one_host_share_a_lookup_that_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    count, go = [0], threading.Event()
    really = socket.getaddrinfo

    def look_up(host: Any, *more: Any, **options: Any) -> list[Any]:
        if host not in ("slow.example", b"slow.example"):  # of another thread of this process
            return really(host, *more, **options)
        count[0] += 1
        go.wait(10)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("1.1.1.1", 80))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)

    async def story() -> None:
        backend = GuardedBackend(Allowed.of([]), _Network())
        calls = [backend.connect_tcp("slow.example", 80, 0.2) for _ in range(20)]
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(one, httpcore.ConnectTimeout) for one in outcomes)
        go.set()

    asyncio.run(story())
    assert count == [1]


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "0x7f.1", "2130706433", "127.1", "[::1]", "[::ffff:7f00:1]"]
)
def test_all_spellings_of_loopback_are_forbidden(host: str) -> None:
    with Target() as target:
        url = f"http://{host}:{target.port}/"

        async def story() -> None:
            poster = Poster(Allowed.of([]))
            message = Message(id="1", topic="t", group="g", body=1, due_ms=0)
            push = StoredPushTarget(topic="t", group="g", url=url, secret=new_secret())
            answer = await poster.post(push, message, 5.0)
            assert answer.verdict is PushVerdict.FAILED
            assert "not allowed" in answer.reason or "cannot be resolved" in answer.reason
            await poster.close()

        asyncio.run(story())
        assert target.received == []


def test_pushes_to_internal_addresses_fail_with_the_reason(
    gateway: Gateway, redis_url: str
) -> None:
    client, topic = gateway.client, new_topic("push")
    with Target() as target:
        refusal = client.put(f"/v1/topics/{topic}/push", json={"url": target.url})
        assert refusal.status_code == 400
        assert "internal address" in refusal.json()["detail"]
        url = f"http://localhost:{target.port}/"  # a name is checked when connecting
        assert client.put(f"/v1/topics/{topic}/push", json={"url": url}).status_code == 201
        sent = client.post("/mykit/push", json={"topic": topic, "id": "x"}).json()["data"]
        wait_until(lambda: any("not allowed: localhost" in line for line in gateway.said))
        with Producer(redis_url) as producer:

            def reason() -> str:
                found = producer.get(topic, sent)
                return str(found and found.reason)

            wait_until(lambda: "not allowed: localhost resolves to" in reason())
        assert client.delete(f"/v1/topics/{topic}/push").status_code == 200
        assert target.received == []
