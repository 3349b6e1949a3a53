"""The handlers of a topic: receivers of `message_received`, and batch handlers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
from blinker import Signal

from lisa.consumer.inflight import Held
from lisa.consumer.models import Reader, reader_for
from lisa.core.model.clock import parse_duration
from lisa.core.model.envelope import decode_envelope
from lisa.core.model.errors import ConfigError
from lisa.core.model.keys import check_group, check_topic
from lisa.core.model.message import Message
from lisa.core.model.retry_policy import RetryPolicy
from lisa.core.model.signals import Signals, everywhere

DEFAULT_TIMEOUT = timedelta(hours=1)
LARGEST_BATCH = 10_000
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

    def __post_init__(self) -> None:
        self.is_async = _is_async(self.handler)

    def __call__(self, _topic: str, *, message: Message) -> Any:
        """Called by blinker, with the topic as the sender."""
        return self.handler(message)

    def call(self, held: Held) -> Any:
        """Call the handler, with the body decoded as the model. Raises what the handler raises."""
        if self.read is None:
            return self.handler(held.message)
        return self.handler(self.message(held))

    def message(self, held: Held) -> Message:
        """The message with its body decoded as the model.

        Raises BodyMismatch if the body does not match.
        """
        if self.read is None:
            return held.message
        return msgspec.structs.replace(held.message, body=self.read(decode_envelope(held.data)))


@dataclass(eq=False, slots=True)
class _Listener:
    """A receiver that user code connected to a signal: `f(topic, *, message)`."""

    function: Callable[..., Any]
    timeout_s: None = None

    @property
    def is_async(self) -> bool:
        return _is_async(self.function)

    def call(self, held: Held) -> Any:
        return self.function(held.message.topic, message=held.message)


class HandlerPlan(NamedTuple):
    """The current handlers of a topic: single-message receivers and at most one batch handler."""

    receivers: tuple[Receiver | _Listener, ...]
    batch: Receiver | None

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
        _check_signature(topic, handler, "message" if batch is None else "batch")
        receiver = Receiver(
            handler,
            read=None if model is None else reader_for(model),
            batch=_batch_size(topic, batch, within),
            within_s=_seconds(topic, "within", within) or 0.0,
            timeout_s=_seconds(topic, "timeout", timeout),
            retry=None if retry is None else _retry_policy(topic, retry),
            concurrency=_checked_concurrency(topic, concurrency),
            group="" if group is None else check_group(group),
        )
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
            tuple(one if isinstance(one, Receiver) else _Listener(one) for one in heard),
            self.batch(topic, wanted),
        )


def _senders(signal: Signal) -> Iterator[str]:
    # blinker has no public list of senders; it uses a string sender as its own key.
    for sender, receivers in list(signal._by_sender.items()):  # noqa: SLF001
        if isinstance(sender, str) and receivers:
            yield sender


def handler_name(function: Callable[..., Any]) -> str:
    """A handler's name for log lines and errors, such as `shop.handlers.cancel_unpaid`."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return ".".join(filter(None, (named.__module__, named.__qualname__)))


def _check_signature(topic: str, handler: object, argument: str) -> None:
    """Raise ConfigError if a handler is not callable with one positional argument."""
    if not callable(handler):
        raise ConfigError(f"the handler of topic {topic!r} is not callable: {handler!r}")
    try:
        # The wrapper's own signature: a decorator may pass further arguments to what it wraps.
        signature = inspect.signature(handler, follow_wrapped=False)
    except (ValueError, TypeError, NameError):  # a builtin, or annotations that do not exist
        return
    try:
        signature.bind(argument)
    except TypeError as error:
        name = handler_name(handler)
        raise ConfigError(
            f"topic {topic!r}: the handler {name} must take one positional argument, the "
            f"{argument}: {error}; define it as {name.rpartition('.')[2]}({argument}), and give "
            "other arguments defaults or bind them with functools.partial"
        ) from None


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  checks for a coroutine function
    )


def _batch_size(topic: str, batch: int | None, within: object) -> int | None:
    if batch is None:
        if within is not None:
            raise ConfigError(f"topic {topic!r}: within= needs batch=")
        return None
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= LARGEST_BATCH:
        raise ConfigError(f"topic {topic!r}: batch={batch!r} must be from 1 to {LARGEST_BATCH}")
    return batch


def _retry_policy(topic: str, value: object) -> RetryPolicy:
    try:
        return RetryPolicy.parse(value)
    except ValueError as error:
        raise ConfigError(f"topic {topic!r}: retry: {error}") from None


def _checked_concurrency(topic: str, value: int | None) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigError(f"topic {topic!r}: concurrency={value!r} must be a number from 1")
    return value


def _seconds(topic: str, name: str, value: timedelta | str | None) -> float | None:
    if value is None:
        return None
    try:
        seconds = parse_duration(value).total_seconds()
    except ValueError as error:
        raise ConfigError(f"topic {topic!r}: {name}: {error}") from None
    if name == "timeout" and seconds == 0:
        raise ConfigError(f"topic {topic!r}: timeout must be above 0")
    return seconds
