"""The base class of middleware for producers and consumers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from lisa.core.model.middleware import BaseMiddleware, passes_on

if TYPE_CHECKING:
    from lisa.consumer import Batch, Settled
    from lisa.core.model.message import Message
    from lisa.producer import SendCall, SendOutcome


class Middleware(BaseMiddleware):
    """Code around each send of a producer, and around each handler of a consumer.

    Define the methods that you need. Each gets the next step of the chain as `call_next`, calls it
    or raises, and returns its result, changed or not. The first middleware of a list is the
    outermost. Methods run on the threads and tasks that send or handle, also concurrently.

    A `Producer` needs `send` and an `AsyncProducer` needs `send_async`; a handler needs `handle`,
    or `handle_async` if it is `async def`; a batch handler needs `handle_batch` or
    `handle_batch_async`. Middleware that has only other forms is refused (ConfigError) when the
    producer is created or the handler registered. Middleware without any form of `send` does
    nothing in producers; without any form of `handle` it does nothing in consumers.
    """

    @passes_on
    def send(
        self, call: SendCall, call_next: Callable[[SendCall], Sequence[SendOutcome]]
    ) -> Sequence[SendOutcome]:
        """Run around a send. Returns one outcome for each message, in order.

        An error raised here becomes the error of the send.
        """
        return call_next(call)

    @passes_on
    async def send_async(
        self, call: SendCall, call_next: Callable[[SendCall], Awaitable[Sequence[SendOutcome]]]
    ) -> Sequence[SendOutcome]:
        """Asynchronous version of `send`."""
        return await call_next(call)

    @passes_on
    def handle(self, message: Message, call_next: Callable[[Message], Any]) -> Any:
        """Run around one call of a handler. Returns the handler's result.

        An error raised here counts as a failure of the handler: the message is retried, or treated
        as a `Retry`, `Defer` or `Discard` says. Returning without `call_next` skips the handler.
        """
        return call_next(message)

    @passes_on
    async def handle_async(
        self, message: Message, call_next: Callable[[Message], Awaitable[Any]]
    ) -> Any:
        """Asynchronous version of `handle`, for `async def` handlers."""
        return await call_next(message)

    @passes_on
    def handle_batch(self, batch: Batch, call_next: Callable[[Batch], Any]) -> Any:
        """Run around one call of a batch handler, like `handle`. Pass on the same batch."""
        return call_next(batch)

    @passes_on
    async def handle_batch_async(
        self, batch: Batch, call_next: Callable[[Batch], Awaitable[Any]]
    ) -> Any:
        """Asynchronous version of `handle_batch`."""
        return await call_next(batch)

    @passes_on
    def settled(self, settled: Settled) -> None:
        """Run after each call that settles messages of handlers, on one of Lisa's threads.

        Keep it short. Errors are logged and ignored.
        """
