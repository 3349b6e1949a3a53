"""A call that creates an earlier head wakes the managers; other calls do not."""

from collections.abc import Callable
from typing import Any

import pytest

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


@pytest.mark.parametrize("case", CASES)
def test_managers_are_woken_when(bench: Bench, case: str) -> None:
    state, make, wakes = CASES[case]
    bench.put(**state)
    transition = make(bench)
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
        assert heard == [TOPIC.encode()] * wakes
    finally:
        subscription.close()
