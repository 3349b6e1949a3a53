"""Calls every script that moves messages at its largest batch, under worst-case conditions.

The ids are spread over millions of waiting messages; the stream and the index have hundreds of
thousands of entries.
"""

from __future__ import annotations

import random
import time
from collections.abc import Generator, Sequence
from typing import Any, Literal, TypeAlias

from benchmarks.safety.fill import BATCH, BODY, GROUP, TOPIC, due_text, waiting_id
from lisa.core.model.envelope import encode_envelope
from lisa.core.model.options import LARGEST_BATCH, LARGEST_WINDOW
from lisa.core.model.stream import Entry
from lisa.core.store.store import chunks
from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.base import Transition
from lisa.core.transitions.change import Cancel, Reschedule
from lisa.core.transitions.delivery import Open, Pull
from lisa.core.transitions.enqueue import Enqueue, OnDuplicate
from lisa.core.transitions.garbage import Purge, Requeue
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.journal import Prune
from lisa.core.transitions.lease import FIRST, Extend, Reclaim, Release, Renew
from lisa.core.transitions.promote import Promote
from lisa.core.transitions.restore import Restore, RestoreItem, RestoreState
from lisa.core.transitions.retry import Fail, Failure
from lisa.core.transitions.upkeep import Expire, Mend, Trim
from lisa.producer.calls import HIGH_COST, REPLACE_COST

TOKEN = "T" * 8
CONSUMER = "measured"
Calls: TypeAlias = Generator[Transition[Any], Any, Any]
"""Yields transitions, and is sent their replies."""


class Round:
    """One round of calls; the number of waiting messages is the same before and after it."""

    def __init__(self, number: int, waiting: int) -> None:
        self._number = number
        self._waiting = waiting
        self._random = random.Random(number)
        self._now_ms = time.time_ns() // 1_000_000

    def calls(self) -> Calls:
        """All calls, in an order that satisfies their preconditions."""
        yield from self._through_every_state()
        yield from self._among_the_waiting()
        yield from self._ends()

    def _ids(self, stem: str) -> list[str]:
        return [f"{stem}-{self._number}-{i:03}" for i in range(BATCH)]

    def _send(self, all_ids: Sequence[str], due: str, ttl_ms: int | None = None) -> Calls:
        for ids in chunks(all_ids, BATCH // (HIGH_COST * Enqueue.steps)):
            data = [encode_envelope(TOKEN, BODY)] * len(ids)
            ttls = [ttl_ms] * len(ids)
            yield Enqueue(TOPIC, ids, [due], data, ttls, (), OnDuplicate.KEEP)

    def _take(self, timeout_ms: int | None = None) -> Calls:
        taken: list[Entry] = []
        while len(taken) < BATCH:
            pulled = yield Pull(TOPIC, GROUP, CONSUMER, BATCH // Pull.steps, timeout_ms)
            _check(len(pulled.entries) == BATCH // Pull.steps, pulled)
            taken += pulled.entries
        return taken

    def _promote(self) -> Calls:
        moved = 0
        while moved < BATCH:
            promoted = yield Promote(TOPIC)
            _check(promoted.moved == LARGEST_BATCH, promoted)
            moved += promoted.moved

    def _fail_all(self, delay: int | Literal["discard"]) -> Calls:
        entries: list[Entry] = yield from self._take()
        for some in chunks(entries, BATCH // Fail.steps):
            yield Fail(TOPIC, GROUP, [Failure(one.id, one.entry, "no", delay) for one in some])

    def _renew(self) -> Calls:
        """Renew leases as after a clock step."""
        now_ms = time.time_ns() // 1_000_000
        start = FIRST
        for _ in range(BATCH // LARGEST_WINDOW):
            renewed = yield Renew(TOPIC, GROUP, 1, now_ms + 60_000, start)
            _check(renewed.renewed == LARGEST_WINDOW, renewed)
            start = renewed.cursor

    def _through_every_state(self) -> Calls:
        ids = self._ids("moved")
        yield from self._send(ids, "+0")
        entries: list[Entry] = yield from self._take()
        for some in chunks(entries, BATCH // Open.steps):
            yield Open(TOPIC, GROUP, some, 60_000)
        receipts = [(one.id, one.entry) for one in entries]
        for pairs in chunks(receipts, BATCH // Extend.steps):
            yield Extend(TOPIC, GROUP, CONSUMER, pairs, 60_000)
        yield from self._renew()
        for pairs in chunks(receipts, BATCH // Release.steps):
            yield Release(TOPIC, GROUP, pairs)
        yield from self._fail_all(0)
        yield from self._promote()
        yield from self._take(1)
        time.sleep(0.003)
        for _ in range(-(-BATCH // LARGEST_WINDOW)):
            yield Reclaim(TOPIC, GROUP)
        for names in chunks(ids, BATCH // Reschedule.steps):
            yield Reschedule(TOPIC, [(one, "+0") for one in names])
        yield from self._promote()
        yield from self._fail_all("discard")
        for names in chunks(ids, BATCH // Requeue.steps):
            yield Requeue(TOPIC, GROUP, names)
        yield from self._promote()
        yield Trim(TOPIC, GROUP, window=BATCH)
        entries = yield from self._take()
        for some in chunks(entries, BATCH // Ack.steps):
            acked = yield Ack(
                TOPIC,
                GROUP,
                [Settlement(one.id, one.entry, f"{TOKEN}-", one.due_ms, 1, "c") for one in some],
            )
            _check(set(acked) == {"acked"}, acked)

    def _among_the_waiting(self) -> Calls:
        """Inspect, reschedule, cancel and resend random waiting ids."""
        numbers = self._random.sample(range(self._waiting), min(BATCH, self._waiting))
        ids = [waiting_id(number) for number in numbers]
        for names in chunks(ids, BATCH // Inspect.steps):
            yield Inspect(TOPIC, names)
        for names in chunks(ids, BATCH // Mend.steps):
            yield Mend(TOPIC, names)
        for some in chunks(numbers, BATCH // Reschedule.steps):
            moves = [(waiting_id(n), due_text(n + self._number, self._now_ms)) for n in some]
            yield Reschedule(TOPIC, moves)
        for names in chunks(ids, BATCH // Cancel.steps):
            yield Cancel(TOPIC, names)
        for some in chunks(numbers, BATCH // (REPLACE_COST * Enqueue.steps)):
            names = [waiting_id(number) for number in some]
            dues = [due_text(number, self._now_ms) for number in some]
            data = [encode_envelope(TOKEN, BODY)] * len(some)
            yield Enqueue(TOPIC, names, dues, data, (), (), OnDuplicate.REPLACE)
        made, due = self._ids("new"), [due_text(self._number, self._now_ms)]
        for i, names in enumerate(chunks(made, BATCH // Enqueue.steps)):
            data = [encode_envelope(f"n{i}{self._number:06}", BODY)] * len(names)
            keep = OnDuplicate.KEEP
            yield Enqueue(TOPIC, names, due, data, (), (), keep, are_ids_new=True)
        for names in chunks(made, BATCH // Cancel.steps):
            yield Cancel(TOPIC, names)

    def _ends(self) -> Calls:
        """Expire, purge and restore full batches."""
        ids = self._ids("late")
        yield from self._send(ids, "1", ttl_ms=1)
        for names in chunks(ids, BATCH // Expire.steps):
            yield Expire(TOPIC, names)
        ids = self._ids("dead")
        yield from self._send(ids, "+0")
        yield from self._fail_all("discard")
        for names in chunks(ids, BATCH // Purge.steps):
            yield Purge(TOPIC, GROUP, names)
        ids, dead = self._ids("restored"), (RestoreState(GROUP, "garbage", 5, 2),)
        data = encode_envelope(TOKEN, BODY)
        for names in chunks(ids, BATCH // Restore.steps):
            yield Restore(
                TOPIC,
                [
                    RestoreItem(one, data, 4_000_000_000_000, None, "0,5", dead[i % 2 :])
                    for i, one in enumerate(names)
                ],
            )
        for names in chunks(ids, BATCH // Purge.steps):
            yield Purge(TOPIC, GROUP, names)
        for names in chunks(ids, BATCH // Cancel.steps):
            yield Cancel(TOPIC, names)
        yield Prune(TOPIC)


def _check(as_foreseen: object, reply: object) -> None:
    if not as_foreseen:
        raise SystemExit(f"a batch was incomplete, so its time is invalid: {str(reply)[:200]}")
