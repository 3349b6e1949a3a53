"""Tombstones of a token that begins with '~' last for `dedupe_for`, however the message ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from lisa.core.transitions.ack import Ack
from lisa.core.transitions.cancel import Cancel
from lisa.core.transitions.enqueue import Sent
from lisa.core.transitions.expire import Expire
from lisa.core.transitions.purge import Purge
from lisa.core.transitions.undeclare import Undeclare
from tests.contract.bench import TOPIC, item
from tests.contract.state import G, Row
from tests.rows import enqueue

if TYPE_CHECKING:
    from collections.abc import Callable

    from lisa.core.transitions.base import Transition
    from tests.contract.bench import Bench

DAY_MS = 86_400_000
READY = G(ready=[Row("long", 7, 1, "c1"), Row("short", 7, 1, "c1")])
DEAD = G(garbage={"long": 5, "short": 5})
ENDS: dict[str, tuple[dict[str, Any], Callable[[Bench], Transition[Any]]]] = {
    "ack": (
        {"lisa": READY},
        lambda bench: Ack(
            TOPIC,
            "lisa",
            [
                bench.settlement("long", fence="~~~~~~~~-"),
                bench.settlement("short"),
            ],
        ),
    ),
    "cancel": (
        {"lisa": G(), "waiting": {"long": 1, "short": 1}},
        lambda _: Cancel(TOPIC, ["long", "short"]),
    ),
    "expire": (
        {"lisa": G(), "waiting": {"long": 1, "short": 1}, "expiry": {"long": 2, "short": 2}},
        lambda _: Expire(TOPIC, ["long", "short"]),
    ),
    "purge": ({"lisa": DEAD}, lambda _: Purge(TOPIC, "lisa", ["long", "short"])),
    "undeclare": ({"lisa": DEAD}, lambda _: Undeclare(TOPIC, "lisa", ["long", "short"])),
}


def spans(bench: Bench) -> dict[str, int]:
    """The remaining lifetime of each id's tombstone in ms."""
    return {m: bench.store.ask("PTTL", bench.keys.done(m)) for m in ("long", "short")}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("options", [{}, {"dedupe_for": str(2 * DAY_MS)}, {"retention": "0"}])
def test_each_tombstone_has_its_own_retention(
    bench: Bench, name: str, options: dict[str, str]
) -> None:
    state, call = ENDS[name]
    bench.put(body={"long": "~-", "short": "A-"}, options=options, **state)
    bench.call(call(bench))
    found = spans(bench)
    wanted = int(options.get("dedupe_for", DAY_MS))
    assert wanted - 60_000 < found["long"] <= wanted
    assert found["short"] == -2 if options.get("retention") == "0" else 0 < found["short"] <= 60_000


def test_a_longer_retention_applies_to_both(bench: Bench) -> None:
    state, call = ENDS["cancel"]
    options = {"retention": str(3 * DAY_MS)}
    bench.put(body={"long": "~-", "short": "A-"}, options=options, **state)
    bench.call(call(bench))
    assert min(spans(bench).values()) > 2 * DAY_MS


def test_a_remembered_id_is_a_duplicate(bench: Bench) -> None:
    bench.put(lisa=G(), waiting={"long": 1}, body={"long": "~-"})
    bench.call(Cancel(TOPIC, ["long"]))
    again = enqueue(TOPIC, "~another", [item("long", "+0")])
    assert bench.call(again) == [Sent.DUPLICATE]


def test_the_topic_records_when_the_last_tombstone_expires(bench: Bench) -> None:
    """A draining shard is kept until then."""
    state, call = ENDS["cancel"]
    bench.put(body={"long": "~-", "short": "A-"}, **state)
    bench.call(call(bench))
    lasting = int(bench.store.ask("HGET", bench.keys.options, "lasting"))
    assert lasting == bench.store.ask("PEXPIRETIME", bench.keys.done("long"))
