"""A consumer's lifespan: resources for handlers, opened at the start and closed at the end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from contextvars import ContextVar
from typing import Any

from lisa.core.model.errors import ConfigError, StartupFailed
from lisa.core.model.outcomes import reason_of

log = logging.getLogger("lisa.consumer")

Lifespan = Callable[[], AbstractContextManager[Any] | AbstractAsyncContextManager[Any]]
"""Makes a context manager, such as a function with `@contextmanager` or `@asynccontextmanager`."""

entering: ContextVar[bool] = ContextVar("entering", default=False)
"""True in the task of an asynchronous lifespan until the consumer has entered it."""

LEAVE_S = 30.0
"""How long an asynchronous context manager may take to close."""


class StartScope:
    """Cancels the asynchronous lifespan of a start; used on the lifespan's event loop."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._task: asyncio.Task[Any] | None = None

    def apply(self) -> None:
        """Apply to the lifespan that is entered in the current context."""
        _scope.set(self)

    def cancel(self) -> None:
        """Cancel the lifespan if it is being entered, or as soon as it will be."""
        self.is_cancelled = True
        if self._task is not None:
            self._task.cancel()

    def begin(self) -> None:
        """The current task is about to enter the lifespan. Raises CancelledError."""
        self._task = asyncio.current_task()
        if self.is_cancelled:
            raise asyncio.CancelledError

    def end(self) -> None:
        """The lifespan is entered, so it is left as usual."""
        self._task = None


_scope: ContextVar[StartScope] = ContextVar("_scope")

Spawn = Callable[[Awaitable[Any]], "Future[Any]"]


def managed(lifespan: Lifespan) -> AbstractContextManager[Any] | AbstractAsyncContextManager[Any]:
    """Call a lifespan. Raises ConfigError if it returns no context manager."""
    manager: object = lifespan()
    if isinstance(manager, (AbstractContextManager, AbstractAsyncContextManager)):
        return manager
    raise ConfigError(
        f"the lifespan returned no context manager but a {type(manager).__name__}; decorate the "
        "function with @contextmanager or @asynccontextmanager"
    )


class LifespanRun:
    """One run of a lifespan, from the start of a consumer to its end.

    An asynchronous context manager is entered and left by one task, run by `spawn` on the event
    loop of the handlers.
    """

    def __init__(self, lifespan: Lifespan | None, spawn: Spawn) -> None:
        self._lifespan = lifespan
        self._spawn = spawn
        self._manager: AbstractContextManager[Any] | None = None

    def enter(self) -> Any:
        """The state for handlers; None without a lifespan. Raises StartupFailed."""
        if self._lifespan is None:
            return None
        try:
            manager = managed(self._lifespan)
            if isinstance(manager, AbstractAsyncContextManager):
                manager = _OnLoop(manager, self._spawn)
            state = manager.__enter__()
        except Exception as error:
            scope = _scope.get(None)
            if scope is None or not scope.is_cancelled:
                log.exception("the consumer's lifespan failed at startup")
            raise StartupFailed(
                f"the consumer's lifespan failed at startup: {reason_of(error)}"
            ) from error
        self._manager = manager
        return state

    def leave(self) -> None:
        """Close what `enter` opened; errors are logged."""
        manager, self._manager = self._manager, None
        if manager is None:
            return
        try:
            manager.__exit__(None, None, None)
        except Exception:
            log.exception("the consumer's lifespan failed at shutdown")


class _OnLoop(AbstractContextManager[Any]):
    """An asynchronous context manager, entered and left from other threads than its loop's."""

    def __init__(self, manager: AbstractAsyncContextManager[Any], spawn: Spawn) -> None:
        self._manager = manager
        self._spawn = spawn
        self._entered: Future[tuple[Any, Callable[[], object]]] = Future()

    def __enter__(self) -> Any:
        self._ended = self._spawn(self._hold())
        wait([self._entered, self._ended], return_when=FIRST_COMPLETED)
        if not self._entered.done():
            self._ended.result()  # raises
        state, self._leave = self._entered.result()
        return state

    def __exit__(self, *_: object) -> None:
        self._leave()
        self._ended.result(LEAVE_S)  # a handler may block the loop

    async def _hold(self) -> None:
        loop, leaving = asyncio.get_running_loop(), asyncio.Event()
        scope = _scope.get(None) or StartScope()
        scope.begin()
        entering.set(True)
        async with self._manager as state:
            scope.end()
            entering.set(False)
            self._entered.set_result((state, lambda: loop.call_soon_threadsafe(leaving.set)))
            await leaving.wait()
