"""Calls of every script, for the tests that hold for all scripts.

One sample of each, from which other families of tests build calls, and further cases of scripts
whose repeated calls or events differ.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias
from unittest.mock import ANY

from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.base import Transition
from lisa.core.transitions.change import Cancel, Reschedule
from lisa.core.transitions.delivery import Limits, Open, Pull
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.core.transitions.garbage import Purge, Requeue
from lisa.core.transitions.groups import Declare, Forget, Undeclare
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.journal import Prune, Read
from lisa.core.transitions.lease import Extend, Reclaim, Release, Renew
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.restore import Restore, RestoreItem, RestoreState
from lisa.core.transitions.retry import Deferral, Fail, Failure, Postpone
from lisa.core.transitions.schedule import NewOccurrence, Schedule
from lisa.core.transitions.topic import Absorb, Clear, Configure, LimitKeys, SetLayout
from lisa.core.transitions.upkeep import Expire, Mend, Recount, Trim
from tests.contract.bench import TOPIC, Bench, Near, Receipts, item
from tests.contract.state import FAR, FOREIGN, LONG, G, Row, envelope
from tests.rows import Burst, coalesce, enqueue

COUNTED_AGAIN = ("stale@lisa", "cleared@lisa", "duplicate")
"""Refused calls are counted on every call."""

LIVE = dict.fromkeys("abc", "A-")
HELD = G(ready=[Row("a", 1, 2, "c1"), Row("b", 2, 1, "c1")], attempts={"a": 1}, leases={"a": FAR})
BUSY: dict[str, Any] = {
    "waiting": {"c": FAR},
    "body": LIVE,
    "policy": {"a": "0,0"},
    "expiry": {"c": FAR},
    "lisa": HELD,
}
FANNED = {**BUSY, "audit": G(ready=[Row("a", 1), Row("b", 2, 1, "c9")])}
DEAD = {
    "body": LIVE,
    "lisa": G(garbage={"a": 5, "b": 6}, attempts={"a": 2}, reasons={"a": "no"}),
    "audit": G(ready=[Row("b", 5)]),
}
AHEAD = Row("c", 3, 1, "c1-h", LONG)
LATE: dict[str, Any] = {
    "body": LIVE,
    "policy": {"b": ""},
    "lisa": G(ready=[Row("a", 1, 1, "c1", LONG), Row("b", 2, 1, "c1", LONG)], leases={"b": 5}),
}

Make: TypeAlias = Callable[["Receipts", Sequence[str]], "Transition[Any]"]
Events: TypeAlias = Callable[["Near"], list[tuple[Any, ...]]]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One call of a script.

    make: builds the call for some ids; takes their entries from the receipts.
    state: a state in which the call for `ids` has an effect.
    repeats_its_answer: a repeated call returns the first answer, apart from instants and counts.
    events: what the call writes to the journal, if the script moves messages.
    takes_batches: its time depends on the size of a batch.
    is_called_by_roles: a role calls it in its usual work.
    """

    make: Make
    state: dict[str, Any] = field(default_factory=dict)
    ids: Sequence[str] = ("a", "b", "c")
    repeats_its_answer: bool = True
    events: Events = lambda _: []
    takes_batches: bool = True
    is_called_by_roles: bool = True


UNTIL: dict[str, tuple[Any, ...]] = {"b": (FAR + 1, "", FAR)}
CREATED = {"due": FAR, "envelope": "A-", "expires": FAR + 5, "policy": "0"}
SAMPLES: dict[str, Sample] = {
    "absorb": Sample(
        make=lambda _, ids: Absorb(
            TOPIC, 3, 8, {f"sent@{m}": 2 for m in ids}, {"0of8": 7}, "lisa:{t}:m"
        ),
        state={"options": {"layout": "3:4:1:8,2"}, "stats": {"sent": 3}},
        repeats_its_answer=False,
        takes_batches=False,
        is_called_by_roles=False,
    ),
    "ack": Sample(
        make=lambda by, ids: Ack(TOPIC, "lisa", [by.settlement(m) for m in ids]),
        state=BUSY,
        ids=("a", "b"),
        repeats_its_answer=False,
        events=lambda _: [(m, "acked", "lisa", 1, {"due": 0, "end": 1}) for m in "ab"],
    ),
    "cancel": Sample(
        make=lambda _, ids: Cancel(TOPIC, ids),
        state={
            "body": LIVE,
            "waiting": {"c": FAR},
            "lisa": G(retry={"a": 5}, attempts={"a": 2}, ready=[Row("b", 7, 1, "c1")]),
        },
        ids=("a", "b", "c", "x"),
        events=lambda _: [
            ("a", "cancelled", "", 2, {"end": 1}),
            ("c", "cancelled", "", 0, {"end": 1}),
        ],
    ),
    "clear": Sample(
        make=lambda _, ids: Clear(TOPIC, 3, ("lisa",)),
        state={"options": {"accepts": "-3"}, "stats": {"sent": 3}, "lisa": G()},
        takes_batches=False,
        is_called_by_roles=False,
    ),
    "coalesce": Sample(
        make=lambda _, ids: coalesce(
            TOPIC, "A" * 8, [Burst(m, "d5000,60000", envelope("A-")) for m in ids]
        ),
        state={
            "body": {"a\x1f~1": "B-", "b\x1f~1": "B-"},
            "waiting": {"a\x1f~1": FAR},
            "keyed": {"a": "~1\x1f", "b": "~1\x1f"},
            "lisa": G(ready=[Row("b\x1f~1", 5, 1, "c1")]),
        },
        events=lambda now: [
            (m, state, "", 0, {"due": now + 5_000, "envelope": "A-"})
            for m, state in [("a\x1f~1", "replaced"), ("b\x1f~2", "sent"), ("c\x1f~1", "sent")]
        ],
    ),
    "configure": Sample(
        make=lambda _, ids: Configure(TOPIC, dict.fromkeys(ids, "1")),
        ids=("capacity", "paused"),
        takes_batches=False,
    ),
    "declare": Sample(make=lambda _, ids: Declare(TOPIC, "audit"), state=BUSY, takes_batches=False),
    "enqueue": Sample(
        make=lambda _, ids: enqueue(TOPIC, "A" * 8, [item(m, "+0") for m in ids]),
        state={"body": {"a": "B-"}, "waiting": {"a": 1}, "lisa": G()},
        events=lambda now: [(m, "sent", "", 0, {"due": now, "envelope": "A-"}) for m in "bc"],
    ),
    "expire": Sample(
        make=lambda _, ids: Expire(TOPIC, ids),
        state={
            "body": LIVE,
            "expiry": {"a": 5, "b": 5, "x": 5},
            "options": {"late": "1000,skip"},
            "waiting": {"c": 1},
            "lisa": G(ready=[Row("a", 1, 1, "c1")], retry={"b": 3}),
            "audit": G(retry={"a": 5}),
        },
        ids=("a", "b", "c", "x"),
        events=lambda _: [
            ("a", "expired", "audit", 0, {}),
            ("b", "expired", "", 0, {"end": 1}),
            ("c", "skipped", "", 0, {"end": 1}),
        ],
    ),
    "extend": Sample(
        make=lambda by, ids: Extend(TOPIC, "lisa", "c1", [by.receipt(m) for m in ids]),
        state=BUSY,
        ids=("a",),
        events=lambda _: [("a", "extended", "lisa", 2, {})],
    ),
    "forget": Sample(
        make=lambda _, ids: Forget(TOPIC, "lisa", ids, 0),
        state={"consumers": {"c1": "{}", "c2": "{}"}, "body": LIVE, "lisa": HELD},
        ids=("c1", "c2"),
        takes_batches=False,
    ),
    "defer": Sample(
        make=lambda by, ids: Postpone(
            TOPIC, "lisa", [Deferral(*by.receipt(m), *UNTIL.get(m, (5_000, "busy"))) for m in ids]
        ),
        state=BUSY,
        ids=("a", "b"),
        events=lambda now: [
            ("a", "deferred", "lisa", 1, {"due": now + 5_000, "reason": "busy"}),
            ("b", "ready", "lisa", 1, {"due": 2, "reason": "released"}),
        ],
    ),
    "inspect": Sample(
        make=lambda _, ids: Inspect(TOPIC, ids),
        state=FANNED,
        ids=("a", "b", "c", "x"),
        repeats_its_answer=False,
    ),
    "limit": Sample(
        make=lambda _, ids: LimitKeys(TOPIC, "set", dict.fromkeys(ids, "weight=2")),
        ids=("a", "lisa\x1fb"),
        takes_batches=False,
    ),
    "mend": Sample(
        make=lambda _, ids: Mend(TOPIC, ids),
        state={
            "body": LIVE,
            "lisa": G(entries={"a": None}, retry={"b": 1}, garbage={"b": 1}),
            "waiting": {"x": 1},
        },
        ids=("a", "b", "c", "x"),
        events=lambda now: [
            ("a", "retry", "lisa", 0, {"due": now, "reason": "entry-lost"}),
            ("a", "mended", "", 0, {"reason": "entry-lost"}),
            ("b", "mended", "", 0, {"reason": "second-place"}),
            ("c", "mended", "", 0, {"reason": "no-place", "due": now}),
            ("x", "lost", "", 0, {"reason": "no-body", "end": 1}),
        ],
    ),
    "open": Sample(
        make=lambda by, ids: Open(
            TOPIC, "lisa", [by.opening(m) for m in ids], limits=[Limits(FAR, FAR + 1)] * len(ids)
        ),
        state=BUSY,
        ids=("a",),
        repeats_its_answer=False,
        events=lambda _: [("a", "in_flight", "lisa", 2, {"due": 1})],
    ),
    "promote": Sample(
        make=lambda _, ids: Promote(TOPIC),
        state={
            "waiting": {"a": 1, "c": FAR},
            "body": LIVE,
            "lisa": G(retry={"b": 2}, attempts={"b": 3}),
            "audit": G(),
        },
        repeats_its_answer=False,
        events=lambda _: [
            ("a", "ready", "audit", 1, {"due": 1}),
            ("a", "ready", "lisa", 1, {"due": 1}),
            ("b", "ready", "lisa", 4, {"due": 2}),
        ],
    ),
    "prune": Sample(
        make=lambda _, ids: Prune(TOPIC, ids),
        state={"options": {"journal": "1"}, "waiting": {"a": 1}, "body": LIVE, "lisa": G()},
        ids=(),
        repeats_its_answer=False,
    ),
    "pull": Sample(
        make=lambda _, ids: Pull(TOPIC, "lisa", "c1", 10),
        state={"body": LIVE, "lisa": G(ready=[Row("a", 1)])},
    ),
    "purge": Sample(
        make=lambda _, ids: Purge(TOPIC, "lisa", ids),
        state=DEAD,
        ids=("a", "b", "x"),
        events=lambda _: [
            ("a", "purged", "lisa", 2, {"end": 1}),
            ("b", "purged", "lisa", 0, {}),
        ],
    ),
    "read": Sample(
        make=lambda _, ids: Read(TOPIC, "-", "+"), state={"options": {"journal": "1"}, **BUSY}
    ),
    "reclaim": Sample(
        make=lambda _, ids: Reclaim(TOPIC, "lisa"),
        state={**LATE, "lisa": G(ready=[*LATE["lisa"].ready, AHEAD], leases={"b": 5})},
        events=lambda now: [
            ("c", "ready", "lisa", 1, {"due": 3, "reason": "suspect"}),
            ("b", "garbage", "lisa", 1, {"reason": "ack timeout"}),
            ("a", "retry", "lisa", 1, {"reason": "ack timeout", "due": now + 20_000}),
        ],
    ),
    "recount": Sample(
        make=lambda _, ids: Recount(TOPIC, "lisa", ids),
        state={"options": {"lanes": "1"}, "body": LIVE, "lisa": G(ready=[Row("a", 1)])},
        ids=("",),
        repeats_its_answer=False,
        takes_batches=False,
        is_called_by_roles=False,
    ),
    "release": Sample(
        make=lambda by, ids: Release(TOPIC, "lisa", [by.receipt(m) for m in ids]),
        state=BUSY,
        ids=("a", "b"),
        events=lambda _: [
            ("a", "ready", "lisa", 2, {"due": 1, "reason": "released"}),
            ("b", "ready", "lisa", 1, {"due": 2, "reason": "released"}),
        ],
    ),
    "renew": Sample(
        make=lambda by, ids: Renew(TOPIC, "lisa", 5_000, by.clock() - 1_000),
        state=LATE,
        repeats_its_answer=False,
        is_called_by_roles=False,
    ),
    "requeue": Sample(
        make=lambda _, ids: Requeue(TOPIC, "lisa", ids),
        state=DEAD,
        ids=("a", "x"),
        events=lambda now: [("a", "requeued", "lisa", 0, {"due": now})],
    ),
    "reschedule": Sample(
        make=lambda _, ids: Reschedule(TOPIC, [(m, str(FAR)) for m in ids]),
        state={
            "waiting": {"c": 5},
            "body": LIVE,
            "expiry": {"a": FAR, "c": FAR},
            "lisa": G(ready=[Row("a", 1)], retry={"b": 1}, attempts={"b": 1}),
        },
        events=lambda _: [
            ("a", "rescheduled", "", 0, {"due": FAR, "expires": 2 * FAR - 1}),
            ("b", "rescheduled", "", 0, {"due": FAR}),
            ("c", "rescheduled", "", 0, {"due": FAR, "expires": 2 * FAR - 5}),
        ],
    ),
    "restore": Sample(
        make=lambda _, ids: Restore(TOPIC, [RestoreItem(m, envelope("A-"), 5) for m in ids]),
        state={"body": {"a": "B-"}, "lisa": G()},
        events=lambda _: [(m, "restored", "", 0, {"due": 5, "envelope": "A-"}) for m in "bc"],
        is_called_by_roles=False,
    ),
    "retry": Sample(
        make=lambda by, ids: Fail(TOPIC, "lisa", [Failure(*by.receipt(m), "boom") for m in ids]),
        state=BUSY,
        ids=("a", "b"),
        events=lambda now: [
            ("a", "retry", "lisa", 2, {"reason": "boom", "due": now}),
            ("b", "retry", "lisa", 1, {"reason": "boom", "due": now + 20_000}),
        ],
    ),
    "schedule": Sample(
        make=lambda _, ids: Schedule(
            TOPIC,
            "s",
            "1.5.0",
            b"1.6.0 {}",
            6,
            creates=[NewOccurrence(m, FAR, envelope("A-"), 5, "0") for m in ids],
            drops=["x"],
        ),
        state={
            "body": {"a": "B-", "x": "B-"},
            "waiting": {"a": 1, "x": 5},
            "schedules": {"s": "1.5.0 {}"},
            "ticks": {"s": 5},
        },
        events=lambda _: [
            ("x", "cancelled", "", 0, {"end": 1}),
            *[(m, "sent", "", 0, CREATED) for m in "bc"],
        ],
        takes_batches=False,
    ),
    "set_layout": Sample(
        make=lambda _, ids: SetLayout(TOPIC, "close", 3),
        takes_batches=False,
        is_called_by_roles=False,
    ),
    "trim": Sample(
        make=lambda _, ids: Trim(TOPIC, "lisa"),
        state={"body": LIVE, "lisa": G(ready=[Row("a", 1, 1, FOREIGN)], entries={})},
        repeats_its_answer=False,
    ),
    "undeclare": Sample(
        make=lambda _, ids: Undeclare(TOPIC, "lisa", ids, drop=True),
        state={"body": LIVE, "lisa": G(retry={"a": 5, "b": 5}), "audit": G(ready=[Row("b", 5)])},
        ids=("a", "b"),
        events=lambda _: [
            ("a", "purged", "lisa", 0, {"reason": "group removed", "end": 1}),
            ("b", "purged", "lisa", 0, {"reason": "group removed"}),
        ],
        takes_batches=False,
    ),
}


class Case(NamedTuple):
    """A state, a call, and the events that the call writes to the journal."""

    state: dict[str, Any]
    make: Callable[[Receipts], Transition[Any]]
    events: Events = lambda _: []


def sampled(sample: Sample) -> Case:
    return Case(sample.state, lambda by: sample.make(by, sample.ids), sample.events)


def sends(mode: OnDuplicate) -> Callable[[Receipts], Transition[Any]]:
    batch = [
        item("a", "+0", "one", ttl_ms=60_000),
        item("n", "+0"),
        item("m", str(FAR), policy="5"),
        item("n", "7", "two"),
    ]
    return lambda _: enqueue(TOPIC, "A" * 8, batch, mode)


def acks(*attempts: int, sender: str = "A", state: str = "acked") -> Callable[[Receipts], Ack]:
    """Deliveries of message a; only the second attempt's receipt is current."""
    return lambda by: Ack(
        TOPIC,
        "lisa",
        [
            Settlement("a", by.entry("a") if n == 2 else "9-9", f"{sender * 8}-", 7, n)
            for n in attempts
        ],
        state,
    )


AGAIN: dict[str, Any] = {"body": LIVE, "lisa": G(ready=[Row("a", 7, 2, "c1")], attempts={"a": 1})}
RESTORED = {"envelope": "A+two", "reason": "boom"}
AFTER_LEASE = {"due": 7, "end": 1, "reason": "after its lease had ended"}
N_SENT = ("n", "sent", "", 0)
M_SENT = ("m", "sent", "", 0, {"due": FAR, "envelope": "A-", "policy": "5"})

CASES: dict[str, Case] = {
    **{name: sampled(sample) for name, sample in SAMPLES.items()},
    "ack of several groups": Case(
        FANNED,
        lambda by: SAMPLES["ack"].make(by, ("a", "b")),
        lambda _: [(m, "acked", "lisa", 1, {"due": 0}) for m in "ab"],
    ),
    "ack that comes late": Case(
        {"body": LIVE, "lisa": G(retry={"a": FAR}, attempts={"a": 1})},
        acks(1),
        lambda _: [("a", "acked", "lisa", 1, AFTER_LEASE)],
    ),
    "ack of two deliveries of one message": Case(
        AGAIN, acks(2, 1), lambda _: [("a", "acked", "lisa", 2, {"due": 7, "end": 1})]
    ),
    "ack of two deliveries of one message, the older one first": Case(
        AGAIN, acks(1, 2), lambda _: [("a", "acked", "lisa", 1, AFTER_LEASE)]
    ),
    "ack of what was past its ttl": Case(
        AGAIN,
        acks(2, state="expired"),
        lambda _: [("a", "expired", "lisa", 2, {"due": 7, "end": 1})],
    ),
    "ack with a stale receipt": Case(AGAIN, acks(1, sender="Z")),
    "clear, a shard that is in use": Case(
        {"options": {"accepts": "4"}, "lisa": HELD}, lambda _: Clear(TOPIC, 3, ("lisa",))
    ),
    "coalesce, throttled": Case(
        {"throttled": {"a": 5}},
        lambda _: coalesce(
            TOPIC,
            "A" * 8,
            [Burst(m, "t5000", envelope(f"A-{m}")) for m in ("a", "b", "a")],
        ),
        lambda now: [
            (f"{m}\x1f~1", state, "", 0, {"due": now, "envelope": f"A-{m}"})
            for m, state in [("a", "sent"), ("b", "sent"), ("a", "replaced")]
        ],
    ),
    "coalesce, what is ready": Case(
        {
            "body": {"a\x1f~2": "B-"},
            "keyed": {"a": "~2\x1f"},
            "lisa": G(ready=[Row("a\x1f~2", 5)]),
            "audit": G(retry={"a\x1f~2": 7}),
        },
        lambda _: coalesce(TOPIC, "A" * 8, [Burst("a", f"l{FAR}", envelope("A-"), 5, "0")]),
        lambda _: [("a\x1f~2", "replaced", "", 0, {**CREATED, "due": 5, "expires": 10})],
    ),
    "configure, another number of shards": Case(
        {"options": {"layout": "3:4:1:", "shards": "4"}},
        lambda _: Configure(TOPIC, {"shards": "8"}),
    ),
    "configure, paused and unlimited": Case(
        {}, lambda _: Configure(TOPIC, {"paused": "1", "capacity": None})
    ),
    "configure, declared": Case(
        {"options": {"max_ready": "5"}},
        lambda _: Configure(TOPIC, {"max_ready": "7", "ack_timeout": "900"}, declared=True),
    ),
    "enqueue, new": Case(
        {"lisa": G(), "audit": G()},
        sends(OnDuplicate.KEEP),
        lambda now: [
            ("a", "sent", "", 0, {"due": now, "envelope": "A-one", "expires": now + 60_000}),
            (*N_SENT, {"due": now, "envelope": "A-"}),
            M_SENT,
            *[(m, "ready", g, 1, {"due": now}) for g in ("audit", "lisa") for m in "an"],
        ],
    ),
    "enqueue, keep": Case(
        {"body": {"a": "B-"}, "waiting": {"a": 1}},
        sends(OnDuplicate.KEEP),
        lambda now: [(*N_SENT, {"due": now, "envelope": "A-"}), M_SENT],
    ),
    "enqueue, reject": Case(
        {"body": {"a": "B-"}, "lisa": HELD},
        sends(OnDuplicate.REJECT),
        lambda now: [
            (*N_SENT, {"due": now, "envelope": "A-"}),
            M_SENT,
            ("n", "ready", "lisa", 1, {"due": now}),
        ],
    ),
    "enqueue, replace": Case(
        {"body": {"a": "B-"}, "lisa": HELD},
        sends(OnDuplicate.REPLACE),
        lambda now: [
            ("a", "replaced", "", 0, {"due": now, "envelope": "A-one", "expires": now + 60_000}),
            M_SENT,
            ("n", "replaced", "", 0, {"due": 7, "envelope": "A-two"}),
            ("n", "ready", "lisa", 1, {"due": 7}),
            ("a", "ready", "lisa", 1, {"due": now}),
        ],
    ),
    "expire, too late for a late policy": Case(
        {
            "options": {"own_late": "1"},
            "body": LIVE,
            "policy": {"a": "*;1000,skip;2,", "b": "*;1000,garbage", "c": "*;1000,run"},
            "waiting": dict.fromkeys("abc", 5),
            "lisa": G(),
            "audit": G(),
        },
        lambda _: Expire(TOPIC, ["a", "b", "c"]),
        lambda _: [
            ("a", "skipped", "", 0, {"end": 1}),
            *[("b", "garbage", group, 0, {"reason": ANY}) for group in ("audit", "lisa")],
        ],
    ),
    "mend that only judges": Case(
        SAMPLES["mend"].state, lambda _: Mend(TOPIC, ["b", "c", "x"], judge=True)
    ),
    "open beside what is past its ttl": Case(
        {**BUSY, "expiry": {"b": 5, "c": FAR}},
        lambda by: Open(TOPIC, "lisa", [by.opening(m) for m in "ab"]),
        lambda _: [("a", "in_flight", "lisa", 2, {"due": 1})],
    ),
    "open inside and outside a window": Case(
        {
            "body": LIVE,
            "lisa": G(
                ready=[Row("a", 1, 2, "c1"), Row("b", 2, 3, "c1"), Row("c", 3, 1, "c1")],
                attempts={"a": 1, "b": 2},
            ),
        },
        lambda by: Open(
            TOPIC,
            "lisa",
            [by.opening(m) for m in "abc"],
            limits=[Limits(FAR, FAR + 1), Limits(1, FAR), Limits(1, 2)],
        ),
        lambda _: [
            ("a", "in_flight", "lisa", 2, {"due": 1}),
            ("b", "deferred", "lisa", 2, {"due": FAR, "reason": "outside its window"}),
            ("c", "ready", "lisa", 1, {"due": 3, "reason": "released"}),
        ],
    ),
    "open of what is gone": Case(
        {"lisa": HELD},
        lambda by: Open(TOPIC, "lisa", [by.opening("a")]),
        lambda _: [("a", "lost", "lisa", 0, {"reason": "no-body", "end": 1})],
    ),
    "open while paused": Case(
        {**BUSY, "options": {"paused": "1"}},
        lambda by: Open(TOPIC, "lisa", [by.opening("b"), by.opening("a")]),
        lambda _: [
            ("b", "ready", "lisa", 1, {"due": 2}),
            ("a", "ready", "lisa", 2, {"due": 1}),
        ],
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
    "reschedule, to several times": Case(
        SAMPLES["reschedule"].state,
        lambda _: Reschedule(TOPIC, [("a", str(FAR)), ("b", str(FAR)), ("c", str(FAR + 1))]),
        lambda _: [
            ("a", "rescheduled", "", 0, {"due": FAR, "expires": 2 * FAR - 1}),
            ("b", "rescheduled", "", 0, {"due": FAR}),
            ("c", "rescheduled", "", 0, {"due": FAR + 1, "expires": 2 * FAR - 4}),
        ],
    ),
    "restore, with policies and states": Case(
        {"body": {"a": "B-"}, "done": {"d": ("A-", "acked", 1, 1, 5)}, "lisa": G(), "audit": G()},
        lambda _: Restore(
            TOPIC,
            [
                *[RestoreItem(m, envelope("A-"), 5) for m in "ad"],
                RestoreItem("n", envelope("A-"), 5, FAR, "0"),
                RestoreItem(
                    "m",
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
            ("n", "restored", "", 0, {"due": 5, "envelope": "A-", "expires": FAR, "policy": "0"}),
            ("m", "restored", "lisa", 2, {"due": 9, "place": "retry", **RESTORED}),
            ("m", "restored", "audit", 3, {"due": 7, "place": "garbage", **RESTORED}),
        ],
    ),
    "retry, and discard": Case(
        BUSY,
        lambda by: Fail(
            TOPIC,
            "lisa",
            [Failure(*by.receipt("a"), "boom"), Failure(*by.receipt("b"), "bad", "discard")],
        ),
        lambda now: [
            ("a", "retry", "lisa", 2, {"reason": "boom", "due": now}),
            ("b", "garbage", "lisa", 1, {"reason": "bad"}),
        ],
    ),
    "schedule, an unstarted message is replaced": Case(
        {"body": {"x": "B-"}, "schedules": {"s": "1.5.0 {}"}, "lisa": G(ready=[Row("x", 5)])},
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
    "set_layout, an older number is forgotten": Case(
        {"options": {"layout": "3:4:2,1:", "emptied:2": "5"}},
        lambda _: SetLayout(TOPIC, "forget", 3, [2]),
    ),
    "set_layout, with a new layout number": Case(
        {"options": {"layout": "3:4:1:16", "emptied:1": "5"}},
        lambda _: SetLayout(TOPIC, "renumber", 7, [1, 4, 8]),
    ),
    "set_layout, a layout lost as a whole": Case(
        {}, lambda _: SetLayout(TOPIC, "renumber", 0, [1, 4])
    ),
}


def comparable(bench: Bench) -> dict[str, Any]:
    """The topic's state without counts of refused calls."""
    state = bench.state()
    stats = {k: n for k, n in state.pop("stats", {}).items() if k not in COUNTED_AGAIN}
    return {**state, "stats": stats}
