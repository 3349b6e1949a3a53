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
from collections import Counter, deque
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
    event,
    exists,
    func,
    select,
    text,
    update,
)
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError

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
"""How often the table is looked at: for a second after rows were found, and later."""
BUSY_FOR_S = 1.0

LOOK_BACK_S = 2.0
"""Most looks skip numbers that were passed this long ago: deleted rows that an old transaction
keeps the database from removing would make each look slower. The others, one a second and at most
a tenth of the time, find rows that were committed later than that."""
SWEEP_S, SWEEP_SHARE = 1.0, 10

LET_GO_S = 60
"""The database ends the transaction of a relay that it has not heard of for so long."""
_LET_GO = f"SET LOCAL idle_in_transaction_session_timeout = '{LET_GO_S}s'"

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
    """Rows that wait, and rows that were set aside.

    age_s: the age in seconds of the oldest that waits, and not behind one that was set aside.
    """

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
        self._passed_to = self._swept_to = 0
        self._was_sweep = False
        self.is_behind = False
        """Whether the last batch was full, or leaves later operations on its messages."""
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

        Raises LisaError, and what the database raises. Then all rows are still in the table, and
        Redis may have done some of their operations, which will be repeated.
        """
        began = time.monotonic()
        floor, pause_s = self._floor(began), max(SWEEP_S, SWEEP_SHARE * self._sweep_s)
        is_sweep = began >= self._swept + pause_s and not self._was_sweep
        start = self._swept_to if is_sweep else floor
        self._was_sweep, self.is_behind = is_sweep, False
        if self._dialect == "sqlite" and not self._has_rows():
            return 0
        with self._transaction() as connection:
            numbers = self._queries.lock(connection, start)
            last, is_full = max(numbers, default=0), len(numbers) == BATCH
            if is_sweep and is_full and last < floor:  # there may be more, after another look
                self._swept_to = last
            elif is_sweep:
                self._swept_to, self._swept = 0, time.monotonic()
                self._sweep_s = self._swept - began
            taken = self._forward(connection, numbers) if numbers else 0
        if numbers and not is_sweep:
            self._passed.append((began, last))
        self.is_behind |= is_full
        return taken

    def _floor(self, now: float) -> int:
        """The number above which a usual look begins."""
        while self._passed and self._passed[0][0] <= now - LOOK_BACK_S:
            self._passed_to = max(self._passed_to, self._passed.popleft()[1])
        return self._passed_to

    def _has_rows(self) -> bool:
        """A look without a lock, which on SQLite would stop all writers."""
        with self._engine.connect() as connection:
            return self._queries.has_rows(connection)

    @contextmanager
    def _transaction(self) -> Iterator[Connection]:
        with self._engine.connect() as connection:
            if self._dialect != "sqlite":
                with connection.begin():
                    if self._dialect == "postgresql":
                        connection.exec_driver_sql(_LET_GO)
                    yield connection
                return
            connection.exec_driver_sql("BEGIN IMMEDIATE")  # in the driver's autocommit mode
            try:
                yield connection
            except BaseException:
                connection.exec_driver_sql("ROLLBACK")
                raise
            connection.exec_driver_sql("COMMIT")

    def _forward(self, connection: Connection, numbers: Sequence[int]) -> int:
        """Do the operations of locked rows; returns how many had their turn."""
        rows = self._queries.read(connection, numbers)
        results = self.store.drive(self._forwarding.forward(rows))
        done, failed = list[int](), list[tuple[int, RowFailure]]()
        for row in rows:
            if row.seq not in results:
                continue
            failure = results[row.seq]
            if failure is None:
                done.append(row.seq)
                self.is_behind |= row.is_followed
            else:
                failed.append((row.seq, failure))
            result = "set_aside" if failure and failure.is_final else "postponed"
            self.done.add(1, OPERATIONS.get(row.operation, "?"), result if failure else "forwarded")
        self._queries.delete(connection, done)
        self._queries.postpone(connection, failed)
        for (reason, is_final), count in Counter(failure for _, failure in failed).items():
            told = "set aside" if is_final else "trying again"
            level = logging.ERROR if is_final else logging.WARNING
            log.log(level, "outbox: %s: %d operations, %s", reason, count, told)
        self._deleted += len(done)
        return len(results)

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
        except Exception as error:  # noqa: BLE001  logged; tried again
            return self._failed(error)
        self.is_redis_there = True
        if self.error:
            log.info("relay %s: works again", self.name)
            self.error = ""
        self._backoff.reset()
        now = time.monotonic()
        if taken:
            self._found = now
        if taken and self.is_behind:
            return 0.0
        pause_s = BUSY_S if now - self._found < BUSY_FOR_S else IDLE_S
        return max(0.0, began + pause_s - now)

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
        if not isinstance(error, LisaError):
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
                return  # a commit since the last look was not notified: look again
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
            # The server's own vacuum looks at a table once a minute. Other servers with this
            # dialect may have none.
            with suppress(DBAPIError), self._plain.connect() as connection:
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
        other = table.alias()
        same = other.c.id_hash == table.c.id_hash
        is_first = ~exists().where(same, other.c.seq < table.c.seq)
        self._due = select(table.c.seq).where(is_due, is_first).limit(1)
        self._lock = (
            select(table.c.seq)
            .where(is_due, is_first)
            .order_by(table.c.seq)
            .limit(BATCH)
            .with_for_update(skip_locked=True)
        )
        columns = [column for column in table.c if column is not table.c.reason]
        is_followed = exists().where(same, other.c.seq > table.c.seq)
        self._read = select(*columns, database_ms(), is_followed).where(is_first)
        self._is_aside = table.c.try_ms.is_(None)
        is_held = exists().where(same, other.c.seq < table.c.seq, other.c.try_ms.is_(None))
        oldest = select(func.min(table.c.created_ms)).where(~self._is_aside, ~is_held)
        aside = select(func.count()).where(self._is_aside).select_from(table)
        whole = select(func.count(), aside.scalar_subquery(), oldest.scalar_subquery())
        self._backlog = whole.add_columns(database_ms()).select_from(table)

    def has_rows(self, connection: Connection) -> bool:
        """Whether there is a row whose time has come."""
        return connection.execute(self._due).first() is not None

    def lock(self, connection: Connection, start: int) -> list[int]:
        """Lock the first rows of messages, if their time has come and no other relay has them.

        start: look at larger numbers only. Returns up to `BATCH` numbers.
        """
        return list(connection.scalars(self._lock.where(self._table.c.seq > start)))

    def read(self, connection: Connection, numbers: Sequence[int]) -> list[OutboxRow]:
        """Locked rows that still are the first ones of their messages.

        The locks may be on rows that are newer than what their query saw of others. So this is
        another one: an earlier row that another relay has is still there, or was done.
        """
        found = connection.execute(self._read.where(self._table.c.seq.in_(numbers))).all()
        read_s = time.monotonic()
        return sorted(OutboxRow._make((*columns, read_s)) for columns in found)

    # InnoDB locks all rows that it reads, so each row is changed by its number, and no other read.

    def delete(self, connection: Connection, numbers: Sequence[int]) -> None:
        """Delete rows."""
        if numbers:
            own = delete(self._table).where(self._table.c.seq == bindparam("number"))
            connection.execute(own, [{"number": number} for number in numbers])

    def postpone(self, connection: Connection, failed: Sequence[tuple[int, RowFailure]]) -> None:
        """Set rows aside, or have them tried again later."""
        own = update(self._table).where(self._table.c.seq == bindparam("number"))
        for is_final, again in ((True, None), (False, database_ms() + TRY_AGAIN_MS)):
            some = [(seq, reason) for seq, (reason, final) in failed if final is is_final]
            if some:
                change = own.values(try_ms=again, reason=bindparam("told"))
                connection.execute(change, [{"number": seq, "told": told} for seq, told in some])

    def count(self, connection: Connection) -> Backlog:
        """Count the rows."""
        rows, set_aside, oldest, now_ms = connection.execute(self._backlog).one()
        age_s = max(0, now_ms - oldest) / 1000 if oldest is not None else 0.0
        return Backlog(rows - set_aside, age_s, set_aside)

    def set_aside(self, connection: Connection, limit: int | None = None) -> list[RowSetAside]:
        """The rows that were set aside, the oldest first."""
        table, other = self._table, self._table.alias()
        is_behind = (other.c.id_hash == table.c.id_hash, other.c.seq > table.c.seq)
        behind = select(func.count()).where(*is_behind).scalar_subquery()
        columns = (table.c.seq, table.c.operation, table.c.topic, table.c.message_id)
        age_ms = database_ms() - table.c.created_ms
        query = select(*columns, table.c.reason, age_ms, behind).where(self._is_aside)
        return [
            RowSetAside(*row)
            for row in connection.execute(query.order_by(table.c.seq).limit(limit))
        ]

    def release(
        self, connection: Connection, numbers: Sequence[int], *, discard: bool = False
    ) -> list[int]:
        """Have rows that were set aside tried again, or discard them.

        numbers: at most `BATCH`. Returns those that were set aside.
        """
        chosen = (self._table.c.seq.in_(numbers), self._is_aside)
        found = list(connection.scalars(select(self._table.c.seq).where(*chosen)))
        if discard:
            self.delete(connection, found)
        else:
            again = update(self._table).where(*chosen)
            connection.execute(again.values(try_ms=0, reason=None))
        return found


def _shown(url: URL) -> str:
    plain = URL.create(url.get_backend_name(), None, None, url.host, url.port, url.database)
    return plain.render_as_string()


def _let_go(connection: Any, _: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"SET SESSION wait_timeout = {LET_GO_S}")


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
            engine = create_engine(
                candidate, isolation_level=isolation, pool_size=2, max_overflow=2
            )
            if family in ("mysql", "mariadb"):
                event.listen(engine, "connect", _let_go)
            return engine
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
