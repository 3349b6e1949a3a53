"""The floor of lateness: a poller and a consumer in raw commands, each a process of its own.

    python -m lisa.cli.bench.bare poll|consume

Both read LISA_REDIS_URL, the consumer also BENCH_LEDGER (a directory). The poller asks every 2 ms
for what is due, whether something is or not.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from lisa.cli.bench.floor import BATCH, CONSUMER, GROUP, Keyring
from lisa.cli.bench.ledger import RECORD, Writer
from lisa.cli.bench.server import client

PERIOD_S = 0.002
BLOCK_MS = 1_000


def poll(server: Any, keys: Keyring) -> None:
    """Move what is due into the stream, every 2 ms."""
    turn = time.monotonic()
    while True:
        now_ms = time.time_ns() // 1_000_000
        due = server.zrangebyscore(
            keys.waiting, "-inf", now_ms, start=0, num=BATCH, withscores=True
        )
        if due:
            pipeline = server.pipeline(transaction=False)
            for one, score in due:
                pipeline.xadd(keys.ready, {"id": one, "due": int(score)})
            pipeline.zrem(keys.waiting, *(one for one, _ in due))
            pipeline.execute()
        turn = max(turn + PERIOD_S, time.monotonic())
        time.sleep(max(0.0, turn - time.monotonic()))


def consume(server: Any, keys: Keyring, writer: Writer) -> None:
    """Read, fetch bodies, note the time, take all away."""
    while True:
        found = server.xreadgroup(GROUP, CONSUMER, {keys.ready: ">"}, count=BATCH, block=BLOCK_MS)
        for entries in (batch for _, batch in found):
            ids = [entry for entry, _ in entries]
            bodies = [keys.body + fields[b"id"].decode() for _, fields in entries]
            server.mget(bodies)
            for _, fields in entries:
                writer.note(RECORD.pack(int(fields[b"due"]) * 1000, time.time_ns() // 1000))
            pipeline = server.pipeline(transaction=False)
            pipeline.xack(keys.ready, GROUP, *ids)
            pipeline.xdel(keys.ready, *ids)
            pipeline.unlink(*bodies)
            pipeline.execute()


def main(part: str) -> None:
    """Run until SIGTERM."""
    with client(os.environ["LISA_REDIS_URL"]) as server:
        if part == "poll":
            poll(server, Keyring())
        else:
            folder = Path(os.environ["BENCH_LEDGER"])
            consume(server, Keyring(), Writer(folder / f"{os.getpid()}.ledger"))


if __name__ == "__main__":
    main(sys.argv[1])
