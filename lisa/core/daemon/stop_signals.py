"""The signals that stop a role, also while it starts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from typing import Any, NoReturn

STOPPING = (signal.SIGTERM, signal.SIGINT)

_replaced: dict[int, Any] = {}


def stopping() -> tuple[signal.Signals, ...]:
    """The signals that stop a role: SIGHUP, too, unless the program handles or ignores it.

    A terminal that closes sends SIGHUP; `nohup` makes a program ignore it.
    """
    is_free = handler_of(signal.SIGHUP) == signal.SIG_DFL
    return (*STOPPING, signal.SIGHUP) if is_free else STOPPING


def exit_on_signals(numbers: Iterable[signal.Signals]) -> None:
    """Exit with 0 on these signals until the role sets its own handlers.

    As process 1 of a container, a program never sees a signal for which it has no handler: a role
    that is stopped while it starts would run on until it is killed.
    """
    for number in numbers:
        before = signal.signal(number, _exit)
        if before != _exit:
            _replaced[number] = before


def handler_of(number: int) -> Any:
    """A signal's handler, apart from that of `exit_on_signals`."""
    handler = signal.getsignal(number)
    return _replaced[number] if handler == _exit else handler


def _exit(*_: object) -> NoReturn:
    # Not sys.exit: an import, such as that of handlers, may catch any exception.
    os._exit(0)
