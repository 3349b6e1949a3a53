"""What the `settled` methods of middleware get."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from lisa.core.model.message import Message
from lisa.core.model.middleware import SETTLED, BaseMiddleware, methods

log = logging.getLogger("lisa.consumer")

T = TypeVar("T")


class Settled(msgspec.Struct, frozen=True, kw_only=True):
    """One call that settled messages of a topic for a group.

    operation: "ack"; "retry", also for messages that moved to garbage; or "expire".
    ended: when the call ended, in seconds since the epoch.
    seconds: how long the call took; None if the messages were settled along with a read.
    error: the error of the call, after which it is repeated; None if it succeeded.
    """

    topic: str
    group: str
    operation: str
    messages: Sequence[Message]
    ended: float
    seconds: float | None = None
    error: BaseException | None = None


class SettleWatch:
    """Calls the `settled` methods of middleware; false if there are none."""

    def __init__(self, middleware: Sequence[BaseMiddleware] = ()) -> None:
        self._methods = methods(middleware, SETTLED, "settled", "a consumer")

    def __bool__(self) -> bool:
        return bool(self._methods)

    def during(
        self, call: Callable[[], T], topic: str, group: str, operation: str, messages: list[Message]
    ) -> T:
        """Make a call that settles messages, and report it. Raises what it raises."""
        began, error = time.monotonic(), None
        try:
            return call()
        except BaseException as raised:
            error = raised
            raise
        finally:
            self.report(
                Settled(
                    topic=topic,
                    group=group,
                    operation=operation,
                    messages=messages,
                    ended=time.time(),
                    seconds=time.monotonic() - began,
                    error=error,
                )
            )

    def report(self, settled: Settled) -> None:
        """Call all methods."""
        for method in self._methods:
            try:
                method(settled)
            except Exception:
                log.exception("topic %s: the middleware's method settled raised", settled.topic)
