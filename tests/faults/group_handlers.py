"""Consumers of many groups in one process: `python -m tests.faults.group_handlers URL LEDGER G...`

Each handler call adds one line to the ledger before its message is settled: group, id, attempt,
due (ms), begin (ms), and the body.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

from lisa import Consumer

if TYPE_CHECKING:
    from lisa.core.model.message import Message

SLOW_S = 0.2


def main(url: str, ledger: str, *groups: str) -> None:
    file = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())

    def handle(message: Message) -> None:
        begin_ms = time.time_ns() // 1_000_000
        body = message.body
        line = (message.group, message.id, message.attempt, message.due_ms, begin_ms, body)
        os.write(file, ("\t".join(map(str, line)) + "\n").encode())
        if body == "slow":
            time.sleep(SLOW_S)
        if body == "poison" or (body == "fails" and message.attempt == 1):
            raise ValueError(body)

    with ExitStack() as running:
        for group in groups:
            consumer = Consumer(url, group=group)
            consumer.on("orders", handle)
            running.enter_context(consumer)
        print("handling", flush=True)  # noqa: T201
        stopped.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
