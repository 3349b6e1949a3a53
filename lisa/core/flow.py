"""One description of a conversation with the server, run by blocking and asyncio callers alike.

A *flow* is a generator that yields steps and is sent their results: `Execute` for one command,
`ExecuteMany` for a pipeline, `Pause` for a wait, `Await` for other tasks. Only the drivers here
differ between the two worlds, so no method body exists twice. (The idea is that of sans-I/O
protocol libraries.)
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

__all__ = [
    "AsyncLink",
    "Await",
    "Chain",
    "Command",
    "Execute",
    "ExecuteMany",
    "Flow",
    "Link",
    "Pause",
    "Step",
    "adrive",
    "awaiting",
    "blocking",
    "drive",
]

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

Command: TypeAlias = Sequence[str | bytes | int | float]


class Execute(NamedTuple):
    """Send one command; the flow is sent the raw reply, or thrown the client's error."""

    command: Command


class ExecuteMany(NamedTuple):
    """Send commands together; the flow is sent a list of replies, errors among them as values."""

    commands: Sequence[Command]


class Chain(NamedTuple):
    """Send commands together, on one connection, to the node that has a key.

    The flow is sent a list of replies, errors among them as values.
    """

    key: str
    commands: Sequence[Command]


class Pause(NamedTuple):
    """Wait."""

    seconds: float


class Await(NamedTuple):
    """Wait for what other tasks do; only a flow that is run on an event loop may."""

    awaitable: Awaitable[Any]


Step: TypeAlias = Execute | ExecuteMany | Chain | Pause | Await
Flow: TypeAlias = Generator[Step, Any, T]


class Link(Protocol):
    """A connection as a blocking caller sees it."""

    def execute(self, command: Command) -> Any:
        """Send one command; raises the client's errors."""

    def execute_many(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands together; errors stand among the replies."""

    def execute_chain(self, key: str, commands: Sequence[Command]) -> list[Any]:
        """The same on one connection, to the node that has a key."""

    def close(self) -> None:
        """Close all sockets."""


class AsyncLink(Protocol):
    """A connection as an asyncio caller sees it."""

    async def execute(self, command: Command) -> Any:
        """As `Link.execute`."""

    async def execute_many(self, commands: Sequence[Command]) -> list[Any]:
        """As `Link.execute_many`."""

    async def execute_chain(self, key: str, commands: Sequence[Command]) -> list[Any]:
        """As `Link.execute_chain`."""

    async def close(self) -> None:
        """As `Link.close`."""


def drive(flow: Flow[T], link: Link) -> T:
    """Run a flow to its end, blocking."""
    try:
        step = next(flow)
        while True:
            result: object = None
            try:
                if isinstance(step, Execute):
                    result = link.execute(step.command)
                elif isinstance(step, ExecuteMany):
                    result = link.execute_many(step.commands)
                elif isinstance(step, Chain):
                    result = link.execute_chain(step.key, step.commands)
                elif isinstance(step, Pause):
                    time.sleep(step.seconds)
                else:
                    raise TypeError("a blocking caller has no event loop to await anything on")
            except Exception as error:  # noqa: BLE001  the flow is told, and judges
                step = flow.throw(error)
            else:
                step = flow.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def adrive(flow: Flow[T], link: AsyncLink) -> T:
    """Run a flow to its end on the running event loop."""
    try:
        step = next(flow)
        while True:
            result: object = None
            try:
                if isinstance(step, Execute):
                    result = await link.execute(step.command)
                elif isinstance(step, ExecuteMany):
                    result = await link.execute_many(step.commands)
                elif isinstance(step, Chain):
                    result = await link.execute_chain(step.key, step.commands)
                elif isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                else:
                    result = await step.awaitable
            except Exception as error:  # noqa: BLE001  the flow is told, and judges
                step = flow.throw(error)
            else:
                step = flow.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


class _Blocking(Protocol):
    def _drive(self, flow: Flow[T]) -> T: ...


class _Awaiting(Protocol):
    async def _drive(self, flow: Flow[T]) -> T: ...


def _show(call: Callable[..., object], method: Callable[..., object]) -> None:
    """Let `help()` name what a caller gets, not the flow that the method writes."""
    signature = inspect.signature(method)
    result = str(signature.return_annotation).removeprefix("Flow[").removesuffix("]")
    call.__dict__["__signature__"] = signature.replace(return_annotation=result)


def blocking(method: Callable[Concatenate[Any, P], Flow[T]]) -> Callable[Concatenate[Any, P], T]:
    """A method that writes a flow becomes a blocking one, its signature and docstring kept.

    The object gives `_drive`, which runs a flow.
    """

    @functools.wraps(method)
    def call(self: _Blocking, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._drive(method(self, *args, **kwargs))

    _show(call, method)
    return call


def awaiting(
    method: Callable[Concatenate[Any, P], Flow[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """The same for asyncio: the method becomes a coroutine function."""

    @functools.wraps(method)
    async def call(self: _Awaiting, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._drive(method(self, *args, **kwargs))

    _show(call, method)
    return call
