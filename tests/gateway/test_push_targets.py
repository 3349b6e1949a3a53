"""Setting, listing and removing push targets, by HTTP and command line."""

import asyncio
import base64
import json
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.parse import urlsplit

import httpcore
import httpx
import pytest
from click.testing import CliRunner, Result
from redis import Redis

from lisa import Producer
from lisa.admin import push as admin
from lisa.admin.push import StoredPushTarget, new_secret
from lisa.cli.main import main
from lisa.core.model.envelope import encode_envelope, new_token
from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import DEFAULT_GROUP
from lisa.core.model.message import Message
from lisa.core.model.options import TopicOptions
from lisa.core.store.paging import START
from lisa.core.store.replies import pairs
from lisa.core.store.store import SyncStore
from lisa.core.transitions.groups import Undeclare
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.promote import Promote
from lisa.gateway.push import some_topics
from lisa.gateway.push.network import Allowed, GatewayFault, GuardedBackend, NotAllowed
from lisa.gateway.push.poster import Poster, PushVerdict, sign
from tests.gateway.push_targets import PushTopic, Target
from tests.gateways import Gateway, new_topic
from tests.rows import Item, enqueue
from tests.servers import connect, open_store, wait_until

URL = "https://hooks.example.com/x?y=1"
SECRET = "whsec_" + base64.b64encode(b"k" * 32).decode()


@pytest.fixture
def store(redis_url: str) -> SyncStore:
    return open_store(redis_url)


@pytest.fixture
def topic() -> str:
    return new_topic("push")


@pytest.fixture
def path(topic: str) -> str:
    return f"/v1/topics/{topic}/push"


def lisa(redis_url: str, *words: str) -> Result:
    """`lisa topic push`."""
    return CliRunner().invoke(main, ["--redis", redis_url, "topic", "push", *words])


def test_the_signature_matches_the_specification() -> None:
    """The example from the tests of Standard Webhooks' libraries."""
    key = admin.key_of("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
    body = b'{"test": 2432232314}'
    signature = sign(key, "msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, body)
    assert signature == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_target_is_set_listed_and_removed_and_its_secret_shown_once(
    client: httpx.Client, topic: str, path: str, gateway: Gateway, redis_url: str
) -> None:
    assert client.get(path).status_code == 404  # no topic yet
    made = client.put(path, json={"url": URL, "concurrency": 3, "timeout_ms": 5_000})
    shown = {"group": "lisa", "url": URL, "concurrency": 3, "timeout_ms": 5_000}
    secret = made.json()["secret"]
    assert (made.status_code, made.json()) == (201, shown | {"secret": secret})
    assert len(admin.key_of(secret)) == 32
    assert client.get(path).json() == {"targets": [shown]}
    told = client.get(path).text + lisa(redis_url, topic).output
    told += lisa(redis_url, topic, "--json").output + "".join(gateway.said)
    assert URL in told
    assert secret not in told
    assert secret not in repr(StoredPushTarget(topic="t", group="g", url=URL, secret=secret))
    assert "/x?y=1" not in "".join(gateway.said)  # a hook's path is often its password
    assert client.delete(path).json() == {"removed": ["lisa"]}
    assert client.delete(path).status_code == 404
    assert client.get(path).json() == {"targets": []}


def test_a_secret_is_kept_until_renewed(
    client: httpx.Client, topic: str, path: str, store: SyncStore
) -> None:
    def secret() -> str:
        (target,) = store.drive(admin.targets(store, topic))
        return target.secret

    first = client.put(path, json={"url": URL}).json()["secret"]
    again = client.put(path, json={"url": URL + "2"})
    assert (again.status_code, "secret" in again.json(), secret()) == (200, False, first)
    renewed = client.put(path, json={"url": URL, "renew_secret": True}).json()["secret"]
    assert secret() == renewed != first
    given = client.put(path, json={"url": URL, "secret": SECRET})
    assert ("secret" in given.json(), secret()) == (False, SECRET)


def test_one_topic_may_have_a_target_for_each_group(client: httpx.Client, path: str) -> None:
    def groups() -> list[str]:
        return [target["group"] for target in client.get(path).json()["targets"]]

    for group in ("billing", "audit"):
        assert client.put(path, json={"url": URL, "group": group}).status_code == 201
    refused = client.put(path, json={"url": URL})
    assert refused.status_code == 400
    assert "several groups (audit, billing)" in refused.json()["detail"]
    assert groups() == ["audit", "billing"]
    assert client.delete(path, params={"group": "audit"}).status_code == 200
    assert client.delete(path, params={"group": "audit"}).status_code == 404
    assert groups() == ["billing"]


BAD: list[dict[str, Any]] = [
    {},
    {"url": ""},
    {"url": "ftp://hooks.example.com/"},
    {"url": "https:///x"},
    {"url": "https://user:pass@hooks.example.com/"},
    {"url": "https://hooks.example.com/#part"},
    {"url": "https://hooks.example.com/a b"},
    {"url": "https://hööks.example.com/"},
    {"url": "https://hooks.example.com\\@evil.example/"},
    {"url": "https://hooks.example.com/\r\nx: y"},
    {"url": "https://hooks.example.com/" + "x" * 2_000},
    {"url": "http://169.254.169.254/latest/"},
    {"url": "http://[::ffff:10.0.0.1]/"},
    {"url": URL, "concurrency": 0},
    {"url": URL, "concurrency": 1_001},
    {"url": URL, "timeout_ms": 99},
    {"url": URL, "secret": "whsec_c2hvcnQ="},
    {"url": URL, "secret": "whsec_###"},
    {"url": URL, "secret": SECRET, "renew_secret": True},
    {"url": URL, "secret": "whsec_ü"},
    {"url": URL, "group": "a b"},
]


def test_invalid_targets_are_rejected(client: httpx.Client, path: str) -> None:
    for body in BAD:
        answer = client.put(path, json=body)
        assert answer.status_code == 400, body
        assert answer.headers["content-type"] == "application/problem+json"
        assert len(answer.json()["detail"]) > 10
    assert "has the port 0" in client.put(path, json={"url": "https://a.example:0/"}).text
    assert client.get(path).status_code == 404


def test_the_command_line_does_the_same(
    redis_url: str, topic: str, store: SyncStore, tmp_path: Path
) -> None:
    none = lisa(redis_url, topic)
    assert (none.exit_code, none.stdout) == (1, "")
    assert "has no push target" in none.stderr
    made = lisa(redis_url, topic, URL, "--timeout", "3s", "--concurrency", "2")
    assert made.exit_code == 0, made.stderr
    secret = made.stdout.rpartition("(shown only once): ")[2].strip()
    limits: dict[str, Any] = {"group": "lisa", "url": URL, "concurrency": 2, "timeout_ms": 3_000}
    (target,) = store.drive(admin.targets(store, topic))
    assert target == StoredPushTarget(topic=topic, secret=secret, **limits)
    assert json.loads(lisa(redis_url, topic, "--json").stdout) == [{"topic": topic, **limits}]
    file = tmp_path / "secret"
    file.write_text(SECRET + "\n")
    again = lisa(redis_url, topic, URL, "--secret-file", str(file))
    assert (again.exit_code, "whsec_" in again.stdout) == (0, False)
    assert store.drive(admin.targets(store, topic))[0].secret == SECRET
    renewed = json.loads(lisa(redis_url, topic, URL, "--new-secret", "--json").stdout)
    assert store.drive(admin.targets(store, topic))[0].secret == renewed["secret"] != SECRET
    for words in (
        ("ftp://x/",),
        (URL, "--remove"),
        (URL, "--timeout", "1ms"),
        (URL, "--new-secret", "--secret-file", __file__),
        (URL, "--secret-file", __file__),
        (URL, "--secret-file", sys.executable),
    ):
        done = lisa(redis_url, topic, *words)
        assert (done.exit_code, done.stdout, done.stderr.count("\n")) == (2, "", 1), words
    assert lisa(redis_url, topic, "--remove", "--group", "other").exit_code == 1
    assert lisa(redis_url, topic, "--remove").exit_code == 0
    assert lisa(redis_url, topic, "--remove").exit_code == 1
    assert store.drive(admin.targets(store, topic)) == []


def test_options_and_damaged_targets_do_not_disturb_a_target(
    store: SyncStore, server: Redis, topic: str
) -> None:
    """Leases are renewed by any ack timeout, even one that cannot be read."""
    store.drive(admin.set_target(store, topic, URL, timeout=timedelta(seconds=1)))
    options, field = f"lisa:{{{topic}}}:options", admin.FIELD + DEFAULT_GROUP
    written: Any = server.hgetall(options)
    assert TopicOptions.from_hash(pairs(written)) == TopicOptions()
    for ack_timeout, read_as in (
        ("9" * 30, 10_000),
        ("x", 10_000),
        ("0", 100),
        ("2500", 2_500),
    ):
        server.hset(options, "ack_timeout", ack_timeout)
        (target,) = store.drive(admin.targets(store, topic))
        assert target.ack_timeout_ms == read_as
    evil = '{"url":"file:///x","secret":"whsec_x"}'
    server.hset(options, mapping={"push:broken": "{", "push:evil": evil})
    assert [one.group for one in store.drive(admin.targets(store, topic))] == ["lisa"]
    stored = json.loads(server.hget(options, field) or b"")
    for bound in ({"concurrency": -3}, {"concurrency": 10**9}, {"timeout_ms": -5}):
        server.hset(options, field, json.dumps({**stored, **bound}))
        assert store.drive(admin.targets(store, topic)) == []
    assert sorted(store.drive(admin.remove(store, topic))) == ["broken", "evil", "lisa"]


def test_the_group_s_interrupted_removal_is_finished_first(store: SyncStore, topic: str) -> None:
    store.drive(admin.set_target(store, topic, URL, group="mail"))
    token = new_token()
    store.call(enqueue(topic, token, [Item("old", "+0", encode_envelope(token, 1))]))
    store.call(Promote(topic))
    store.call(Undeclare(topic, "mail"))
    store.drive(admin.set_target(store, topic, URL, group="mail"))
    assert store.drive(store.groups(topic)) == ("mail",)
    (old,) = store.call(Inspect(topic, ["old"]))
    assert old.tombstone
    assert old.tombstone.state == "purged"


def test_many_topics_are_read_in_parts(store: SyncStore, server: Redis) -> None:
    stem = new_topic("many")
    names = {f"{stem}-{n}" for n in range(3_000)}
    store.drive(store.register(names))
    found, cursor, parts = set(), START, 0
    while not parts or cursor != START:
        cursor, some = store.drive(some_topics(store, cursor, 1_000))
        assert len(some) < 1_500
        found |= some
        parts += 1
    assert names <= found
    assert parts > 1
    server.zrem("lisa:topics", *names)


def test_archives_hold_no_secrets(store: SyncStore, redis_url: str, topic: str) -> None:
    from lisa.pipeline.jobs.archive import JournalRecord
    from lisa.pipeline.server import Server

    store.drive(admin.set_target(store, topic, URL))
    with connect(redis_url) as client:
        client.hset(f"lisa:{{{topic}}}:options", "ack_timeout", "5000")
    with closing(JournalRecord(Server(redis_url), "archive")) as keeper:
        assert keeper.topics([topic])[topic].options == {"ack_timeout": "5000"}


# The allow-list -----------------------------------------------------------------------------------


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


def is_allowed(allowed: Allowed, host: str, address: str) -> bool:
    try:
        allowed.check(host, address)
    except NotAllowed:
        return False
    return True


def test_only_listed_internal_addresses_are_allowed() -> None:
    for address in INTERNAL:
        for entries in ([], ["*"]):  # a name opens no network
            with pytest.raises(NotAllowed, match="internal"):
                Allowed.of(entries).check("hooks.example.com", address)
    for entry, address in (
        ("10.1.0.0/16", "10.1.2.3"),
        ("10.1.2.3", "10.1.2.3"),
        ("10.1.0.0/16", "::ffff:10.1.2.3"),
        ("fd00::/8", "fd12::1"),
        ("[::1]", "::1"),
        ("127.0.0.0/8", "127.0.0.1"),
    ):
        allowed = Allowed.of([entry])
        assert is_allowed(allowed, "any.example.com", address)
        for other in ("10.2.0.1", "169.254.169.254", "1.1.1.1", "::2"):
            assert not is_allowed(allowed, "any.example.com", other)


def test_names_may_be_patterns_in_any_case() -> None:
    allowed = Allowed.of(["*.Example.com", "10.0.0.0/8"])
    assert allowed.check("Hooks.EXAMPLE.com.", "1.1.1.1") == "1.1.1.1"
    assert allowed.check("a.b.example.com", "10.0.0.1") == "10.0.0.1"
    for host in ("example.com", "example.com.evil.org", "evilexample.com"):
        assert not is_allowed(allowed, host, "1.1.1.1")


def test_an_invalid_allow_list_is_rejected() -> None:
    for entry in ("10.0.0.0/33", "http://a.example", "a b", "10.0.0.1/8", ""):
        with pytest.raises(ConfigError, match="push-allow"):
            Allowed.of([entry])


class _Network(httpcore.AsyncNetworkBackend):
    """Records the requested address and fails."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def connect_tcp(self, host: str, *_: Any, **__: Any) -> httpcore.AsyncNetworkStream:
        self.asked.append(host)
        raise httpcore.ConnectError("no")


Lookups = Callable[[str], list[str]]


@pytest.fixture
def resolve(monkeypatch: pytest.MonkeyPatch) -> Callable[[Lookups], None]:
    """Replaces lookups of names under `.example`."""
    really = socket.getaddrinfo

    def replace(addresses_of: Lookups) -> None:
        def look_up(host: Any, port: int, *more: Any, **options: Any) -> list[Any]:
            name = host.decode() if isinstance(host, bytes) else str(host)
            if not name.endswith(".example"):
                return really(host, port, *more, **options)  # of another thread of this process
            kind = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
            return [(*kind, (address, port)) for address in addresses_of(name)]

        monkeypatch.setattr(socket, "getaddrinfo", look_up)

    return replace


async def test_a_connection_uses_the_checked_address(
    resolve: Callable[[Lookups], None],
) -> None:
    """A name is resolved once, because a second lookup may differ (DNS rebinding)."""
    answers = [["1.1.1.1"], ["127.0.0.1"], ["10.0.0.1", "1.1.1.1", "127.0.0.1", "1.0.0.1"]]
    resolve(lambda _: answers.pop(0))
    network = _Network()
    backend = GuardedBackend(Allowed.of([]), network)
    with pytest.raises(httpcore.ConnectError):
        await backend.connect_tcp("rebind.example", 80, 1.0)
    assert network.asked == ["1.1.1.1"]
    with pytest.raises(NotAllowed):
        await backend.connect_tcp("rebind.example", 80, 1.0)
    assert network.asked == ["1.1.1.1"]
    with pytest.raises(httpcore.ConnectError):
        await backend.connect_tcp("mixed.example", 80, 1.0)
    assert network.asked[1:] == ["1.1.1.1", "1.0.0.1"]  # of several, only allowed ones
    assert answers == []


async def test_pushes_to_one_host_share_a_lookup_that_times_out(
    resolve: Callable[[Lookups], None],
) -> None:
    asked, go = [], threading.Event()

    def slow(name: str) -> list[str]:
        asked.append(name)
        go.wait(10)
        return ["1.1.1.1"]

    resolve(slow)
    backend = GuardedBackend(Allowed.of([]), _Network())
    calls = [backend.connect_tcp("slow.example", 80, 0.2) for _ in range(20)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    go.set()
    assert all(isinstance(outcome, GatewayFault) for outcome in outcomes)
    assert asked == ["slow.example"]


@pytest.mark.parametrize(
    ("lookup", "kind"),
    [
        (["10.0.0.1"], NotAllowed),
        ([], NotAllowed),
        (socket.gaierror(socket.EAI_NONAME, "no such name"), NotAllowed),
        (socket.gaierror(socket.EAI_AGAIN, "no resolver answers"), GatewayFault),
        (socket.gaierror(socket.EAI_SYSTEM, "too many open files"), GatewayFault),
        (RuntimeError("can't start new thread"), GatewayFault),
        (["1.1.1.1"], httpcore.ConnectError),
    ],
)
async def test_faults_of_the_gateway_are_told_from_those_of_the_target(
    resolve: Callable[[Lookups], None], lookup: Any, kind: type[Exception]
) -> None:
    """A name that does not exist has the same error as one that is internal."""

    def look_up(_name: str) -> list[str]:
        if isinstance(lookup, Exception):
            raise lookup
        return list(lookup)

    resolve(look_up)
    with pytest.raises(kind):
        await GuardedBackend(Allowed.of([]), _Network()).connect_tcp("a.example", 80, 1.0)


async def test_all_spellings_of_loopback_are_forbidden(target: Target) -> None:
    message = Message(id="1", topic="t", group="g", body=1, due_ms=0)
    poster = Poster(Allowed.of([]), Mock(about_ms=lambda: 0))
    names = ("127.0.0.1", "localhost", "0x7f.1", "2130706433", "127.1")
    for host in (*names, "[::1]", "[::ffff:7f00:1]"):
        url = f"http://{host}:{target.port}/"
        push = StoredPushTarget(topic="t", group="g", url=url, secret=new_secret())
        answer = await poster.post(push, message, 5.0)
        assert answer.verdict is PushVerdict.FAILED
        shown = urlsplit(url).hostname
        assert answer.reason == f"not allowed: {shown} has no address that this gateway may push to"
    await poster.close()
    assert target.received == []


def test_pushes_to_internal_addresses_fail_with_the_reason(
    gateway: Gateway, producer: Producer, redis_url: str, target: Target
) -> None:
    client, topic = gateway.client, PushTopic(redis_url, producer)
    refusal = client.put(topic.path, json={"url": target.url})
    assert refusal.status_code == 400
    assert "internal address" in refusal.json()["detail"]
    # A name is checked when connecting.
    topic.push_to(client, f"http://localhost:{target.port}/")
    sent = topic.send()
    wait_until(lambda: any("not allowed: localhost" in line for line in gateway.said))
    wait_until(lambda: "not allowed: localhost has no address" in topic.reason(sent))
    assert client.delete(topic.path).status_code == 200
    assert target.received == []
