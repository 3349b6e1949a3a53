"""The lifespan of an attached consumer, entered and left within a test."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import Any

from lisa.consumer.invoke import AwaitResult
from lisa.consumer.lifespan import Lifespan, managed
from lisa.core.redis.flow import Flow


class AttachedLifespan:
    """One run of a lifespan. Its errors reach the test.

    An asynchronous context manager is entered and left by one task.
    """

    def __init__(self, lifespan: Lifespan | None) -> None:
        self._lifespan = lifespan
        self._state: Any = None
        self._entered = ExitStack()
        self._task: asyncio.Task[None] | None = None
        self._leaving = asyncio.Event()

    def enter(self) -> Flow[Any]:
        """The state for handlers; enters the lifespan at the first call."""
        lifespan, self._lifespan = self._lifespan, None
        if lifespan is not None:
            manager = managed(lifespan)
            if isinstance(manager, AbstractAsyncContextManager):
                self._state = yield AwaitResult(self._begin(manager))
            else:
                self._state = self._entered.enter_context(manager)
        return self._state

    def leave(self) -> Flow[None]:
        """Close what `enter` opened."""
        self._entered.close()
        if self._task is not None:
            yield AwaitResult(self._end(self._task))

    async def _begin(self, manager: AbstractAsyncContextManager[Any]) -> Any:
        state: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._hold(manager, state))
        await asyncio.wait({task, state}, return_when=asyncio.FIRST_COMPLETED)
        if not state.done():
            task.result()  # raises
        self._task = task
        return state.result()

    async def _hold(
        self, manager: AbstractAsyncContextManager[Any], entered: asyncio.Future[Any]
    ) -> None:
        async with manager as state:
            entered.set_result(state)
            await self._leaving.wait()

    async def _end(self, task: asyncio.Task[None]) -> None:
        self._leaving.set()
        await task
