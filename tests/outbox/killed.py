"""An application and a relay that are killed at their n-th step, for each n; run as a process.

Steps: before and after each statement of the database, each commit, and each command of Redis.
Prints the number of steps, after the role has run to its end in the last child.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from sqlalchemy import Engine, create_engine, event, text
from sqlalchemy.orm import Session

from lisa.core.redis.connection import Connection
from lisa.outbox import Outbox, Relay

ORDERS = "CREATE TABLE orders (id VARCHAR(40) PRIMARY KEY, state VARCHAR(40) NOT NULL)"


def application(url: str, _redis: str, number: int, step: Callable[[], None]) -> None:
    """Place, change and pay orders, each in a transaction, and have one rolled back."""
    engine, outbox = create_engine(url), Outbox()
    watch(engine, step)

    def insert(session: Session, name: str, state: str) -> None:
        values = {"id": f"{name}-{number}", "state": state}
        session.execute(text("INSERT INTO orders VALUES (:id, :state)"), values)

    def change(session: Session, name: str, state: str) -> None:
        values = {"id": f"{name}-{number}", "state": state}
        session.execute(text("UPDATE orders SET state = :state WHERE id = :id"), values)

    def send(session: Session, name: str, **options: Any) -> None:
        outbox.send(session, "orders", name, id=f"{name}-{number}", **options)

    with Session(engine) as session:
        for name in ("paid", "moved", "new"):
            insert(session, name, "waiting")
            send(session, name, delay="1h")
        session.commit()
        change(session, "paid", "cancelled")
        outbox.cancel(session, "orders", f"paid-{number}")
        change(session, "moved", "moved")
        outbox.reschedule(session, "orders", f"moved-{number}", delay="50h")
        session.commit()
        insert(session, "lost", "waiting")
        send(session, "lost")
        session.rollback()
        insert(session, "short", "cancelled")
        send(session, "short", delay="1h")
        outbox.cancel(session, "orders", f"short-{number}")
        session.commit()


def relay(url: str, redis: str, _number: int, step: Callable[[], None]) -> None:
    """Forward all rows."""
    made = Relay(url, redis)
    watch(made._engine, step)
    execute = Connection.execute

    def counted(*args: Any) -> Any:
        step()
        reply = execute(*args)
        step()
        return reply

    Connection.execute = counted  # type: ignore[method-assign, assignment]
    while made.step():
        pass


def watch(engine: Engine, step: Callable[[], None]) -> None:
    """Call `step` before and after each statement and commit."""
    for name in ("before_cursor_execute", "after_cursor_execute"):
        event.listen(engine, name, lambda *_: step())
    commit = engine.dialect.do_commit

    def commits(connection: Any) -> None:
        step()
        commit(connection)
        step()

    engine.dialect.do_commit = commits  # type: ignore[method-assign, assignment]


def main(role: str, url: str, redis: str) -> None:
    """Run the role in children, each killed one step later, until one reaches its end."""
    act = {"application": application, "relay": relay}[role]
    for number in count(1):
        child = os.fork()
        if not child:
            steps = iter(range(1, number))

            def step(left: Iterator[int] = steps) -> None:
                if next(left, None) is None:
                    os.kill(os.getpid(), signal.SIGKILL)

            try:
                act(url, redis, number, step)
            except BaseException:  # noqa: BLE001  printed
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status != signal.SIGKILL:
            sys.exit(status and 1)
        sys.stdout.write(f"{number}\n")
        sys.stdout.flush()
        sys.stdin.readline()  # the test has looked at what is left


if __name__ == "__main__":
    main(*sys.argv[1:])
