"""How handlers and signal receivers are registered with a consumer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypedDict, TypeVar, Unpack, overload

from blinker import Signal

from lisa.consumer.batches import Batch
from lisa.consumer.handlers import Handlers
from lisa.core.model.errors import ConfigError
from lisa.core.model.message import Message
from lisa.core.model.retry_policy import RetryPolicy

H = TypeVar("H", bound=Callable[..., Any])
M = TypeVar("M")
R = TypeVar("R")


class HandlerOptions(TypedDict, total=False):
    """The options of `on` and `subscribe`, besides `model` and `batch`."""

    within: timedelta | str | None
    timeout: timedelta | str | None
    retry: RetryPolicy | str | Sequence[timedelta | str] | None
    concurrency: int | None
    group: str | None


class Registration:
    """The part of `Consumer` that takes handlers and receivers."""

    _new_handlers = Handlers

    def __init__(self) -> None:
        self._handlers = self._new_handlers()

    @property
    def message_received(self) -> Signal:
        """Fired for each delivered message; its receivers handle the message."""
        return self._handlers.signals.received

    @property
    def message_acked(self) -> Signal:
        """Fired when Redis has confirmed the ack of a message."""
        return self._handlers.signals.acked

    @property
    def message_retrying(self) -> Signal:
        """Fired when a message failed and will be retried."""
        return self._handlers.signals.retrying

    @property
    def message_dead(self) -> Signal:
        """Fired when a message becomes a dead letter."""
        return self._handlers.signals.dead

    @property
    def message_expired(self) -> Signal:
        """Fired when a message is past its ttl and will not be handled."""
        return self._handlers.signals.expired

    def _registered(self, topic: str) -> None:
        """Called after a handler of a topic was added."""

    @overload
    def on(
        self,
        topic: str,
        *,
        model: type[M],
        batch: None = None,
        **options: Unpack[HandlerOptions],
    ) -> Callable[[Callable[[Message[M]], R]], Callable[[Message[M]], R]]: ...
    @overload
    def on(
        self, topic: str, *, model: type[M], batch: int, **options: Unpack[HandlerOptions]
    ) -> Callable[[Callable[[Batch[M]], R]], Callable[[Batch[M]], R]]: ...
    @overload
    def on(
        self,
        topic: str,
        handler: None = None,
        *,
        model: Any = None,
        batch: int | None = None,
        **options: Unpack[HandlerOptions],
    ) -> Callable[[H], H]: ...
    @overload
    def on(
        self,
        topic: str,
        handler: H,
        *,
        model: Any = None,
        batch: int | None = None,
        **options: Unpack[HandlerOptions],
    ) -> H: ...
    def on(
        self,
        topic: str,
        handler: Any = None,
        *,
        model: Any = None,
        batch: int | None = None,
        within: timedelta | str | None = None,
        timeout: timedelta | str | None = None,
        retry: RetryPolicy | str | Sequence[timedelta | str] | None = None,
        concurrency: int | None = None,
        group: str | None = None,
    ) -> Any:
        """Register a handler of a topic, as a decorator or by a call with the handler.

        A running consumer starts to read the topic. So does one whose block was entered without
        handlers: it starts with the first one.

        model: type of the body (msgspec Struct, dataclass, TypedDict, pydantic model). A message
            whose body does not match becomes a dead letter, with the reason.
        batch: call the handler with a `Batch` of up to this many messages.
        within: how long the first message of a batch waits for others; 0 by default.
        timeout: how long a handler may run; after that, its lease expires and the message
            is retried; 1 h by default.
        retry: the pauses after failures, as a `RetryPolicy`, text such as `"1s,10s,1m"` or a
            sequence; by default those of the message or the topic, which in any case limit the
            number of attempts. `Retry(delay=)` takes precedence.

        concurrency: the most handlers of this topic that run at the same time; at most the
            consumer's, which is the default. Given before the consumer reads the topic.
        group: the group whose messages the handler takes, declared if missing; by default those of
            the consumer's group. Several groups of one topic may have handlers.

        The handlers of one topic and group share `retry` and `concurrency`: giving two values is a
        ConfigError. The handler takes one positional argument and may be `async def`. The consumer
        keeps a strong reference. Raises ConfigError if an option or the handler's signature is
        invalid.
        """
        if callable(topic):  # `@consumer.on` without a call would register nothing
            raise ConfigError("a handler's topic is missing; write @consumer.on('TOPIC')")

        def take(function: H) -> H:
            self._handlers.add(
                topic,
                function,
                model=model,
                batch=batch,
                within=within,
                timeout=timeout,
                retry=retry,
                concurrency=concurrency,
                group=group,
            )
            self._registered(topic)
            return function

        return take if handler is None else take(handler)
