"""The relay: takes rows of an outbox, has their operations done in Redis, and deletes them.

The queries are those of job queues in SQL: FOR UPDATE SKIP LOCKED, so that relays share the rows,
and never a cursor, which would skip rows of transactions that commit late.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, Self

from sqlalchemy import (
    Connection,
    Engine,
    bindparam,
    create_engine,
    delete,
    exists,
    func,
    select,
    text,
    update,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, SQLAlchemyError

from lisa.core.daemon.threads import ServiceThread, begin_round, rest
from lisa.core.metrics.families import STEP_SECONDS
from lisa.core.metrics.numbers import Spread, Tally
from lisa.core.model.backoff import LONGEST_AWAY_S, Backoff
from lisa.core.model.durability import Replicas
from lisa.core.model.errors import ConfigError, LisaError, ServerUnavailable
from lisa.core.model.keys import Keys
from lisa.core.redis.address import Address
from lisa.core.redis.connection import Connection as RedisConnection
from lisa.core.store import presence
from lisa.core.store.store import SyncStore
from lisa.outbox.forwarding import Forwarding, OutboxRow, RowFailure
from lisa.outbox.outbox import CHANNEL, OPERATIONS
from lisa.outbox.tables import Tables, database_ms

log = logging.getLogger(__name__)

BATCH = 500
BUSY_S, IDLE_S = 0.025, 0.25
"""Pauses between looks at the table: for a second after rows were found, and later."""
BUSY_FOR_S = 1.0

LOOK_BACK_S = 2.0
"""Most looks skip numbers that were passed this long ago: deleted rows that an old transaction
keeps the database from removing would make each look slower. The others, one a second and at most
a tenth of the time, find rows that were committed later than that."""
SWEEP_S, SWEEP_SHARE = 1.0, 10

PATIENCE = timedelta(seconds=2)
"""How long a call to Redis is repeated while rows are locked."""

TRY_AGAIN_MS = 5_000
"""When an operation is tried again that failed for now, such as one on a full topic."""

COUNT_EVERY_S, COUNT_SHARE = 5.0, 20
VACUUM_EVERY_S, VACUUM_ROWS = 5.0, 1_000

_BLOCKING_DRIVERS = {
    "postgresql": ("psycopg", "psycopg2"),
    "mysql": ("mysqldb", "pymysql"),
    "mariadb": ("mysqldb", "pymysql"),
    "sqlite": ("pysqlite",),
}


class Backlog(NamedTuple):
    """Rows that wait, the age of the oldest in seconds, and rows that were set aside."""

    rows: int = 0
    age_s: float = 0.0
    set_aside: int = 0


class RowSetAside(NamedTuple):
    """A row that can never be sent as it is, and how many later rows wait behind it."""

    seq: int
    operation: str
    topic: str
    message_id: str
    reason: str | None
    age_ms: int
    behind: int


class Relay:
    """Forwards the operations of an outbox. Any number of relays may run on a table.

    database: the URL of the database, as SQLAlchemy writes it.
    server, prefix, durability: as for `Producer`.
    tables: the names of the tables.
    notify: listen to the commits of an `Outbox` that has `notify`, too. PostgreSQL with psycopg.

    A row is deleted after Redis has taken its operation, in a transaction that holds the row
    locked. If the relay dies in between, the operation is repeated with the same send token,
    without a further effect. Raises ConfigError for a URL or driver that cannot be used.
    """

    def __init__(
        self,
        database: str | URL,
        server: str | Address | None = None,
        *,
        prefix: str | None = None,
        tables: Tables | None = None,
        durability: Replicas | None = None,
        notify: bool = False,
    ) -> None:
        self.name = presence.unique_name("relay")
        self.tables = tables or Tables()
        engine = self._engine = engine_of(database)
        self._dialect = engine.dialect.name
        self._plain = engine.execution_options(isolation_level="AUTOCOMMIT")
        if notify and (self._dialect, engine.driver) != ("postgresql", "psycopg"):
            raise ConfigError(
                "notify needs PostgreSQL with the driver psycopg, not "
                f"{self._dialect} with {engine.driver}"
            )
        address = Address.of(server).answering_within(PATIENCE.total_seconds())
        self.store = SyncStore(RedisConnection(address), Keys.of(prefix), PATIENCE, who="relay")
        self._forwarding = Forwarding(
            self.store, zone=None, patience=PATIENCE, durability=durability
        )
        self._queries = Queries(self.tables)
        self._notify = notify
        self._listener: Connection | None = None
        self._stopping = threading.Event()
        self.thread = ServiceThread("lisa-relay", self._work, is_over=self._stopping.is_set)
        self.table = f"{_shown(engine.url)} {self.tables.outbox.fullname}"
        """The database and the table, without user and password."""
        self.done = Tally()
        """Operations by their name and result: forwarded, set_aside, postponed."""
        self.seconds = Spread(STEP_SECONDS)
        """How long batches took."""
        self.is_redis_there: bool | None = None
        """None before the first round has ended."""
        self.errors = 0
        self.error = ""
        """What the last round failed with; empty if it succeeded."""
        self.backlog = Backlog()
        self._backoff = Backoff(longest_s=LONGEST_AWAY_S)
        self._found = self._counted = self._count_s = self._swept = self._sweep_s = -1e9
        self._vacuumed, self._deleted = time.monotonic(), 0
        self._passed: deque[tuple[float, int]] = deque()
        self._beaten, self._started_ms = -1e9, 0

    def start(self) -> Self:
        """Start the relay's thread, and return the relay."""
        self.thread.start()
        return self

    def stop(self) -> None:
        """Finish the batch, stop and close all connections."""
        self._stopping.set()
        self.thread.join()
        if self._listener is not None:
            self._listener.close()
        self._engine.dispose()
        if self._started_ms and self.is_redis_there:
            with suppress(LisaError):
                self.store.drive(presence.leave_relay(self.store, self.name))
        self.store.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def step(self) -> int:
        """Forward one batch. Returns how many rows it took; 0 if the others are taken or blocked.

        Raises LisaError, and what the database raises; then nothing was taken from the table.
        """
        began = time.monotonic()
        is_sweep = began >= self._swept + max(SWEEP_S, SWEEP_SHARE * self._sweep_s)
        floor = self._floor(began)
        if self._dialect == "sqlite" and not self._has_rows():
            return 0
        with self._transaction() as connection:
            numbers = self._queries.lock(connection, 0 if is_sweep else floor)
            is_passed = len(numbers) == BATCH and numbers[-1][0] <= floor
            if is_sweep and not is_passed:  # else there may be more
                self._swept = time.monotonic()
                self._sweep_s = self._swept - began
            if not numbers:
                return 0
            taken = self._forward(connection, numbers)
        self._passed.append((began, numbers[-1][0]))
        return taken

    def _floor(self, now: float) -> int:
        """The number above which a usual look begins."""
        while len(self._passed) > 1 and self._passed[1][0] <= now - LOOK_BACK_S:
            self._passed.popleft()
        return self._passed[0][1] if self._passed and self._passed[0][0] <= now - LOOK_BACK_S else 0

    def _has_rows(self) -> bool:
        """A look without a lock, which on SQLite would stop all writers."""
        with self._engine.connect() as connection:
            return self._queries.has_rows(connection)

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with self._engine.connect() as connection:
            if self._dialect != "sqlite":
                with connection.begin():
                    yield connection
                return
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # in the driver's autocommit mode
            try:
                yield connection
            except BaseException:
                connection.exec_driver_sql("ROLLBACK")
                raise
            connection.exec_driver_sql("COMMIT")

    def _forward(self, connection: Connection, numbers: Sequence[tuple[int, int]]) -> int:
        """Do the operations of locked rows, given by `seq` and `id_hash`; returns how many."""
        rows, blocked = self._queries.read(connection, numbers)
        results = self.store.drive(self._forwarding.forward(rows))
        failed = {seq: failure for seq, failure in results.items() if failure is not None}
        done = [seq for seq in results if seq not in failed]
        self._queries.delete(connection, done)
        for seq, failure in failed.items():
            self._queries.postpone(connection, seq, failure)
        for seq, again in blocked.items():
            self._queries.change(connection, seq, try_ms=again)
        for row in rows:
            if row.seq in results:
                self._count(row, failed.get(row.seq))
        self._deleted += len(done)
        return len(results)

    def _count(self, row: OutboxRow, failure: RowFailure | None) -> None:
        result = "forwarded"
        if failure is not None:
            result = "set_aside" if failure.is_final else "postponed"
            log.log(
                logging.ERROR if failure.is_final else logging.WARNING,
                "outbox: message %s of topic %s: %s: %s",
                row.message_id,
                row.topic,
                "set aside" if failure.is_final else "trying again",
                failure.reason,
            )
        self.done.add(1, OPERATIONS[row.operation], result)

    # The thread.

    def _work(self) -> None:
        while not self._stopping.is_set():
            begin_round()
            pause_s = self._round()
            rest()
            if pause_s:
                self._wait(pause_s)

    def _round(self) -> float:
        """One step and what is due besides it. Returns the pause in seconds before the next."""
        try:
            self._keep_house()  # first: while Redis is away, the backlog grows
            if self.is_redis_there is False:  # do not wait for it while rows are locked
                self.store.drive(self.store.command("PING"))
            began = time.monotonic()
            taken = self.step()
            if taken:
                self.seconds.observe(time.monotonic() - began)
            self._beat()
        except (LisaError, SQLAlchemyError) as error:
            return self._failed(error)
        self.is_redis_there = True
        if self.error:
            log.info("relay %s: works again", self.name)
            self.error = ""
        self._backoff.reset()
        now = time.monotonic()
        if taken:
            self._found = now
        if taken >= BATCH:
            return 0.0
        return BUSY_S if now - self._found < BUSY_FOR_S else IDLE_S

    def _failed(self, error: Exception) -> float:
        known = isinstance(error, LisaError | DBAPIError)
        told = " ".join(str(getattr(error, "orig", error)).split())
        self.errors += 1
        if told != self.error:
            log.error("relay %s: %s; trying again", self.name, told, exc_info=not known)
        self.error = told
        self.is_redis_there = not isinstance(error, ServerUnavailable)
        if self.is_redis_there:
            with suppress(LisaError):
                self._beat(told)
        if isinstance(error, DBAPIError) and error.connection_invalidated:
            self._engine.dispose()
        return self._backoff.take()

    def _wait(self, pause_s: float) -> None:
        """Wait for the end of the pause, and with `notify` for a commit."""
        if not self._notify or self._stopping.is_set():
            self._stopping.wait(pause_s)
            return
        try:
            if self._listener is None:
                self._listener = self._plain.connect()
                self._listener.execute(text(f"LISTEN {CHANNEL}"))
            driver: Any = self._listener.connection.driver_connection
            for _ in driver.notifies(timeout=pause_s, stop_after=1):
                return
        except Exception as error:  # noqa: BLE001  of the driver; polling goes on without it
            log.warning("relay %s: cannot listen: %s", self.name, error)
            if self._listener is not None:
                self._listener.invalidate()
                self._listener = None
            self._stopping.wait(pause_s)

    def _keep_house(self) -> None:
        """Count what waits, and have PostgreSQL reuse the space of deleted rows."""
        now = time.monotonic()
        if now >= self._counted + max(COUNT_EVERY_S, COUNT_SHARE * self._count_s):
            with self._engine.connect() as connection:
                self.backlog = self._queries.count(connection)
            self._counted = time.monotonic()
            self._count_s = self._counted - now
        is_due = now >= self._vacuumed + VACUUM_EVERY_S and self._deleted >= VACUUM_ROWS
        if is_due and self._dialect == "postgresql":
            # The server's own vacuum looks at a table once a minute.
            with self._plain.connect() as connection:
                name = connection.dialect.identifier_preparer.format_table(self.tables.outbox)
                connection.exec_driver_sql(f"VACUUM (SKIP_LOCKED, INDEX_CLEANUP ON) {name}")
            self._vacuumed, self._deleted = time.monotonic(), 0

    def _beat(self, error: str = "") -> None:
        """Announce this relay. Raises LisaError."""
        if time.monotonic() < self._beaten + presence.BEAT.total_seconds():
            return
        self._started_ms = self._started_ms or self.store.drive(self.store.server_time_ms())
        me = presence.RelayPresence(
            name=self.name,
            host=socket.gethostname(),
            pid=os.getpid(),
            started_ms=self._started_ms,
            table=self.table,
            backlog=self.backlog.rows,
            age_ms=round(self.backlog.age_s * 1000),
            set_aside=self.backlog.set_aside,
            error=error,
        )
        self.store.drive(presence.announce_relay(self.store, me))
        self._beaten = time.monotonic()


class Queries:
    """The statements of a relay, in one form for all databases."""

    def __init__(self, tables: Tables) -> None:
        table = self._table = tables.outbox
        # The clock is read once for a statement, not for each row.
        is_due = table.c.try_ms <= select(database_ms()).scalar_subquery()
        self._due = select(table.c.seq).where(is_due).limit(1)
        self._lock = (
            select(table.c.seq, table.c.id_hash)
            .where(is_due)
            .order_by(table.c.seq)
            .limit(BATCH)
            .with_for_update(skip_locked=True)
        )
        columns = [column for column in table.c if column is not table.c.reason]
        self._read = select(*columns, database_ms()).order_by(table.c.seq)
        waits = func.sum(func.coalesce(table.c.try_ms * 0 + 1, 0))
        oldest = func.min(table.c.created_ms + table.c.try_ms * 0)  # not of those set aside
        self._backlog = select(func.count(), waits, oldest, database_ms()).select_from(table)

    def has_rows(self, connection: Connection) -> bool:
        """Whether there is a row whose time has come."""
        return connection.execute(self._due).first() is not None

    def lock(self, connection: Connection, floor: int) -> list[tuple[int, int]]:
        """Lock rows whose time has come and that no other relay has: their seq and id_hash."""
        query = self._lock.where(self._table.c.seq > floor)
        return [(row.seq, row.id_hash) for row in connection.execute(query)]

    def read(
        self, connection: Connection, numbers: Sequence[tuple[int, int]]
    ) -> tuple[list[OutboxRow], dict[int, int | None]]:
        """The locked rows whose earlier operations on the same message are locked, too.

        Also, for rows behind one that is set aside or postponed, when that is tried again. Reads
        all rows of these messages, as of now: after the locks, so that a row that another relay has
        is still there, or its operation was done.
        """
        own = {seq for seq, _ in numbers}
        query = self._read.where(self._table.c.id_hash.in_({id_hash for _, id_hash in numbers}))
        found = connection.execute(query).all()
        read_s = time.monotonic()
        rows, behind = list[OutboxRow](), dict[int, OutboxRow]()
        blocked: dict[int, int | None] = {}
        for row in (OutboxRow._make((*columns, read_s)) for columns in found):
            if row.id_hash not in behind and row.seq in own:
                rows.append(row)
            elif (first := behind.setdefault(row.id_hash, row)).try_ms != 0 and row.seq in own:
                blocked[row.seq] = first.try_ms
        return rows, blocked

    # InnoDB locks all rows that it reads, so each row is changed by its number, and no other read.

    def delete(self, connection: Connection, numbers: Sequence[int]) -> None:
        """Delete rows."""
        if numbers:
            own = delete(self._table).where(self._table.c.seq == bindparam("number"))
            connection.execute(own, [{"number": number} for number in numbers])

    def postpone(self, connection: Connection, seq: int, failure: RowFailure) -> None:
        """Set a row aside, or have it tried again later."""
        again = None if failure.is_final else database_ms() + TRY_AGAIN_MS
        self.change(connection, seq, try_ms=again, reason=failure.reason)

    def change(self, connection: Connection, seq: int, **values: Any) -> None:
        """Change columns of a row."""
        connection.execute(update(self._table).where(self._table.c.seq == seq).values(**values))

    def count(self, connection: Connection) -> Backlog:
        """Count the rows."""
        rows, waiting, oldest, now_ms = connection.execute(self._backlog).one()
        waiting = int(waiting or 0)
        age_s = max(0, now_ms - oldest) / 1000 if oldest is not None else 0.0
        return Backlog(waiting, age_s, rows - waiting)

    def set_aside(self, connection: Connection, limit: int | None = None) -> list[RowSetAside]:
        """The rows that were set aside, without those behind another one, the oldest first."""
        table, other = self._table, self._table.alias()
        same = other.c.id_hash == table.c.id_hash
        first = ~exists().where(same, other.c.seq < table.c.seq, other.c.try_ms.is_(None))
        behind = select(func.count()).where(same, other.c.seq > table.c.seq).scalar_subquery()
        columns = (table.c.seq, table.c.operation, table.c.topic, table.c.message_id)
        age_ms = database_ms() - table.c.created_ms
        query = select(*columns, table.c.reason, age_ms, behind).where(table.c.try_ms.is_(None))
        found = connection.execute(query.where(first).order_by(table.c.seq).limit(limit))
        return [RowSetAside(*row) for row in found]

    def release(
        self, connection: Connection, numbers: Sequence[int], *, discard: bool = False
    ) -> list[int]:
        """Have rows that were set aside tried again, or discard them; then those behind them.

        numbers: at most `BATCH`. Returns those that were set aside.
        """
        table = self._table
        chosen = table.c.seq.in_(numbers), table.c.try_ms.is_(None)
        found = connection.execute(select(table.c.seq, table.c.id_hash).where(*chosen)).all()
        if discard:
            self.delete(connection, [row.seq for row in found])
        # Not only rows that are set aside now: a relay may be about to set one of them aside.
        same = update(table).where(table.c.id_hash.in_({row.id_hash for row in found}))
        connection.execute(same.values(try_ms=0, reason=None))
        return [row.seq for row in found]


def _shown(url: URL) -> str:
    plain = URL.create(url.get_backend_name(), None, None, url.host, url.port, url.database)
    return plain.render_as_string()


def engine_of(database: str | URL) -> Engine:
    """An engine with a blocking driver that is installed. Raises ConfigError."""
    try:
        url = make_url(database)
    except ArgumentError:
        raise ConfigError(
            "the database is not a URL such as postgresql://user@localhost/shop"
        ) from None
    family, _, driver = url.drivername.partition("+")
    names = [driver, *_BLOCKING_DRIVERS.get(family, ())]
    missing = ""
    for name in filter(None, dict.fromkeys(names)):
        candidate = url.set(drivername=f"{family}+{name}")
        try:
            if candidate.get_dialect().is_async:
                continue
            isolation = "AUTOCOMMIT" if family == "sqlite" else "READ COMMITTED"
            return create_engine(candidate, isolation_level=isolation, pool_size=2, max_overflow=2)
        except ModuleNotFoundError as error:
            missing = missing or str(error.name)
        except NoSuchModuleError:
            continue
    wanted = (
        f"install a driver, such as {_BLOCKING_DRIVERS[family][-1]}"
        if missing
        else ("use postgresql, mysql, mariadb or sqlite")
    )
    raise ConfigError(f"no driver for the database {family}: {wanted}")
