"""Call the handlers of a message or a batch, and collect their outcomes.

The calls are flows, so that threads and the event loop share the same code. On a thread, the link
of `drive` is a function that waits for an awaitable.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, NamedTuple

from lisa.consumer.batches import Batch
from lisa.consumer.inflight import RETURNED_FALSE, Held, Outcome, Verdict, combined, verdict_of
from lisa.consumer.models import BodyMismatch
from lisa.consumer.receivers import HandlerPlan
from lisa.core.model.message import Message
from lisa.core.model.outcomes import meant_to_be_raised
from lisa.core.redis.flow import Flow, adrive, drive

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
