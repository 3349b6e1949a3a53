"""Reports settlements to the `settled` methods of middleware."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TypeVar

import msgspec

from lisa.consumer.inflight import Held
from lisa.consumer.subscription import Subscription
from lisa.core.model.message import Message
from lisa.core.model.middleware import SETTLED, BaseMiddleware, methods
from lisa.core.transitions.base import Transition

log = logging.getLogger("lisa.consumer")

T = TypeVar("T")


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """One call that settled messages of a topic for a group.

    operation: "ack"; "retry", also for messages that moved to garbage; "defer"; or "expire".
    ended: when the call ended, in seconds since the epoch.
    seconds: how long the call took; None if the messages were settled along with a read.
    error: the error of the call, which will be repeated; None if it succeeded.
    """

    topic: str
    group: str
    operation: str
    messages: Sequence[Message]
    ended: float
    seconds: float | None = None
    error: BaseException | None = None


class SettleWatch:
    """Reports calls that settle messages to middleware with the method `settled`."""

    def __init__(self, middleware: Sequence[BaseMiddleware] = ()) -> None:
        self._methods = methods(middleware, SETTLED, "settled", "a consumer")

    def call(
        self,
        sub: Subscription,
        transition: Transition[T],
        operation: str,
        deliveries: Sequence[Held],
    ) -> T:
        """Run a transition that settles deliveries. Raises LisaError."""
        if not self._methods:
            return sub.store.call(transition)
        began, error = time.monotonic(), None
        try:
            return sub.store.call(transition)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.report(sub, operation, deliveries, time.monotonic() - began, error)

    def report(
        self,
        sub: Subscription,
        operation: str,
        deliveries: Sequence[Held],
        seconds: float | None = None,
        error: BaseException | None = None,
    ) -> None:
        """Report one call."""
        if not self._methods:
            return
        settled = Settled(
            topic=sub.topic,
            group=sub.group,
            operation=operation,
            messages=[held.message for held in deliveries],
            ended=time.time(),
            seconds=seconds,
            error=error,
        )
        for method in self._methods:
            try:
                method(settled)
            except BaseException:  # sys.exit() in middleware must not end the calling thread
                log.exception("topic %s: the method settled of middleware raised", sub.shard)
