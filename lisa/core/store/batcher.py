"""Batches concurrent calls: the sends of many tasks go out in one script call.

A call that finds no call in progress waits for the next iteration of the event loop, so that all
ready tasks join it. Calls made while one is in progress form the next batch. Without a timer, a
single call is not delayed. (DataLoader batches the same way.)
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeAlias, TypeVar

from lisa.core.model.errors import InvalidMessage, LisaError, ServerUnavailable, TopicFull
from lisa.core.redis.flow import start_task
from lisa.core.store.store import caller

K = TypeVar("K")
T = TypeVar("T")
R = TypeVar("R")
Deadline: TypeAlias = Callable[[], float | None]
_Calls: TypeAlias = list[tuple[T, asyncio.Future[R]]]


class Batcher(Generic[K, T, R]):
    """Batches calls by tasks of one event loop. Calls with the same key may be combined, in order.

    Calls on behalf of different callers are not combined, because a script call has one actor in
    the journal. The task that sends a batch inherits the caller from the task that starts it.

    work: processes the items of one key and appends each result, in order, when it is known; None
        for an item without a result that precedes items with one.
    count: how many of the items queued for a key, from the first, fit into one batch.
    deadline: until when the current caller waits, in the event loop's time; None for no limit.
    """

    def __init__(
        self,
        work: Callable[[K, Sequence[T], list[R | None]], Awaitable[None]],
        count: Callable[[K, Iterable[T]], int],
        deadline: Deadline | None = None,
    ) -> None:
        self._work = work
        self._count = count
        self._deadline = deadline
        self._queues: dict[tuple[K, str], _Calls[T, R]] = {}
        self._workers: dict[tuple[K, str], asyncio.Task[None]] = {}

    async def call(self, key: K, item: T) -> R:
        """Return the item's own result, or raise its own error, as if it had been sent alone.

        Cancelling one caller does not affect the others. An item that is not yet sent is dropped,
        also at the deadline, which raises ServerUnavailable.
        """
        loop, own = asyncio.get_running_loop(), (key, caller.get())
        worker = self._workers.get(own)
        if worker is None:
            self._queues[own] = []
            self._workers[own] = start_task(self._run(own))
        elif worker.get_loop() is not loop:
            raise RuntimeError("an AsyncProducer belongs to the event loop that first uses it")
        future: asyncio.Future[R] = loop.create_future()
        self._queues[own].append((item, future))
        deadline = self._deadline() if self._deadline else None
        if deadline is None:
            return await future
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                return await future
        except TimeoutError:
            if not limit.expired():
                raise
            raise ServerUnavailable("the server did not answer the calls before this one") from None

    async def finish(self) -> None:
        """Wait until all queued items are sent."""
        here = asyncio.get_running_loop()
        workers = [worker for worker in self._workers.values() if worker.get_loop() is here]
        if workers:
            await asyncio.wait(workers)

    def cancel(self) -> None:
        """Cancel the calls whose items are not yet sent."""
        here = asyncio.get_running_loop()
        for worker in self._workers.values():
            if worker.get_loop() is here:
                worker.cancel()

    async def _run(self, own: tuple[K, str]) -> None:
        key, queue = own[0], self._queues[own]
        batch: _Calls[T, R] = []
        try:
            while batch := self._take(key, queue):
                await self._send(key, batch)
                if queue:
                    await asyncio.sleep(0)  # callers that just got a result may join the next batch
        finally:
            del self._workers[own], self._queues[own]
            for _, future in batch + queue:  # not empty only if this task was cancelled
                future.cancel()

    def _take(self, key: K, queue: _Calls[T, R]) -> _Calls[T, R]:
        wanted = [call for call in queue if not call[1].done()]
        count = self._count(key, (item for item, _ in wanted)) if wanted else 0
        queue[:] = wanted[count:]
        return wanted[:count]

    async def _send(self, key: K, batch: _Calls[T, R]) -> None:
        results: list[R | None] = []
        try:
            await self._work(key, [item for item, _ in batch], results)
        except Exception as error:  # noqa: BLE001  each caller receives the error
            await self._bisect(key, _answered(batch, results), error)
        else:
            _answered(batch, results)

    async def _bisect(self, key: K, batch: _Calls[T, R], error: Exception) -> None:
        """Split a refused batch, since a single message may be invalid, or only some may fit."""
        middle = len(batch) // 2
        if middle and isinstance(error, (InvalidMessage, TopicFull)):
            for half in (batch[:middle], batch[middle:]):
                if waiting := [call for call in half if not call[1].done()]:
                    await self._send(key, waiting)
            return
        for _, future in batch:
            future.set_exception(_copy_of(error))


def _answered(batch: _Calls[T, R], results: Sequence[R | None]) -> _Calls[T, R]:
    """Set the results. Returns the calls that have no result and still wait."""
    for (_, future), result in zip(batch, results, strict=False):
        if result is not None and not future.done():
            future.set_result(result)
    return [call for call in batch if not call[1].done()]


def _copy_of(error: Exception) -> Exception:
    """A separate error per caller, since raising one adds to its traceback and attributes."""
    if not isinstance(error, LisaError):
        return error
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    return copied
