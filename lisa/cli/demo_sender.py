"""The demo's producer: sends order time-outs, cancels some, reschedules some.

python -m lisa.cli.demo_sender MESSAGES SECONDS
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from lisa import Outgoing, Producer
from lisa.cli.demo import DemoEvent, DemoLedger

HEAD_START_MS = 1_500  # time to send the first messages before they are due
NEVER = 1_000

TOPIC = "orders"


def orders(count: int, start_ms: int, span_ms: int) -> Iterator[Outgoing]:
    """Evenly spread time-outs; 1 in 20 may fail once or twice, 1 in 1,000 always fails."""
    for number in range(count):
        fails = NEVER if number % 1_000 == 7 else number % 3 if number % 20 == 3 else 0
        yield Outgoing(
            {"order": number, "fails": fails},
            at_ms=start_ms + number * span_ms // count,
            retry="100ms,200ms,400ms",
        )


def cancel_some(producer: Producer, ledger: DemoLedger, ids: list[str]) -> None:
    """Cancel the time-outs of paid orders; record which cancellations succeeded."""
    for message_id, outcome in zip(ids, producer.cancel_many(TOPIC, ids), strict=True):
        ledger.write(
            DemoEvent("cancelled" if outcome == "cancelled" else "too_late", message_id, 0)
        )


def reschedule_some(producer: Producer, ledger: DemoLedger, ids: list[str], due_ms: int) -> None:
    """Move time-outs to the second after `due_ms`."""
    for number, message_id in enumerate(ids):
        later_ms = due_ms + number * 1_000 // len(ids)
        if producer.reschedule(TOPIC, message_id, at_ms=later_ms) == "rescheduled":
            ledger.write(DemoEvent("rescheduled", message_id, later_ms))


def main(count: int, seconds: float) -> None:
    """Send all messages, then cancel and reschedule some while others fall due."""
    ledger = DemoLedger(Path(os.environ["LISA_DEMO_LEDGER"]))
    span_ms = int(seconds * 1000)
    with Producer(os.environ["LISA_REDIS_URL"]) as producer:
        start_ms = time.time_ns() // 1_000_000 + HEAD_START_MS
        report = producer.send_many(TOPIC, orders(count, start_ms, span_ms))
        sent = [outcome.id for outcome in report if outcome.outcome == "accepted"]
        ledger.write(*(DemoEvent("sent", message_id, 0) for message_id in sent))
        shuffled = random.Random(42).sample(sent, len(sent))
        tenth = len(sent) // 10
        reschedule_some(producer, ledger, shuffled[tenth : tenth + tenth // 2], start_ms + span_ms)
        # Half are cancelled now, the other half step by step until the last message is due.
        cancel_some(producer, ledger, shuffled[: tenth // 2])
        later = shuffled[tenth // 2 : tenth]
        rounds = max(1, int(seconds * 2))
        for turn in range(rounds):
            cancel_some(producer, ledger, later[turn::rounds])
            time.sleep(max(0.0, seconds / rounds - 0.05))
        ledger.write(DemoEvent("end", "-", 0))


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]))
