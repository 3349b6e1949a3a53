"""The limit on the occurrences of a schedule that one request creates."""

from __future__ import annotations

from itertools import islice

from lisa.core.model.errors import InvalidMessage
from lisa.core.model.recurring.definition import Record
from lisa.core.model.recurring.ticks import ticks_after
from lisa.core.store import schedule_reads
from lisa.core.store.store import AsyncStore
from lisa.gateway.turns import in_turns

MOST_BACKFILLED = 10_000
"""A range without a limit could fill the server, and its work would outlive the request."""


async def count_backfilled(store: AsyncStore, record: Record, from_ms: int, to_ms: int) -> int:
    """The number of past ticks in a range, both ends included. Raises InvalidMessage."""
    schedule_reads.check_range(from_ms, to_ms)
    now_ms = await store.drive(store.server_time_ms())
    ticks = ticks_after(record, from_ms - 1, min(to_ms, now_ms))
    count = 0
    async for _ in in_turns(islice(ticks, MOST_BACKFILLED + 1)):
        count += 1
    if count > MOST_BACKFILLED:
        raise InvalidMessage(
            f"the range has more than {MOST_BACKFILLED:,} ticks; choose a shorter one, or use "
            "lisa schedules backfill"
        )
    return count
