"""Fire the signals for settled messages."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import msgspec
from blinker import Signal

from lisa.core.delivery.source import Delivered
from lisa.core.model.message import Message
from lisa.core.model.signals import Signals, call_receivers, everywhere
from lisa.core.transitions.ack import Acked
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
    def has_receivers(pair: tuple[Signal, Signal]) -> bool:
        """Whether either signal has receivers; if not, no message needs to be built."""
        return bool(pair[0].receivers or pair[1].receivers)

    def fire_failure(self, message: Message, reason: str, retried: Retried) -> None:
        """Fire `retrying` or `dead` for a failed message, unless its delivery was stale."""
        if retried.outcome is Failed.STALE:
            return
        pair = self.dead if retried.outcome is Failed.DEAD else self.retrying
        if self.has_receivers(pair):
            due_ms = retried.due_ms
            self.fire(pair, msgspec.structs.replace(message, reason=reason, next_due_ms=due_ms))

    def fire_unfit(self, unfit: Iterable[tuple[Delivered, Acked | Retried]]) -> None:
        """Fire `expired`, `retrying` or `dead` for settled messages that no handler may see."""
        for one, outcome in unfit:
            if one.fault is not None and isinstance(outcome, Retried):
                self.fire_failure(one.message, one.fault.reason, outcome)
            elif outcome is not Acked.STALE:
                self.fire(self.expired, one.message)

    def fire(self, pair: tuple[Signal, Signal], message: Message) -> None:
        """Call all receivers of both signals."""
        call_receivers(pair, message, self._spawn, log)
