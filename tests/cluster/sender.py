"""A program that sends to some topics until stopped: python -m tests.cluster.sender.

URL LEDGER PAUSE_S DELAY_S REPLICAS TOPIC...

Concurrently: sends confirmed by the given number of replicas, ids s-1, s-2, ...; sends without
replicas, p-1, ...; and sends with replicas by tasks of an event loop, a-1, ... The ledger lists
attempts and confirmations.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import NamedTuple

from lisa import AsyncProducer, LisaError, Producer, replicas
from lisa.core.model.durability import Replicas


def line(ledger: int, what: str, topic: str, name: str, said: object = "") -> None:
    """Append to the ledger, which is shared by several threads."""
    os.write(ledger, f"{what} {topic} {name} {time.time()} {said}\n".encode())


class Order(NamedTuple):
    """The program's arguments, see above."""

    url: str
    ledger: int
    pause_s: float
    delay: timedelta
    replicas: int
    topics: list[str]
    ended: threading.Event


def durability(order: Order) -> Replicas | None:
    """The durability of confirmed sends; without replicas, only the primary."""
    return replicas(order.replicas) if order.replicas else None


def send(order: Order, producer: Producer, kind: str, topic: str) -> None:
    """Send to one topic in a thread, so that an unavailable topic does not block the others."""
    for number in itertools.count(1):
        if order.ended.wait(order.pause_s * len(order.topics)):
            return
        name = f"{kind}-{number}"
        line(order.ledger, "try", topic, name)
        try:
            producer.send(topic, name, id=name, delay=order.delay)
        except LisaError as error:
            line(order.ledger, "not", topic, name, repr(error))
        else:
            line(order.ledger, "sent", topic, name)


async def send_too(order: Order, producer: AsyncProducer, topic: str) -> None:
    """Send to one topic in a task."""
    for number in itertools.count(1):
        await asyncio.sleep(order.pause_s * len(order.topics))
        if order.ended.is_set():
            return
        name = f"a-{number}"
        line(order.ledger, "try", topic, name)
        try:
            await producer.send(topic, name, id=name, delay=order.delay)
        except LisaError as error:
            line(order.ledger, "not", topic, name, repr(error))
        else:
            line(order.ledger, "sent", topic, name)


async def tasks(order: Order) -> None:
    """All topics, with an `AsyncProducer`."""
    async with AsyncProducer(order.url, durability=durability(order)) as producer:
        await asyncio.gather(*(send_too(order, producer, topic) for topic in order.topics))


def main() -> None:
    url, path, pause_s, delay_s, count, *topics = sys.argv[1:]
    ledger = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    ended = threading.Event()
    delay = timedelta(seconds=float(delay_s))
    order = Order(url, ledger, float(pause_s), delay, int(count), topics, ended)
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    with Producer(url, durability=durability(order)) as sure, Producer(url) as plain:
        threads = [
            threading.Thread(target=send, args=(order, producer, kind, topic))
            for producer, kind in ((sure, "s"), (plain, "p"))
            for topic in topics
        ]
        for thread in threads:
            thread.start()
        asyncio.run(tasks(order))
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
