"""The limit on the occurrences of a schedule that one request creates."""

from __future__ import annotations

from lisa.admin.schedules import count_ticks
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.recurring.definition import Record
from lisa.core.store import schedule_reads
from lisa.core.store.store import AsyncStore

MOST_BACKFILLED = 10_000
"""A range without a limit could fill the server, and its work would outlive the request."""


async def count_backfilled(store: AsyncStore, record: Record, from_ms: int, to_ms: int) -> int:
    """The number of past ticks in a range, both ends included. Raises InvalidMessage."""
    schedule_reads.check_range(from_ms, to_ms)
    now_ms = await store.drive(store.server_time_ms())
    count = count_ticks(record, from_ms, min(to_ms, now_ms), MOST_BACKFILLED)
    if count > MOST_BACKFILLED:
        raise InvalidMessage(
            f"the range has more than {MOST_BACKFILLED:,} ticks; choose a shorter one, or use "
            "lisa schedules backfill"
        )
    return count
