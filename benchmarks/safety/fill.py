"""Fills one topic: millions of waiting messages, hundreds of thousands in flight."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from itertools import pairwise

from lisa.core.address import Address
from lisa.core.connection import Connection
from lisa.core.envelope import encode_envelope, new_token
from lisa.core.keys import Keys
from lisa.core.store import SyncStore
from lisa.core.transitions.configure import Configure
from lisa.core.transitions.declare import Declare
from lisa.core.transitions.enqueue import Enqueue
from lisa.core.transitions.pull import Pull

__all__ = [
    "BATCH",
    "BODY",
    "GROUP",
    "HOLDER",
    "TOPIC",
    "due_text",
    "fill",
    "open_store",
    "waiting_id",
]

TOPIC, GROUP, HOLDER = "orders", "lisa", "holder"
BATCH = 500
BODY = "x" * 60
FILLERS = 2
YEAR_MS = 365 * 86_400_000
PRIME = 2_654_435_761
"""Multiplied by it, numbers in a row lie far from each other: dues, and so places, are mixed."""


def open_store(url: str) -> SyncStore:
    """Transitions on a server."""
    return SyncStore(Connection(Address(url)), Keys())


def waiting_id(number: int) -> str:
    """The id of one of those that fill the topic."""
    return f"waiting-{number:08}"


def due_text(number: int, now_ms: int) -> str:
    """Some instant of the year that begins tomorrow."""
    return str(now_ms + 86_400_000 + number * PRIME % YEAR_MS)


def fill(url: str, waiting: int, in_flight: int) -> float:
    """Fill an empty server; how many seconds it took."""
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
        raise SystemExit("the server could not be filled: has it the memory?")
    return time.monotonic() - began


def _put_in_flight(store: SyncStore, count: int) -> None:
    """Sent due, and taken at once by one who holds on to them."""
    for start in range(0, count, BATCH):
        ids = [f"in-flight-{number:08}" for number in range(start, min(start + BATCH, count))]
        _send(store, ids, ["+0"])
        taken = store.call(Pull(TOPIC, GROUP, HOLDER, len(ids)))
        if len(taken.entries) != len(ids):
            raise SystemExit("a message that was sent due was not ready")


def _fill_part(url: str, start: int, end: int) -> None:
    store, now_ms = open_store(url), time.time_ns() // 1_000_000
    store.drive(store.groups(TOPIC))
    for first in range(start, end, BATCH):
        numbers = range(first, min(first + BATCH, end))
        _send(store, [waiting_id(n) for n in numbers], [due_text(n, now_ms) for n in numbers])
    store.close()


def _send(store: SyncStore, ids: Sequence[str], dues: Sequence[str]) -> None:
    token = new_token()
    data = [encode_envelope(token, BODY)] * len(ids)
    store.call(Enqueue(TOPIC, token, ids, dues, data, (), (), are_ids_new=True))
