"""What each call does to a message, wherever it is: the answers, and the resulting state."""

from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from lisa.core.transitions.ack import Ack, Acked
from lisa.core.transitions.change import Cancel, Cancelled, Reschedule, Rescheduled
from lisa.core.transitions.enqueue import OnDuplicate, Sent
from lisa.core.transitions.garbage import Purge, Requeue
from lisa.core.transitions.lease import Extend, Release
from lisa.core.transitions.retry import (
    Deferral,
    Deferred,
    Fail,
    Failed,
    Failure,
    Postpone,
    Postponed,
    Retried,
)
from lisa.core.transitions.upkeep import Expire, Expired
from tests.contract.bench import TOPIC, Bench, item
from tests.contract.state import FAR, G, Row

D = 1_000
READY, HELD = Row("a", D), Row("a", D, 1, "c1")
FAILED: dict[str, Any] = {"attempts": {"a": 2}, "reasons": {"a": "no"}}


class Place(NamedTuple):
    """A state of message a, and the answers to calls for it.

    expire: if its ttl has ended. ack: with the receipt of an earlier delivery.
    keep_live: to another message of the same id.
    """

    state: dict[str, Any]
    cancel: str
    reschedule: str
    expire: str
    ack: str
    keep_live: str = "duplicate"

    @property
    def groups(self) -> dict[str, G]:
        return {name: part for name, part in self.state.items() if isinstance(part, G)}

    @property
    def is_live(self) -> bool:
        return "body" in self.state

    def settled(self, bench: Bench, how: str, due: int | None, attempts: int) -> dict[str, Any]:
        """The message's tombstone, and nothing else but empty groups."""
        mark = self.state["body"]["a"]
        done = {"a": (mark, how, due, attempts, bench.now)}
        return {"done": done, **dict.fromkeys(self.groups, G())}


def live(*answers: str, body: str = "A-", **state: Any) -> Place:
    return Place({"body": {"a": body}, **state}, *answers)


def settled(how: str, cancel: str = "done", ack: str = "stale") -> Place:
    state = {"done": {"a": ("A-", how, D, 1, D)}, "lisa": G()}
    return Place(state, cancel, "done", "not_due", ack, "replaced")


FREE = ("cancelled", "rescheduled", "expired")
BUSY = ("in_flight", "in_flight", "in_flight")
PLACES = {
    "waiting": live(*FREE, "late", waiting={"a": D}, lisa=G()),
    "waiting, no group": live(*FREE, "", waiting={"a": D}),
    "waiting after failures": live(*FREE, "late", waiting={"a": D}, lisa=G(**FAILED)),
    "waiting for two": live(*FREE, "stale", waiting={"a": D}, lisa=G(**FAILED), audit=G()),
    "ready": live(*FREE, "late", lisa=G(ready=[READY])),
    "ready again": live(*FREE, "late", lisa=G(ready=[Row("a", D, 3)], **FAILED)),
    "in flight": live(*BUSY, "late", lisa=G(ready=[HELD], leases={"a": FAR})),
    "retry": live(*FREE, "late", lisa=G(retry={"a": D}, **FAILED)),
    "garbage": live(
        *("cancelled", "done", "not_due", "late", "replaced"), lisa=G(garbage={"a": D}, **FAILED)
    ),
    "retry and ready": live(
        *FREE, "late", lisa=G(retry={"a": D}, **FAILED), audit=G(ready=[READY])
    ),
    "ready and in flight": live(*BUSY, "late", lisa=G(ready=[READY]), audit=G(ready=[HELD])),
    "in flight, retry, and ready": live(
        *(*BUSY, "late"), lisa=G(ready=[HELD]), audit=G(retry={"a": 7}), mail=G(ready=[READY])
    ),
    "garbage and retry": live(
        *("cancelled", "done", "not_due", "late"),
        lisa=G(garbage={"a": D}, **FAILED),
        audit=G(retry={"a": 7}),
    ),
    "ready, a group was declared later": live(*FREE, "late", lisa=G(ready=[READY]), audit=G()),
    "only another group's": live(*FREE, "stale", lisa=G(), audit=G(retry={"a": D})),
    "settled by one, retry": live(
        *("done", "done", "expired", "repeated"), body="A+", lisa=G(), audit=G(retry={"a": D})
    ),
    "settled by one, garbage, replaced": live(
        *("done", "done", "not_due", "repeated", "replaced"),
        body="AR",
        lisa=G(),
        audit=G(garbage={"a": D}),
    ),
    "acked": settled("acked", ack="repeated"),
    "cancelled": settled("cancelled", cancel="cancelled"),
    "expired": settled("expired"),
    "purged": settled("purged"),
    "unknown": Place({"lisa": G()}, "unknown", "unknown", "not_due", "stale", "accepted"),
}
EACH = pytest.mark.parametrize("place", PLACES)


def put(bench: Bench, name: str, **more: Any) -> Place:
    place = PLACES[name]
    if place.is_live:
        more = {"policy": {"a": "5"}, "expiry": {"a": FAR + 50}, **more}
    bench.put(**place.state, **(more if place.is_live else {}))
    return place


def end_of(place: Place) -> tuple[int | None, int]:
    """The due time and the number of attempts in the tombstone of a message taken back."""
    attempts = max((group.attempts.get("a", 0) for group in place.groups.values()), default=0)
    return place.state.get("waiting", {}).get("a"), attempts


@EACH
def test_cancel(bench: Bench, place: str) -> None:
    held = put(bench, place)
    assert bench.call(Cancel(TOPIC, ["a"])) == [Cancelled(held.cancel)]
    if held.cancel == "cancelled" and held.is_live:
        bench.check(**held.settled(bench, "cancelled", *end_of(held)), stats={"cancelled": 1})
        assert bench.call(Cancel(TOPIC, ["a"])) == [Cancelled.CANCELLED]
    bench.check_unchanged()


@EACH
def test_reschedule(bench: Bench, place: str) -> None:
    """The ttl counts from the due time, if it is known, or else from now."""
    held = put(bench, place)
    assert bench.call(Reschedule(TOPIC, [("a", str(FAR))])) == [Rescheduled(held.reschedule)]
    if held.reschedule != "rescheduled":
        bench.check_unchanged()
        return
    first = [row for group in held.groups.values() for row in group.ready if row.attempt == 1]
    due = held.state.get("waiting", {}).get("a", first[0].due if first else None)
    ends = bench.state()["expiry"]["a"]
    assert 2 * FAR + 50 - ends == (bench.now if due is None else due)
    left = {n: replace(group, ready=(), retry={}) for n, group in held.groups.items()}
    bench.check_change(waiting={"a": FAR}, expiry={"a": ends}, stats={"rescheduled": 1}, **left)


@EACH
def test_expire(bench: Bench, place: str) -> None:
    """A delivery in flight finishes, and garbage has no ttl; other groups drop the message."""
    held = put(bench, place, expiry={"a": 5})
    assert bench.call(Expire(TOPIC, ["a", "a"])) == [
        Expired(held.expire),
        Expired.NOT_DUE if held.expire == "expired" else Expired(held.expire),
    ]
    if held.expire == "expired":
        bench.check(**held.settled(bench, "expired", *end_of(held)), stats={"expired": 1})
    elif held.is_live:
        groups = held.groups.items()
        left = {n: G() for n, group in groups if not group.garbage and HELD not in group.ready}
        bench.check_change(expiry=None if held.expire == "not_due" else {"a": 5}, **left)
    else:
        bench.check_unchanged()


@EACH
def test_only_its_own_garbage_is_requeued_or_purged(bench: Bench, place: str) -> None:
    held = put(bench, place)
    if held.groups and not held.groups["lisa"].garbage:
        assert bench.call(Requeue(TOPIC, "lisa", ["a"])) == [False]
        assert bench.call(Purge(TOPIC, "lisa", ["a"])) == [False]
        bench.check_unchanged()


GROUPS = pytest.mark.parametrize("place", [name for name in PLACES if PLACES[name].groups])


@GROUPS
def test_ack_with_an_earlier_receipt(bench: Bench, place: str) -> None:
    """A late success settles the message, unless it belongs to another life of the message."""
    held = put(bench, place)
    other = bench.settlement("a", entry="1-1", fence="ZZZZZZZZ-", due=D)
    assert bench.call(Ack(TOPIC, "lisa", [other])) == [Acked.STALE]
    stale = {"stale@lisa": 1}
    bench.check_change(stats=stale)
    late = bench.settlement("a", entry="1-1", due=D)
    assert bench.call(Ack(TOPIC, "lisa", [late])) == [Acked(held.ack)]
    counted = {**stale, "acked@lisa": 1, "acked_late@lisa": 1}
    if held.ack != "late":
        bench.check_change(stats={"stale@lisa": 2} if held.ack == "stale" else stale)
    elif any(group.retry or group.ready for n, group in held.groups.items() if n != "lisa"):
        bench.check_change(body={"a": "A+"}, stats=counted, lisa=G())
    else:
        bench.check(**held.settled(bench, "acked", D, 1), stats=counted)


@GROUPS
def test_other_calls_with_an_earlier_receipt_change_nothing(bench: Bench, place: str) -> None:
    put(bench, place)
    assert bench.call(Release(TOPIC, "lisa", [("a", "1-1")])) == [False]
    assert bench.call(Extend(TOPIC, "lisa", "c1", [("a", "1-1")])) == [False]
    deferrals = [Deferral("a", "1-1", 5, "busy"), Deferral("a", "1-1", FAR, closes_ms=1)]
    stale = [Postponed(Deferred.STALE)] * 2
    assert bench.call(Postpone(TOPIC, "lisa", deferrals)) == stale
    bench.check_unchanged()
    said = bench.call(Fail(TOPIC, "lisa", [Failure("a", "1-1", "boom")]))
    assert said == [Retried(Failed.STALE, None, 0)]
    bench.check_change(stats={"stale@lisa": 1})


@EACH
@pytest.mark.parametrize("mode", OnDuplicate)
def test_send_again(bench: Bench, place: str, mode: OnDuplicate) -> None:
    """With the same token nothing changes; then with another token, and again with that one.

    An update takes the due time of what could be rescheduled, and else replaces.
    """
    held = put(bench, place)
    is_known = "body" in held.state or "done" in held.state
    if is_known:
        was_replaced = held.state.get("body") == {"a": "AR"}
        expected = Sent.REPLACED if was_replaced else Sent.ACCEPTED
        assert bench.send(item("a", "+0"), on_duplicate=mode) == [expected]
        bench.check_unchanged()
    rows = [row for group in held.groups.values() for row in group.ready]
    replaced = "replaced_in_flight" if any(row.holder for row in rows) else "replaced"
    updated = "updated" if held.reschedule == "rescheduled" else replaced
    answers = {"keep": "duplicate", "reject": "rejected", "keep_live": held.keep_live}
    answers |= {"replace": replaced, "update": updated}
    answer = Sent(answers[mode] if is_known else "accepted")
    for _ in range(2):
        assert bench.send(item("a", FAR + 1, "new", sender="B"), on_duplicate=mode) == [answer]
        if answer in ("duplicate", "rejected"):
            bench.check_change(stats={"duplicate": 1} if answer == "duplicate" else None)
            return
        mark = {"accepted": "-", "replaced": "r", "replaced_in_flight": "f", "updated": "b"}[answer]
        waiting, part, stats = {"a": FAR + 1}, G(), {"sent": 1}
        if answer == "updated":
            waits = held.state.get("waiting", {})
            retries = [group.retry["a"] for group in held.groups.values() if group.retry]
            due = min([*waits.values(), *retries, *(row.due for row in rows)])
            waiting = {"a": due}
            if not waits:  # due and next, so it is ready again
                waiting, part, stats = {}, G(ready=[Row("a", due)]), {"sent": 1, "promoted": 1}
        groups = dict.fromkeys(held.groups, part)
        bench.check(waiting=waiting, body={"a": f"B{mark}new"}, stats=stats, **groups)
