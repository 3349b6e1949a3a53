"""No script blocks the server for long: a full batch of each, timed by the server itself.

The aim is 5 ms; the bound here is loose, for machines that share their cores.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any

import pytest

from lisa.core import scripts
from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.cancel import Cancel
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.enqueue import Enqueue
from lisa.core.transitions.expire import Expire
from lisa.core.transitions.extend import Extend
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.mend import Mend
from lisa.core.transitions.open import Open
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.pull import Pull
from lisa.core.transitions.purge import Purge
from lisa.core.transitions.reclaim import Reclaim
from lisa.core.transitions.release import Release
from lisa.core.transitions.requeue import Requeue
from lisa.core.transitions.reschedule import Reschedule
from lisa.core.transitions.retry import Failure, Retry
from lisa.core.transitions.trim import Trim
from tests.contract.bench import TOPIC, item

if TYPE_CHECKING:
    from lisa.core.stream import Entry
    from tests.contract.bench import Bench

FULL = 500
ROUNDS = 5
BOUND_MS = 15.0
TIMED = set(scripts.names()) - {"configure", "declare", "forget", "undeclare"}


def take(bench: Bench, timeout_ms: int | None = None) -> list[Entry]:
    entries = bench.call(Pull(TOPIC, "lisa", "c1", FULL, timeout_ms)).entries
    assert len(entries) == FULL
    return entries


def one_round(bench: Bench, number: int) -> None:
    """Full batches through every place."""
    token = "T" * 8
    ids = [f"{number}-{i:04}" for i in range(FULL)]

    def send(due: str, **extras: Any) -> None:
        bench.call(Enqueue(TOPIC, token, [item(m, due, "x" * 100, **extras) for m in ids]))

    send("+0")
    entries = take(bench)
    bench.call(Open(TOPIC, "lisa", entries, 60_000))
    receipts = [(one.id, one.entry) for one in entries]
    bench.call(Extend(TOPIC, "lisa", "c1", receipts, 60_000))
    bench.call(Release(TOPIC, "lisa", receipts))
    failures = [Failure(one.id, one.entry, "no", 0) for one in take(bench)]
    bench.call(Retry(TOPIC, "lisa", failures))
    assert bench.call(Promote(TOPIC)).moved == FULL
    bench.call(Inspect(TOPIC, ids))
    bench.call(Mend(TOPIC, ids))
    take(bench, 1)
    time.sleep(0.003)
    assert len(bench.call(Reclaim(TOPIC, "lisa", window=FULL)).moved) == FULL
    bench.call(Reschedule(TOPIC, [(m, "+0") for m in ids]))
    assert bench.call(Promote(TOPIC)).moved == FULL
    failures = [Failure(one.id, one.entry, "no", "discard") for one in take(bench)]
    bench.call(Retry(TOPIC, "lisa", failures))
    bench.call(Requeue(TOPIC, "lisa", ids))
    assert bench.call(Promote(TOPIC)).moved == FULL
    bench.call(Trim(TOPIC, "lisa", window=FULL))
    entries = take(bench)
    acks = [Settlement(one.id, one.entry, "TTTTTTTT-", one.due_ms, 1, "c") for one in entries]
    assert set(bench.call(Ack(TOPIC, "lisa", acks))) == {"acked"}
    end_the_rest(bench, number, token)


def end_the_rest(bench: Bench, number: int, token: str) -> None:
    """Full batches out of waiting and garbage."""
    for end, due, extras in (
        ("cancel", "+60000", {}), ("expire", "1", {"ttl_ms": 1}), ("purge", "+0", {}),
    ):  # fmt: skip
        ids = [f"{end}{number}-{i:04}" for i in range(FULL)]
        bench.call(Enqueue(TOPIC, token, [item(m, due, "x" * 100, **extras) for m in ids]))
        if end == "cancel":
            assert set(bench.call(Cancel(TOPIC, ids))) == {"cancelled"}
        elif end == "expire":
            assert {one.value for one, _ in bench.call(Expire(TOPIC, ids))} == {"expired"}
        else:
            failures = [Failure(one.id, one.entry, "no", "discard") for one in take(bench)]
            bench.call(Retry(TOPIC, "lisa", failures))
            assert all(bench.call(Purge(TOPIC, "lisa", ids)))


@pytest.mark.not_on_fakeredis("it runs in this process, so its times say nothing")
def test_a_full_batch_of_every_script_is_quick(bench: Bench) -> None:
    for name in scripts.names():
        bench.store.ask("SCRIPT", "LOAD", scripts.load(name).source)
    bench.call(Declare(TOPIC, "lisa"))
    bench.store.ask("CONFIG", "SET", "slowlog-max-len", 10_000)
    bench.store.ask("SLOWLOG", "RESET")
    bench.store.ask("CONFIG", "SET", "slowlog-log-slower-than", 0)
    try:
        for number in range(ROUNDS):
            one_round(bench, number)
    finally:
        bench.store.ask("CONFIG", "SET", "slowlog-log-slower-than", 10_000)
    name_of = {scripts.load(name).sha.encode(): name for name in scripts.names()}
    took: dict[str, list[float]] = {}
    for entry in bench.store.ask("SLOWLOG", "GET", -1):
        if entry[3][0] == b"EVALSHA":
            took.setdefault(name_of[entry[3][1]], []).append(entry[2] / 1000)
    bench.store.ask("SLOWLOG", "RESET")
    medians = {name: statistics.median(times) for name, times in sorted(took.items())}
    print({name: round(ms, 2) for name, ms in medians.items()})  # noqa: T201  shown on failure
    assert set(medians) >= TIMED
    assert max(medians.values()) < BOUND_MS, medians
