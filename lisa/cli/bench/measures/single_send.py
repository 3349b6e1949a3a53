"""Single sends: Lisa's `send` against PING on the same kind of connection."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

from lisa import Producer
from lisa.cli.bench.floor import BODY
from lisa.cli.bench.run import Run
from lisa.cli.bench.server import BenchServer, fresh_server
from lisa.cli.bench.subject import TOPIC, prepared
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection

NAME = "single_send"
TURNS = 10
HOUR = timedelta(hours=1)


def measure(run: Run) -> None:
    """Figures: calls per second. Both are measured in turns, for equal conditions."""
    each = max(1, run.sizes.single // TURNS)
    for _ in run.repeats("sending one by one"):
        with fresh_server() as server, prepared(server) as producer:
            ping_s, send_s = _in_turns(server, producer, each)
            redis_us = _redis_us(server, producer, each)
        run.results.add(NAME, "floor", "rate", each * TURNS / ping_s, "1/s")
        run.results.add(NAME, "lisa", "rate", each * TURNS / send_s, "1/s")
        run.results.add(NAME, "lisa", "redis", redis_us, "us")


def _in_turns(server: BenchServer, producer: Producer, each: int) -> tuple[float, float]:
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


def _redis_us(server: BenchServer, producer: Producer, count: int) -> float:
    """The server's CPU time per message."""
    before_us = server.cpu_us()
    for _ in range(count):
        producer.send(TOPIC, BODY, delay=HOUR)
    return (server.cpu_us() - before_us) / count


def _seconds(count: int, call: Callable[[], object]) -> float:
    began = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - began
