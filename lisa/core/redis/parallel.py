"""Asks several servers in parallel."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from lisa.core.redis.address import SENTINEL_TIMEOUT_S

T = TypeVar("T")
A = TypeVar("A")

OTHERS_S = 0.1
"""Time to wait for further answers after the first."""


def ask_together(asked: Iterable[A], ask: Callable[[A], T]) -> list[T | Exception]:
    """Call `ask` for all items in parallel and return the answers and errors that arrive in time.

    After the first answer, the others get `OTHERS_S` more.
    """
    replies: SimpleQueue[T | Exception] = SimpleQueue()

    def work(one: A) -> None:
        try:
            replies.put(ask(one))
        except Exception as error:  # noqa: BLE001  errors are returned as answers
            replies.put(error)

    count = 0
    for one in asked:
        count += 1
        try:
            threading.Thread(target=work, args=(one,), name="lisa-ask", daemon=True).start()
        except RuntimeError:  # the thread limit is reached, or the process is exiting
            work(one)
    found: list[T | Exception] = []
    ends = time.monotonic() + 2 * SENTINEL_TIMEOUT_S  # one for connecting, one for the reply
    with suppress(Empty):
        while len(found) < count:
            found.append(replies.get(timeout=max(0.0, ends - time.monotonic())))
            if not isinstance(found[-1], Exception):
                ends = min(ends, time.monotonic() + OTHERS_S)
    return found
