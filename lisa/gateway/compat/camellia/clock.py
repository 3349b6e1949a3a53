"""Redis's clock, asked for once by all requests that meet: no gateway's own clock decides (C19)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from lisa.core.store import AsyncStore
from lisa.producer.gathering import Gathering

__all__ = ["Clock"]


class Clock:
    """The server's time: exact, or as good as it was last known."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self._asking: Gathering[None, None, int] = Gathering(self._ask, _all)
        self._ahead_us = 0

    async def now_us(self) -> int:
        """Microseconds, not before this call was made. Raises LisaError."""
        return await self._asking.call(None, None)

    def about_ms(self) -> int:
        """Milliseconds, by this machine's clock and how far it was off: for figures only."""
        return (time.time_ns() // 1000 + self._ahead_us) // 1000

    async def _ask(self, _key: None, items: Sequence[None], known: list[int | None]) -> None:
        now_us = await self._store.drive(self._store.server_time_us())
        self._ahead_us = now_us - time.time_ns() // 1000
        known += [now_us] * len(items)


def _all(_key: None, items: Iterable[None]) -> int:
    return sum(1 for _ in items)
