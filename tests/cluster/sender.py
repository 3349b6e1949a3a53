"""A program that sends to topics until stopped: python -m tests.cluster.sender.

URL LEDGER REPLICAS TOPIC...

Concurrently: sends confirmed by the given number of replicas, ids s-1, s-2, ...; sends without
replicas, p-1, ...; and sends with replicas by tasks of an event loop, a-1, ... The ledger lists
attempts and confirmations.
"""

import asyncio
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from lisa import AsyncProducer, LisaError, Producer, replicas

PAUSE_S, DELAY_S = 0.006, 0.3
DELAY = timedelta(seconds=DELAY_S)


class Sender:
    def __init__(self, url: str, ledger: str, count: str, *topics: str) -> None:
        self._url = url
        self._ledger = os.open(ledger, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._durability = replicas(int(count)) if int(count) else None
        self._topics = topics
        self._pause_s = PAUSE_S * len(topics)
        self._ended = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: self._ended.set())

    def run(self) -> None:
        sure = Producer(self._url, durability=self._durability)
        with sure, Producer(self._url) as plain:
            threads = [
                threading.Thread(target=self._send, args=(producer, kind, topic))
                for producer, kind in ((sure, "s"), (plain, "p"))
                for topic in self._topics
            ]
            for thread in threads:
                thread.start()
            asyncio.run(self._send_in_tasks())
            for thread in threads:
                thread.join()

    @contextmanager
    def _noted(self, topic: str, name: str) -> Iterator[None]:
        """Note an attempt and its result in the ledger, which several threads share."""

        def line(what: str, said: object = "") -> None:
            os.write(self._ledger, f"{what} {topic} {name} {time.time()} {said}\n".encode())

        line("try")
        try:
            yield
        except LisaError as error:
            line("not", repr(error))
        else:
            line("sent")

    def _send(self, producer: Producer, kind: str, topic: str) -> None:
        """Send to one topic in a thread, so that an unavailable topic does not block the others."""
        for number in itertools.count(1):
            if self._ended.wait(self._pause_s):
                return
            name = f"{kind}-{number}"
            with self._noted(topic, name):
                producer.send(topic, name, id=name, delay=DELAY)

    async def _send_in_tasks(self) -> None:
        async def send(topic: str) -> None:
            for number in itertools.count(1):
                await asyncio.sleep(self._pause_s)
                if self._ended.is_set():
                    return
                name = f"a-{number}"
                with self._noted(topic, name):
                    await producer.send(topic, name, id=name, delay=DELAY)

        async with AsyncProducer(self._url, durability=self._durability) as producer:
            await asyncio.gather(*map(send, self._topics))


if __name__ == "__main__":
    Sender(*sys.argv[1:]).run()
