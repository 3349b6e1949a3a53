"""The floor: the same work as raw commands by redis-py, variadic and pipelined, 500 a call.

It keeps none of Lisa's promises: nothing is atomic, nothing is checked, no options are read,
nothing is counted. What it costs is what the data model costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lisa.cli.bench.server import Server
from lisa.core.keys import Keys

__all__ = ["BATCH", "BODY", "CONSUMER", "GROUP", "Floor", "Keyring", "Step", "life"]

BODY = "x" * 100
BATCH = 500
GROUP = "floor"
CONSUMER = "floor"
RETENTION_MS = 60_000
TOMBSTONE = "abcdefgh-acked,1234567890123,1,1234567890123"


class Keyring:
    """The floor's keys: as long as Lisa's."""

    def __init__(self) -> None:
        topic = Keys("floor").topic("bench")
        group = topic.group(GROUP)
        self.waiting, self.ready, self.entries = topic.waiting, group.ready, group.entries
        self.body, self.done = topic.body(""), topic.done("")


@dataclass(frozen=True, slots=True)
class Step:
    """What one step cost, in microseconds a message: the server's processor, and the clock."""

    redis_us: float
    wall_us: float


class Floor:
    """One topic in raw commands.

    bare: without what lets a message be found by its id (the index of stream entries) and a call
    be repeated after its message was settled (tombstones).
    """

    def __init__(self, client: Any, *, bare: bool = False) -> None:
        self._client = client
        self._bare = bare
        self._keys = Keyring()
        self._held: list[list[tuple[str, str]]] = []
        client.xgroup_create(self._keys.ready, GROUP, "0", mkstream=True)

    def send(self, ids: Sequence[str], due_ms: int) -> None:
        """MSET of bodies and one ZADD."""
        for batch in _batches(ids):
            pipeline = self._client.pipeline(transaction=False)
            pipeline.mset({f"{self._keys.body}{one}": BODY for one in batch})
            pipeline.zadd(self._keys.waiting, dict.fromkeys(batch, due_ms))
            pipeline.execute()

    def promote(self, now_ms: int) -> None:
        """Move what is due into the stream."""
        keys, moved = self._keys, 0
        while due := self._client.zrangebyscore(keys.waiting, "-inf", now_ms, start=0, num=BATCH):
            # Entry ids of our own making, so that the index goes into the same pipeline.
            entries = [f"{now_ms}-{moved + number}" for number in range(1, len(due) + 1)]
            pipeline = self._client.pipeline(transaction=False)
            for one, entry in zip(due, entries, strict=True):
                pipeline.xadd(keys.ready, {"id": one}, id=entry)
            if not self._bare:
                pipeline.hset(keys.entries, mapping=dict(zip(due, entries, strict=True)))
            pipeline.zrem(keys.waiting, *due)
            pipeline.execute()
            moved += len(due)

    def read(self) -> None:
        """XREADGROUP and the bodies."""
        keys = self._keys
        while found := self._client.xreadgroup(GROUP, CONSUMER, {keys.ready: ">"}, count=BATCH):
            batch = [(entry, fields[b"id"].decode()) for entry, fields in found[0][1]]
            self._client.mget([keys.body + one for _, one in batch])
            self._held.append(batch)

    def settle(self) -> None:
        """Look at the index, take everything away, leave tombstones."""
        for batch in self._held:
            entries, ids = zip(*batch, strict=True)
            self._settle(entries, ids)
        self._held.clear()

    def _settle(self, entries: Sequence[str], ids: Sequence[str]) -> None:
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
        if not self._bare:
            for one in ids:
                pipeline.set(keys.done + one, TOMBSTONE, px=RETENTION_MS)
            pipeline.execute()


def life(server: Server, count: int, *, bare: bool = False) -> dict[str, Step]:
    """The whole life of `count` messages, step by step: send, promote, read, settle."""
    floor = Floor(server.client, bare=bare)
    ids = [f"{number:022d}" for number in range(count)]
    due_ms = time.time_ns() // 1_000_000
    steps: dict[str, Callable[[], None]] = {
        "send": lambda: floor.send(ids, due_ms),
        "promote": lambda: floor.promote(due_ms),
        "read": floor.read,
        "settle": floor.settle,
    }
    return {name: _timed(server, count, step) for name, step in steps.items()}


def _timed(server: Server, count: int, step: Callable[[], None]) -> Step:
    cpu, began = server.cpu_us(), time.perf_counter()
    step()
    wall_us = (time.perf_counter() - began) * 1e6
    return Step((server.cpu_us() - cpu) / count, wall_us / count)


def _batches(ids: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(ids), BATCH):
        yield ids[start : start + BATCH]
