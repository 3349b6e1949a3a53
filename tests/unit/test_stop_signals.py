"""Which signals stop a role."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from lisa.core.daemon.stop_signals import exit_on_signals, handler_of, stopping


@contextmanager
def handled(number: signal.Signals, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_a_program_that_handles_or_ignores_sighup_keeps_it(handler: Any) -> None:
    with handled(signal.SIGHUP, signal.SIG_DFL):
        assert signal.SIGHUP in stopping()
    with handled(signal.SIGHUP, handler):
        assert signal.SIGHUP not in stopping()
        assert signal.SIGTERM in stopping()


def test_exits_at_start_do_not_count_as_the_program_s_handlers() -> None:
    with handled(signal.SIGHUP, signal.SIG_DFL):
        for _ in range(2):
            exit_on_signals([signal.SIGHUP])
            assert signal.getsignal(signal.SIGHUP) != signal.SIG_DFL
            assert handler_of(signal.SIGHUP) == signal.SIG_DFL
            assert signal.SIGHUP in stopping()
