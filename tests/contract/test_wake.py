"""A call that creates an earlier head wakes the managers; other calls do not."""

from collections.abc import Callable
from typing import Any

import pytest

from lisa.core.transitions.ack import Ack
from lisa.core.transitions.base import Transition
from lisa.core.transitions.change import Reschedule
from lisa.core.transitions.garbage import Requeue
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.lease import Reclaim
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.retry import Fail, Failure
from lisa.core.transitions.topic import Configure, LimitKeys
from lisa.core.transitions.upkeep import Mend
from tests.contract.bench import TOPIC, Bench, item
from tests.contract.state import FAR, G, Row
from tests.rows import enqueue

HEAD: dict[str, Any] = {"waiting": {"h": FAR}, "body": "ha"}
HELD = Row("a", 1, 1, "c1", 60_000)


def send(due: int) -> Callable[[Bench], Transition[Any]]:
    return lambda _: enqueue(TOPIC, "B" * 8, [item("n", due, sender="B")])


def move(due: int) -> Callable[[Bench], Transition[Any]]:
    return lambda _: Reschedule(TOPIC, [("a", str(due))])


def fail(delay: Any) -> Callable[[Bench], Transition[Any]]:
    return lambda bench: Fail(TOPIC, "lisa", [Failure(*bench.receipt("a"), "no", delay)])


CASES: dict[str, tuple[dict[str, Any], Callable[[Bench], Transition[Any]], bool]] = {
    "first message": ({"lisa": G()}, send(FAR), True),
    "first message, no group": ({}, send(1), True),
    "earlier message": ({**HEAD, "lisa": G()}, send(FAR - 1), True),
    "later message": ({**HEAD, "lisa": G()}, send(FAR + 1), False),
    "straight to ready": ({**HEAD, "lisa": G()}, send(1), False),
    "rescheduled to earlier": ({**HEAD, "lisa": G(retry={"a": FAR})}, move(FAR - 1), True),
    "rescheduled to later": ({**HEAD, "lisa": G(retry={"a": FAR})}, move(FAR + 1), False),
    "requeued": (
        {**HEAD, "lisa": G(garbage={"a": 1})},
        lambda _: Requeue(TOPIC, "lisa", ["a"]),
        True,
    ),
    "earlier retry": ({**HEAD, "lisa": G(ready=[HELD], retry={"r": FAR})}, fail(5), True),
    "later retry": ({**HEAD, "lisa": G(ready=[HELD], retry={"r": 1})}, fail(5), False),
    "to garbage": ({**HEAD, "lisa": G(ready=[HELD])}, fail("discard"), False),
    "reclaimed": ({**HEAD, "lisa": G(ready=[HELD])}, lambda _: Reclaim(TOPIC, "lisa"), True),
    "resumed": (
        {"options": {"paused": "1"}},
        lambda _: Configure(TOPIC, {"paused": "0"}),
        True,
    ),
    "another option": ({}, lambda _: Configure(TOPIC, {"max_ready": "5"}), False),
    "an option of lanes": ({}, lambda _: Configure(TOPIC, {"slack": "5"}), True),
    "a group's option of lanes": ({}, lambda _: Configure(TOPIC, {"slack@lisa": "5"}), True),
    "the same option of lanes": (
        {"options": {"slack": "5", "lanes": "1"}},
        lambda _: Configure(TOPIC, {"slack": "5"}),
        False,
    ),
    "limits of a key": ({}, lambda _: LimitKeys(TOPIC, "set", {"k": "weight=2"}), True),
    "no limits of a key": ({}, lambda _: LimitKeys(TOPIC, "set", {"k": ""}), False),
    "a new group": ({**HEAD}, lambda _: Declare(TOPIC, "lisa"), True),
    "the same group": ({**HEAD, "lisa": G()}, lambda _: Declare(TOPIC, "lisa"), False),
    "a message without a state": ({**HEAD, "lisa": G()}, lambda _: Mend(TOPIC, ["a"]), True),
    "promote": ({"waiting": {"a": 1}, "lisa": G()}, lambda _: Promote(TOPIC), False),
}


def announcements(bench: Bench, transition: Transition[Any]) -> int:
    """How often a call wakes the managers."""
    subscription = bench.store.connection.subscribe(bench.keys.wake)
    try:
        # Once the server has answered, the subscription precedes everything that follows.
        assert subscription.get(0.02) is None
        while not bench.store.ask("PUBSUB", "NUMSUB", bench.keys.wake)[1]:
            pass
        bench.call(transition)
        bench.store.ask("PUBLISH", bench.keys.wake, "end")
        heard = []
        while (message := subscription.get(5.0)) != b"end":
            heard.append(message)
        assert heard == [TOPIC.encode()] * len(heard)
        return len(heard)
    finally:
        subscription.close()


@pytest.mark.parametrize("case", CASES)
def test_managers_are_woken_when(bench: Bench, case: str) -> None:
    state, make, wakes = CASES[case]
    bench.put(**state)
    assert announcements(bench, make(bench)) == wakes


@pytest.mark.parametrize(
    ("options", "wakes"),
    [
        ({"order": "continue", "key_rate": "1,60000,1"}, True),
        ({"key_concurrency": "1", "rate": "1,60000,1"}, True),
        ({"key_rate": "1,60000,1"}, False),  # the promotion has told already
    ],
)
def test_an_ack_tells_when_its_lane_opens(
    bench: Bench, options: dict[str, str], *, wakes: bool
) -> None:
    bench.put(lisa=G(), options={"lanes": "1", **options})
    names = ["k\x1f1", "k\x1f2"]
    bench.send(*[item(name, "+0") for name in names])
    told = bench.call(Promote(TOPIC)).next_due_ms
    assert (told is None) == wakes
    ack = Ack(TOPIC, "lisa", [bench.settlement(names[0])])
    assert announcements(bench, ack) == wakes
