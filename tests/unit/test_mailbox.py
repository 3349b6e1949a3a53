"""Signals wake the mailbox, on any thread."""

from __future__ import annotations

import signal
import threading

from lisa.core.daemon.mailbox import Mailbox


def test_items_from_any_thread_keep_their_order() -> None:
    mailbox: Mailbox[int] = Mailbox()
    threading.Timer(0.05, mailbox.post, [1]).start()
    assert mailbox.get() == 1
    mailbox.post(2)
    mailbox.post(3)
    assert [mailbox.get(), mailbox.get()] == [2, 3]


def test_a_signal_that_another_thread_caught_wakes_the_main_thread() -> None:
    mailbox: Mailbox[int] = Mailbox()
    caught = threading.Event()

    def catch() -> None:
        # Sent to this thread: a main thread waiting for a lock would not wake up.
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        caught.set()

    too_late = threading.Timer(10, mailbox.post, [0])
    too_late.start()
    try:
        with mailbox.handling_signals(mailbox.post, [signal.SIGUSR1]):
            threading.Timer(0.1, catch).start()
            assert mailbox.get() == signal.SIGUSR1
    finally:
        too_late.cancel()
    assert caught.wait(5)
