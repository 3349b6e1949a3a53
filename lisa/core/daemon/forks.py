"""Keeps a process's signal handlers from the children that it forks."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

_former: dict[int, Any] = {}
_forking = threading.local()


@contextmanager
def not_inherited(former: Mapping[int, Any]) -> Iterator[None]:
    """Give children that are forked meanwhile the `former` handlers, by signal.

    A handler of messages may fork, as `multiprocessing.Pool` does on Linux. With the signal
    handlers of its parent, the child would survive SIGTERM. Through the wakeup file descriptor,
    which the two share, the signal could stop the parent.
    """
    _former.update(former)
    try:
        yield
    finally:
        for number in former:
            _former.pop(number, None)


def _block() -> None:
    """Delay signals until the child has its handlers."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, list(_former))


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


def _begin_child() -> None:
    if _former:
        signal.set_wakeup_fd(-1)
    for number, handler in _former.items():
        signal.signal(number, handler)
    _former.clear()
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_begin_child)
