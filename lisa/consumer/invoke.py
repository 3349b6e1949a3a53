"""Batches, and the calls of handlers for a message or a batch.

The calls are flows, so that threads and the event loop share the same code. On a thread, the link
of `drive` is a function that waits for an awaitable.
"""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NamedTuple, overload

from lisa.consumer.handlers import BodyMismatch, HandlerPlan
from lisa.consumer.inflight import RETURNED_FALSE, Held, Outcome, Verdict, combined, verdict_of
from lisa.core.model.errors import InvalidMessage
from lisa.core.model.message import Body_co, Message
from lisa.core.model.outcomes import meant_to_be_raised
from lisa.core.redis.flow import Flow, adrive, drive


class Batch(Sequence[Message[Body_co]]):
    """The messages of one call of a batch handler, annotated as in `Batch[Order]`.

    If the handler returns, all messages are acked; if it raises, all are retried. Messages passed
    to `fail` follow their own errors instead.
    """

    def __init__(self, messages: Sequence[Message[Body_co]]) -> None:
        self._messages = messages
        self._failed: dict[str, Verdict] = {}

    @overload
    def __getitem__(self, index: int) -> Message[Body_co]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Message[Body_co]]: ...
    def __getitem__(self, index: int | slice) -> Message[Body_co] | Sequence[Message[Body_co]]:
        return self._messages[index]

    def __len__(self) -> int:
        return len(self._messages)

    def __iter__(self) -> Iterator[Message[Body_co]]:
        return iter(self._messages)

    def __repr__(self) -> str:
        return f"<Batch of {len(self)}, {len(self._failed)} failed>"

    def fail(self, message: Message, error: BaseException | str) -> None:
        """Mark one message as failed, as if the handler had raised `error` for it alone.

        Also for a `Retry`, `Defer` or `Discard`.

        Raises InvalidMessage if the message is not in this batch.
        """
        if not any(one is message for one in self._messages):
            raise InvalidMessage(f"message {message.id!r} is not in this batch")
        self._failed[message.id] = verdict_of(meant_to_be_raised(error) or error)

    def verdict(self, message: Message) -> Verdict | None:
        """The verdict of `fail` on a message, or None."""
        return self._failed.get(message.id)


class Collector:
    """Collects deliveries until a batch is full, or its first delivery has waited `within_s`."""

    def __init__(self, size: int, within_s: float) -> None:
        self.size = size
        self._within_s = within_s
        self._gathered: list[Held] = []
        self._ends = 0.0

    def __len__(self) -> int:
        return len(self._gathered)

    def add(self, deliveries: Sequence[Held]) -> None:
        """Add deliveries, the oldest first."""
        if deliveries and not self._gathered:
            self._ends = time.monotonic() + self._within_s
        self._gathered += deliveries

    def left_s(self) -> float | None:
        """Seconds until the collected deliveries must be handed out; None if there are none."""
        return max(0.0, self._ends - time.monotonic()) if self._gathered else None

    def ready(self) -> list[list[Held]]:
        """Remove and return the batches to hand out now; the last may be incomplete."""
        size, found = self.size, []
        while len(self._gathered) >= size:
            found.append(self._gathered[:size])
            self._gathered = self._gathered[size:]
            self._ends = time.monotonic() + self._within_s
        if self._gathered and time.monotonic() >= self._ends:
            found.append(self.take())
        return found

    def take(self) -> list[Held]:
        """Remove and return all collected deliveries."""
        gathered, self._gathered = self._gathered, []
        return gathered


Wait = Callable[[Awaitable[Any]], Any]
"""Waits on a thread for an awaitable that runs on the event loop."""

NO_RECEIVER = Verdict("this topic no longer has a receiver")
NOT_RUN = Verdict("the handler returned a generator or a coroutine, whose code has not run")


class AwaitResult(NamedTuple):
    """Wait for an awaitable, such as one that a handler returned."""

    awaitable: Awaitable[Any]

    def run(self, wait: Wait) -> Any:
        """The result; `wait` runs the awaitable on an event loop."""
        return wait(self.awaitable)

    def arun(self, _link: object) -> Awaitable[Any]:
        """The awaitable."""
        return self.awaitable


def on_message(plan: HandlerPlan, held: Held) -> Flow[Outcome]:
    """Call all receivers, even after one has raised."""
    if not plan.receivers:
        return NO_RECEIVER
    worst: Outcome = None
    for receiver in plan.receivers:
        try:
            result = receiver.call(held)
            if result is not None and inspect.isawaitable(result):
                result = yield AwaitResult(result)
            worst = combined(worst, _outcome_of(result))
        except asyncio.CancelledError as error:
            return verdict_of(error)
        except BaseException as error:  # noqa: BLE001  sys.exit() in a handler is a failure too
            worst = combined(worst, _judged(error))
    return worst


def on_message_sync(plan: HandlerPlan, held: Held, wait: Wait) -> Outcome:
    """Run `on_message` on a thread; the common case of one receiver needs no generator."""
    if len(plan.receivers) != 1:
        return drive(on_message(plan, held), wait)
    try:
        result = plan.receivers[0].call(held)
        if result is None:
            return None
        if inspect.isawaitable(result):
            result = wait(result)
    except BaseException as error:  # noqa: BLE001  as in on_message
        return _judged(error)
    return _outcome_of(result)


async def on_message_async(plan: HandlerPlan, held: Held) -> Outcome:
    """Run `on_message` on an event loop; the common case of one receiver needs no generator."""
    if len(plan.receivers) != 1:
        return await adrive(on_message(plan, held), None)
    try:
        result = plan.receivers[0].call(held)
        if result is not None and inspect.isawaitable(result):
            result = await result
    except asyncio.CancelledError as error:
        return verdict_of(error)
    except BaseException as error:  # noqa: BLE001  as in on_message
        return _judged(error)
    return _outcome_of(result)


def on_batch(plan: HandlerPlan, deliveries: list[Held]) -> Flow[list[Outcome]]:
    """Call the receivers of single messages, then the batch handler once.

    Once the batch is cancelled, what was not called yet is not called.
    """
    receiver = plan.batch
    outcomes: list[Outcome] = [None] * len(deliveries)
    fitting: list[tuple[int, Message]] = []
    for index, held in enumerate(deliveries):
        if receiver is None or plan.receivers:
            outcome = outcomes[index] = yield from on_message(plan, held)
            if _is_cancelled(outcome, deliveries):
                done = index if receiver is None else 0
                return [*outcomes[:done], *(one or outcome for one in outcomes[done:])]
        if receiver is None:
            continue
        try:
            fitting.append((index, receiver.message(held)))
        except Exception as error:  # noqa: BLE001  a model's validators may raise anything
            outcomes[index] = combined(outcomes[index], _judged(error))
    if receiver is not None and fitting:
        batch = Batch([message for _, message in fitting])
        said = yield from _call_batch(receiver.run, batch)
        for index, message in fitting:
            outcomes[index] = combined(outcomes[index], batch.verdict(message) or said)
    return outcomes


def _is_cancelled(outcome: Outcome, deliveries: list[Held]) -> bool:
    """Whether the consumer cancelled a batch; a receiver may also raise CancelledError itself."""
    is_cancelled = outcome is not None and isinstance(outcome.error, asyncio.CancelledError)
    return is_cancelled and any(one.overdue or one.ended for one in deliveries)


def _call_batch(handler: Callable[[Batch], Any], batch: Batch) -> Flow[Outcome]:
    try:
        result = handler(batch)
        if result is not None and inspect.isawaitable(result):
            result = yield AwaitResult(result)
    except BaseException as error:  # noqa: BLE001  as in on_message
        return verdict_of(error)
    return _outcome_of(result)


def _outcome_of(result: object) -> Outcome:
    """The outcome of a handler that returned."""
    if result is None:
        return None
    if isinstance(result, (GeneratorType, AsyncGeneratorType, CoroutineType)):
        return NOT_RUN
    if (error := meant_to_be_raised(result)) is not None:
        return verdict_of(error)
    return RETURNED_FALSE if result is False else None


def _judged(error: BaseException) -> Verdict:
    is_mismatch = isinstance(error, BodyMismatch)
    return Verdict(str(error), "discard") if is_mismatch else verdict_of(error)
