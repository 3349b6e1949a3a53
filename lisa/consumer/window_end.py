"""Ends deliveries whose windows close before a handler starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lisa.consumer.inflight import Held
from lisa.core.model.sharding import Shard
from lisa.core.model.stream import Entry
from lisa.core.store.store import SyncStore
from lisa.core.transitions.defer import Defer, Outside
from lisa.core.transitions.open import Opened


def note_limits(
    held: Mapping[str, Held], entries: Sequence[Entry], opened: Opened, asked_at: float
) -> None:
    """Record when the windows of opened deliveries close.

    asked_at: `time.monotonic` right before the call that opened them, so the result is early by at
    most a round trip, and never late.
    """
    for entry, limits in zip(entries, opened.limits, strict=False):
        if limits is not None and entry.entry in held:
            held[entry.entry].close_at(limits, opened.now_us, asked_at)


def move(store: SyncStore, shard: Shard, group: str, held: Held) -> None:
    """Move a delivery until its window opens. Raises LisaError."""
    if held.limits is not None:
        store.call(Defer(shard, group, [Outside(*held.receipt, *held.limits)]))
