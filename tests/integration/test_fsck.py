"""fsck reports and repairs every kind of orphan, without losses or false reports."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from lisa import Consumer, Manager, Message, Producer, Retry
from lisa.admin.fsck import KINDS, CheckReport, check
from lisa.core.model.envelope import encode_envelope, fence_of, new_token
from lisa.core.model.keys import GroupKeys, TopicKeys
from lisa.core.store.store import SyncStore
from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.cancel import Cancel
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.open import Open
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.pull import Pull
from lisa.core.transitions.reschedule import Reschedule
from lisa.core.transitions.retry import Fail, Failure
from lisa.core.transitions.undeclare import Undeclare
from lisa.embedded import EmbeddedServer
from tests.rows import Item, enqueue
from tests.servers import connect, open_store

TOPIC = "orders"
GROUP = "lisa"
LATER = "+600000"
SLOW_US = 2_000
MOST_RUNS = 5


@pytest.fixture
def server(redis_url: str) -> str:
    return redis_url


@pytest.fixture
def keys(store: SyncStore) -> TopicKeys:
    return store.keys.topic(TOPIC)


@pytest.fixture
def own(keys: TopicKeys) -> GroupKeys:
    return keys.group(GROUP)


def send(store: SyncStore, *ids: str, due: str = "+0", ttl_ms: int | None = None) -> None:
    token = new_token()
    envelope = encode_envelope(token, {"n": 1})
    store.call(enqueue(TOPIC, token, [Item(one, due, envelope, ttl_ms, "0") for one in ids]))


def take(store: SyncStore, count: int = 100, group: str = GROUP) -> dict[str, str]:
    """Entries by id, as read by a consumer."""
    found = store.call(Pull(TOPIC, group, "c1", count)).entries
    if found:
        store.call(Open(TOPIC, group, found))
    return {entry.id: entry.entry for entry in found}


def one_of_each(store: SyncStore) -> None:
    """A message in every state: waiting, ready, in flight, retry, garbage."""
    store.call(Declare(TOPIC, GROUP))
    send(store, "dead", "retrying", "held")
    held = take(store)
    dead = Failure("dead", held["dead"], "boom", "discard")
    store.call(Fail(TOPIC, GROUP, [dead, Failure("retrying", held["retrying"], "boom", 600_000)]))
    send(store, "ready", ttl_ms=600_000)
    send(store, "waiting", due=LATER, ttl_ms=600_000)


def run(store: SyncStore, *, repair: bool = False, topics: tuple[str, ...] = ()) -> CheckReport:
    return store.drive(check(store, topics, repair=repair))


def mend(store: SyncStore) -> None:
    """Repair everything; nothing is found afterwards."""
    assert run(store, repair=True).ok
    assert run(store).findings == []


def test_what_is_in_order(store: SyncStore, keys: TopicKeys, own: GroupKeys) -> None:
    assert run(store).ok
    send(store, "without-groups")
    store.call(Promote(TOPIC))
    assert run(store).findings == []
    store.call(Cancel(TOPIC, ["without-groups"]))
    one_of_each(store)
    report = run(store)
    assert (report.findings, report.bodies, report.entries) == ([], 5, 2)
    store.call(Reschedule(TOPIC, [("retrying", LATER)]))
    store.call(Declare(TOPIC, "second"))
    send(store, "both")
    store.call(Promote(TOPIC))
    held = take(store, group="second")
    fence = fence_of(store.ask("GET", keys.body("both")))
    store.call(Ack(TOPIC, "second", [Settlement("both", held["both"], fence, 0, 1)]))
    assert run(store, repair=True).findings == []
    assert store.ask("HGET", own.attempts, "retrying") == b"1", "it keeps its attempts"


def drop_entry(raw: redis.Redis, own: GroupKeys, one: str) -> None:
    entry = raw.hget(own.entries, one)
    assert entry is not None
    raw.xdel(own.ready, entry)


Break = Callable[[redis.Redis, TopicKeys, GroupKeys], Any]

BREAKAGES: list[tuple[str, str, Break]] = [
    ("no-place", "waiting", lambda raw, keys, own: raw.zrem(keys.waiting, "waiting")),
    ("no-place", "retrying", lambda raw, keys, own: raw.zrem(own.retry, "retrying")),
    ("no-place", "dead", lambda raw, keys, own: raw.zrem(own.garbage, "dead")),
    *(
        ("no-body", one, lambda raw, keys, own, one=one: raw.delete(keys.body(one)))
        for one in ("waiting", "ready", "held", "retrying", "dead")
    ),
    ("no-body", "x", lambda raw, keys, own: raw.hset(keys.policy, "x", "0")),
    ("no-body", "x", lambda raw, keys, own: raw.zadd(keys.expiry, {"x": 1})),
    ("no-body", "x", lambda raw, keys, own: raw.hset(own.attempts, "x", 2)),
    ("no-body", "x", lambda raw, keys, own: raw.hset(own.reasons, "x", "boom")),
    ("no-body", "x", lambda raw, keys, own: raw.zadd(own.leases, {"x": 1})),
    ("second-place", "waiting", lambda raw, keys, own: raw.zadd(own.retry, {"waiting": 9e12})),
    ("second-place", "held", lambda raw, keys, own: raw.zadd(own.retry, {"held": 9e12})),
    ("second-place", "retrying", lambda raw, keys, own: raw.zadd(own.garbage, {"retrying": 1})),
    ("second-place", "ready", lambda raw, keys, own: raw.zadd(keys.waiting, {"ready": 9e12})),
    ("entry-lost", "ready", lambda raw, keys, own: drop_entry(raw, own, "ready")),
    ("entry-lost", "held", lambda raw, keys, own: drop_entry(raw, own, "held")),
    ("entry-lost", "ready", lambda raw, keys, own: raw.hset(own.entries, "ready", "1-1")),
]


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: "-".join(breakage[:2]))
def test_an_orphan_id_is_named_and_mended(
    breakage: tuple[str, str, Break], store: SyncStore, raw: redis.Redis, keys: TopicKeys
) -> None:
    kind, one, damage = breakage
    one_of_each(store)
    bodies = set(raw.scan_iter(keys.bodies_pattern()))
    damage(raw, keys, keys.group(GROUP))
    seen = run(store)
    assert (kind, one) in {(found.kind, found.id) for found in seen.findings}
    assert {found.id for found in seen.findings if found.id} == {one}
    assert kind in KINDS
    assert not seen.ok
    assert run(store).kinds == seen.kinds, "looking alone mends nothing"
    mend(store)
    lost = {keys.body(one).encode()} if kind == "no-body" else set()
    assert set(raw.scan_iter(keys.bodies_pattern())) == bodies - lost


def test_foreign_records_go_and_ours_stay(
    store: SyncStore, raw: redis.Redis, keys: TopicKeys, own: GroupKeys
) -> None:
    one_of_each(store)
    store.call(Declare(TOPIC, "second"))  # too new for these messages
    raw.hset(keys.group("second").attempts, "held", 3)
    raw.hset(keys.group("ghost").reasons, "x", "boom")
    fields: Any
    for fields in ({"id": "stranger"}, {"what": "ever"}, {"id": "held", "due": "0"}):
        raw.xadd(own.ready, fields)
    raw.xreadgroup(GROUP, "foreign", {own.ready: ">"}, count=2)  # ready, and the foreign entry
    seen = run(store)
    assert seen.kinds == {"leftover": 1, "foreign-entry": 3, "undeclared-group": 1}
    mend(store)
    assert not raw.exists(keys.group("second").attempts, *keys.group("ghost"))
    assert raw.xlen(own.ready) == raw.hlen(own.entries) == 2
    entry = raw.xadd(own.ready, {"id": "stranger"})
    raw.xreadgroup(GROUP, "foreign", {own.ready: ">"}, count=5)
    raw.xdel(own.ready, entry)
    assert run(store).kinds == {"pending-lost": 1}
    mend(store)


@pytest.mark.parametrize(
    ("lost", "kinds"),
    [
        ("ready", {"no-stream": 1, "entry-lost": 2}),
        ("entries", {"no-place": 2, "foreign-entry": 2}),
    ],
)
def test_a_lost_stream_or_index(
    store: SyncStore, raw: redis.Redis, own: GroupKeys, lost: str, kinds: dict[str, int]
) -> None:
    one_of_each(store)
    raw.delete(getattr(own, lost))
    assert run(store).kinds == kinds
    mend(store)
    assert store.call(Promote(TOPIC)).moved == 2
    assert set(take(store)) == {"ready", "held"}


def test_a_lost_declaration_is_declared_again(
    store: SyncStore, raw: redis.Redis, keys: TopicKeys
) -> None:
    one_of_each(store)
    raw.delete(keys.groups)
    (found,) = run(store).findings
    assert found.kind == "undeclared-group"
    assert "has 4 unsettled messages" in found.what
    mend(store)
    assert store.drive(store.groups(TOPIC)) == (GROUP,)
    assert raw.exists(*(keys.body(one) for one in ("dead", "retrying", "held", "ready"))) == 4


def test_a_removal_cut_short_is_finished(
    store: SyncStore, raw: redis.Redis, keys: TopicKeys
) -> None:
    one_of_each(store)
    store.call(Undeclare(TOPIC, GROUP))  # and its process is killed
    assert run(store, repair=True).findings == [], "it may be under way"
    raw.hset(keys.options, f"removing:{GROUP}", 1)  # long ago
    (found,) = run(store).findings
    assert found.kind == "undeclared-group"
    assert "interrupted" in found.what
    mend(store)
    assert not raw.exists(*keys.group(GROUP))
    assert list(raw.scan_iter(keys.bodies_pattern())) == [keys.body("waiting").encode()]


def test_topics_that_are_unlisted_or_written_by_other_programs(
    store: SyncStore, raw: redis.Redis, keys: TopicKeys
) -> None:
    send(store, "a", due=LATER)
    raw.delete(store.keys.topics)
    assert run(store).kinds == {"unregistered": 1}
    assert run(store, repair=True).ok
    assert store.drive(store.topics()) == [TOPIC]
    raw.zadd(keys.waiting, {b"\xff\x00": 1})
    raw.set("lisa:{broken}:waiting", "a string")
    raw.set("lisa:{broken}:body:x", "1")
    report = run(store, repair=True)
    assert report.kinds == {"bad-id": 1, "wrong-type": 1}
    assert not report.ok, "neither can be mended by a program"
    assert run(store, topics=("other",)).ok
    assert run(store, topics=(TOPIC,)).kinds == {"bad-id": 1}


# During changes


def test_moving_messages_are_never_reported(server: str) -> None:
    """Messages are sent, cancelled, moved, and handled by two groups, of which some fail."""
    done, handled, reports = threading.Event(), list[str](), list[CheckReport]()

    def handle(message: Message) -> None:
        handled.append(message.id)
        if message.attempt == 1 and isinstance(message.body, int) and message.body % 5 == 0:
            raise Retry(delay="0s")

    def send_all() -> None:
        with Producer(server) as producer:
            while not done.is_set():
                report = producer.send_many(TOPIC, range(10), delay="2ms", ttl="10m")
                producer.send_many(TOPIC, range(10))
                later = [sent.id for sent in report]
                producer.cancel_many(TOPIC, later[:2])
                producer.reschedule(TOPIC, later[3], delay="1ms")

    consumers = [Consumer(server, group=group, concurrency=2) for group in (GROUP, "second")]
    for consumer in consumers:
        consumer.on(TOPIC, handle)
    store = open_store(server)
    groups = {TOPIC: [GROUP, "second"]}
    with Manager(server, groups=groups), consumers[0], consumers[1], ThreadPoolExecutor() as pool:
        sending = pool.submit(send_all)
        try:
            while min(len(handled) / 600, len(reports) / 6) < 1 and not sending.done():
                reports.append(run(store, repair=len(reports) % 2 == 1))
        finally:
            done.set()
        sending.result()
    store.close()
    assert [found for report in reports for found in report.findings] == []
    assert sum(report.bodies for report in reports) > 0


# Bounded steps


def slow_commands(raw: redis.Redis) -> set[bytes]:
    """Commands above the limit since the last call, with their arguments."""
    found = {bytes(entry["command"]) for entry in raw.slowlog_get(1000)}
    raw.slowlog_reset()
    return found


@pytest.mark.full
def test_no_step_blocks_the_server(own_server: EmbeddedServer) -> None:
    """60,000 waiting messages; the limit is 2 ms per command in the server's slow log.

    An unbounded command is slow in every run; a busy machine delays different ones.
    """
    store, envelope = open_store(own_server.url), encode_envelope(new_token(), "x")
    store.drive(store.register([TOPIC]))
    store.call(Declare(TOPIC, GROUP))
    for start in range(0, 60_000, 500):
        items = [Item(f"{start + i:08d}", LATER, envelope) for i in range(500)]
        store.call(enqueue(TOPIC, new_token(), items))
    with connect(own_server.url) as raw:
        raw.config_set("slowlog-log-slower-than", SLOW_US)
        raw.config_set("slowlog-max-len", 1000)
        slow_commands(raw)
        report = run(store)
        assert (report.findings, report.bodies, report.records) == ([], 60_000, 60_000)
        slow = slow_commands(raw)
        for _ in range(MOST_RUNS):
            if slow:
                run(store)
                slow &= slow_commands(raw)
        assert slow == set()
        raw.zrange(store.keys.topic(TOPIC).waiting, 0, -1)
        assert slow_commands(raw), "the slow log would have told"
    store.close()
