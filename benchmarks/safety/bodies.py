"""All calls that read or write bodies, with bodies of 20 kB, 100 kB and 1 MB."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, TypeAlias

from benchmarks.safety.fill import GROUP
from lisa.core.delivery.pace import AHEAD_BYTES
from lisa.core.model.envelope import encode_envelope, encode_tail
from lisa.core.store.store import SyncStore, chunks
from lisa.core.transitions.ack import Ack, Settlement
from lisa.core.transitions.base import STEPS_PER_CALL, Transition
from lisa.core.transitions.change import Cancel
from lisa.core.transitions.delivery import Open, Pull
from lisa.core.transitions.enqueue import OnDuplicate
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.inspect import Inspect
from lisa.core.transitions.journal import Prune, Read
from lisa.core.transitions.restore import Restore, RestoreItem
from lisa.core.transitions.topic import Configure
from lisa.producer.calls import MOST, Single, calls, combine, fitting

TOPIC, JOURNALED = "bodies", "journaled"
SIZES = {"20 kB": 20_000, "100 kB": 100_000, "1 MB": 1_000_000}
Calls: TypeAlias = Generator[Transition[Any], Any, Any]
"""Yields transitions, and is sent their replies."""


class _OneCall(Inspect):
    """Inspects only in its first call, so that only that call is timed."""

    def remainder(self, result: Any) -> None:  # noqa: ARG002  it is not asked for
        return None


def prepare(store: SyncStore) -> None:
    """Create two topics, the second with a journal."""
    for topic in (TOPIC, JOURNALED):
        store.drive(store.register([topic]))
        store.call(Declare(topic, GROUP))
        store.call(Configure(topic, {"retention": "20000", "journal_max": "1"}))
    store.call(Configure(JOURNALED, {"journal": "1"}))


class Bodies:
    """One round with bodies of one size; settles all its messages.

    The number of messages is the maximum that a consumer or a pull has in flight at once.
    """

    def __init__(self, number: int, size: int) -> None:
        count = min(STEPS_PER_CALL // Ack.steps, AHEAD_BYTES // size)
        self._ids = [f"large-{number}-{size}-{i:03}" for i in range(count)]
        self._size = size

    def calls(self) -> Calls:
        """All calls, in an order that satisfies their preconditions."""
        for topic in (TOPIC, JOURNALED):
            yield from self._send(topic, "+0")
            yield from self._inspect(topic)
            yield from self._handle(topic)
            yield from self._restore(topic)
            restored = [f"r{one}" for one in self._ids]
            for ids in chunks(restored, STEPS_PER_CALL // Cancel.steps):
                yield Cancel(topic, ids)
        start, is_last = "-", False
        while not is_last:
            is_last, items = yield Read(JOURNALED, start, "+")
            start = f"({items[-1][0].decode()}" if items else start
        while (yield Prune(JOURNALED)).more:
            pass

    def _send(self, topic: str, due: str) -> Calls:
        tail = encode_tail("x" * self._size, b"0000")
        whole = combine([Single(one, due, tail, None, None) for one in self._ids])
        yield from calls(topic, OnDuplicate.KEEP, whole, MOST)

    def _inspect(self, topic: str) -> Calls:
        left = self._ids
        while left:
            found = yield _OneCall(topic, left[: STEPS_PER_CALL // Inspect.steps])
            left = left[len(found) :]

    def _handle(self, topic: str) -> Calls:
        entries = (yield Pull(topic, GROUP, "measured", len(self._ids))).entries
        settlements: list[Settlement] = []
        while entries:
            opened = yield Open(topic, GROUP, entries)
            count = len(opened.envelopes)
            settlements += [
                Settlement(one.id, one.entry, data[1:10].decode(), one.due_ms, 1, "c")
                for one, data in zip(entries, opened.envelopes, strict=False)
            ]
            entries = entries[count:]
        for some in chunks(settlements, STEPS_PER_CALL // Ack.steps):
            yield Ack(topic, GROUP, some)

    def _restore(self, topic: str) -> Calls:
        envelope = encode_envelope("T" * 8, "x" * self._size)
        items = [RestoreItem(f"r{one}", envelope, 4_000_000_000_000) for one in self._ids]
        while items:
            count = fitting([len(envelope)] * len(items), STEPS_PER_CALL // Restore.steps)
            yield Restore(topic, items[:count])
            items = items[count:]
