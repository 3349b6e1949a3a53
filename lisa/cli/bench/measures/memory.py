"""Bytes of server memory per waiting message."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

from lisa import Producer
from lisa.cli.bench.floor import BODY, Floor
from lisa.cli.bench.run import Run
from lisa.cli.bench.server import BenchServer, debian_binary, fresh_server
from lisa.cli.bench.subject import TOPIC, prepared

NAME = "memory"
FAR_MS = 4_000_000_000_000
EMBEDDED, DEBIAN = "embedded server", "redis-server"


def measure(run: Run) -> None:
    """Figures: bytes for a body of 100 bytes with a generated id, on two servers."""
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
        with prepared(server):
            pass
        before = _without_buffers(server)
        with Producer(server.url) as producer:
            producer.send_many(TOPIC, [BODY] * count, delay=timedelta(hours=1))
        lisa = (_without_buffers(server) - before) / count
    run.results.add(NAME, "floor", name, floor, "bytes")
    run.results.add(NAME, "lisa", name, lisa, "bytes")


def _without_buffers(server: BenchServer) -> int:
    """The server's memory once it has freed the buffers of closed connections."""
    time.sleep(0.2)
    return server.memory()
