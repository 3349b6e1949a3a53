"""One message at a time: Lisa's `send` against PING on the same kind of connection."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from lisa import Producer
from lisa.cli.bench.floor import BODY
from lisa.cli.bench.run import Run
from lisa.cli.bench.server import Server, fresh_server
from lisa.cli.bench.subject import TOPIC, prepared
from lisa.core.address import Address
from lisa.core.connection import Connection

__all__ = ["NAME", "measure"]

NAME = "single_send"
TURNS = 10
HOUR = timedelta(hours=1)


def measure(run: Run) -> None:
    """Figures: calls a second. The two take turns, so that both meet the same machine."""
    each = max(1, run.sizes.single // TURNS)
    for _ in run.repeats("sending one by one"):
        with fresh_server() as server, prepared(server) as producer:
            ping_s, send_s = _in_turns(server, producer, each)
        run.results.add(NAME, "floor", "rate", each * TURNS / ping_s, "1/s")
        run.results.add(NAME, "lisa", "rate", each * TURNS / send_s, "1/s")


def _in_turns(server: Server, producer: Producer, each: int) -> tuple[float, float]:
    connection = Connection(Address.of(server.url))

    def ping() -> None:
        connection.execute(("PING",))

    def send() -> None:
        producer.send(TOPIC, BODY, delay=HOUR)

    ping()
    ping_s = send_s = 0.0
    for _ in range(TURNS):
        ping_s += _seconds(each, ping)
        send_s += _seconds(each, send)
    connection.close()
    return ping_s, send_s


def _seconds(count: int, call: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - began
