"""Entries that carry bodies: when they are opened without a call, and when their lease begins."""

from typing import Any

import pytest
from redis import exceptions

from lisa.core.delivery.opening import (
    DEFAULT_ACK_MS,
    PlainState,
    StreamRead,
    from_entries,
    parse_state,
)
from lisa.core.model.stream import Entry
from lisa.core.transitions.delivery import Opened

READ = StreamRead(asked_at=100.0, read_at=100.010, state=PlainState(5_000_300, 9_000))
"""The server's clock shows 5,000.300 ms when the read begins, which takes 10 ms."""
LATER = READ._replace(read_at=103.010, state_asked_at=103.0)
"""The read began at 100, and the state was asked for at 103."""
APART = READ._replace(is_adjacent=False)
"""The state is of another packet."""
UNKNOWN = READ._replace(state=PlainState(5_000_300, None))
"""The state does not tell the ack timeout."""

CASES: list[tuple[StreamRead, list[int], float | None, int]] = [
    # the read, when its entries were added, when their lease began (None: not opened), ack timeout
    (READ, [5_001], 100.0007, 7_000),
    (READ, [5_003, 5_002], 100.0017, 7_000),
    (READ, [5_010], 100.0097, 7_000),
    (READ, [4_000], 100.0, 9_000),
    (READ, [5_000], 100.0, 9_000),  # perhaps added before the read
    (READ, [5_000, 5_001], 100.0, 7_000),
    (READ, [5_011], 100.0, 9_000),  # later than now: the clock was set
    (LATER, [4_999], 102.9987, 9_000),
    (LATER, [4_999, 3_000], 100.9997, 9_000),
    (LATER, [1_000], 100.0, 9_000),  # before the read
    (LATER, [5_011], 100.0, 9_000),
    (APART, [5_001], 100.0007, 7_000),
    (APART, [5_000], None, 0),
    (APART, [5_011], None, 0),
    (UNKNOWN, [5_001], 100.0007, 7_000),
    (UNKNOWN, [5_000], None, 0),
    (UNKNOWN, [5_011], None, 0),
]


def entries_added(*times_ms: int) -> list[Entry]:
    return [Entry(f"{ms}-0", f"m{ms}", 900, 1, 7_000, b"body") for ms in times_ms]


def test_a_lease_begins_when_the_entry_was_added_or_the_read_began() -> None:
    for read, times_ms, leased_at, ack_timeout_ms in CASES:
        found = from_entries(entries_added(*times_ms), read)
        if leased_at is None:
            assert found is None
            continue
        assert found is not None
        opened, began_at = found
        assert began_at == pytest.approx(leased_at)
        n, now_us = len(times_ms), max(5_010_300, *(1_000 * ms for ms in times_ms))
        assert opened == Opened(now_us, ack_timeout_ms, False, [False] * n, [b"body"] * n)


def test_all_must_carry_bodies_and_the_state_must_be_known() -> None:
    [whole] = entries_added(5_001)
    assert from_entries([whole, whole._replace(envelope=b"")], READ) is None
    assert from_entries([whole], READ._replace(state=None)) is None


def test_a_paused_topic_a_removed_group_a_journal_or_a_window_needs_a_call() -> None:
    time, refused = [b"5", b"300"], exceptions.NoPermissionError("HMGET")
    needs: list[tuple[int, Any]] = [
        (1, [None, b"1", None, None]),
        (1, [None, None, b"1", None]),
        (1, [None, None, None, b"9-17"]),
        (0, [None, None, None, None]),
        (1, refused),
    ]
    for declared, options in needs:
        assert parse_state([time, declared, options]) is None
    assert parse_state([time, 1, [None] * 4]) == PlainState(5_000_300, DEFAULT_ACK_MS)
    assert parse_state([time, 1, [b"7000", b"0", b"0", b""]]) == PlainState(5_000_300, 7_000)
