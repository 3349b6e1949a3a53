"""Calls that meet are sent together: the sends of many tasks in one script call.

A call that finds nothing under way waits for the event loop's next round, so that all tasks which
are about to call come along; what comes while a call is under way goes with the next one. There is
no timer: a lone call waits for nobody. (DataLoader's way of batching.)
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Generic, TypeAlias, TypeVar

from lisa.core.errors import InvalidMessage, LisaError, TopicFull

__all__ = ["Gathering"]

K = TypeVar("K")
T = TypeVar("T")
R = TypeVar("R")
_Calls: TypeAlias = list[tuple[T, asyncio.Future[R]]]


class Gathering(Generic[K, T, R]):
    """Calls by tasks of one event loop. Those of one key may go together, in their order.

    work: does together what it is given for a key, and notes each one's result, in order, as it
        is known; None for one that has none, though some after it have.
    count: how many of those that wait for a key, from the first on, may go together.
    """

    def __init__(
        self,
        work: Callable[[K, Sequence[T], list[R | None]], Awaitable[None]],
        count: Callable[[K, Iterable[T]], int],
    ) -> None:
        self._work = work
        self._count = count
        self._lines: dict[K, _Calls[T, R]] = {}
        self._workers: dict[K, asyncio.Task[None]] = {}

    async def call(self, key: K, item: T) -> R:
        """The item's own result; raises its own error, as if it had been sent alone.

        Cancelling a caller harms no other. Its item is dropped if it has not been sent yet.
        """
        loop = asyncio.get_running_loop()
        worker = self._workers.get(key)
        if worker is None:
            self._lines[key] = []
            self._workers[key] = loop.create_task(self._run(key))
        elif worker.get_loop() is not loop:
            raise RuntimeError("an AsyncProducer belongs to the event loop that first uses it")
        future: asyncio.Future[R] = loop.create_future()
        self._lines[key].append((item, future))
        return await future

    async def finish(self) -> None:
        """Wait until all that waits has been sent."""
        here = asyncio.get_running_loop()
        workers = [one for one in self._workers.values() if one.get_loop() is here]
        if workers:
            await asyncio.wait(workers)

    async def _run(self, key: K) -> None:
        line = self._lines[key]
        batch: _Calls[T, R] = []
        try:
            while batch := self._take(key, line):
                await self._send(key, batch)
                if line:
                    await asyncio.sleep(0)  # those who were just answered may come along
        finally:
            del self._workers[key], self._lines[key]
            for _, future in batch + line:  # there are some only if this very task was cancelled
                future.cancel()

    def _take(self, key: K, line: _Calls[T, R]) -> _Calls[T, R]:
        wanted = [one for one in line if not one[1].done()]
        count = self._count(key, (item for item, _ in wanted)) if wanted else 0
        line[:] = wanted[count:]
        return wanted[:count]

    async def _send(self, key: K, batch: _Calls[T, R]) -> None:
        results: list[R | None] = []
        try:
            await self._work(key, [item for item, _ in batch], results)
        except Exception as error:  # noqa: BLE001  those who called are told, each for itself
            await self._tell_apart(key, _answered(batch, results), error)
        else:
            _answered(batch, results)

    async def _tell_apart(self, key: K, batch: _Calls[T, R], error: Exception) -> None:
        """Each its own truth: what the topic refused may be one message's fault, or not all fit."""
        middle = len(batch) // 2
        if middle and isinstance(error, (InvalidMessage, TopicFull)):
            for half in (batch[:middle], batch[middle:]):
                if waiting := [one for one in half if not one[1].done()]:
                    await self._send(key, waiting)
            return
        for _, future in batch:
            future.set_exception(_twin(error))


def _answered(batch: _Calls[T, R], results: Sequence[R | None]) -> _Calls[T, R]:
    """Hand out the results; who has none yet, and still waits for one."""
    for (_, future), result in zip(batch, results, strict=False):
        if result is not None and not future.done():
            future.set_result(result)
    return [one for one in batch if not one[1].done()]


def _twin(error: Exception) -> Exception:
    """An error of one's own: whoever raises it adds to its trace, or notes something in it."""
    if not isinstance(error, LisaError):
        return error
    twin = copy.copy(error)
    twin.__cause__ = error.__cause__
    return twin
