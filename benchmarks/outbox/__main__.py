"""`python -m benchmarks.outbox --database URL`: what an outbox costs, and what its relay keeps up.

A plain transaction inserts a row; the measured one sends a message besides. The time from commit to
ready is from the end of COMMIT to the id of the stream's entry, by the clock of the machine that
runs the application and Redis. The tables `bench_orders`, `bench_outbox` and
`bench_inbox` are recreated.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from statistics import median, quantiles

import click
from sqlalchemy import Column, Integer, Table, create_engine, func, insert, select

from benchmarks.bench.__main__ import clear_settings
from benchmarks.bench.results import Fault
from benchmarks.bench.server import BenchServer, fresh_server
from benchmarks.bench.work import GROUP, TOPIC, store_on
from benchmarks.table import Figures, Row, show
from lisa.admin.groups import add
from lisa.core.transitions.topic import Configure
from lisa.outbox import Outbox, Tables

BODY = {"n": 0, "pad": "x" * 80}
BACKLOG, PIECE = 50_000, 500
TRANSACTIONS = 1_500
THREADS = 8
PATIENCE_S = 120.0

ROWS = (
    Row("cost", "ms of a transaction that inserts one row", lambda f: f["plain_ms"]),
    Row("cost", "ms that a send adds to it", lambda f: f["added_ms"], at_most=0.3),
    *(
        row
        for of in ("steady", "open")
        for row in (
            Row(of, "transactions per second", lambda f: f["rate"]),
            Row(of, "ms from commit to ready, p50", lambda f: f["p50"]),
            Row(of, "ms from commit to ready, p99", lambda f: f["p99"], at_most=50),
            Row(of, "MB of the table with its indexes, most (PostgreSQL)", lambda f: f["size"]),
        )
    ),
    Row("drain", "rows per second, one relay", lambda f: f["rate"], at_least=10_000),
)


class Shop:
    """An application with its tables, on an empty server."""

    def __init__(self, database: str, server: BenchServer) -> None:
        self.database, self.server = database, server
        self.tables = Tables(outbox="bench_outbox", inbox="bench_inbox")
        self.orders = Table(
            "bench_orders", self.tables.metadata, Column("n", Integer, primary_key=True)
        )
        self.engine = create_engine(database, pool_size=THREADS)
        self.tables.metadata.drop_all(self.engine)
        self.tables.metadata.create_all(self.engine)
        self.outbox = Outbox(tables=self.tables)
        self._lock, self._number = threading.Lock(), 0

    def close(self) -> None:
        """Drop the tables."""
        self.tables.metadata.drop_all(self.engine)
        self.engine.dispose()

    def commit(self, *, sends: bool = True) -> tuple[str, int]:
        """Commit an order, with a message or without; returns its id and the instant in ms."""
        with self._lock:
            self._number += 1
            number = self._number
        with self.engine.begin() as connection:
            connection.execute(insert(self.orders), {"n": number})
            sent = self.outbox.send(connection, TOPIC, BODY) if sends else ""
        return sent, time.time_ns() // 1_000_000

    def commit_many(self, count: int) -> None:
        """Commit sends, hundreds in a transaction."""
        for _ in range(count // PIECE):
            with self.engine.begin() as connection:
                for _ in range(PIECE):
                    self.outbox.send(connection, TOPIC, BODY, delay="1h")

    def rows(self) -> int:
        """How many rows the outbox has."""
        with self.engine.connect() as connection:
            return connection.scalar(select(func.count()).select_from(self.tables.outbox)) or 0

    def size_mb(self) -> float:
        """The size of the outbox's table; 0 where the database does not tell."""
        if self.engine.dialect.name != "postgresql":
            return 0.0
        with self.engine.connect() as connection:
            size = func.pg_total_relation_size(self.tables.outbox.name)
            return (connection.scalar(select(size)) or 0) / 1e6

    @contextmanager
    def relay(self, *, is_at_work: bool = True) -> Iterator[None]:
        """Run `lisa-relay`. If it `is_at_work`, the block begins when no row is left."""
        command = (sys.executable, "-m", "lisa.cli.relay", "--redis", self.server.url)
        settings = {
            "LISA_RELAY__DATABASE": self.database,
            "LISA_RELAY__OUTBOX": self.tables.outbox.name,
        }
        process = subprocess.Popen(command, env={**os.environ, **settings})
        try:
            if is_at_work:
                self.commit()
                self.wait_until(lambda: self.rows() == 0, "the relay's start")
            yield
        finally:
            process.terminate()
            process.wait(PATIENCE_S)

    def wait_until(self, is_over: Callable[[], bool], what: str) -> None:
        """Wait. Raises Fault."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_over():
            if time.monotonic() > deadline:
                raise Fault(f"{what} took too long")
            time.sleep(0.02)


def cost(shop: Shop) -> Figures:
    """Transactions with and without a send, in turns, on one connection."""
    spent: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(TRANSACTIONS):
        for sends, times in spent.items():
            began = time.perf_counter()
            shop.commit(sends=sends)
            times.append((time.perf_counter() - began) * 1000)
    plain_ms, whole_ms = map(median, spent.values())
    return {"plain_ms": plain_ms, "added_ms": whole_ms - plain_ms}


def drain(shop: Shop) -> Figures:
    """Rows that were committed before the relay starts, from the first it deletes to the last."""
    shop.commit_many(BACKLOG)
    first = shop.rows()
    with shop.relay(is_at_work=False):
        shop.wait_until(lambda: shop.rows() < first, "the relay's start")
        began, left = time.monotonic(), shop.rows()
        shop.wait_until(lambda: shop.rows() == 0, "the drain")
        return {"rate": left / (time.monotonic() - began)}


def steady(shop: Shop, seconds: float, rate: int) -> Figures:
    """Transactions at a constant rate, each with a message that is due at once."""
    committed, sizes = dict[str, int](), [0.0]
    count = round(seconds * rate)

    def commit(number: int) -> None:
        time.sleep(max(0.0, began + number / rate - time.monotonic()))
        sent, at_ms = shop.commit()
        committed[sent] = at_ms
        if number % (rate * 5) == 0:
            sizes.append(shop.size_mb())

    with shop.relay():
        began = time.monotonic()
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(commit, range(count)))
        took_s = time.monotonic() - began
        shop.wait_until(lambda: shop.rows() == 0, "the relay")
    ready = shop.server.client.xrange(f"lisa:{{{TOPIC}}}:g:{GROUP}:ready")
    late = [
        int(entry.split(b"-")[0]) - committed[fields[b"id"].decode()]
        for entry, fields in ready
        if fields[b"id"].decode() in committed
    ]
    if len(late) != len(committed):
        raise Fault(f"{len(late)} of {len(committed)} messages became ready")
    centiles = quantiles(late, n=100)
    return {"rate": count / took_s, "p50": centiles[49], "p99": centiles[98], "size": max(sizes)}


def with_open_transaction(shop: Shop, seconds: float, rate: int) -> Figures:
    """The same, while another transaction is open that has inserted a row at the beginning."""
    with shop.engine.begin() as connection:
        shop.outbox.send(connection, TOPIC, BODY)
        connection.rollback()
    with shop.engine.connect() as connection:
        connection.execute(insert(shop.orders), {"n": -1})
        figures = steady(shop, seconds, rate)
        connection.rollback()
    return figures


@click.command()
@click.option("--database", required=True, metavar="URL", help="A database for the tables.")
@click.option("--seconds", default=60.0, help="How long transactions are made at a constant rate.")
@click.option("--rate", default=1_000, help="Transactions per second.")
@click.option("--open-seconds", default=0.0, help="Again, with another transaction open.")
def main(database: str, seconds: float, rate: int, open_seconds: float) -> None:
    """Measure. Exits with 1 if a bound is missed."""
    clear_settings()
    with fresh_server() as server, closing(Shop(database, server)) as shop:
        with closing(store_on(server)) as store:
            store.drive(add(store, TOPIC, GROUP))
            store.call(Configure(TOPIC, {"max_ready": "10000000"}))
        figures = {"cost": cost(shop)}
        figures["steady"] = steady(shop, seconds, rate)
        if open_seconds:
            figures["open"] = with_open_transaction(shop, open_seconds, rate)
        figures["drain"] = drain(shop)
    is_met = show([row for row in ROWS if row.of in figures], figures)
    sys.exit(not is_met)


if __name__ == "__main__":
    main()
