"""Calls the handlers of a message or a batch, and gathers what they said.

What is to be awaited is yielded, so that a thread and an event loop run the same lines.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

from lisa.consumer.batches import Batch
from lisa.consumer.handlers import Plan
from lisa.consumer.held import RETURNED_FALSE, Held, Outcome, Verdict, heavier, verdict_of
from lisa.consumer.models import Misfit
from lisa.core.message import Message

__all__ = ["Wait", "arun", "on_batch", "on_message", "on_message_here", "run"]

T = TypeVar("T")
Calls = Generator[Awaitable[Any], Any, T]
Wait = Callable[[Awaitable[Any]], Any]
"""Waits, on a thread, for something that runs on the event loop."""

NOBODY = Verdict("nobody receives this topic's messages any more")


def on_message(plan: Plan, held: Held) -> Calls[Outcome]:
    """Call all receivers, also after one raised."""
    if not plan.receivers:
        return NOBODY
    worst: Outcome = None
    for receiver in plan.receivers:
        try:
            result = receiver.call(held)
            if result is not None and inspect.isawaitable(result):
                result = yield result
            if result is False:
                worst = heavier(worst, RETURNED_FALSE)
        except asyncio.CancelledError as error:
            return verdict_of(error)
        except BaseException as error:  # noqa: BLE001  sys.exit() in a handler is a failure too
            worst = heavier(worst, _judged(error))
    return worst


def on_message_here(plan: Plan, held: Held, wait: Wait) -> Outcome:
    """`on_message` run on a thread; without a generator where there is one receiver, as a rule."""
    if len(plan.receivers) != 1:
        return run(on_message(plan, held), wait)
    try:
        result = plan.receivers[0].call(held)
        if result is None:
            return None
        if inspect.isawaitable(result):
            result = wait(result)
    except BaseException as error:  # noqa: BLE001  as in on_message
        return _judged(error)
    return RETURNED_FALSE if result is False else None


def on_batch(plan: Plan, deliveries: list[Held]) -> Calls[list[Outcome]]:
    """Call the handler of batches once, and before it the receivers of single messages."""
    receiver = plan.batch
    if receiver is None:
        singly: list[Outcome] = []
        for held in deliveries:
            outcome = yield from on_message(plan, held)
            singly.append(outcome)
        return singly
    outcomes: list[Outcome] = [None] * len(deliveries)
    fitting: list[tuple[int, Message]] = []
    for place, held in enumerate(deliveries):
        if plan.receivers:
            outcomes[place] = yield from on_message(plan, held)
        try:
            fitting.append((place, receiver.message(held)))
        except Misfit as error:
            outcomes[place] = heavier(outcomes[place], _misfit(error))
    if fitting:
        batch = Batch([message for _, message in fitting])
        said = yield from _call_batch(receiver.handler, batch)
        for place, message in fitting:
            outcomes[place] = heavier(outcomes[place], batch.verdict(message) or said)
    return outcomes


def _call_batch(handler: Callable[[Batch], Any], batch: Batch) -> Calls[Outcome]:
    try:
        result = handler(batch)
        if result is not None and inspect.isawaitable(result):
            result = yield result
    except BaseException as error:  # noqa: BLE001  as in on_message
        return verdict_of(error)
    return RETURNED_FALSE if result is False else None


def _misfit(error: Misfit) -> Verdict:
    return Verdict(str(error), "discard")


def _judged(error: BaseException) -> Verdict:
    return _misfit(error) if isinstance(error, Misfit) else verdict_of(error)


def run(calls: Calls[T], wait: Wait) -> T:
    """Run calls on a thread; `wait` waits for what an event loop has to do."""
    try:
        step = next(calls)
        while True:
            try:
                result = wait(step)
            except BaseException as error:  # noqa: BLE001  it is the handler's: calls judge it
                step = calls.throw(error)
            else:
                step = calls.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]


async def arun(calls: Calls[T]) -> T:
    """Run calls on the running event loop."""
    try:
        step = next(calls)
        while True:
            try:
                result = await step
            except BaseException as error:  # noqa: BLE001  as in run
                step = calls.throw(error)
            else:
                step = calls.send(result)
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
