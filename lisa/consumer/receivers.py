"""Handlers and receivers of blinker signals, to which a topic's messages are handed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec

from lisa.consumer.handler_checks import is_async_handler
from lisa.consumer.inflight import Held
from lisa.consumer.models import Reader
from lisa.core.model.callables import function_name
from lisa.core.model.envelope import decode_envelope
from lisa.core.model.errors import ConfigError
from lisa.core.model.message import Message
from lisa.core.model.middleware import HANDLE, BaseMiddleware, chain, methods
from lisa.core.model.retry_policy import RetryPolicy

DEFAULT_TIMEOUT = timedelta(hours=1)

Handler = Callable[[Any], Any]
"""Takes a `Message`, or a `Batch` for a batch handler; may be `async def`."""


@dataclass(eq=False, slots=True)
class Receiver:
    """A one-argument handler of one topic with its options, connected to blinker as a receiver."""

    handler: Handler
    read: Reader | None = None
    batch: int | None = None
    within_s: float = 0.0
    timeout_s: float | None = None
    retry: RetryPolicy | None = None
    concurrency: int | None = None
    group: str = ""
    is_async: bool = field(init=False)
    run: Handler = field(init=False)
    """Calls the handler through the middleware."""

    def __post_init__(self) -> None:
        self.is_async = is_async_handler(self.handler)
        self.run = self.handler

    def use(self, middleware: Sequence[BaseMiddleware]) -> None:
        """Call the handler through middleware. Raises ConfigError if a method is missing."""
        in_batches = self.batch is not None
        self.run = _through(middleware, self.handler, self.handler, in_batches=in_batches)

    def __call__(self, _topic: str, *, message: Message) -> Any:
        """Called by blinker, with the topic as the sender."""
        return self.run(message)

    def call(self, held: Held) -> Any:
        """Call the handler, with the body decoded as the model. Raises what the handler raises."""
        if self.read is None:
            return self.run(held.message)
        return self.run(self.message(held))

    def message(self, held: Held) -> Message:
        """The message with its body decoded as the model.

        Raises BodyMismatch if the body does not match.
        """
        if self.read is None:
            return held.message
        return msgspec.structs.replace(held.message, body=self.read(decode_envelope(held.data)))


@dataclass(eq=False, slots=True)
class Listener:
    """A receiver that user code connected to a signal: `f(topic, *, message)`.

    error: why middleware cannot be called around it. Then each call raises it.
    """

    function: Callable[..., Any]
    run: Handler | None = None
    error: ConfigError | None = None
    timeout_s: None = None

    @classmethod
    def of(cls, function: Callable[..., Any], middleware: Sequence[BaseMiddleware]) -> Listener:
        """A listener whose function is called through middleware."""
        if not middleware:
            return cls(function)

        def call(message: Message) -> Any:
            return function(message.topic, message=message)

        try:
            return cls(function, _through(middleware, function, call))
        except ConfigError as error:
            return cls(function, error=error)

    @property
    def is_async(self) -> bool:
        """Whether the function is `async def`."""
        return is_async_handler(self.function)

    def call(self, held: Held) -> Any:
        """Call the function. Raises what it raises."""
        if self.error is not None:
            raise self.error
        if self.run is None:
            return self.function(held.message.topic, message=held.message)
        return self.run(held.message)


def _through(
    middleware: Sequence[BaseMiddleware],
    handler: Handler,
    call: Handler,
    *,
    in_batches: bool = False,
) -> Handler:
    """A function that makes a call of a handler through middleware. Raises ConfigError."""
    if not middleware:
        return call
    form = "handle_batch" if in_batches else "handle"
    if is_async_handler(handler):
        form += "_async"
    user = f"the handler {function_name(handler)}"
    return chain(methods(middleware, HANDLE, form, user), call)


class HandlerPlan(NamedTuple):
    """The current handlers of a topic: single-message receivers and at most one batch handler."""

    receivers: tuple[Receiver | Listener, ...]
    batch: Receiver | None

    def check(self) -> None:
        """Raise ConfigError if a receiver lacks a method of the middleware.

        Receivers may also be connected later. Their messages then fail with this error.
        """
        for one in self.receivers:
            if isinstance(one, Listener) and one.error is not None:
                raise one.error

    @property
    def names(self) -> list[str]:
        """The names of the handlers, with their modules."""
        functions = [
            one.handler if isinstance(one, Receiver) else one.function for one in self._all
        ]
        return [f"{one.__module__}.{function_name(one)}" for one in functions]

    @property
    def is_empty(self) -> bool:
        """Whether the topic has no handler."""
        return not self._all

    @property
    def _all(self) -> tuple[Receiver | Listener, ...]:
        return (*self.receivers, self.batch) if self.batch else self.receivers

    @property
    def is_async(self) -> bool:
        """Whether all handlers are `async def`, so that no thread is needed."""
        every = self._all
        return bool(every) and all(one.is_async for one in every)

    @property
    def timeout_s(self) -> float:
        """The shortest timeout of all handlers in seconds; 1 h if none has a timeout."""
        asked = [one.timeout_s for one in self._all if one.timeout_s is not None]
        return min(asked, default=DEFAULT_TIMEOUT.total_seconds())
