"""kill -9 of application and relay at every step: exactly the committed operations have effects."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

from lisa import Producer
from lisa.core.store.replies import counters
from lisa.outbox import Outbox, Relay, Tables
from tests.outbox.conftest import Database
from tests.outbox.killed import ORDERS

ROOT = Path(__file__).parent.parent.parent
HOUR_MS = 3_600_000
pytestmark = pytest.mark.parametrize(
    "database",
    ["sqlite", "postgresql", pytest.param("mariadb", marks=[pytest.mark.full, pytest.mark.sample])],
    indirect=True,
)
LEAST_STEPS = {"application": 20, "relay": 12}


@pytest.fixture
def orders(database: Database) -> Iterator[Engine]:
    """An engine on a database with a table of orders and an outbox; keeps no connection."""
    engine = create_engine(database.url, poolclass=NullPool)
    Tables().metadata.create_all(engine)
    with engine.begin() as connection:
        connection.execute(text(ORDERS))
    yield engine
    engine.dispose()


class Killed:
    """The process of `tests.outbox.killed`."""

    def __init__(self, role: str, database: Database, redis_url: str) -> None:
        command = [sys.executable, "-m", "tests.outbox.killed", role, database.url, redis_url]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def steps(self) -> Iterator[int]:
        """The number of each child after it was killed; the next one starts afterwards."""
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        with self.process:
            for line in self.process.stdout:
                yield int(line)
                self.process.stdin.write("\n")
        assert self.process.returncode == 0


def forward_all(engine: Engine, redis_url: str) -> None:
    relay = Relay(engine.url, redis_url)
    while relay.step():
        pass
    relay.stop()


def test_a_killed_application(orders: Engine, database: Database, redis_url: str) -> None:
    steps = list(Killed("application", database, redis_url).steps())
    assert len(steps) >= LEAST_STEPS["application"]
    forward_all(orders, redis_url)
    with orders.connect() as connection:
        states = {
            str(row.id): row.state for row in connection.execute(text("SELECT * FROM orders"))
        }
    assert not [name for name in states if name.startswith("lost")]
    now_ms = time.time() * 1000
    with Producer(redis_url) as producer:
        for number in range(1, len(steps) + 2):
            for name in ("paid", "moved", "new", "lost", "short"):
                found = producer.get("orders", f"{name}-{number}")
                state = states.get(f"{name}-{number}")
                if state is None:
                    assert found is None
                    continue
                assert found is not None
                assert found.state == ("cancelled" if state == "cancelled" else "waiting")
                if state == "moved":
                    assert (found.due_ms or 0) > now_ms + 40 * HOUR_MS
        assert all(f"{name}-{len(steps) + 1}" in states for name in ("paid", "moved", "short"))


def test_a_killed_relay(orders: Engine, database: Database, redis_url: str) -> None:
    outbox, producer = Outbox(), Producer(redis_url)

    def place(number: int) -> None:
        with Session(orders) as session:
            for name in ("plain", "cancelled", "moved", "replaced"):
                outbox.send(session, "orders", name, id=f"{name}-{number}", delay="1h")
            outbox.send(session, "mails", "new", id=f"mail-{number}", on_duplicate="replace")
            outbox.cancel(session, "orders", f"cancelled-{number}")
            outbox.reschedule(session, "orders", f"moved-{number}", delay="50h")
            session.commit()
            outbox.send(session, "orders", "lost", id=f"lost-{number}")
            session.rollback()

    count = 1
    place(count)
    for number in Killed("relay", database, redis_url).steps():
        count = number + 1
        place(count)
    assert count > LEAST_STEPS["relay"]
    now_ms = time.time() * 1000
    wanted = {"plain": "waiting", "cancelled": "cancelled", "moved": "waiting", "lost": None}
    for number in range(1, count + 1):
        for name, state in wanted.items():
            found = producer.get("orders", f"{name}-{number}")
            assert (found and found.state) == state
            if found is not None and name == "moved":
                assert (found.due_ms or 0) > now_ms + 40 * HOUR_MS
        assert producer.get("mails", f"mail-{number}") is not None
    for topic, sends in (("orders", 4), ("mails", 1)):
        stats = counters(producer._store.ask("HGETALL", f"lisa:{{{topic}}}:stats"))
        assert stats["sent"] == sends * count
        assert "duplicate" not in stats
    producer.close()
