"""Redis's clock, by which all roles judge; the gateway's own clock may differ (C19)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress

from lisa.core.model.errors import LisaError
from lisa.core.store.batcher import Batcher
from lisa.core.store.store import AsyncStore

READ_EVERY_S = 5.0


class RedisClock:
    """The server's time: exact by request, or estimated from the last reading.

    Before the first reading, the estimate is this machine's time.
    """

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self._asking: Batcher[None, None, int] = Batcher(
            self._ask, lambda _key, items: sum(1 for _ in items)
        )
        self._ahead_us = time.time_ns() // 1000 - _elapsed_us()

    async def now_us(self) -> int:
        """The server's time in microseconds, read after this call. Raises LisaError."""
        return await self._asking.call(None, None)

    def about_us(self) -> int:
        """The server's time in microseconds, estimated from the last reading."""
        return _elapsed_us() + self._ahead_us

    def about_ms(self) -> int:
        """The server's time in milliseconds, estimated from the last reading."""
        return self.about_us() // 1000

    async def follow(self) -> None:
        """Read the server's time regularly, until cancelled."""
        while True:
            with suppress(LisaError):  # the estimate continues
                await self.now_us()
            await asyncio.sleep(READ_EVERY_S)

    async def _ask(self, _key: None, items: Sequence[None], known: list[int | None]) -> None:
        began_us = _elapsed_us()
        now_us = await self._store.drive(self._store.server_time_us())
        self._ahead_us = now_us - (began_us + _elapsed_us()) // 2
        known += [now_us] * len(items)


def _elapsed_us() -> int:
    """Microseconds of a clock that is never set."""
    return time.monotonic_ns() // 1000
