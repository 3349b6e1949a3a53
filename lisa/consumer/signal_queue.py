"""Fire the signals for settled messages."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from blinker import Signal

from lisa.core.model.message import Message
from lisa.core.model.signals import Signals, everywhere
from lisa.core.transitions.retry import Failed, Retried

log = logging.getLogger("lisa.consumer")


class SignalSender:
    """Fires a consumer's own signals together with the module-wide ones.

    Errors of receivers are logged and ignored, because the message is settled already. `spawn` runs
    the coroutine of an `async def` receiver.
    """

    def __init__(self, own: Signals, spawn: Callable[[Awaitable[Any]], Any]) -> None:
        self._spawn = spawn
        self.acked = (own.acked, everywhere.acked)
        self.retrying = (own.retrying, everywhere.retrying)
        self.dead = (own.dead, everywhere.dead)
        self.expired = (own.expired, everywhere.expired)

    @staticmethod
    def heard(pair: tuple[Signal, Signal]) -> bool:
        """Whether either signal has receivers; if not, no message needs to be built."""
        return bool(pair[0].receivers or pair[1].receivers)

    def fire_failure(self, message: Message, reason: str, retried: Retried) -> None:
        """Fire `retrying` or `dead` for a failed message, unless its delivery was stale."""
        if retried.outcome is Failed.STALE:
            return
        pair = self.dead if retried.outcome is Failed.DEAD else self.retrying
        if self.heard(pair):
            told = msgspec.structs.replace(message, reason=reason, next_due_ms=retried.due_ms)
            self.fire(pair, told)

    def fire(self, pair: tuple[Signal, Signal], message: Message) -> None:
        """Call all receivers of both signals."""
        topic = message.topic
        for signal in pair:
            for receiver in signal.receivers_for(topic):
                try:
                    result: Any = receiver(topic, message=message)
                    if result is not None and inspect.isawaitable(result):
                        self._spawn(result)
                except BaseException:  # sys.exit() in a receiver must not end the settler
                    log.exception("topic %s: a receiver of message %s raised", topic, message.id)
