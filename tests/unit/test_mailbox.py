"""The mailbox wakes for signals, whichever thread they reach."""

from __future__ import annotations

import signal
import threading

from lisa.core.mailbox import Mailbox


def test_items_come_in_order_from_any_thread() -> None:
    mailbox: Mailbox[int] = Mailbox()
    threading.Timer(0.05, mailbox.post, [1]).start()
    assert mailbox.get() == 1
    mailbox.post(2)
    mailbox.post(3)
    assert [mailbox.get(), mailbox.get()] == [2, 3]


def test_a_signal_that_another_thread_caught_wakes_the_main_thread() -> None:
    mailbox: Mailbox[int] = Mailbox()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: mailbox.post(number))
    caught = threading.Event()

    def catch() -> None:
        # To this very thread: the main one would sleep on, if it waited on a lock.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        caught.set()

    too_late = threading.Timer(10, mailbox.post, [0])
    too_late.start()
    try:
        with mailbox.hearing_signals():
            threading.Timer(0.1, catch).start()
            assert mailbox.get() == signal.SIGUSR1
    finally:
        too_late.cancel()
        signal.signal(signal.SIGUSR1, before)
    assert caught.wait(5)
