"""What the threads of a service rely on: restarts, waking by signals, and a flat stack."""

from __future__ import annotations

import signal
import sys
import threading
from datetime import timedelta

import pytest
import redis

from lisa.core.daemon import threads
from lisa.core.daemon.mailbox import Mailbox
from lisa.core.daemon.threads import (
    ServiceThread,
    longest_round_s,
    rest,
    stalled,
    unforeseen_errors,
)
from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.redis.flow import Execute
from lisa.core.store.store import SyncStore
from lisa.core.transitions.reclaim import Reclaim
from tests.servers import wait_until


@pytest.mark.parametrize("error", [AttributeError("none"), SystemExit(3)])
def test_work_that_raises_is_logged_counted_and_run_again_until_its_end(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "RESTART_AFTER_S", 0.01)
    calls: list[int] = []
    is_over = threading.Event()
    before = unforeseen_errors()

    def work() -> None:
        calls.append(1)
        if len(calls) == 3:
            is_over.set()
        raise error

    thread = ServiceThread("lisa-test", work, is_over=is_over.is_set)
    thread.start()
    thread.join(60)
    assert len(calls) == 3
    assert unforeseen_errors() - before >= 2
    said = [one for one in caplog.records if "lisa-test: unexpected error" in one.message]
    assert said[0].exc_info is not None
    assert said[0].exc_info[1] is error


def test_a_long_round_is_a_fault_and_a_long_rest_is_not() -> None:
    may_rest, may_end = threading.Event(), threading.Event()

    def work() -> None:
        threads.begin_round()
        may_rest.wait(60)
        rest()
        may_end.wait(60)
        sys.exit(1)

    thread = ServiceThread("lisa-test", work, is_over=lambda: True, longest_s=0.05)
    assert stalled([thread]) == [], "a thread that has not started has no fault"
    thread.start()
    wait_until(lambda: thread.fault is not None)
    assert stalled([thread])[0].startswith("thread lisa-test has not completed a round for ")
    may_rest.set()
    wait_until(lambda: thread.fault is None)
    may_end.set()
    thread.join(60)
    assert stalled([thread])[0].startswith("thread lisa-test has ended, ")
    assert (longest_round_s(5), longest_round_s(60)) == (50, 270)


def test_a_mailbox_keeps_order_and_is_woken_by_a_signal_that_another_thread_caught() -> None:
    mailbox: Mailbox[int] = Mailbox()
    for number in (1, 2):
        mailbox.post(number)
    assert [mailbox.get(), mailbox.get()] == [1, 2]

    def catch() -> None:
        # Sent to this thread: a main thread waiting for a lock would not wake up.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)

    too_late = threading.Timer(60, mailbox.post, [0])
    too_late.start()
    caught = threading.Timer(0.1, catch)
    try:
        with mailbox.handling_signals(mailbox.post, [signal.SIGUSR1]):
            caught.start()
            assert mailbox.get() == signal.SIGUSR1
    finally:
        too_late.cancel()
        caught.join()


def test_a_long_outage_does_not_grow_the_stack() -> None:
    """A long patience can take thousands of attempts."""
    address = Address("redis://localhost:1/0")
    flow = SyncStore(Connection(address), Keys(), timedelta(hours=1)).run(Reclaim("orders", "lisa"))
    step = next(flow)
    for _ in range(5000):
        away = redis.ConnectionError("away")
        step = flow.throw(away) if isinstance(step, Execute) else flow.send(None)
