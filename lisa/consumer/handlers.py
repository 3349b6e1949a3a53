"""The handlers of a topic: receivers of `message_received`, and batch handlers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
from blinker import Signal

from lisa.consumer.handler_checks import (
    check_signature,
    checked_batch,
    checked_concurrency,
    checked_retry,
    checked_seconds,
    is_async_handler,
)
from lisa.consumer.inflight import Held
from lisa.consumer.models import Reader, reader_for
from lisa.core.model.callables import function_name
from lisa.core.model.envelope import decode_envelope
from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import check_group, check_topic
from lisa.core.model.message import Message
from lisa.core.model.middleware import HANDLE, BaseMiddleware, chain, methods
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.model.signals import Signals, everywhere

DEFAULT_TIMEOUT = timedelta(hours=1)
SHARED_OPTIONS = ("retry", "concurrency")
"""Options that apply to the messages of a topic, so its handlers cannot give different values."""

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
class _Listener:
    """A receiver that user code connected to a signal: `f(topic, *, message)`.

    error: why middleware cannot be called around it. Then each call raises it.
    """

    function: Callable[..., Any]
    run: Handler | None = None
    error: ConfigError | None = None
    timeout_s: None = None

    @classmethod
    def of(cls, function: Callable[..., Any], middleware: Sequence[BaseMiddleware]) -> _Listener:
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
        return is_async_handler(self.function)

    def call(self, held: Held) -> Any:
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

    receivers: tuple[Receiver | _Listener, ...]
    batch: Receiver | None

    def check(self) -> None:
        """Raise ConfigError if a receiver lacks a method of the middleware.

        Receivers may also be connected later. Their messages then fail with this error.
        """
        for one in self.receivers:
            if isinstance(one, _Listener) and one.error is not None:
                raise one.error

    @property
    def is_empty(self) -> bool:
        """Whether the topic has no handler."""
        return not self.receivers and self.batch is None

    @property
    def is_async(self) -> bool:
        """Whether all handlers are `async def`, so that no thread is needed."""
        every = (*self.receivers, self.batch) if self.batch else self.receivers
        return bool(every) and all(one.is_async for one in every)

    @property
    def timeout_s(self) -> float:
        """The shortest timeout of all handlers in seconds; 1 h if none has a timeout."""
        every = (*self.receivers, self.batch) if self.batch else self.receivers
        asked = [one.timeout_s for one in every if one.timeout_s is not None]
        return min(asked, default=DEFAULT_TIMEOUT.total_seconds())


class Handlers:
    """A consumer's own signals and handlers; the module-wide signals are used in addition."""

    def __init__(self) -> None:
        self.signals = Signals()
        self._own: dict[str, list[Receiver]] = {}
        self._batches: dict[tuple[str, str], Receiver] = {}
        self._named: set[tuple[str, str]] = set()
        """Topics with the groups that a handler names."""
        self.middleware: Sequence[BaseMiddleware] = ()

    def use(self, middleware: Sequence[BaseMiddleware]) -> None:
        """Call all handlers through middleware. Raises ConfigError if a method is missing."""
        self.middleware = middleware
        for receiver in itertools.chain(*self._own.values(), self._batches.values()):
            receiver.use(middleware)

    def add(
        self,
        topic: str,
        handler: Handler,
        *,
        model: Any = None,
        batch: int | None = None,
        within: timedelta | str | None = None,
        timeout: timedelta | str | None = None,
        retry: object = None,
        concurrency: int | None = None,
        group: str | None = None,
    ) -> None:
        """Register a handler of a topic.

        Raises ConfigError if an option or the handler's signature is invalid, and InvalidMessage if
        the topic name is.
        """
        check_topic(topic)
        check_signature(topic, handler, "message" if batch is None else "batch")
        receiver = Receiver(
            handler,
            read=None if model is None else reader_for(model),
            batch=checked_batch(topic, batch, within),
            within_s=checked_seconds(topic, "within", within) or 0.0,
            timeout_s=checked_seconds(topic, "timeout", timeout),
            retry=None if retry is None else checked_retry(topic, retry),
            concurrency=checked_concurrency(topic, concurrency),
            group="" if group is None else check_group(group),
        )
        receiver.use(self.middleware)
        for name in SHARED_OPTIONS:
            self._check_shared(topic, receiver.group, name, getattr(receiver, name))
        where = topic, receiver.group
        if receiver.batch is None:
            self._own.setdefault(topic, []).append(receiver)
            self.signals.received.connect(receiver, sender=topic, weak=False)
        elif where in self._batches:
            raise ConfigError(f"topic {topic!r} already has a batch handler; only one is allowed")
        else:
            self._batches[where] = receiver
        if receiver.group:
            self._named.add(where)

    def remove(self, topic: str) -> None:
        """Remove the handlers of a topic that `add` registered."""
        self._batches = {where: one for where, one in self._batches.items() if where[0] != topic}
        self._named = {where for where in self._named if where[0] != topic}
        for receiver in self._own.pop(topic, []):
            self.signals.received.disconnect(receiver, sender=topic)

    def topics(self) -> list[str]:
        """The topics of this consumer's own handlers, sorted by name."""
        batches = {topic for topic, _ in self._batches}
        return sorted(batches.union(_senders(self.signals.received)))

    def groups(self, topic: str) -> list[str]:
        """The groups that handlers of a topic name, sorted."""
        return sorted(group for named, group in self._named if named == topic)

    def has_without_group(self, topic: str) -> bool:
        """Whether a handler of the topic names no group."""
        own = self._own.get(topic, ())
        return (topic, "") in self._batches or any(not one.group for one in own)

    def module_topics(self) -> list[str]:
        """The topics of module-wide receivers, sorted by name."""
        return sorted(_senders(everywhere.received))

    def _scope(self, topic: str, wanted: str) -> str:
        """The group that its handlers name, or "" for that of handlers that name none."""
        return wanted if (topic, wanted) in self._named else ""

    def batch(self, topic: str, wanted: str = "") -> Receiver | None:
        """The batch handler of a topic for a requested group, or None."""
        return self._batches.get((topic, self._scope(topic, wanted)))

    def option(self, topic: str, wanted: str, name: str) -> Any:
        """The value of one of `SHARED_OPTIONS` that a handler gives, or None."""
        scope = self._scope(topic, wanted)
        own = [one for one in self._own.get(topic, ()) if one.group == scope]
        every = [*own, *filter(None, [self._batches.get((topic, scope))])]
        return next((value for one in every if (value := getattr(one, name)) is not None), None)

    def _check_shared(self, topic: str, group: str, name: str, value: object) -> None:
        known = self.option(topic, group, name)
        if None not in (known, value) and known != value:
            raise ConfigError(
                f"topic {topic!r}: another handler has a different {name}=; one value applies to "
                "all handlers of a topic"
            )

    def plan(self, topic: str, wanted: str = "") -> HandlerPlan:
        """The current handlers of a topic for a requested group, or "".

        Weakly connected receivers may have disappeared.
        """
        heard: Iterable[Any] = (
            *self.signals.received.receivers_for(topic),
            *everywhere.received.receivers_for(topic),
        )
        if self._named:
            scope = self._scope(topic, wanted)
            heard = [one for one in heard if not isinstance(one, Receiver) or one.group == scope]
        return HandlerPlan(
            tuple(
                one if isinstance(one, Receiver) else _Listener.of(one, self.middleware)
                for one in heard
            ),
            self.batch(topic, wanted),
        )


def _senders(signal: Signal) -> Iterator[str]:
    # blinker has no public list of senders; it uses a string sender as its own key.
    for sender, receivers in list(signal._by_sender.items()):  # noqa: SLF001
        if isinstance(sender, str) and receivers:
            yield sender
