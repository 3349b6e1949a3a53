"""The demo's consumer: a typical handler module that also writes a ledger."""

from __future__ import annotations

import os
import time
from pathlib import Path

from lisa import Consumer, Message
from lisa.cli.demo import DemoEvent, DemoLedger

ledger = DemoLedger(Path(os.environ["LISA_DEMO_LEDGER"]))
consumer = Consumer(os.environ["LISA_REDIS_URL"])


@consumer.on("orders")
def cancel_unpaid(message: Message) -> None:
    """Cancel an unpaid order. Some attempts fail, and a few orders always fail."""
    if message.attempt == 1:
        lateness_us = time.time_ns() // 1000 - message.due_ms * 1000
        ledger.write(DemoEvent("opened", message.id, lateness_us))
    if message.attempt <= message.body["fails"]:
        raise RuntimeError("the payment service does not answer")
    ledger.write(DemoEvent("handled", message.id, message.attempt))


@consumer.message_retrying.connect
def record_retry(_topic: str, *, message: Message) -> None:
    """Record that a message will be retried."""
    ledger.write(DemoEvent("retrying", message.id, message.attempt))


@consumer.message_dead.connect
def record_dead(_topic: str, *, message: Message) -> None:
    """Record that a message moved to garbage."""
    ledger.write(DemoEvent("dead", message.id, message.attempt))
