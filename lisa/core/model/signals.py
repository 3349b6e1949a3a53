"""The blinker signals that consumers and managers fire.

The sender is the topic, a string, which matches by value. Receivers are called as
`f(topic, *, message)`. Each consumer also has its own set of the five signals.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from blinker import Signal

from lisa.core.model.message import Message


class Signals:
    """A set of the five signals."""

    __slots__ = ("acked", "dead", "expired", "received", "retrying")

    def __init__(self) -> None:
        self.received = Signal("A message was delivered to a handler.")
        self.acked = Signal("Redis confirmed that a message is settled.")
        self.retrying = Signal("A message failed and will be tried again.")
        self.dead = Signal("A message moved to garbage.")
        self.expired = Signal("A message exceeded its ttl and will not be handled.")


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
