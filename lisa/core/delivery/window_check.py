"""Opens entries of messages that may have windows: Python computes the instants, a script compares.

A plain read gets the headers and Redis's clock. From them follows, for each message, until when it
may be handed over, and when its window opens after that. `open` then compares these instants with
Redis's clock and moves the messages outside their windows, in one step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from lisa.core.model.envelope import HEAD_BYTES, headers_of
from lisa.core.model.errors import ConfigError
from lisa.core.model.sharding import topic_of
from lisa.core.model.windows.openings import limits_at
from lisa.core.model.windows.placing import window_of
from lisa.core.redis.flow import Command, Flow
from lisa.core.store.store import Store
from lisa.core.transitions.base import text
from lisa.core.transitions.open import Limits, Open, Opened
from lisa.core.transitions.release import Release

MARGIN_MS = 20
"""The end of a window in which nothing is handed over: a handler takes a moment to begin."""

FIRST_BYTES = 1024
"""How much of each envelope to read first; longer headers take another read."""

UNKNOWN_ZONES = "unknown_zones"
"""The counter in a topic's `stats` of deliveries whose header names no time zone."""

MOST_TOLD = 1_000
"""Maximum errors about zones that a process logs: headers are users' data."""

_told: set[tuple[str, str]] = set()

log = logging.getLogger(__name__)


def open_in_windows(store: Store, call: Open) -> Flow[Opened]:
    """Open the first of the entries within their windows. Raises LisaError.

    Raises ConfigError if a window names holidays and their library is not installed; the entries
    are then released.
    """
    keys = store.keys.topic(call.topic)
    now_ms = yield from store.server_time_ms(keys.waiting)
    window: Command = ("HGET", keys.options, "window")
    bodies = list(call.id_keys(keys))
    topic_window, *heads = yield from store.commands(
        [window, *[("GETRANGE", body, 0, FIRST_BYTES - 1) for body in bodies]]
    )
    heads = yield from _complete(store, bodies, heads)
    unknown: list[str] = []
    try:
        limits = [
            limits_of(head, text(topic_window or b""), now_ms, unknown.append) for head in heads
        ]
    except ConfigError:
        # Otherwise the leases would end and count attempts that no handler made.
        receipts = [(entry.id, entry.entry) for entry in call.entries]
        yield from store.run(Release(call.topic, call.group, receipts))
        raise
    if unknown:
        _warn(topic_of(call.topic), unknown)
        yield from store.command("HINCRBY", keys.stats, UNKNOWN_ZONES, len(unknown))
    return (yield from store.run(replace(call, limits=limits)))


def _warn(topic: str, unknown: Sequence[str]) -> None:
    """Log each error about a zone once."""
    for one in dict.fromkeys(unknown):
        if (topic, one) not in _told and len(_told) < MOST_TOLD:
            _told.add((topic, one))
            log.warning("topic %s: %s", topic, one)


def _complete(store: Store, bodies: Sequence[str], heads: Sequence[bytes]) -> Flow[list[bytes]]:
    """The beginnings of envelopes, with all their headers."""
    found = list(heads)
    ends = [_end(head) for head in found]
    long = [i for i, (head, end) in enumerate(zip(found, ends, strict=True)) if end > len(head)]
    if long:
        reads: list[Command] = [("GETRANGE", bodies[i], 0, ends[i] - 1) for i in long]
        for i, head in zip(long, (yield from store.commands(reads)), strict=True):
            found[i] = head
    return found


def _end(head: bytes) -> int:
    """Where the headers end; 0 if that cannot be read."""
    try:
        return HEAD_BYTES + int(head[11:HEAD_BYTES], 16)
    except ValueError:
        return 0


def limits_of(
    head: bytes, topic_window: str, now_ms: int, unknown: Callable[[str], None]
) -> Limits | None:
    """The limits of one message; None if it has no window, or one that no longer opens.

    unknown: called if a header should name a zone and does not.
    """
    window = window_of(headers_of(head), topic_window, unknown)
    found = None if window is None else limits_at(window, now_ms)
    if found is None:
        return None
    closes_ms, opens_ms = found
    return Limits(max(0, closes_ms - MARGIN_MS), opens_ms)
