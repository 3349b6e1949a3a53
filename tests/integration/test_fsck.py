"""fsck reports and repairs every kind of orphan, without losses or false reports."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import redis

from lisa.admin import groups
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
from lisa.core.transitions.release import Release
from lisa.core.transitions.reschedule import Reschedule
from lisa.core.transitions.retry import Fail, Failure
from tests.rows import Item, enqueue
from tests.servers import PATIENCE, open_store

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
    store.call(
        Fail(
            TOPIC,
            GROUP,
            [
                Failure("dead", held["dead"], "boom", "discard"),
                Failure("retrying", held["retrying"], "boom", 600_000),
            ],
        )
    )
    send(store, "ready", ttl_ms=600_000)
    send(store, "waiting", due=LATER, ttl_ms=600_000)


def run(store: SyncStore, *, repair: bool = False, topics: tuple[str, ...] = ()) -> CheckReport:
    return store.drive(check(store, topics, repair=repair))


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
    ("no-body", "waiting", lambda raw, keys, own: raw.delete(keys.body("waiting"))),
    ("no-body", "ready", lambda raw, keys, own: raw.delete(keys.body("ready"))),
    ("no-body", "held", lambda raw, keys, own: raw.delete(keys.body("held"))),
    ("no-body", "retrying", lambda raw, keys, own: raw.delete(keys.body("retrying"))),
    ("no-body", "dead", lambda raw, keys, own: raw.delete(keys.body("dead"))),
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
    own = keys.group(GROUP)
    one_of_each(store)
    bodies = set(raw.scan_iter(keys.bodies_pattern()))
    damage(raw, keys, own)
    left = set(raw.scan_iter(keys.bodies_pattern()))
    seen = run(store)
    assert (kind, one) in {(found.kind, found.id) for found in seen.findings}
    assert {found.id for found in seen.findings if found.id} == {one}
    assert kind in KINDS
    assert not seen.ok
    assert run(store).kinds == seen.kinds, "looking alone mends nothing"
    mended = run(store, repair=True)
    assert mended.ok
    assert mended.total > 0
    assert run(store).findings == []
    assert set(raw.scan_iter(keys.bodies_pattern())) == left, "no message is lost"
    assert left == bodies - ({keys.body(one).encode()} if kind == "no-body" else set())


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
    assert run(store, repair=True).ok
    assert run(store).findings == []
    assert not raw.exists(keys.group("second").attempts, *keys.group("ghost"))
    assert raw.xlen(own.ready) == raw.hlen(own.entries) == 2
    entry = raw.xadd(own.ready, {"id": "stranger"})
    raw.xreadgroup(GROUP, "foreign", {own.ready: ">"}, count=5)
    raw.xdel(own.ready, entry)
    assert run(store).kinds == {"pending-lost": 1}
    assert run(store, repair=True).ok
    assert run(store).findings == []


@pytest.mark.parametrize("lost", ["ready", "entries"])
def test_a_lost_stream_or_index(
    store: SyncStore, raw: redis.Redis, own: GroupKeys, lost: str
) -> None:
    one_of_each(store)
    raw.delete(getattr(own, lost))
    assert run(store).kinds == (
        {"no-stream": 1, "entry-lost": 2}
        if lost == "ready"
        else {"no-place": 2, "foreign-entry": 2}
    )
    assert run(store, repair=True).ok
    assert run(store).findings == []
    assert store.call(Promote(TOPIC)).moved == 2
    assert set(take(store)) == {"ready", "held"}


def test_a_lost_declaration_is_declared_again(
    store: SyncStore, raw: redis.Redis, keys: TopicKeys
) -> None:
    one_of_each(store)
    raw.delete(keys.groups)
    seen = run(store)
    assert seen.kinds == {"undeclared-group": 1}
    assert "has 4 unsettled messages" in seen.findings[0].what
    assert run(store, repair=True).ok
    assert store.drive(store.groups(TOPIC)) == (GROUP,)
    assert run(store).findings == []
    assert raw.exists(*(keys.body(one) for one in ("dead", "retrying", "held", "ready"))) == 4


class Crash(BaseException):
    """Interrupts a removal."""


def test_a_removal_cut_short_is_finished(
    store: SyncStore, raw: redis.Redis, keys: TopicKeys
) -> None:
    def stop(_: int) -> None:
        raise Crash

    one_of_each(store)
    with pytest.raises(Crash):
        store.drive(groups.remove(store, TOPIC, GROUP, progress=stop))
    assert run(store, repair=True).findings == [], "it may be under way"
    raw.hset(keys.options, f"removing:{GROUP}", 1)  # long ago
    seen = run(store)
    assert seen.kinds == {"undeclared-group": 1}
    assert "interrupted" in seen.findings[0].what
    assert run(store, repair=True).ok
    assert not raw.exists(*keys.group(GROUP))
    assert list(raw.scan_iter(keys.bodies_pattern())) == [keys.body("waiting").encode()]
    assert run(store).findings == []


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


class Traffic(threading.Thread):
    """Sends, promotes, fails, releases, cancels, reschedules and settles, in two groups."""

    def __init__(self, url: str, seed: int) -> None:
        super().__init__(daemon=True)
        self.done = threading.Event()
        self.settled = 0
        self.failure: BaseException | None = None
        self._store = open_store(url)
        self._random = random.Random(seed)
        self._name = f"t{seed}"

    def run(self) -> None:
        try:
            n = 0
            while not self.done.is_set():
                n += 1
                self._step([f"{self._name}-{n}-{i}" for i in range(20)])
        except BaseException as error:  # noqa: BLE001 - shown by the test
            self.failure = error
        finally:
            self._store.close()

    def _step(self, ids: list[str]) -> None:
        send(self._store, *ids[:10], due="+2", ttl_ms=600_000)
        send(self._store, *ids[10:])
        self._store.call(Promote(TOPIC))
        self._store.call(Cancel(TOPIC, ids[:2]))
        self._store.call(Reschedule(TOPIC, [(ids[3], "+1"), (ids[12], "+1")]))
        for group in (GROUP, "second"):
            held = take(self._store, 30, group)
            for one, entry in held.items():
                self._settle(group, one, entry)

    def _settle(self, group: str, one: str, entry: str) -> None:
        choice = self._random.random()
        if choice < 0.2:
            self._store.call(Fail(TOPIC, group, [Failure(one, entry, "boom", 0)]))
        elif choice < 0.3:
            self._store.call(Release(TOPIC, group, [(one, entry)]))
        else:
            body = self._store.ask("GET", self._store.keys.topic(TOPIC).body(one))
            if body is not None:
                fence = fence_of(body)
                self._store.call(Ack(TOPIC, group, [Settlement(one, entry, fence, 0, 1)]))
                self.settled += 1


def test_moving_messages_are_never_reported(server: str) -> None:
    store = open_store(server)
    store.drive(store.register([TOPIC]))
    for group in (GROUP, "second"):
        store.call(Declare(TOPIC, group))
    traffic = [Traffic(server, seed) for seed in (1, 2)]
    for one in traffic:
        one.start()
    try:
        reports: list[CheckReport] = []
        while sum(one.settled for one in traffic) < 600 and not any(t.failure for t in traffic):
            reports.append(run(store, repair=len(reports) % 2 == 1))
    finally:
        for one in traffic:
            one.done.set()
        for one in traffic:
            one.join(PATIENCE.total_seconds())
    assert [one.failure for one in traffic] == [None, None]
    assert len(reports) > 3
    assert [found for report in reports for found in report.findings] == []
    assert sum(report.bodies for report in reports) > 0


# Bounded steps


def slow_commands(raw: redis.Redis) -> set[bytes]:
    """Commands above the limit since the last call, with their arguments."""
    found = {bytes(entry["command"]) for entry in raw.slowlog_get(1000)}
    raw.slowlog_reset()
    return found


@pytest.mark.full
def test_no_step_blocks_the_server(redis_url: str) -> None:
    """60,000 waiting messages; the limit is 2 ms per command in the server's slow log.

    An unbounded command is slow in every run; a busy machine delays different ones.
    """
    store = open_store(redis_url)
    raw = redis.Redis.from_url(redis_url, legacy_responses=False)
    store.drive(store.register([TOPIC]))
    store.call(Declare(TOPIC, GROUP))
    envelope = encode_envelope(new_token(), "x")
    for start in range(0, 60_000, 500):
        items = [Item(f"{start + i:08d}", LATER, envelope) for i in range(500)]
        store.call(enqueue(TOPIC, new_token(), items))
    before: dict[Any, Any] = raw.config_get("slowlog-log-slower-than", "slowlog-max-len")
    raw.config_set("slowlog-log-slower-than", SLOW_US)
    raw.config_set("slowlog-max-len", 1000)
    try:
        slow_commands(raw)
        report = run(store)
        slow = slow_commands(raw)
        assert report.findings == []
        assert report.bodies == report.records == 60_000
        for _ in range(MOST_RUNS):
            if slow:
                run(store)
                slow &= slow_commands(raw)
        assert slow == set()
        raw.zrange(store.keys.topic(TOPIC).waiting, 0, -1)
        assert slow_commands(raw), "the slow log would have told"
    finally:
        for name, value in before.items():
            raw.config_set(name, value)
        raw.flushall()
        raw.close()
        store.close()
