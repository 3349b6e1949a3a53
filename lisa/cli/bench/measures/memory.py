"""Bytes of the server's memory for each waiting message."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

from lisa.cli.bench.floor import Floor
from lisa.cli.bench.run import Run
from lisa.cli.bench.server import debian_binary, fresh_server
from lisa.cli.bench.subject import TOPIC, bodies, prepared

__all__ = ["EMBEDDED", "NAME", "measure"]

NAME = "memory"
FAR_MS = 4_000_000_000_000
EMBEDDED, DEBIAN = "embedded server", "redis-server"


def measure(run: Run) -> None:
    """Figures: a message of 100 bytes with a generated id, due in an hour; two servers."""
    for _ in run.repeats("memory"):
        _on(run, EMBEDDED, None)
        if (binary := debian_binary()) is not None:
            _on(run, DEBIAN, binary)
    if debian_binary() is None:
        run.results.missing[DEBIAN] = "not on PATH (Debian: apt-get install redis-server)"


def _on(run: Run, name: str, binary: Path | None) -> None:
    count = run.sizes.memory
    with fresh_server(binary) as server:
        if binary is not None:
            run.results.versions[DEBIAN] = server.describe()
        before = server.memory()
        Floor(server.client).send({f"{number:022d}": FAR_MS for number in range(count)})
        floor = (server.memory() - before) / count
    with fresh_server(binary) as server:
        with prepared(server) as producer:
            before = server.memory()
            producer.send_many(TOPIC, bodies(count), delay=timedelta(hours=1))
        time.sleep(0.2)  # for the server to give back the closed connection's buffers
        lisa = (server.memory() - before) / count
    run.results.add(NAME, "floor", name, floor, "bytes")
    run.results.add(NAME, "lisa", name, lisa, "bytes")
