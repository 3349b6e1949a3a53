"""One call of every script, for the tests that hold for all scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from lisa.core.transitions.absorb import Absorb
from lisa.core.transitions.ack import Ack
from lisa.core.transitions.cancel import Cancel
from lisa.core.transitions.clear import Clear
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.defer import Defer, Outside
from lisa.core.transitions.expire import Expire
from lisa.core.transitions.extend import Extend
from lisa.core.transitions.forget import Forget
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.mend import Mend
from lisa.core.transitions.open import Limits, Open
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.prune import Prune
from lisa.core.transitions.pull import Pull
from lisa.core.transitions.purge import Purge
from lisa.core.transitions.read import Read
from lisa.core.transitions.reclaim import Reclaim
from lisa.core.transitions.release import Release
from lisa.core.transitions.renew import Renew
from lisa.core.transitions.requeue import Requeue
from lisa.core.transitions.reschedule import Reschedule
from lisa.core.transitions.restore import Restore, RestoreItem
from lisa.core.transitions.retry import Fail, Failure
from lisa.core.transitions.schedule import NewOccurrence, Schedule
from lisa.core.transitions.set_layout import SetLayout
from lisa.core.transitions.trim import Trim
from lisa.core.transitions.undeclare import Undeclare
from tests.contract.bench import TOPIC, item
from tests.contract.state import FOREIGN, G, Row, envelope
from tests.rows import enqueue

if TYPE_CHECKING:
    from lisa.core.transitions.base import Transition
    from tests.contract.bench import Bench, Receipts

FAR = 4_000_000_000_000
LONG = 60_000
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
DEAD = {"body": LIVE, "lisa": G(garbage={"a": 5, "b": 6}, attempts={"a": 2}, reasons={"a": "no"})}
LATE = {
    "body": LIVE,
    "lisa": G(ready=[Row("a", 1, 1, "c1", LONG), Row("b", 2, 1, "c1", LONG)], leases={"b": 5}),
}

Make: TypeAlias = Callable[["Receipts", Sequence[str]], "Transition[Any]"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One call of a script.

    make: builds the call for some ids; takes their entries from the receipts.
    state: a state in which the call for `ids` has an effect.
    repeats_its_answer: a repeated call returns the first answer, apart from instants and counts.
    moves_messages: the script writes events to the journal.
    takes_batches: its time depends on the size of a batch.
    is_called_by_roles: a role calls it in its usual work.
    """

    make: Make
    state: dict[str, Any] = field(default_factory=dict)
    ids: Sequence[str] = ("a", "b", "c")
    repeats_its_answer: bool = True
    moves_messages: bool = False
    takes_batches: bool = True
    is_called_by_roles: bool = True


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
        moves_messages=True,
    ),
    "cancel": Sample(
        make=lambda _, ids: Cancel(TOPIC, ids),
        state=BUSY,
        ids=("a", "c", "x"),
        moves_messages=True,
    ),
    "clear": Sample(
        make=lambda _, ids: Clear(TOPIC, 3, ("lisa",)),
        state={"options": {"accepts": "-3"}, "stats": {"sent": 3}, "lisa": G()},
        takes_batches=False,
        is_called_by_roles=False,
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
        moves_messages=True,
    ),
    "expire": Sample(
        make=lambda _, ids: Expire(TOPIC, ids),
        state={
            "body": LIVE,
            "expiry": {"a": 5, "b": 5, "x": 5},
            "options": {"late": "1000,skip"},
            "waiting": {"c": 1},
            "lisa": G(ready=[Row("a", 1, 1, "c1")], retry={"b": 3}),
        },
        ids=("a", "b", "c", "x"),
        moves_messages=True,
    ),
    "extend": Sample(
        make=lambda by, ids: Extend(TOPIC, "lisa", "c1", [by.receipt(m) for m in ids]),
        state=BUSY,
        ids=("a",),
        moves_messages=True,
    ),
    "forget": Sample(
        make=lambda _, ids: Forget(TOPIC, "lisa", ids, 0),
        state={"consumers": {"c1": "{}", "c2": "{}"}, "body": LIVE, "lisa": HELD},
        ids=("c1", "c2"),
        takes_batches=False,
    ),
    "defer": Sample(
        make=lambda by, ids: Defer(TOPIC, "lisa", [Outside(*by.receipt(m), 1, FAR) for m in ids]),
        state=BUSY,
        ids=("a", "b"),
        moves_messages=True,
    ),
    "inspect": Sample(
        make=lambda _, ids: Inspect(TOPIC, ids),
        state=FANNED,
        ids=("a", "b", "c", "x"),
        repeats_its_answer=False,
    ),
    "mend": Sample(
        make=lambda _, ids: Mend(TOPIC, ids),
        state={
            "body": LIVE,
            "lisa": G(entries={"a": None}, retry={"b": 1}, garbage={"b": 1}),
            "waiting": {"x": 1},
        },
        ids=("a", "b", "c", "x"),
        moves_messages=True,
    ),
    "open": Sample(
        make=lambda by, ids: Open(
            TOPIC, "lisa", [by.opening(m) for m in ids], limits=[Limits(FAR, FAR + 1)] * len(ids)
        ),
        state=BUSY,
        ids=("a",),
        repeats_its_answer=False,
        moves_messages=True,
    ),
    "promote": Sample(
        make=lambda _, ids: Promote(TOPIC),
        state={
            "waiting": {"a": 1, "c": FAR},
            "body": LIVE,
            "lisa": G(retry={"b": 2}),
            "audit": G(),
        },
        repeats_its_answer=False,
        moves_messages=True,
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
        ids=("a", "x"),
        moves_messages=True,
    ),
    "read": Sample(
        make=lambda _, ids: Read(TOPIC, "-", "+"), state={"options": {"journal": "1"}, **BUSY}
    ),
    "reclaim": Sample(make=lambda _, ids: Reclaim(TOPIC, "lisa"), state=LATE, moves_messages=True),
    "release": Sample(
        make=lambda by, ids: Release(TOPIC, "lisa", [by.receipt(m) for m in ids]),
        state=BUSY,
        ids=("a", "b"),
        moves_messages=True,
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
        moves_messages=True,
    ),
    "reschedule": Sample(
        make=lambda _, ids: Reschedule(TOPIC, [(m, str(FAR)) for m in ids]),
        state={
            "waiting": {"c": 5},
            "body": LIVE,
            "expiry": {"a": FAR, "c": FAR},
            "lisa": G(ready=[Row("a", 1)], retry={"b": 1}, attempts={"b": 1}),
        },
        moves_messages=True,
    ),
    "restore": Sample(
        make=lambda _, ids: Restore(TOPIC, [RestoreItem(m, envelope("A-"), 5) for m in ids]),
        state={"body": {"a": "B-"}, "lisa": G()},
        moves_messages=True,
        is_called_by_roles=False,
    ),
    "retry": Sample(
        make=lambda by, ids: Fail(TOPIC, "lisa", [Failure(*by.receipt(m), "boom") for m in ids]),
        state=BUSY,
        ids=("a", "b"),
        moves_messages=True,
    ),
    "schedule": Sample(
        make=lambda _, ids: Schedule(
            TOPIC,
            "s",
            "1.5.0",
            b"1.6.0 {}",
            6,
            creates=[NewOccurrence(m, FAR, envelope("A-"), 5) for m in ids],
            drops=["x"],
        ),
        state={
            "body": {"a": "B-", "x": "B-"},
            "waiting": {"a": 1, "x": 5},
            "schedules": {"s": "1.5.0 {}"},
            "ticks": {"s": 5},
        },
        moves_messages=True,
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
        state=FANNED,
        ids=("a", "b"),
        moves_messages=True,
        takes_batches=False,
    ),
}


def comparable(bench: Bench) -> dict[str, Any]:
    """The topic's state without counts of refused calls."""
    state = bench.state()
    stats = {k: n for k, n in state.pop("stats", {}).items() if k not in COUNTED_AGAIN}
    return {**state, "stats": stats}
