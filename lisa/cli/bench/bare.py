"""The floor's processes: a poller and a consumer that use raw commands.

    python -m lisa.cli.bench.bare poll|consume [--whole]

Both read LISA_REDIS_URL; the consumer also reads BENCH_LEDGER (a directory). The poller polls for
due messages every 2 ms. `--whole` adds the index and the tombstones.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from lisa.cli.bench.floor import Floor
from lisa.cli.bench.ledger import RECORD, Writer
from lisa.cli.bench.server import client

PERIOD_S = 0.002
BLOCK_MS = 1_000


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
