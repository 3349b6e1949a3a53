"""The demo's consumer: what a user's handler module looks like, with a ledger beside it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from lisa import Consumer, Message
from lisa.cli.demo.ledger import Event, Ledger

ledger = Ledger(Path(os.environ["LISA_DEMO_LEDGER"]))
consumer = Consumer(os.environ["LISA_REDIS_URL"])


@consumer.on("orders")
def cancel_unpaid(message: Message) -> None:
    """Cancel an order that was not paid; some fail at first, a few always."""
    if message.attempt == 1:
        lateness_us = time.time_ns() // 1000 - message.due_ms * 1000
        ledger.write(Event("opened", message.id, lateness_us))
    if message.attempt <= message.body["fails"]:
        raise RuntimeError("the payment service does not answer")
    ledger.write(Event("handled", message.id, message.attempt))


@consumer.message_retrying.connect
def note_retry(_topic: str, *, message: Message) -> None:
    """A message will be tried again."""
    ledger.write(Event("retrying", message.id, message.attempt))


@consumer.message_dead.connect
def note_garbage(_topic: str, *, message: Message) -> None:
    """A message went to garbage."""
    ledger.write(Event("dead", message.id, message.attempt))
