"""Ends deliveries whose windows close before a handler starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.model.stream import Entry
from lisa.core.transitions.defer import Defer, Outside
from lisa.core.transitions.open import Opened

if TYPE_CHECKING:
    from lisa.consumer.inflight import Held
    from lisa.consumer.subscription import Subscription


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


def defer(sub: Subscription, held: Held) -> None:
    """Move a delivery until its window opens, and drop it.

    If the server does not answer, it is released later and opened again, with a new check.
    """
    if held.limits is not None:
        outside = Outside(*held.receipt, *held.limits)
        try:
            sub.store.call(Defer(sub.shard, sub.group, [outside]))
        except ServerUnavailable:
            sub.unreleased.put(held.receipt)
        except LisaError as error:
            sub.not_released(1, error)
    sub.leases.drop(held)
