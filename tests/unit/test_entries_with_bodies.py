"""Entries that carry bodies: when they are opened without a call, and when their lease begins."""

from __future__ import annotations

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
from lisa.core.transitions.open import Opened

READ = StreamRead(asked_at=100.0, read_at=100.010, state=PlainState(5_000_300, 9_000))
"""The server's clock shows 5,000.300 ms when the read begins, which takes 10 ms."""


def entries_added(*times_ms: int) -> list[Entry]:
    return [Entry(f"{ms}-0", f"m{ms}", 900, 1, 7_000, b"body") for ms in times_ms]


@pytest.mark.parametrize(
    ("times_ms", "leased_at", "ack_timeout_ms"),
    [
        ([5_001], 100.0007, 7_000),
        ([5_003, 5_002], 100.0017, 7_000),
        ([5_010], 100.0097, 7_000),
        ([4_000], 100.0, 9_000),
        ([5_000], 100.0, 9_000),  # perhaps added before the read
        ([5_000, 5_001], 100.0, 7_000),
        ([5_011], 100.0, 9_000),  # later than now: the clock was set
    ],
)
def test_a_lease_begins_when_the_entry_was_added_or_the_read_began(
    times_ms: list[int], leased_at: float, ack_timeout_ms: int
) -> None:
    found = from_entries(entries_added(*times_ms), READ)
    assert found is not None
    opened, began_at = found
    assert began_at == pytest.approx(leased_at)
    n, now_us = len(times_ms), max(5_010_300, *(1_000 * ms for ms in times_ms))
    assert opened == Opened(now_us, ack_timeout_ms, False, [False] * n, [b"body"] * n)


@pytest.mark.parametrize(
    ("times_ms", "leased_at"),
    [
        ([4_999], 102.9987),
        ([4_999, 3_000], 100.9997),
        ([1_000], 100.0),  # before the read
        ([5_011], 100.0),  # later than now: the clock was set
    ],
)
def test_a_state_that_was_read_later_tells_how_long_ago_the_entry_was_added(
    times_ms: list[int], leased_at: float
) -> None:
    """The read began at 100, and the state was asked for at 103."""
    read = READ._replace(read_at=103.010, state_asked_at=103.0)
    found = from_entries(entries_added(*times_ms), read)
    assert found is not None
    opened, began_at = found
    assert began_at == pytest.approx(leased_at)
    assert opened.ack_timeout_ms == 9_000
    assert opened.now_us == max(5_010_300, *(1_000 * ms for ms in times_ms))


@pytest.mark.parametrize(("ms", "is_opened"), [(5_001, True), (5_000, False), (5_011, False)])
def test_without_a_state_of_the_same_packet_only_entries_added_later_are_opened(
    ms: int, is_opened: object
) -> None:
    for read in (
        READ._replace(is_adjacent=False),
        READ._replace(state=PlainState(5_000_300, None)),
    ):
        found = from_entries(entries_added(ms), read)
        assert (found is not None) == is_opened
        assert found is None or found[0].ack_timeout_ms == 7_000


def test_all_must_carry_bodies_and_the_state_must_be_known() -> None:
    [whole] = entries_added(5_001)
    assert from_entries([whole, whole._replace(envelope=b"")], READ) is None
    assert from_entries([whole], READ._replace(state=None)) is None


@pytest.mark.parametrize(
    ("declared", "options", "state"),
    [
        (1, [None, None, None, None], PlainState(5_000_300, DEFAULT_ACK_MS)),
        (1, [b"7000", b"0", b"0", b""], PlainState(5_000_300, 7_000)),
        (1, [None, b"1", None, None], None),
        (1, [None, None, b"1", None], None),
        (1, [None, None, None, b"9-17"], None),
        (0, [None, None, None, None], None),
        (1, exceptions.NoPermissionError("HMGET"), None),
    ],
)
def test_a_paused_topic_a_removed_group_a_journal_or_a_window_needs_a_call(
    declared: int, options: Any, state: PlainState | None
) -> None:
    assert parse_state([[b"5", b"300"], declared, options]) == state
