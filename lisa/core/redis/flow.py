"""Flows: server conversations written once, and run blocking or with asyncio.

A *flow* is a generator that yields steps and receives their results: `Execute` for one command,
`ExecuteMany` for a pipeline, `Pause` for a delay, `Await` for an awaitable, `Aside` for a flow that
runs beside this one. Only the drivers in this module differ between blocking and asyncio callers.
(The idea comes from sans-I/O protocol libraries.) A flow that repeats a step does so within a
`Patience`; one that writes may wait until replicas have confirmed it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import random
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Sequence
from types import FunctionType
from typing import Any, Concatenate, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

import msgspec

from lisa.core.model.backoff import Backoff
from lisa.core.model.durability import Replicas
from lisa.core.redis import errors

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

MAX_REPAIRS = 20
LONGEST_PAUSE_S = 1.0
"""Longest pause between two attempts of a step."""

Command: TypeAlias = Sequence[str | bytes | int | float]


class Link(Protocol):
    """The interface of a connection; an asyncio connection returns awaitables of the replies."""

    def execute(self, command: Command) -> Any:
        """Send one command. Raises the client's errors."""

    def execute_many(self, commands: Sequence[Command]) -> Any:
        """Send commands together; the replies may include errors."""

    def execute_on_each(self, command: Command) -> Any:
        """Send one command to each primary; pairs of its name and its reply or error."""

    def execute_chain(self, key: str, commands: Sequence[Command]) -> Any:
        """Send commands together, on one connection, to the node that holds `key`."""


class Step(Protocol):
    """One step of a flow. `link` is the connection, or another object that the step knows."""

    def run(self, link: Any) -> Any:
        """Run the step, blocking."""

    def arun(self, link: Any) -> Any:
        """Run the step on the running event loop; returns an awaitable."""


Flow: TypeAlias = Generator[Step, Any, T]


class Execute(msgspec.Struct, frozen=True):
    """Send one command. The flow receives the raw reply, or the client's error as an exception."""

    command: Command

    def run(self, link: Link) -> Any:
        """The reply; with an asyncio connection, to be awaited."""
        return link.execute(self.command)

    arun = run


class ExecuteMany(msgspec.Struct, frozen=True):
    """Send commands together. The flow receives a list of replies, which may include errors."""

    commands: Sequence[Command]

    def run(self, link: Link) -> Any:
        """The replies; with an asyncio connection, to be awaited."""
        return link.execute_many(self.commands)

    arun = run


class Chain(msgspec.Struct, frozen=True):
    """Send commands together, on one connection, to the node that holds `key`.

    The flow receives a list of replies, which may include errors.
    """

    key: str
    commands: Sequence[Command]

    def run(self, link: Link) -> Any:
        """The replies; with an asyncio connection, to be awaited."""
        return link.execute_chain(self.key, self.commands)

    arun = run


class ExecuteOnEach(msgspec.Struct, frozen=True):
    """Send one command without keys to each primary of a cluster, or to the single server.

    The flow receives pairs of a node's name, "" for a single server, and the raw reply, which may
    be an error.
    """

    command: Command

    def run(self, link: Link) -> Any:
        """The pairs; with an asyncio connection, to be awaited."""
        return link.execute_on_each(self.command)

    arun = run


class Pause(NamedTuple):
    """Sleep."""

    seconds: float

    def run(self, _link: Any) -> None:
        """Sleep in this thread."""
        time.sleep(self.seconds)

    def arun(self, _link: Any) -> Awaitable[None]:
        """Sleep in this task."""
        return asyncio.sleep(self.seconds)


class Await(NamedTuple):
    """Await an awaitable; only for flows that run on an event loop."""

    awaitable: Awaitable[Any]

    def run(self, _link: Any) -> Any:
        """Raise TypeError, because only an event loop can await."""
        raise TypeError("a blocking caller cannot run a flow that awaits")

    def arun(self, _link: Any) -> Awaitable[Any]:
        """The awaitable."""
        return self.awaitable


class Aside(NamedTuple):
    """Run another flow on the same connection, and wait at most `within_s` seconds for it.

    The other flow handles its own errors. `running` holds its thread or task until it ends.
    """

    flow: Flow[None]
    within_s: float
    running: set[Any]

    def run(self, link: Link) -> None:
        """Run the other flow in a thread."""

        def work() -> None:
            try:
                drive(self.flow, link)
            finally:
                self.running.discard(thread)

        # A daemon thread: a hanging server must not keep the process alive.
        thread = threading.Thread(target=work, name="lisa-aside", daemon=True)
        self.running.add(thread)
        try:
            thread.start()
        except RuntimeError:  # the interpreter is shutting down
            self.running.discard(thread)
            return
        thread.join(self.within_s)

    async def arun(self, link: Link) -> None:
        """Run the other flow in a task."""
        task = start_task(adrive(self.flow, link), "lisa-aside")
        self.running.add(task)
        task.add_done_callback(self.running.discard)
        await asyncio.wait({task}, timeout=self.within_s)


def start_task(coroutine: Coroutine[Any, Any, T], name: str | None = None) -> asyncio.Task[T]:
    """A task that begins in the next iteration of the running event loop.

    Under `asyncio.eager_task_factory`, `create_task` runs the first step immediately, before its
    caller can take note of the task.
    """
    return asyncio.Task(coroutine, loop=asyncio.get_running_loop(), name=name)


def any_runs(aside: set[Any]) -> bool:
    """Whether a thread or task of `Aside` runs. A forked child has no threads of its parent."""
    return any(
        not isinstance(runner, threading.Thread) or runner.is_alive() for runner in list(aside)
    )


def drive(flow: Flow[T], link: Any) -> T:
    """Run a flow to completion, blocking. Its steps run on `link`, usually a connection."""
    try:
        step = next(flow)
        while True:
            try:
                result = step.run(link)
            except BaseException as error:  # noqa: BLE001  the flow handles it
                step = flow.throw(error)
            else:
                step = flow.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def adrive(flow: Flow[T], link: Any, replied: Callable[[], None] | None = None) -> T:
    """Run a flow to completion on the running event loop.

    `replied` is called after each step that succeeds, except pauses.
    """
    try:
        step = next(flow)
        while True:
            try:
                result = await step.arun(link)
            except BaseException as error:  # noqa: BLE001  the flow handles it
                step = flow.throw(error)
            else:
                if replied is not None and not isinstance(step, Pause):
                    replied()
                step = flow.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


class Patience:
    """The retry budget of one call: growing pauses until a deadline, and a number of repairs.

    Each pause is random, between half of its nominal length and all of it.
    """

    __slots__ = ("_backoff", "_ends", "_mends")

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds
        self._backoff: Backoff | None = None  # few calls need one
        self._mends = 0

    def again(self) -> Patience:
        """A budget with the same deadline for another call; pauses and repairs start afresh."""
        other = Patience(0)
        other._ends = self._ends
        return other

    def mend(self, error: BaseException, where: str) -> None:
        """Count a repair on the server. Raises the error, as a LisaError, after `MAX_REPAIRS`."""
        self._mends += 1
        if self._mends > MAX_REPAIRS:
            raise errors.translated(error, where)

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self._ends - time.monotonic())

    def next_pause(self, most_s: float = LONGEST_PAUSE_S) -> float | None:
        """Seconds to wait before the next attempt, at most `most_s`; None after the deadline."""
        left = self._ends - time.monotonic()
        if left <= 0:
            return None
        if self._backoff is None:
            self._backoff = Backoff(longest_s=LONGEST_PAUSE_S)
        return min(self._backoff.take(most_s) * random.uniform(0.5, 1.0), left)


def confirmed(call: Command, mark: str, wanted: Replicas, within_s: float) -> Flow[tuple[Any, int]]:
    """The reply to a script call, and how many replicas have its writes.

    Waits for `wanted.count` replicas, and returns this number if the call wrote nothing.

    WAIT counts the replicas that have everything written *on its connection*. A call that is
    repeated after a lost reply writes nothing on its new connection, so a bare WAIT could confirm a
    write that no replica has (as Redis 7.2 and Valkey do; earlier servers count all writes).
    Therefore a dummy write, a key that expires immediately, is sent between the script and WAIT: a
    replica that has it has everything before it. All three are sent together on one connection.

    `mark` is a key on the same node, for the dummy write. Raises errors of the client.
    """
    within_ms = max(1, int(within_s * 1000))  # 0 would block forever
    wait: Command = ("WAIT", wanted.count, within_ms)
    if wanted.fsync:
        wait = ("WAITAOF", 0, wanted.count, within_ms)
    reply, *rest = yield Chain(mark, (call, ("SET", mark, "", "PX", 1), wait))
    if isinstance(reply, Exception):
        raise reply
    if reply[0] != b"OK":
        return reply, wanted.count  # refused or out of date
    for answer in rest:
        if isinstance(answer, Exception):
            raise answer
    waited = rest[-1]
    return reply, waited[1] if wanted.fsync else waited


def lacks_command(error: BaseException) -> bool:
    """Whether the server is too old for WAITAOF."""
    text = str(error).lower()
    return "unknown command" in text and "waitaof" in text


class _Blocking(Protocol):
    def _drive(self, flow: Flow[T]) -> T: ...


class _Awaiting(Protocol):
    async def _drive(self, flow: Flow[T]) -> T: ...


def _show(call: Callable[..., object], method: Callable[..., object]) -> None:
    """Set the signature for `help()`, with the flow's result as return annotation."""
    signature = inspect.signature(method)
    result = str(signature.return_annotation).removeprefix("Flow[").removesuffix("]")
    call.__dict__["__signature__"] = signature.replace(return_annotation=result)


def _of_the_public_call(
    error: TypeError, owner: object, method: Callable[..., object]
) -> TypeError:
    """The error about a call's arguments, with the class that the user called."""
    public = f"{type(owner).__name__}.{method.__name__.removeprefix('_')}()"
    said = str(error).replace(f"{method.__qualname__}()", public)
    return error if said == str(error) else TypeError(said)


def rename_inherited(cls: type, names: Iterable[str]) -> None:
    """Give a public class its own copies of methods that it inherits from an internal one.

    Python's TypeErrors name a function by its qualified name, which would be the internal class's.
    """
    for name in names:
        made = getattr(cls, name)
        if name in vars(cls) or not isinstance(made, FunctionType):  # another, from a mix-in
            continue
        own: Any = FunctionType(
            made.__code__, made.__globals__, name, made.__defaults__, made.__closure__
        )
        functools.update_wrapper(own, made)
        own.__kwdefaults__ = made.__kwdefaults__
        own.__qualname__ = f"{cls.__name__}.{name}"
        setattr(cls, name, own)


def blocking(method: Callable[Concatenate[Any, P], Flow[T]]) -> Callable[Concatenate[Any, P], T]:
    """Turn a method that returns a flow into a blocking method; keeps signature and docstring.

    The object's `_drive` method runs the flow.
    """

    @functools.wraps(method)
    def call(self: _Blocking, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            flow = method(self, *args, **kwargs)
        except TypeError as error:
            raise _of_the_public_call(error, self, method) from None
        return self._drive(flow)

    _show(call, method)
    return call


def awaiting(
    method: Callable[Concatenate[Any, P], Flow[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """Turn a method that returns a flow into a coroutine function."""

    @functools.wraps(method)
    async def call(self: _Awaiting, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            flow = method(self, *args, **kwargs)
        except TypeError as error:
            raise _of_the_public_call(error, self, method) from None
        return await self._drive(flow)

    _show(call, method)
    return call
