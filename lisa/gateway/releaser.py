"""Release deliveries whose client has disconnected."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from lisa.core.delivery.source import LOOK_AGAIN_S
from lisa.core.model.errors import LisaError, ServerUnavailable
from lisa.core.store.store import AsyncStore, chunks
from lisa.core.transitions.release import Release

log = logging.getLogger("lisa.gateway")

RELEASE_WITHIN_S = 60.0
"""How long to retry a release while the server is unavailable."""


class Releaser:
    """Releases deliveries in the background, without counting an attempt."""

    def __init__(self, store: AsyncStore) -> None:
        self._store = store
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closing = False

    def release(self, topic: str, group: str, held: Sequence[tuple[str, str]]) -> None:
        """Start to release (message id, entry id) pairs of one group."""
        task = asyncio.create_task(self._release(topic, group, held))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop_retrying(self) -> None:
        """Try each release only once from now on, because the process stops."""
        self._is_closing = True

    async def finish(self) -> None:
        """Wait for all started releases."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _release(self, topic: str, group: str, held: Sequence[tuple[str, str]]) -> None:
        ends = time.monotonic() + RELEASE_WITHIN_S
        for some in chunks(held, self._store.batch_size(topic, Release)):
            while True:
                try:
                    await self._store.call_by_id(Release(topic, group, some))
                except ServerUnavailable as error:
                    if time.monotonic() < ends and not self._is_closing:
                        await asyncio.sleep(LOOK_AGAIN_S)
                        continue
                    log.warning(
                        "topic %s: %d deliveries were not released; they are redelivered after "
                        "their ack timeout: %s",
                        topic,
                        len(some),
                        error,
                    )
                except LisaError as error:
                    log.warning(
                        "topic %s: %d deliveries were not released; their group was removed: %s",
                        topic,
                        len(some),
                        error,
                    )
                break
