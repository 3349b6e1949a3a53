"""The Redis clock, read once for concurrent requests; the gateway's clock is not used (C19)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lisa.core.store.batcher import Batcher
from lisa.core.store.store import AsyncStore


class ServerTime:
    """The server's time: exact by request, or estimated from the last reading."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self._asking: Batcher[None, None, int] = Batcher(
            self._ask, lambda _key, items: sum(1 for _ in items)
        )
        self._ahead_us = 0

    async def now_us(self) -> int:
        """The server's time in microseconds, read after this call. Raises LisaError."""
        return await self._asking.call(None, None)

    def about_ms(self) -> int:
        """The server's time in ms, estimated from the local clock and its last known offset."""
        return (time.time_ns() // 1000 + self._ahead_us) // 1000

    async def _ask(self, _key: None, items: Sequence[None], known: list[int | None]) -> None:
        now_us = await self._store.drive(self._store.server_time_us())
        self._ahead_us = now_us - time.time_ns() // 1000
        known += [now_us] * len(items)
