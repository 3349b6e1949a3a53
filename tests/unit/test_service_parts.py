"""What the threads of a service rely on: waking by signals, and a flat stack."""

from __future__ import annotations

import signal
import threading
from datetime import timedelta

import redis

from lisa.core.daemon.mailbox import Mailbox
from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.redis.flow import Execute
from lisa.core.store.store import SyncStore
from lisa.core.transitions.reclaim import Reclaim


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
