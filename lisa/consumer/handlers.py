"""Who handles a topic: the receivers of `message_received`, and handlers of batches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, NamedTuple

import msgspec
from blinker import Signal

from lisa.consumer.held import Held
from lisa.consumer.models import Reader, reader_for
from lisa.core.clock import parse_duration
from lisa.core.envelope import decode_envelope
from lisa.core.errors import ConfigError
from lisa.core.keys import check_topic
from lisa.core.message import Message
from lisa.core.signals import Signals, everywhere

__all__ = ["DEFAULT_TIMEOUT", "Handler", "Handlers", "Plan", "Receiver"]

DEFAULT_TIMEOUT = timedelta(hours=1)
LARGEST_BATCH = 10_000

Handler = Callable[[Any], Any]
"""Takes a `Message` (or a `Batch`); may be `async def`."""


class Receiver:
    """A one-argument handler of one topic with its options; to blinker, a receiver like others."""

    __slots__ = ("batch", "handler", "is_async", "read", "timeout_s", "within_s")

    def __init__(
        self,
        handler: Handler,
        *,
        read: Reader | None = None,
        batch: int | None = None,
        within_s: float = 0.0,
        timeout_s: float | None = None,
    ) -> None:
        self.handler = handler
        self.is_async = _is_async(handler)
        self.read = read
        self.batch = batch
        self.within_s = within_s
        self.timeout_s = timeout_s

    def __call__(self, _topic: str, *, message: Message) -> Any:
        """As blinker calls it: the sender is the topic."""
        return self.handler(message)

    def call(self, held: Held) -> Any:
        """Hand the message over, its body read as the model. Raises what the handler raises."""
        if self.read is None:
            return self.handler(held.message)
        return self.handler(self.message(held))

    def message(self, held: Held) -> Message:
        """The message as this handler wants it. Raises Misfit if the body does not fit."""
        if self.read is None:
            return held.message
        return msgspec.structs.replace(held.message, body=self.read(decode_envelope(held.data)))


class _Listener:
    """A receiver that was connected to a signal by hand: `f(topic, *, message)`."""

    __slots__ = ("function", "is_async", "timeout_s")

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.is_async = _is_async(function)
        self.timeout_s: float | None = None

    def call(self, held: Held) -> Any:
        return self.function(held.message.topic, message=held.message)


class Plan(NamedTuple):
    """Who is called for a topic's messages just now."""

    receivers: tuple[Receiver | _Listener, ...]
    batch: Receiver | None

    @property
    def is_empty(self) -> bool:
        """Whether nobody would hear a message."""
        return not self.receivers and self.batch is None

    @property
    def is_async(self) -> bool:
        """Whether all of them are `async def`, so that no thread is needed."""
        every = (*self.receivers, self.batch) if self.batch else self.receivers
        return bool(every) and all(one.is_async for one in every)

    @property
    def timeout_s(self) -> float:
        """After how long a hanging handler loses its lease: the shortest that was asked for."""
        every = (*self.receivers, self.batch) if self.batch else self.receivers
        asked = [one.timeout_s for one in every if one.timeout_s is not None]
        return min(asked, default=DEFAULT_TIMEOUT.total_seconds())


class Handlers:
    """A consumer's own signals and handlers, beside the module-wide signals."""

    def __init__(self) -> None:
        self.signals = Signals()
        self._own: dict[str, list[Receiver]] = {}
        self._batches: dict[str, Receiver] = {}

    def add(
        self,
        topic: str,
        handler: Handler,
        *,
        model: Any = None,
        batch: int | None = None,
        within: timedelta | str | None = None,
        timeout: timedelta | str | None = None,
    ) -> None:
        """Hold a handler of a topic. Raises ConfigError, InvalidMessage."""
        check_topic(topic)
        if not callable(handler):
            raise ConfigError(f"the handler of topic {topic!r} is not callable: {handler!r}")
        receiver = Receiver(
            handler,
            read=None if model is None else reader_for(model),
            batch=_batch_size(topic, batch, within),
            within_s=_seconds(topic, "within", within) or 0.0,
            timeout_s=_seconds(topic, "timeout", timeout),
        )
        if receiver.batch is None:
            self._own.setdefault(topic, []).append(receiver)
            self.signals.received.connect(receiver, sender=topic, weak=False)
        elif topic in self._batches:
            raise ConfigError(f"topic {topic!r} has a handler of batches already; one is allowed")
        else:
            self._batches[topic] = receiver

    def remove(self, topic: str) -> None:
        """Let go of the handlers that `add` took for a topic."""
        self._batches.pop(topic, None)
        for receiver in self._own.pop(topic, []):
            self.signals.received.disconnect(receiver, sender=topic)

    def topics(self) -> list[str]:
        """The topics that this consumer's own handlers name."""
        return sorted({*self._batches, *_senders(self.signals.received)})

    def module_topics(self) -> list[str]:
        """The topics that module-wide receivers name."""
        return sorted(_senders(everywhere.received))

    def batch(self, topic: str) -> Receiver | None:
        """The handler of batches, if a topic has one."""
        return self._batches.get(topic)

    def plan(self, topic: str) -> Plan:
        """Who is called for a topic's messages just now; weak receivers that went are left out."""
        heard = (*self.signals.received.receivers_for(topic),
                 *everywhere.received.receivers_for(topic))  # fmt: skip
        return Plan(
            tuple(one if isinstance(one, Receiver) else _Listener(one) for one in heard),
            self._batches.get(topic),
        )


def _senders(signal: Signal) -> Iterator[str]:
    # blinker keeps no public list of senders; a string sender is its own key there.
    for sender, receivers in list(signal._by_sender.items()):  # noqa: SLF001
        if isinstance(sender, str) and receivers:
            yield sender


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  its kind is asked for, not whether
    )


def _batch_size(topic: str, batch: int | None, within: object) -> int | None:
    if batch is None:
        if within is not None:
            raise ConfigError(f"topic {topic!r}: within= needs batch=")
        return None
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= LARGEST_BATCH:
        raise ConfigError(f"topic {topic!r}: batch={batch!r} is not from 1 to {LARGEST_BATCH}")
    return batch


def _seconds(topic: str, name: str, value: timedelta | str | None) -> float | None:
    if value is None:
        return None
    try:
        seconds = parse_duration(value).total_seconds()
    except ValueError as error:
        raise ConfigError(f"topic {topic!r}: {name}: {error}") from None
    if name == "timeout" and seconds == 0:
        raise ConfigError(f"topic {topic!r}: a timeout of 0 would end every handler at once")
    return seconds
