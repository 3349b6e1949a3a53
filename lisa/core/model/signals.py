"""The blinker signals that consumers and managers fire.

The sender is the topic, a string, which matches by value. Receivers are called as
`f(topic, *, message)`. Each consumer also has its own set of the five signals.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from blinker import ANY, Signal

from lisa.core.model.callables import call_error, check_runs, function_name
from lisa.core.model.errors import ConfigError
from lisa.core.model.message import Message

F = TypeVar("F", bound=Callable[..., Any])


class MessageSignal(Signal):
    """A signal whose receivers are called as `f(topic, *, message)`."""

    def connect(self, receiver: F, sender: Any = ANY, weak: bool = True) -> F:  # noqa: FBT001, FBT002  as in blinker
        """Connect a receiver. Raises ConfigError unless it takes the topic and `message`.

        Raises it for a generator function, too.
        """
        if not callable(receiver):
            raise ConfigError(f"the receiver of a signal is not callable: {receiver!r}")
        if error := call_error(receiver, "topic", message=None):
            name = function_name(receiver)
            raise ConfigError(
                f"the receiver {name} of a signal must take the topic and the message: {error}; "
                f"define it as {name.rpartition('.')[2]}(topic, *, message)"
            )
        check_runs(receiver)
        return super().connect(receiver, sender, weak)


class Signals:
    """A set of the five signals."""

    __slots__ = ("acked", "dead", "expired", "received", "retrying")

    def __init__(self) -> None:
        self.received = MessageSignal("A message was delivered to a handler.")
        self.acked = MessageSignal("Redis confirmed that a message is settled.")
        self.retrying = MessageSignal("A message failed and will be tried again.")
        self.dead = MessageSignal("A message moved to garbage.")
        self.expired = MessageSignal("A message exceeded its ttl, or was skipped as too late.")


everywhere = Signals()
message_received = everywhere.received
message_acked = everywhere.acked
message_retrying = everywhere.retrying
message_dead = everywhere.dead
message_expired = everywhere.expired


def call_receivers(
    signals: Iterable[Signal],
    message: Message,
    run: Callable[[Awaitable[Any]], object],
    log: logging.Logger,
) -> None:
    """Call the receivers of signals for a message that is already settled, retried or dead.

    `run` runs the coroutine of an `async def` receiver. Errors of receivers are logged and ignored.
    """
    # Signal.send stops at the first receiver that raises, and does not support coroutines.
    topic = message.topic
    for signal in signals:
        for receiver in list(signal.receivers_for(topic)):
            try:
                result = receiver(topic, message=message)
                if result is not None and inspect.isawaitable(result):
                    run(result)
            except BaseException:  # sys.exit() in a receiver must not end the calling thread
                log.exception(
                    "topic %s: a receiver of message %s raised",
                    topic,
                    message.id,
                    extra=message.log_fields,
                )
