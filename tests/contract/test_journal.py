"""With `journal` on, every transition appends one event per message in the same step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from lisa.core.model.errors import GroupRemoved
from lisa.core.model.keys import Keys
from lisa.core.store.store import SyncStore
from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.cancel import Cancel
from lisa.core.transitions.defer import Defer, Outside
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.core.transitions.expire import Expire
from lisa.core.transitions.extend import Extend
from lisa.core.transitions.mend import Mend
from lisa.core.transitions.open import Limits, Open
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.prune import Prune, Pruned
from lisa.core.transitions.purge import Purge
from lisa.core.transitions.reclaim import Reclaim
from lisa.core.transitions.release import Release
from lisa.core.transitions.requeue import Requeue
from lisa.core.transitions.reschedule import Reschedule
from lisa.core.transitions.restore import Restore, RestoreItem, RestoreState
from lisa.core.transitions.retry import Fail, Failure
from lisa.core.transitions.schedule import NewOccurrence, Schedule
from lisa.core.transitions.undeclare import Undeclare
from tests.contract.bench import TOPIC, item
from tests.contract.samples import SAMPLES
from tests.contract.state import G, Row, envelope
from tests.rows import enqueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from lisa.core.transitions.base import Transition
    from tests.contract.bench import Bench

FAR = 4_000_000_000_000
LONG = 60_000
ON = {"journal": "1"}
LIVE = dict.fromkeys("abc", "A-")


@dataclass(frozen=True)
class Case:
    """A state, a call, and the expected events, given the bench for values from its clock."""

    state: dict[str, Any]
    make: Callable[[Bench], Transition[Any]]
    events: Callable[[Bench], list[tuple[Any, ...]]]


def reason_of(bench: Bench, group: str) -> str:
    reason: str = bench.state()[f"{group}:reasons"]["b"]
    return reason


def held(bench: Bench, *, attempt: int = 1, fence: str = "AAAAAAAA-") -> Settlement:
    return bench.settlement("a", fence=fence, due=7, attempt=attempt)


CASES: dict[str, Case] = {
    "schedule, a dropped message, and a new one": Case(
        {"body": {"x": "B-"}, "waiting": {"x": 5}, "schedules": {"s": "1.5.0 {}"}, "lisa": G()},
        lambda _: Schedule(
            TOPIC,
            "s",
            "1.5.0",
            b"2.7.0 {}",
            creates=[NewOccurrence("a", FAR, envelope("A-one"), 5, "0")],
            drops=["x"],
        ),
        lambda _: [
            ("x", "cancelled", "", 0, {"end": 1}),
            (
                "a",
                "sent",
                "",
                0,
                {"due": FAR, "envelope": "A-one", "expires": FAR + 5, "policy": "0"},
            ),
        ],
    ),
    "schedule, an unstarted message is replaced": Case(
        {
            "body": {"x": "B-"},
            "schedules": {"s": "1.5.0 {}"},
            "lisa": G(ready=[Row("x", 5)]),
        },
        lambda _: Schedule(
            TOPIC,
            "s",
            "1.5.0",
            b"2.7.0 {}",
            creates=[NewOccurrence("a", FAR, envelope("A-one"))],
            earlier=["x"],
            overlap="replace_unstarted",
        ),
        lambda _: [
            ("x", "cancelled", "", 0, {"end": 1}),
            ("a", "sent", "", 0, {"due": FAR, "envelope": "A-one"}),
        ],
    ),
    "enqueue for later, with all that a message may have": Case(
        {"lisa": G()},
        lambda _: enqueue(
            TOPIC,
            "A" * 8,
            [
                item("a", str(FAR), "one", ttl_ms=5),
                item("b", str(FAR), "two", policy="0,7~0.5"),
            ],
        ),
        lambda _: [
            ("a", "sent", "", 0, {"due": FAR, "envelope": "A-one", "expires": FAR + 5}),
            ("b", "sent", "", 0, {"due": FAR, "envelope": "A-two", "policy": "0,7~0.5"}),
        ],
    ),
    "enqueue straight to ready of two groups": Case(
        {"lisa": G(), "audit": G()},
        lambda _: enqueue(TOPIC, "A" * 8, [item("a", "5", "one")]),
        lambda _: [
            ("a", "sent", "", 0, {"due": 5, "envelope": "A-one"}),
            ("a", "ready", "audit", 1, {"due": 5}),
            ("a", "ready", "lisa", 1, {"due": 5}),
        ],
    ),
    "enqueue that replaces, and one that is a duplicate": Case(
        {"body": {"a": "B-old"}, "waiting": {"a": 5}, "lisa": G()},
        lambda _: enqueue(TOPIC, "A" * 8, [item("a", str(FAR), "new")], OnDuplicate.REPLACE),
        lambda _: [("a", "replaced", "", 0, {"due": FAR, "envelope": "A-new"})],
    ),
    "enqueue of what is there": Case(
        {"body": {"a": "B-old"}, "waiting": {"a": FAR}, "lisa": G()},
        lambda _: enqueue(TOPIC, "A" * 8, [item("a", str(FAR), "new")]),
        lambda _: [],
    ),
    "open inside and outside a window": Case(
        {
            "body": LIVE,
            "lisa": G(
                ready=[Row("a", 1, 2, "c1"), Row("b", 2, 3, "c1"), Row("c", 3, 1, "c1")],
                attempts={"a": 1, "b": 2},
            ),
        },
        lambda bench: Open(
            TOPIC,
            "lisa",
            [bench.opening(one) for one in "abc"],
            limits=[Limits(FAR, FAR + 1), Limits(1, FAR), Limits(1, 2)],
        ),
        lambda _: [
            ("a", "in_flight", "lisa", 2, {"due": 1}),
            ("b", "retry", "lisa", 2, {"due": FAR, "reason": "outside its window"}),
            ("c", "ready", "lisa", 1, {"due": 3, "reason": "released"}),
        ],
    ),
    "defer, first and later attempts": Case(
        {
            "body": LIVE,
            "lisa": G(ready=[Row("a", 1, 1, "c1"), Row("b", 2, 3, "c1")], attempts={"b": 2}),
        },
        lambda bench: Defer(
            TOPIC,
            "lisa",
            [Outside(*bench.receipt("a"), 1, FAR), Outside(*bench.receipt("b"), FAR, FAR + 1)],
        ),
        lambda _: [
            ("a", "retry", "lisa", 0, {"due": FAR, "reason": "outside its window"}),
            ("b", "ready", "lisa", 3, {"due": 2, "reason": "released"}),
        ],
    ),
    "promote, first and later attempts": Case(
        {"body": LIVE, "waiting": {"a": 1, "c": FAR}, "lisa": G(retry={"b": 2}, attempts={"b": 3})},
        lambda _: Promote(TOPIC),
        lambda _: [("a", "ready", "lisa", 1, {"due": 1}), ("b", "ready", "lisa", 4, {"due": 2})],
    ),
    "promote beside a full group": Case(
        {
            "body": LIVE,
            "options": {"max_ready": "1"},
            "waiting": {"a": 1},
            "audit": G(ready=[Row("b", 1)]),
            "lisa": G(),
        },
        lambda _: Promote(TOPIC),
        lambda _: [
            ("a", "retry", "audit", 0, {"due": 1, "reason": "group is full"}),
            ("a", "ready", "lisa", 1, {"due": 1}),
        ],
    ),
    "open, plain": Case(
        {"body": LIVE, "lisa": G(ready=[Row("a", 1, 2, "c1")])},
        lambda bench: Open(TOPIC, "lisa", [bench.opening("a")]),
        lambda _: [("a", "in_flight", "lisa", 2, {"due": 1})],
    ),
    "open beside one that is past its ttl": Case(
        {
            "body": LIVE,
            "expiry": {"b": 5, "c": FAR},
            "lisa": G(ready=[Row("a", 1, 2, "c1"), Row("b", 1, 1, "c1")]),
        },
        lambda bench: Open(TOPIC, "lisa", [bench.opening("a"), bench.opening("b")]),
        lambda _: [("a", "in_flight", "lisa", 2, {"due": 1})],
    ),
    "open while paused": Case(
        {
            "body": LIVE,
            "options": {"paused": "1"},
            "lisa": G(ready=[Row("a", 1, 2, "c1")], attempts={"a": 1}),
        },
        lambda bench: Open(TOPIC, "lisa", [bench.opening("a")]),
        lambda _: [("a", "ready", "lisa", 2, {"due": 1})],
    ),
    "open of what a foreign hand took the body of": Case(
        {"lisa": G(ready=[Row("a", 1, 1, "c1")])},
        lambda bench: Open(TOPIC, "lisa", [bench.opening("a")]),
        lambda _: [("a", "lost", "lisa", 0, {"reason": "no-body", "end": 1})],
    ),
    "extend": Case(
        {"body": LIVE, "lisa": G(ready=[Row("a", 1, 2, "c1")])},
        lambda bench: Extend(TOPIC, "lisa", "c1", [bench.receipt("a"), ("x", "1-1")]),
        lambda _: [("a", "extended", "lisa", 2, {})],
    ),
    "ack": Case(
        {"body": LIVE, "lisa": G(ready=[Row("a", 7, 2, "c1")])},
        lambda bench: Ack(TOPIC, "lisa", [held(bench, attempt=2)]),
        lambda _: [("a", "acked", "lisa", 2, {"due": 7, "end": 1})],
    ),
    "ack of one of two groups": Case(
        {"body": LIVE, "lisa": G(ready=[Row("a", 7, 1, "c1")]), "audit": G(ready=[Row("a", 7)])},
        lambda bench: Ack(TOPIC, "lisa", [held(bench)]),
        lambda _: [("a", "acked", "lisa", 1, {"due": 7})],
    ),
    "ack that comes late": Case(
        {"body": LIVE, "lisa": G(retry={"a": FAR}, attempts={"a": 1})},
        lambda _: Ack(TOPIC, "lisa", [Settlement("a", "9-9", "AAAAAAAA-", 7, 1)]),
        lambda _: [
            ("a", "acked", "lisa", 1, {"due": 7, "end": 1, "reason": "after its lease had ended"})
        ],
    ),
    "ack of two deliveries of one message": Case(
        {"body": LIVE, "lisa": G(ready=[Row("a", 7, 2, "c1")], attempts={"a": 1})},
        lambda bench: Ack(
            TOPIC,
            "lisa",
            [
                held(bench, attempt=2),
                Settlement("a", "9-9", "AAAAAAAA-", 7, 1),
            ],
        ),
        lambda _: [("a", "acked", "lisa", 2, {"due": 7, "end": 1})],
    ),
    "ack of two deliveries of one message, the older one first": Case(
        {"body": LIVE, "lisa": G(ready=[Row("a", 7, 2, "c1")], attempts={"a": 1})},
        lambda bench: Ack(
            TOPIC,
            "lisa",
            [
                Settlement("a", "9-9", "AAAAAAAA-", 7, 1),
                held(bench, attempt=2),
            ],
        ),
        lambda _: [
            ("a", "acked", "lisa", 1, {"due": 7, "end": 1, "reason": "after its lease had ended"})
        ],
    ),
    "ack of what was past its ttl": Case(
        {"body": LIVE, "lisa": G(ready=[Row("a", 7, 1, "c1")])},
        lambda bench: Ack(TOPIC, "lisa", [held(bench)], "expired"),
        lambda _: [("a", "expired", "lisa", 1, {"due": 7, "end": 1})],
    ),
    "ack with a stale receipt": Case(
        {"body": LIVE, "lisa": G(ready=[Row("a", 7, 2, "c1")])},
        lambda _: Ack(TOPIC, "lisa", [Settlement("a", "9-9", "ZZZZZZZZ-", 7, 1)]),
        lambda _: [],
    ),
    "retry and discard": Case(
        {
            "body": LIVE,
            "options": {"retry_delays": "5000"},
            "lisa": G(ready=[Row("a", 7, 1, "c1"), Row("b", 7, 1, "c1")]),
        },
        lambda bench: Fail(
            TOPIC,
            "lisa",
            [
                Failure(*bench.receipt("a"), "boom"),
                Failure(*bench.receipt("b"), "bad", "discard"),
            ],
        ),
        lambda bench: [
            ("a", "retry", "lisa", 1, {"reason": "boom", "due": bench.now + 5000}),
            ("b", "garbage", "lisa", 1, {"reason": "bad"}),
        ],
    ),
    "release": Case(
        {"body": LIVE, "lisa": G(ready=[Row("a", 7, 2, "c1")], attempts={"a": 1})},
        lambda bench: Release(TOPIC, "lisa", [bench.receipt("a")]),
        lambda _: [("a", "ready", "lisa", 2, {"due": 7, "reason": "released"})],
    ),
    "reclaim": Case(
        {
            "body": LIVE,
            "options": {"retry_delays": "5000"},
            "lisa": G(
                ready=[Row("a", 7, 1, "c1", LONG), Row("b", 7, 2, "c1", LONG)], attempts={"b": 1}
            ),
        },
        lambda _: Reclaim(TOPIC, "lisa"),
        lambda bench: [
            ("a", "retry", "lisa", 1, {"reason": "ack timeout", "due": bench.now + 5000}),
            ("b", "garbage", "lisa", 2, {"reason": "ack timeout"}),
        ],
    ),
    "cancel": Case(
        {
            "body": LIVE,
            "waiting": {"c": FAR},
            "lisa": G(retry={"a": 5}, attempts={"a": 2}, ready=[Row("b", 7, 1, "c1")]),
        },
        lambda _: Cancel(TOPIC, ["a", "b", "c", "x"]),
        lambda _: [("a", "cancelled", "", 2, {"end": 1}), ("c", "cancelled", "", 0, {"end": 1})],
    ),
    "reschedule, its ttl with it": Case(
        {"body": LIVE, "waiting": {"a": 100}, "expiry": {"a": 150}, "lisa": G(retry={"b": 5})},
        lambda _: Reschedule(TOPIC, [("a", str(FAR)), ("b", str(FAR)), ("x", "1")]),
        lambda _: [
            ("a", "rescheduled", "", 0, {"due": FAR, "expires": FAR + 50}),
            ("b", "rescheduled", "", 0, {"due": FAR}),
        ],
    ),
    "requeue": Case(
        {"body": LIVE, "lisa": G(garbage={"a": 5}, attempts={"a": 2})},
        lambda _: Requeue(TOPIC, "lisa", ["a", "b"]),
        lambda bench: [("a", "requeued", "lisa", 0, {"due": bench.now})],
    ),
    "purge, another group still owing one": Case(
        {
            "body": LIVE,
            "lisa": G(garbage={"a": 5, "b": 5}, attempts={"a": 2}),
            "audit": G(ready=[Row("b", 5)]),
        },
        lambda _: Purge(TOPIC, "lisa", ["a", "b", "c"]),
        lambda _: [("a", "purged", "lisa", 2, {"end": 1}), ("b", "purged", "lisa", 0, {})],
    ),
    "expire, one group's in flight": Case(
        {
            "body": LIVE,
            "expiry": dict.fromkeys("abc", 5),
            "waiting": {"a": 1},
            "lisa": G(retry={"b": 5, "c": 5}),
            "audit": G(ready=[Row("c", 5, 1, "c1")]),
        },
        lambda _: Expire(TOPIC, ["a", "b", "c"]),
        lambda _: [
            ("a", "expired", "", 0, {"end": 1}),
            ("b", "expired", "", 0, {"end": 1}),
            ("c", "expired", "lisa", 0, {}),
        ],
    ),
    "expire, too late for a late policy": Case(
        {
            "options": {"own_late": "1"},
            "body": LIVE,
            "policy": {"a": "*;1000,skip", "b": "*;1000,garbage", "c": "*;1000,run"},
            "waiting": dict.fromkeys("abc", 5),
            "lisa": G(),
            "audit": G(),
        },
        lambda _: Expire(TOPIC, ["a", "b", "c"]),
        lambda bench: [
            ("a", "skipped", "", 0, {"end": 1}),
            *[("b", "garbage", g, 0, {"reason": reason_of(bench, g)}) for g in ("audit", "lisa")],
        ],
    ),
    "undeclare, the last and not the last group": Case(
        {"body": LIVE, "lisa": G(retry={"a": 5, "b": 5}), "audit": G(ready=[Row("b", 5)])},
        lambda _: Undeclare(TOPIC, "lisa", ["a", "b"]),
        lambda _: [
            ("a", "purged", "lisa", 0, {"reason": "group removed", "end": 1}),
            ("b", "purged", "lisa", 0, {"reason": "group removed"}),
        ],
    ),
    "mend": Case(
        {
            "body": LIVE,
            "waiting": {"x": 1},
            "lisa": G(entries={"a": None}, retry={"b": 5}, garbage={"b": 5}, attempts={"a": 1}),
        },
        lambda _: Mend(TOPIC, ["a", "b", "c", "x"]),
        lambda bench: [
            ("a", "retry", "lisa", 1, {"due": bench.now, "reason": "entry-lost"}),
            ("a", "mended", "", 0, {"reason": "entry-lost"}),
            ("b", "mended", "", 0, {"reason": "second-place"}),
            ("c", "mended", "", 0, {"reason": "no-place", "due": bench.now}),
            ("x", "lost", "", 0, {"reason": "no-body", "end": 1}),
        ],
    ),
    "mend that only judges": Case(
        {"body": LIVE, "waiting": {"x": 1}, "lisa": G()},
        lambda _: Mend(TOPIC, ["c", "x"], judge=True),
        lambda _: [],
    ),
    "restore": Case(
        {"body": {"b": "B-"}, "done": {"d": ("A-", "acked", 1, 1, 5)}, "lisa": G(), "audit": G()},
        lambda _: Restore(
            TOPIC,
            [
                RestoreItem("a", envelope("A-one"), 7, FAR, "0,5"),
                RestoreItem("b", envelope("A-"), 7),
                RestoreItem("d", envelope("A-"), 7),
                RestoreItem(
                    "e",
                    envelope("A+two"),
                    7,
                    group_states=(
                        RestoreState("lisa", "retry", 9, 2),
                        RestoreState("audit", "garbage", 8, 3),
                    ),
                    reason="boom",
                ),
            ],
        ),
        lambda _: [
            (
                "a",
                "restored",
                "",
                0,
                {"due": 7, "envelope": "A-one", "expires": FAR, "policy": "0,5"},
            ),
            (
                "e",
                "restored",
                "lisa",
                2,
                {"due": 9, "envelope": "A+two", "place": "retry", "reason": "boom"},
            ),
            (
                "e",
                "restored",
                "audit",
                3,
                {"due": 7, "envelope": "A+two", "place": "garbage", "reason": "boom"},
            ),
        ],
    ),
}


def test_no_script_is_left_out() -> None:
    told = {name.split()[0].rstrip(",") for name in CASES}
    assert told == {name for name, sample in SAMPLES.items() if sample.moves_messages}


@pytest.mark.parametrize("name", CASES)
def test_events(bench: Bench, name: str) -> None:
    case = CASES[name]
    bench.put(**{**case.state, "options": {**case.state.get("options", {}), **ON}})
    bench.call(case.make(bench))
    state = bench.state()
    expected = case.events(bench)
    assert state.get("events", []) == expected
    assert state.get("stats", {}).get("journaled", 0) == len(expected)


ANEW = ("extend", "promote", "open", "reschedule")
"""A repeated call of these acts again, and reports it."""


@pytest.mark.parametrize("name", [one for one in CASES if not one.startswith(ANEW)])
def test_a_repeated_call_writes_no_further_events(bench: Bench, name: str) -> None:
    case = CASES[name]
    bench.put(**{**case.state, "options": {**case.state.get("options", {}), **ON}})
    call = case.make(bench)
    bench.call(call)
    once = bench.state().get("events", [])
    bench.call(call)
    assert bench.state().get("events", []) == once


@pytest.mark.parametrize("name", CASES)
def test_without_a_journal_only_the_events_are_missing(bench: Bench, name: str) -> None:
    case = CASES[name]
    bench.put(**case.state)
    bench.call(case.make(bench))
    state = bench.state()
    assert "events" not in state
    assert "journaled" not in state.get("stats", {})


def test_the_lateness_of_a_first_delivery_is_journaled_in_microseconds(bench: Bench) -> None:
    due = bench.clock() - 50
    bench.put(body=LIVE, options=ON, lisa=G(ready=[Row("a", due, 1, "c1")]))
    opened = bench.call(Open(TOPIC, "lisa", [bench.opening("a")]))
    [(_, _, _, _, more)] = bench.state()["events"]
    assert more == {"due": due, "late": opened.now_us - due * 1000}
    assert more["late"] >= 50_000


def test_the_actor_names_role_host_and_process(bench: Bench) -> None:
    bench.put(options=ON, lisa=G())
    store = SyncStore(bench.store.connection, Keys(), who="producer")
    store.call(enqueue(TOPIC, "A" * 8, [item("a", str(FAR))]))
    [[_, flat]] = bench.store.ask("XRANGE", bench.keys.events, "-", "+")
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    assert fields[b"actor"].decode() == store.actor
    assert store.actor.startswith("producer@")


def test_an_unusable_journal_key_stops_nothing(bench: Bench) -> None:
    bench.put(options=ON, lisa=G())
    bench.store.ask("SET", bench.keys.events, "not a stream")
    bench.call(enqueue(TOPIC, "A" * 8, [item("a", str(FAR))]))
    assert bench.store.ask("ZRANGE", bench.keys.waiting, 0, -1) == [b"a"]
    stats = bench.store.drive(bench.store.stats(TOPIC))
    assert (stats["journaled"], stats["journal_failed"]) == (1, 1)


def fill(bench: Bench, count: int) -> list[str]:
    """Write events, one id each. Returns the entries' ids."""
    bench.put(options=ON)
    for start in range(0, count, 500):
        ids = [f"m{i:05}" for i in range(start, min(start + 500, count))]
        bench.call(enqueue(TOPIC, "A" * 8, [item(m, str(FAR)) for m in ids]))
    return [entry.decode() for entry, _ in bench.store.ask("XRANGE", bench.keys.events, "-", "+")]


def record(bench: Bench, name: str, entry: str, number: int, ago_ms: int = 0) -> None:
    text = f"{entry} {number} {bench.clock() - ago_ms}"
    bench.store.ask("HSET", bench.keys.archived, name, text)


def numbers(bench: Bench) -> list[int]:
    entries = bench.store.ask("XRANGE", bench.keys.events, "-", "+")
    return [int(flat[flat.index(b"n") + 1]) for _, flat in entries]


@pytest.mark.not_on_fakeredis("its XTRIM knows no nodes")
def test_the_journal_is_trimmed_to_the_slowest_archive(bench: Bench) -> None:
    entries = fill(bench, 1000)
    record(bench, "quick", entries[899], 900)
    record(bench, "slow", entries[599], 600)
    done = bench.call(Prune(TOPIC, ["quick", "slow"]))
    assert done.lost == 0
    assert 400 < done.removed < 600
    left = numbers(bench)
    assert left == list(range(done.removed + 1, 1001))
    assert 600 in left  # the slow archive's last event stays
    assert done.left == len(left)


@pytest.mark.not_on_fakeredis("its XTRIM knows no nodes")
def test_an_archive_that_stopped_reporting_does_not_block_trimming(bench: Bench) -> None:
    entries = fill(bench, 1000)
    record(bench, "dead", entries[9], 10, ago_ms=10_000)
    record(bench, "quick", entries[899], 900)
    assert bench.call(Prune(TOPIC, ["dead", "quick"], hold_ms=5_000)).removed > 700


@pytest.mark.not_on_fakeredis("its XTRIM knows no nodes")
def test_without_an_archive_the_oldest_events_are_removed_and_counted_as_lost(bench: Bench) -> None:
    fill(bench, 1000)
    bench.store.ask("HSET", bench.keys.options, "journal_max", 300)
    done = bench.call(Prune(TOPIC))
    assert done.lost == done.removed
    assert 600 <= done.removed <= 700
    assert numbers(bench) == list(range(done.removed + 1, 1001))
    assert bench.store.drive(bench.store.stats(TOPIC))["journal_lost"] == done.lost
    trimmed = bench.store.ask("HGET", bench.keys.archived, "~trimmed").split()
    assert int(trimmed[0]) == done.removed


@pytest.mark.not_on_fakeredis("its XTRIM knows no nodes")
def test_events_archived_before_an_archive_stopped_are_not_lost(bench: Bench) -> None:
    entries = fill(bench, 1000)
    bench.store.ask("HSET", bench.keys.options, "journal_max", 300)
    record(bench, "dead", entries[499], 500, ago_ms=10_000)
    done = bench.call(Prune(TOPIC, ["dead"], hold_ms=5_000))
    assert done.lost == done.removed - 500


@pytest.mark.not_on_fakeredis("its XTRIM knows no nodes")
@pytest.mark.parametrize("archived", [True, False])
def test_foreign_entries_do_not_stop_trimming(bench: Bench, *, archived: bool) -> None:
    bench.store.ask("XADD", bench.keys.events, "*", "foreign", "1")
    entries = fill(bench, 1000)
    bench.store.ask("HSET", bench.keys.options, "journal_max", 300)
    if archived:
        record(bench, "nightly", entries[700], 700)
    done = bench.call(Prune(TOPIC, ["nightly"]))
    assert 600 <= done.removed <= 701
    assert done.lost == (0 if archived else done.removed - 1)
    assert numbers(bench) == list(range(done.removed, 1001))


def test_a_journal_within_its_limits_is_not_trimmed(bench: Bench) -> None:
    fill(bench, 10)
    assert bench.call(Prune(TOPIC)) == Pruned(0, 0, 10, more=False)
    assert numbers(bench) == list(range(1, 11))


def test_restored_messages_have_their_earlier_state(bench: Bench) -> None:
    bench.put(lisa=G(), audit=G())
    both = (RestoreState("lisa", "retry", 9, 2), RestoreState("audit", "garbage", 8, 3))
    bench.call(
        Restore(
            TOPIC,
            [
                RestoreItem("a", envelope("A-one"), 7, FAR, "0,5"),
                RestoreItem("b", envelope("A+two"), 7, group_states=both, reason="boom"),
                RestoreItem(
                    "c",
                    envelope("A+one"),
                    7,
                    policy="",  # no retries
                    group_states=(RestoreState("lisa", "retry", 5),),
                ),
            ],
        )
    )
    bench.check(
        body={"a": "A-one", "b": "A+two", "c": "A+one"},
        waiting={"a": 7},
        expiry={"a": FAR},
        policy={"a": "0,5", "c": ""},
        stats={"restored": 3},
        lisa=G(retry={"b": 9, "c": 5}, attempts={"b": 2}, reasons={"b": "boom"}),
        audit=G(garbage={"b": 8}, attempts={"b": 3}, reasons={"b": "boom"}),
    )


def test_messages_due_before_1970_are_restored(bench: Bench) -> None:
    """A full group keeps it in retry, with its due time."""
    bench.put(lisa=G(), audit=G())
    states = (RestoreState("lisa", "retry", -5), RestoreState("audit", "retry", -5))
    bench.call(Restore(TOPIC, [RestoreItem("a", envelope("A-one"), -5, group_states=states)]))
    bench.check(
        body={"a": "A-one"},
        stats={"restored": 1},
        lisa=G(retry={"a": -5}),
        audit=G(retry={"a": -5}),
    )


def test_a_group_that_is_not_declared_is_refused_before_anything_is_written(bench: Bench) -> None:
    bench.put(lisa=G())
    items = [
        RestoreItem("a", envelope("A-"), 7),
        RestoreItem("b", envelope("A-"), 7, group_states=(RestoreState("gone", "retry", 9),)),
    ]
    with pytest.raises(GroupRemoved, match="gone"):
        bench.call(Restore(TOPIC, items))
    bench.check(lisa=G())
