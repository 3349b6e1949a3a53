"""Fires the signals that tell what became of a message."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from blinker import Signal

from lisa.core.message import Message
from lisa.core.signals import Signals, everywhere

__all__ = ["Announcer"]

log = logging.getLogger("lisa.consumer")


class Announcer:
    """A consumer's own signals and the module-wide ones, fired together.

    A receiver that raises is logged and stops nobody: the message's fate is settled already.
    `spawn` runs what an `async def` receiver returned.
    """

    def __init__(self, own: Signals, spawn: Callable[[Awaitable[Any]], Any]) -> None:
        self._spawn = spawn
        self.acked = (own.acked, everywhere.acked)
        self.retrying = (own.retrying, everywhere.retrying)
        self.dead = (own.dead, everywhere.dead)
        self.expired = (own.expired, everywhere.expired)

    @staticmethod
    def heard(pair: tuple[Signal, Signal]) -> bool:
        """Whether anyone listens: without, nothing needs to be put together."""
        return bool(pair[0].receivers or pair[1].receivers)

    def fire(self, pair: tuple[Signal, Signal], message: Message) -> None:
        """Call all receivers of a signal."""
        topic = message.topic
        for signal in pair:
            for receiver in signal.receivers_for(topic):
                try:
                    result: Any = receiver(topic, message=message)
                    if result is not None and inspect.isawaitable(result):
                        self._spawn(result)
                except BaseException:  # sys.exit() in a receiver must not end the settler
                    log.exception("topic %s: a receiver of message %s raised", topic, message.id)
