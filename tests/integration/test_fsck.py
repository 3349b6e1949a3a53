"""fsck reports and repairs every kind of orphan, without losses or false reports."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import redis

from lisa import Consumer, Manager, Message, Producer, Retry
from lisa.admin.fsck import KINDS, CheckReport, check
from lisa.core.model.envelope import encode_envelope, fence_of, new_token
from lisa.core.model.keys import GroupKeys, TopicKeys, keyed_id
from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.change import Cancel, Reschedule
from lisa.core.transitions.groups import Undeclare
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.retry import Fail, Failure
from lisa.embedded import EmbeddedServer
from tests.roles import Cast
from tests.rows import Item, enqueue
from tests.servers import connect

TOPIC = "orders"
SLOW_US = 2_000
MOST_RUNS = 5


@pytest.fixture
def server(redis_url: str) -> str:
    return redis_url


def one_of_each(cast: Cast) -> None:
    """A message in every state: waiting, ready, in flight, retry, garbage."""
    for message_id in ("dead", "retrying", "held"):
        cast.send(message_id=message_id, policy="0")
    dead, retrying, _ = cast.take()
    cast.discard(dead)
    cast.store.call(Fail(TOPIC, "g", [Failure("retrying", retrying.entry, "boom", 600_000)]))
    cast.send(message_id="ready", ttl_ms=600_000, policy="0")
    cast.send(message_id="waiting", delay_ms=600_000, ttl_ms=600_000, policy="0")


def run(cast: Cast, *, repair: bool = False, topics: tuple[str, ...] = ()) -> CheckReport:
    return cast.drive(check(cast.store, topics, repair=repair))


def mend(cast: Cast) -> None:
    """Repair everything; nothing is found afterwards."""
    assert run(cast, repair=True).ok
    assert run(cast).findings == []


def test_what_is_in_order(cast: Cast) -> None:
    assert run(cast).ok
    plain = cast.on("plain")  # it has no groups
    sent = plain.send()
    plain.store.call(Promote("plain"))
    assert run(cast).findings == []
    plain.store.call(Cancel("plain", [sent]))
    one_of_each(cast)
    report = run(cast)
    assert (report.findings, report.bodies, report.entries) == ([], 5, 2)
    cast.store.call(Reschedule(TOPIC, [("retrying", "+600000")]))
    second = cast.on(TOPIC, "second").declare()
    cast.send(message_id="both")
    cast.store.call(Promote(TOPIC))
    (both,) = second.take()
    assert second.ack(both).value == "acked"
    assert run(cast, repair=True).findings == []
    assert cast.ask("HGET", cast.own.attempts, "retrying") == b"1", "it keeps its attempts"


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
    cast: Cast, raw: redis.Redis, breakage: tuple[str, str, Break]
) -> None:
    kind, one, damage = breakage
    one_of_each(cast)
    bodies = set(raw.scan_iter(cast.keys.bodies_pattern()))
    damage(raw, cast.keys, cast.own)
    seen = run(cast)
    assert (kind, one) in {(found.kind, found.id) for found in seen.findings}
    assert {found.id for found in seen.findings if found.id} == {one}
    assert kind in KINDS
    assert not seen.ok
    assert run(cast).kinds == seen.kinds, "looking alone mends nothing"
    mend(cast)
    lost = {cast.keys.body(one).encode()} if kind == "no-body" else set()
    assert set(raw.scan_iter(cast.keys.bodies_pattern())) == bodies - lost


def test_foreign_records_go_and_ours_stay(cast: Cast, raw: redis.Redis) -> None:
    own = cast.own
    one_of_each(cast)
    second = cast.on(TOPIC, "second").declare()  # too new for these messages
    raw.hset(second.own.attempts, "held", 3)
    raw.hset(cast.keys.group("ghost").reasons, "x", "boom")
    fields: Any
    for fields in ({"id": "stranger"}, {"what": "ever"}, {"id": "held", "due": "0"}):
        raw.xadd(own.ready, fields)
    raw.xreadgroup("g", "foreign", {own.ready: ">"}, count=2)  # ready, and the foreign entry
    assert run(cast).kinds == {"leftover": 1, "foreign-entry": 3, "undeclared-group": 1}
    mend(cast)
    assert not raw.exists(second.own.attempts, *cast.keys.group("ghost"))
    assert raw.xlen(own.ready) == raw.hlen(own.entries) == 2
    entry = raw.xadd(own.ready, {"id": "stranger"})
    raw.xreadgroup("g", "foreign", {own.ready: ">"}, count=5)
    raw.xdel(own.ready, entry)
    assert run(cast).kinds == {"pending-lost": 1}
    mend(cast)


@pytest.mark.parametrize(
    ("lost", "kinds"),
    [
        ("ready", {"no-stream": 1, "entry-lost": 2}),
        ("entries", {"no-place": 2, "foreign-entry": 2}),
    ],
)
def test_a_lost_stream_or_index(cast: Cast, lost: str, kinds: dict[str, int]) -> None:
    one_of_each(cast)
    cast.ask("DEL", getattr(cast.own, lost))
    assert run(cast).kinds == kinds
    mend(cast)
    assert cast.store.call(Promote(TOPIC)).moved == 2
    assert {entry.id for entry in cast.take()} == {"ready", "held"}


def lanes_of(cast: Cast) -> None:
    """A lane with a message in flight and two parked ones, and one without a key in flight."""
    cast.configure(key_concurrency="1")
    for one in (*(keyed_id("k", own_id) for own_id in "123"), "plain"):
        cast.send(message_id=one)
    cast.store.call(Promote(TOPIC))
    assert len(cast.take()) == 2


LANES = "lisa:{orders}:g:g:lanes"


@pytest.mark.parametrize(
    ("damage", "kinds"),
    [
        (("HSET", LANES, "k", "2 2"), {"miscounted": 1}),
        (("HSET", LANES, "k", "1 1"), {"miscounted": 1}),
        (("HSET", LANES, "k", "1 9 5 0 0 0 "), {"miscounted": 1}),
        (("HSET", LANES, "gone", "1 0"), {"miscounted": 1}),
        (("HDEL", LANES, "k"), {"miscounted": 1}),
        (("HDEL", LANES, ""), {"miscounted": 1}),
        (("DEL", LANES), {"miscounted": 2}),
        (("ZREMRANGEBYRANK", "lisa:{orders}:g:g:queues", 0, 0), {"unqueued": 1, "miscounted": 1}),
        (("DEL", "lisa:{orders}:g:g:queues"), {"unqueued": 2, "miscounted": 1}),
    ],
)
def test_a_lane_is_counted_again_and_goes_on(
    cast: Cast, damage: tuple[str, ...], kinds: dict[str, int]
) -> None:
    lanes_of(cast)
    assert run(cast).findings == []
    cast.ask(*damage)
    assert run(cast).kinds == kinds
    assert run(cast).kinds == kinds, "looking alone mends nothing"
    mend(cast)
    for own_id in "123":
        entry = cast.ask("HGET", cast.own.entries, keyed_id("k", own_id))
        assert entry, own_id
        cast.take()
        (body,) = cast.store.keys.topic(TOPIC).bodies([keyed_id("k", own_id)])
        fence = fence_of(cast.ask("GET", body))
        settlement = Settlement(keyed_id("k", own_id), entry.decode(), fence, 0, 1)
        assert cast.store.call(Ack(TOPIC, "g", [settlement])) == ["acked"]
        cast.store.call(Promote(TOPIC))
    assert run(cast).findings == []
    left = set(cast.ask("HKEYS", LANES))
    assert left - {b""} == {one for one in left if one.startswith(b"\x1f")}


def test_a_lost_declaration_is_declared_again(cast: Cast) -> None:
    one_of_each(cast)
    cast.ask("DEL", cast.keys.groups)
    (found,) = run(cast).findings
    assert found.kind == "undeclared-group"
    assert "has 4 unsettled messages" in found.what
    mend(cast)
    assert cast.groups() == ("g",)
    assert cast.states(["dead", "retrying", "held"]) == ["garbage", "retry", "in_flight"]


def test_a_removal_cut_short_is_finished(cast: Cast, raw: redis.Redis) -> None:
    one_of_each(cast)
    cast.store.call(Undeclare(TOPIC, "g"))  # and its process is killed
    assert run(cast, repair=True).findings == [], "it may be under way"
    cast.configure(**{"removing:g": "1"})  # long ago
    (found,) = run(cast).findings
    assert found.kind == "undeclared-group"
    assert "interrupted" in found.what
    mend(cast)
    assert not raw.exists(*cast.own)
    assert list(raw.scan_iter(cast.keys.bodies_pattern())) == [cast.keys.body("waiting").encode()]


def test_topics_that_are_unlisted_or_written_by_other_programs(
    cast: Cast, raw: redis.Redis
) -> None:
    cast.send(delay_ms=600_000)
    raw.delete(cast.store.keys.topics)
    assert run(cast).kinds == {"unregistered": 1}
    assert run(cast, repair=True).ok
    assert cast.drive(cast.store.topics()) == [TOPIC]
    raw.zadd(cast.keys.waiting, {b"\xff\x00": 1})
    raw.set("lisa:{broken}:waiting", "a string")
    raw.set("lisa:{broken}:body:x", "1")
    report = run(cast, repair=True)
    assert report.kinds == {"bad-id": 1, "wrong-type": 1}
    assert not report.ok, "neither can be mended by a program"
    assert run(cast, topics=("other",)).ok
    assert run(cast, topics=(TOPIC,)).kinds == {"bad-id": 1}


# During changes


def test_moving_messages_are_never_reported(cast: Cast) -> None:
    """Messages are sent, cancelled, moved, and handled by two groups, of which some fail."""
    done, handled, reports = threading.Event(), list[str](), list[CheckReport]()

    def enough() -> bool:
        bodies = sum(report.bodies for report in reports)
        return len(handled) >= 600 and len(reports) >= 6 and bodies > 0

    def handle(message: Message) -> None:
        handled.append(message.id)
        if message.attempt == 1 and isinstance(message.body, int) and message.body % 5 == 0:
            raise Retry(delay="0s")

    def send_all() -> None:
        with Producer(cast.url) as producer:
            while not done.is_set():
                report = producer.send_many(TOPIC, range(10), delay="2ms", ttl="10m")
                producer.send_many(TOPIC, range(10))
                later = [sent.id for sent in report]
                producer.cancel_many(TOPIC, later[:2])
                producer.reschedule(TOPIC, later[3], delay="1ms")

    consumers = [Consumer(cast.url, group=group, concurrency=2) for group in ("g", "second")]
    for consumer in consumers:
        consumer.on(TOPIC, handle)
    manager = Manager(cast.url, groups={TOPIC: ["g", "second"]})
    with manager, consumers[0], consumers[1], ThreadPoolExecutor() as pool:
        sending = pool.submit(send_all)
        try:
            while not enough() and not sending.done():
                reports.append(run(cast, repair=len(reports) % 2 == 1))
        finally:
            done.set()
        sending.result()
    assert [found for report in reports for found in report.findings] == []


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
    cast, envelope = Cast(own_server.url).declare(), encode_envelope(new_token(), "x")
    cast.drive(cast.store.register([TOPIC]))
    for start in range(0, 60_000, 500):
        items = [Item(f"{start + i:08d}", "+600000", envelope) for i in range(500)]
        cast.store.call(enqueue(TOPIC, new_token(), items))
    with connect(own_server.url) as raw:
        raw.config_set("slowlog-log-slower-than", SLOW_US)
        raw.config_set("slowlog-max-len", 1000)
        slow_commands(raw)
        report = run(cast)
        assert (report.findings, report.bodies, report.records) == ([], 60_000, 60_000)
        slow = slow_commands(raw)
        for _ in range(MOST_RUNS):
            if slow:
                run(cast)
                slow &= slow_commands(raw)
        assert slow == set()
        raw.zrange(cast.keys.waiting, 0, -1)
        assert slow_commands(raw), "the slow log would have told"
