"""The public `AsyncConsumer` class, whose handlers run on the application's event loop."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from datetime import timedelta
from functools import partial
from typing import Any, Self

from lisa.consumer.consumer import BaseConsumer
from lisa.consumer.event_loop import AppLoop
from lisa.consumer.lifespan import StartScope
from lisa.consumer.pull import AsyncDelivery, AsyncPuller
from lisa.core.daemon.process_signals import handler_of, not_inherited, stopping
from lisa.core.daemon.threads import in_thread
from lisa.core.model.errors import LisaError
from lisa.core.redis.flow import start_task


class AsyncConsumer(BaseConsumer):
    """Asynchronous version of `Consumer`, for one event loop; the options are the same.

    `async def` handlers are tasks on the event loop that runs `start` or `run`; other handlers run
    on threads. Each call gets a copy of the context variables of that time. An asynchronous context
    manager, which starts the consumer if it has handlers, and stops it.
    """

    _ending: asyncio.Future[LisaError | None] | None = None
    _puller: AsyncPuller | None = None
    _stop_task: asyncio.Task[None] | None = None
    _starting: asyncio.Task[None] | None = None
    """The start by the first handler that was added in the consumer's block."""

    @property
    def _is_used(self) -> bool:
        return super()._is_used or self._puller is not None

    async def start(self) -> Self:
        """Start the consumer and return it; retries an unreachable server.

        Raises ConfigError if a topic or handler is missing, or if the consumer already runs. A
        cancelled start cancels an asynchronous lifespan, and waits for another one.
        """
        await self._begin()
        return self

    async def _begin(self, *, by_block: bool = False) -> None:
        context, scope = copy_context(), StartScope()
        context.run(scope.apply)
        self._app = AppLoop(asyncio.get_running_loop(), threading.current_thread(), context)
        starting = in_thread(context.copy().run, partial(self._start, by_block=by_block))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            scope.cancel()
            await self._in_background(self._finish_stop(starting))
            raise

    async def stop(self) -> None:
        """Stop reading, release unstarted messages, and let running handlers finish in `grace`.

        If one of the consumer's handlers awaits `stop`, it returns and stops in the background, as
        a cancelled `stop` does.
        """
        runtime = self._runtime
        stopping = self._in_background(self._finish_stop())
        if runtime is None or not runtime.has_current_task():
            await stopping

    close = stop

    def _in_background(self, stopping: Coroutine[Any, Any, None]) -> asyncio.Future[None]:
        """Begin to stop; cancelling a task that awaits the result does not interrupt the stop."""
        self._stop_task = start_task(stopping)
        return asyncio.shield(self._stop_task)

    async def _finish_stop(self, starting: asyncio.Future[None] | None = None) -> None:
        """Stop once a cancelled start has ended."""
        puller = self._puller
        if starting is not None:
            await _ended(starting)
            starting.exception()
        stopped = in_thread(self._stop)
        await _ended(stopped)
        stopped.result()
        if puller is not None:
            self._puller = None
            await puller.close()

    async def run(self) -> None:
        """Start unless running, and run until cancelled, `stop`, SIGTERM or SIGHUP; then stop.

        Leaves both signals alone if the program handles SIGTERM, and SIGHUP if the program handles
        or ignores it. Raises ConfigError, also for errors found later, such as a topic with several
        groups.
        """
        ending = self._ending = asyncio.get_running_loop().create_future()
        with _until_signalled(self._end_run):
            try:
                await self._until_started_by_block()
                if self._runtime is None:
                    await self.start()
                failure = await ending
            finally:
                self._ending = None
                await self.stop()
        if failure is not None:
            raise failure

    def pull(
        self,
        topic: str,
        *,
        batch: int = 1,
        wait: timedelta | str = timedelta(0),
        ack_timeout: timedelta | str | None = None,
    ) -> AsyncIterator[AsyncDelivery]:
        """Iterate over up to `batch` deliveries to settle yourself; see `Consumer.pull`.

        The iterator makes one pull: it ends after these deliveries, or if there are none within
        `wait`. Deliveries that it does not reach are released. Raises LisaError.
        """
        topic, times = self._checked_pull(topic, wait, ack_timeout)
        if self._puller is None:
            self._puller = AsyncPuller(self._options, self._handlers.signals)
        return self._puller.pull(topic, batch, *times)

    async def unsubscribe(self, topic: str) -> None:
        """Remove a topic's handlers and release its unstarted messages.

        Running handlers finish, and their outcomes are settled.
        """
        await in_thread(self._unsubscribe, topic)

    async def pause(self, topic: str | None = None) -> None:
        """Pause one topic, or all topics, in this consumer only; held messages are finished.

        Raises ConfigError if the consumer does not run.
        """
        await in_thread(self._running().readers.pause, topic, paused=True)

    async def resume(self, topic: str | None = None) -> None:
        """Resume one topic, or all topics. Raises ConfigError if the consumer does not run."""
        await in_thread(self._running().readers.pause, topic, paused=False)

    async def __aenter__(self) -> Self:
        if self._all_wanted():
            return await self.start()
        self._is_entered, self._starting = True, None
        self._block_loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._until_started_by_block()
        await self.stop()

    def _registered(self, topic: str) -> None:
        # Never waits for the lock, because a start that holds it may wait for the event loop.
        if not self._lock.acquire(blocking=False):
            threading.Thread(target=super()._registered, args=(topic,), daemon=True).start()
            return
        try:
            super()._registered(topic)
        finally:
            self._lock.release()

    def _start_by_block(self) -> None:
        self._is_entered = False
        self._block_loop.call_soon_threadsafe(self._create_start)

    def _create_start(self) -> None:
        self._starting = self._block_loop.create_task(self._start_in_block())

    async def _start_in_block(self) -> None:
        try:
            await self._begin(by_block=True)
        except LisaError as error:
            self._fail(error)

    async def _until_started_by_block(self) -> None:
        if not self._is_entered and self._starting is None:
            await asyncio.sleep(0)  # a handler may just have been added
        if self._starting is not None:
            await asyncio.wait({self._starting})

    def _end_run(self, error: LisaError | None = None) -> bool:
        ending = self._ending
        if ending is not None:
            ending.get_loop().call_soon_threadsafe(_end, ending, error)
        return ending is not None


async def _ended(future: asyncio.Future[None]) -> None:
    """Wait for a future, also when `asyncio.run` cancels all tasks before it closes the loop."""
    while not future.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([future])


def _end(ending: asyncio.Future[LisaError | None], error: LisaError | None) -> None:
    if not ending.done():
        ending.set_result(error)


@contextmanager
def _until_signalled(end: Callable[[], Any]) -> Iterator[None]:
    """Call `end` at the first SIGTERM, or SIGHUP, if nothing handles it; a second SIGTERM kills."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or handler_of(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    loop = asyncio.get_running_loop()
    numbers = [number for number in stopping() if number != signal.SIGINT]  # that is asyncio's

    def terminate() -> None:
        loop.remove_signal_handler(signal.SIGTERM)
        end()

    for number in numbers:
        loop.add_signal_handler(number, terminate if number == signal.SIGTERM else end)
    try:
        with not_inherited(dict.fromkeys(numbers, signal.SIG_DFL)):
            yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
