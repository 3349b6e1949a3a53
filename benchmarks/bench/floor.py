"""The floor, a baseline: Lisa's work done with raw redis-py commands, 500 messages per call.

The floor uses variadic and pipelined commands, and has none of Lisa's guarantees: no atomicity,
checks, options or counters. Its cost is the minimum for this data model.

    python -m benchmarks.bench.floor poll|consume [--whole]

runs the floor's processes, a poller and a consumer. Both read LISA_REDIS_URL; the consumer also
reads BENCH_LEDGER (a directory). The poller polls for due messages every 2 ms. `--whole` adds the
index and the tombstones.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.bench.ledger import RECORD, Writer
from benchmarks.bench.server import BenchServer, client
from lisa.core.model.keys import Keys
from lisa.core.store.store import chunks

BODY = "x" * 100
BATCH = 500
GROUP = "floor"
CONSUMER = "floor"
RETENTION_MS = 60_000
TOMBSTONE = "abcdefgh-acked,1234567890123,1,1234567890123"

PERIOD_S = 0.002
BLOCK_MS = 1_000


class Keyring:
    """The floor's keys, as long as Lisa's keys."""

    def __init__(self) -> None:
        topic = Keys("floor").topic("bench")
        group = topic.group(GROUP)
        self.waiting, self.ready, self.entries = topic.waiting, group.ready, group.entries
        self.body, self.done = topic.body(""), topic.done("")


class Floor:
    """One topic with raw commands.

    bare: without the index of stream entries, which finds messages by id, and without tombstones,
        which make calls idempotent after settlement.
    msetex: write tombstones with one MSETEX, which needs a newer server, instead of several SETs.
    """

    def __init__(self, client: Any, *, bare: bool = False, msetex: bool = False) -> None:
        self._client = client
        self._bare = bare
        self._msetex = msetex
        self._keys = Keyring()
        self._entry = 0
        self._held: list[tuple[list[bytes], list[str]]] = []

    def create(self) -> None:
        """Create the stream and its group."""
        self._client.xgroup_create(self._keys.ready, GROUP, "0", mkstream=True)

    def send(self, messages: Mapping[str, int]) -> None:
        """Send messages (due times in ms by id) with MSET and ZADD."""
        for batch in chunks(list(messages), BATCH):
            pipeline = self._client.pipeline(transaction=False)
            pipeline.mset({f"{self._keys.body}{one}": BODY for one in batch})
            pipeline.zadd(self._keys.waiting, {one: messages[one] for one in batch})
            pipeline.execute()

    def promote(self) -> None:
        """Move due messages to the stream."""
        while self._promote(time.time_ns() // 1_000_000) == BATCH:
            pass

    def _promote(self, now_ms: int) -> int:
        keys = self._keys
        due = self._client.zrangebyscore(
            keys.waiting, "-inf", now_ms, start=0, num=BATCH, withscores=True
        )
        if not due:
            return 0
        pipeline, index = self._client.pipeline(transaction=False), {}
        for one, score in due:
            # Generate the entry ids, so that the index fits into the same pipeline.
            self._entry += 1
            index[one] = f"{now_ms}-{self._entry}"
            pipeline.xadd(keys.ready, {"id": one, "due": int(score)}, id=index[one])
        if not self._bare:
            pipeline.hset(keys.entries, mapping=index)
        pipeline.zrem(keys.waiting, *index)
        pipeline.execute()
        return len(due)

    def read(self, block_ms: int | None = None) -> list[int]:
        """Read messages and their bodies; returns their due times in ms."""
        keys = self._keys
        found = self._client.xreadgroup(
            GROUP, CONSUMER, {keys.ready: ">"}, count=BATCH, block=block_ms
        )
        if not found:
            return []
        entries = [entry for entry, _ in found[0][1]]
        ids = [fields[b"id"].decode() for _, fields in found[0][1]]
        self._client.mget([keys.body + one for one in ids])
        self._held.append((entries, ids))
        return [int(fields[b"due"]) for _, fields in found[0][1]]

    def settle(self) -> None:
        """Settle all messages read: check the index, delete them, write tombstones."""
        for entries, ids in self._held:
            self._settle(entries, ids)
        self._held.clear()

    def _settle(self, entries: Sequence[bytes], ids: Sequence[str]) -> None:
        keys = self._keys
        if not self._bare:
            self._client.hmget(keys.entries, ids)
        pipeline = self._client.pipeline(transaction=False)
        pipeline.xack(keys.ready, GROUP, *entries)
        pipeline.xdel(keys.ready, *entries)
        if not self._bare:
            pipeline.hdel(keys.entries, *ids)
        pipeline.unlink(*(keys.body + one for one in ids))
        pipeline.execute()
        if self._bare:
            return
        if self._msetex:
            pairs = chain.from_iterable((keys.done + one, TOMBSTONE) for one in ids)
            self._client.execute_command("MSETEX", len(ids), *pairs, "PX", RETENTION_MS)
            return
        for one in ids:
            pipeline.set(keys.done + one, TOMBSTONE, px=RETENTION_MS)
        pipeline.execute()


def life(
    server: BenchServer, count: int, *, bare: bool = False, msetex: bool = False
) -> dict[str, float]:
    """Run the life cycle of `count` messages: send, promote, read, settle.

    Returns the server's CPU time of each step, in microseconds per message.
    """
    floor = Floor(server.client, bare=bare, msetex=msetex)
    floor.create()
    due_ms = time.time_ns() // 1_000_000
    messages = {f"{number:022d}": due_ms for number in range(count)}
    steps: dict[str, Callable[[], None]] = {
        "send": lambda: floor.send(messages),
        "promote": floor.promote,
        "read": lambda: _read_all(floor),
        "settle": floor.settle,
    }
    return {name: _timed_us(server, step) / count for name, step in steps.items()}


def _read_all(floor: Floor) -> None:
    while floor.read():
        pass


def _timed_us(server: BenchServer, step: Callable[[], None]) -> float:
    before_us = server.cpu_us()
    step()
    return server.cpu_us() - before_us


def poll(floor: Floor) -> None:
    """Move due messages to the stream every 2 ms."""
    turn = time.monotonic()
    while True:
        floor.promote()
        turn = max(turn + PERIOD_S, time.monotonic())
        time.sleep(max(0.0, turn - time.monotonic()))


def consume(floor: Floor, writer: Writer) -> None:
    """Read messages, record the time, remove them."""
    while True:
        for due_ms in floor.read(BLOCK_MS):
            writer.note(RECORD.pack(due_ms * 1000, time.time_ns() // 1000))
        floor.settle()


def main(part: str, *options: str) -> None:
    """Run until SIGTERM."""
    with client(os.environ["LISA_REDIS_URL"]) as server:
        floor = Floor(server, bare="--whole" not in options)
        if part == "poll":
            poll(floor)
        else:
            folder = Path(os.environ["BENCH_LEDGER"])
            consume(floor, Writer(folder / f"{os.getpid()}.ledger"))


if __name__ == "__main__":
    main(*sys.argv[1:])
