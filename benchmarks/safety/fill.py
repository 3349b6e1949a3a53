"""Fills a topic with millions of waiting messages and hundreds of thousands in flight."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from itertools import pairwise

from lisa.core.model.envelope import encode_envelope, new_token
from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection
from lisa.core.store.store import SyncStore
from lisa.core.transitions.delivery import Pull
from lisa.core.transitions.enqueue import Enqueue
from lisa.core.transitions.groups import Declare
from lisa.core.transitions.topic import Configure

TOPIC, GROUP, HOLDER = "orders", "lisa", "holder"
BATCH = 500
BODY = "x" * 60
FILLERS = 2
YEAR_MS = 365 * 86_400_000
PRIME = 2_654_435_761
"""Multiplying by it spreads the due times of consecutive numbers."""


def open_store(url: str) -> SyncStore:
    """Open a store on the server."""
    return SyncStore(Connection(Address(url)), Keys())


def waiting_id(number: int) -> str:
    """The id of a waiting message."""
    return f"waiting-{number:08}"


def due_text(number: int, now_ms: int) -> str:
    """A due time within the year that begins tomorrow."""
    return str(now_ms + 86_400_000 + number * PRIME % YEAR_MS)


def fill(url: str, waiting: int, in_flight: int) -> float:
    """Fill an empty server; returns the seconds taken."""
    began = time.monotonic()
    store = open_store(url)
    store.drive(store.check_schema())
    store.drive(store.register([TOPIC]))
    store.call(Declare(TOPIC, GROUP))
    options = {"max_ready": "10000000", "ack_timeout": str(86_400_000), "retention": "20000"}
    store.call(Configure(TOPIC, options))
    _put_in_flight(store, in_flight)
    store.close()
    bounds = [waiting * part // FILLERS for part in range(FILLERS + 1)]
    spawning = multiprocessing.get_context("spawn")
    fillers = [
        spawning.Process(target=_fill_part, args=(url, start, end))
        for start, end in pairwise(bounds)
    ]
    for filler in fillers:
        filler.start()
    for filler in fillers:
        filler.join()
    if any(filler.exitcode for filler in fillers):
        raise SystemExit("filling the server failed: is there enough memory?")
    return time.monotonic() - began


def _put_in_flight(store: SyncStore, count: int) -> None:
    """Send messages that are due, and pull them without settling them."""
    for start in range(0, count, BATCH):
        ids = [f"in-flight-{number:08}" for number in range(start, min(start + BATCH, count))]
        _send(store, ids, ["+0"])
        taken = store.call(Pull(TOPIC, GROUP, HOLDER, len(ids)))
        if len(taken.entries) != len(ids):
            raise SystemExit("a due message was not ready")


def _fill_part(url: str, start: int, end: int) -> None:
    store, now_ms = open_store(url), time.time_ns() // 1_000_000
    store.drive(store.groups(TOPIC))
    for first in range(start, end, BATCH):
        numbers = range(first, min(first + BATCH, end))
        _send(store, [waiting_id(n) for n in numbers], [due_text(n, now_ms) for n in numbers])
    store.close()


def _send(store: SyncStore, ids: Sequence[str], dues: Sequence[str]) -> None:
    data = [encode_envelope(new_token(), BODY)] * len(ids)
    store.call(Enqueue(TOPIC, ids, dues, data, (), (), are_ids_new=True))
