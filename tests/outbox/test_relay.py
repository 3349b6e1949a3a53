"""What an outbox writes, and how a relay does it: on each database and a real server."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from sqlalchemy import Engine, delete, func, select, text, update
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from lisa import Producer
from lisa.core.model.errors import ConfigError, InvalidMessage
from lisa.core.store.replies import pairs
from lisa.embedded import EmbeddedServer
from lisa.middleware import Middleware
from lisa.outbox import AsyncOutbox, Outbox, Relay, Tables
from lisa.outbox.relay import PATIENCE, Queries
from lisa.producer.calls import SendCall
from tests.outbox.conftest import Database

HOUR_MS = 3_600_000


class Shop:
    """An application's tables and its outbox, a relay, and what is in Redis."""

    def __init__(self, engine: Engine, redis_url: str) -> None:
        self.engine, self.url = engine, redis_url
        self.tables = Tables()
        self.tables.metadata.create_all(engine)
        self.outbox = Outbox(tables=self.tables)
        self.producer = Producer(redis_url)
        self.relay = Relay(engine.url, redis_url, tables=self.tables)

    def commit(self, *calls: Callable[[Session], Any]) -> list[Any]:
        """Make calls in one transaction."""
        with Session(self.engine) as session, session.begin():
            return [call(session) for call in calls]

    def send(self, body: object = 1, **options: Any) -> str:
        """Send in a transaction of its own."""
        topic = options.pop("topic", "orders")
        return str(
            self.commit(lambda session: self.outbox.send(session, topic, body, **options))[0]
        )

    def state(self, message_id: str, topic: str = "orders") -> str | None:
        found = self.producer.get(topic, message_id)
        return None if found is None else str(found.state)

    def due_ms(self, message_id: str) -> int:
        found = self.producer.get("orders", message_id)
        assert found is not None
        return found.due_ms or 0

    def rows(self) -> list[Any]:
        with self.engine.connect() as connection:
            return list(connection.execute(select(self.tables.outbox).order_by("seq")))

    def make_older(self, by_ms: int) -> None:
        """As if all rows had been inserted earlier."""
        column = self.tables.outbox.c.created_ms
        with self.engine.begin() as connection:
            connection.execute(update(self.tables.outbox).values(created_ms=column - by_ms))

    def wait_until_empty(self) -> None:
        while self.rows():
            time.sleep(0.01)

    def relay_all(self) -> int:
        done = 0
        while taken := self.relay.step():
            done += taken
        return done


@pytest.fixture
def shop(engine: Engine, redis_url: str) -> Iterator[Shop]:
    made = Shop(engine, redis_url)
    yield made
    made.relay.stop()
    made.producer.close()


def test_committed_operations_are_done_and_those_rolled_back_are_not(shop: Shop) -> None:
    with Session(shop.engine) as session:
        lost = shop.outbox.send(session, "orders", 1)
        session.rollback()
    first, second = shop.send({"n": 1}, delay="30m"), shop.send(b"\x00", delay="1h", key="k")
    assert (shop.state(first), shop.state(second)) == (None, None)
    assert shop.relay_all() == 2
    assert (shop.state(lost), shop.state(first), shop.state(second)) == (None, "waiting", "waiting")
    found = shop.producer.get("orders", second)
    assert found is not None
    assert (found.body, second.split("\x1f")[0]) == (b"\x00", "k")
    shop.commit(
        lambda session: shop.outbox.cancel(session, "orders", first),
        lambda session: shop.outbox.reschedule(session, "orders", second, delay="2h"),
    )
    before = shop.due_ms(second)
    assert shop.relay_all() == 2
    assert shop.state(first) == "cancelled"
    assert shop.due_ms(second) == pytest.approx(before + HOUR_MS, abs=30_000)
    assert shop.rows() == []


@pytest.mark.parametrize("kind", ["connection", "scoped_session"])
def test_other_kinds_of_sessions(shop: Shop, kind: str) -> None:
    if kind == "connection":
        with shop.engine.begin() as connection:
            sent = shop.outbox.send(connection, "orders", 1, delay="1h")
    else:
        scoped = scoped_session(sessionmaker(shop.engine))
        sent = shop.outbox.send(scoped, "orders", 1, delay="1h")
        scoped.commit()
        scoped.remove()
    shop.relay_all()
    assert shop.state(sent) == "waiting"


async def test_an_asynchronous_session(shop: Shop, async_engine: AsyncEngine) -> None:
    outbox = AsyncOutbox(tables=shop.tables)
    async with AsyncSession(async_engine) as session, session.begin():
        sent = await outbox.send(session, "orders", 1, delay="1h")
        other = await outbox.send(session, "orders", 1, delay="1h")
        await outbox.cancel(session, "orders", other)
        await outbox.reschedule(session, "orders", sent, delay="2h")
    async with async_engine.connect() as connection:
        lost = await outbox.send(connection, "orders", 1)
        await connection.rollback()
    assert shop.relay_all() == 4
    states = [shop.state(one) for one in (sent, other, lost)]
    assert states == ["waiting", "cancelled", None]


def test_operations_on_one_message_keep_their_order(shop: Shop) -> None:
    def many(session: Session) -> str:
        sent = shop.outbox.send(session, "orders", 0, delay="1h", id="o")
        for n in range(1, 8):
            shop.outbox.cancel(session, "orders", sent)
            shop.outbox.send(session, "orders", n, id="o", on_duplicate="replace", delay="1h")
        shop.outbox.reschedule(session, "orders", "o", delay="3h")
        return sent

    before = datetime.now(UTC)
    shop.commit(many)
    assert shop.relay_all() == 16
    found = shop.producer.get("orders", "o")
    assert found is not None
    assert (found.body, found.state) == (7, "waiting")
    assert shop.due_ms("o") >= (before + timedelta(hours=3)).timestamp() * 1000


def test_a_delay_counts_from_the_insert_by_the_databases_clock(shop: Shop) -> None:
    """A message whose time came before the relay did is late by as much."""
    waits, late = shop.send(delay="1h"), shop.send(delay="5m")
    now_ms = int(time.time() * 1000)
    shop.make_older(10 * 60_000)
    shop.relay_all()
    assert shop.due_ms(waits) == pytest.approx(now_ms + 50 * 60_000, abs=20_000)
    assert shop.due_ms(late) == pytest.approx(now_ms - 5 * 60_000, abs=20_000)


def test_no_message_is_early(shop: Shop) -> None:
    """The remaining delay is counted from before the insert to after the read."""
    for _ in range(20):
        before_us = time.time_ns() // 1000  # on this machine, the clock of both servers
        sent = shop.send(delay="1h")
        time.sleep(0.003)
        shop.relay_all()
        assert shop.due_ms(sent) * 1000 >= before_us + HOUR_MS * 1000


def test_a_repeat_after_a_crash_adds_nothing(shop: Shop) -> None:
    """The relay dies between Redis's answer and the commit: everything is done again."""
    first = shop.send(1, delay="1h")
    replaced = shop.send(2, id="r", delay="1h", on_duplicate="replace")
    shop.send(3, id="s", on_duplicate="keep_live")
    shop.producer.send("orders", 0, id="r", delay="1h")

    def stats() -> dict[bytes, bytes]:
        return pairs(shop.producer._store.ask("HGETALL", "lisa:{orders}:stats"))

    for _ in range(2):
        with suppress(ZeroDivisionError), shop.relay._transaction() as connection:
            shop.relay._forward(connection, shop.relay._queries.lock(connection, 0))
            raise ZeroDivisionError
        assert len(shop.rows()) == 3
        done = stats()
    assert shop.relay_all() == 3
    assert stats() == done
    assert [shop.state(one) for one in (first, replaced)] == ["waiting"] * 2
    assert int(done[b"sent"]) == 4


@pytest.mark.parametrize("first", ["cancel", "reschedule"])
def test_a_repeat_does_not_reach_a_later_send_of_the_same_id(
    shop: Shop, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shop.send(1, id="x", delay="1h")
    shop.relay_all()

    def change(session: Session) -> None:
        if first == "cancel":
            shop.outbox.cancel(session, "orders", "x")
        else:
            shop.outbox.reschedule(session, "orders", "x", delay="5s")
        shop.outbox.send(session, "orders", 2, id="x", delay="2h", on_duplicate="replace")

    shop.commit(change)
    forget = Queries.delete
    for _ in range(3):
        monkeypatch.setattr(Queries, "delete", Mock(side_effect=ZeroDivisionError))
        with pytest.raises(ZeroDivisionError):
            shop.relay.step()
        monkeypatch.setattr(Queries, "delete", forget)
        shop.relay.step()
        if not shop.rows():
            break
    found = shop.producer.get("orders", "x")
    assert found is not None
    assert (found.state, found.body) == ("waiting", 2)
    assert shop.due_ms("x") > time.time() * 1000 + HOUR_MS


def test_a_stopped_relay_holds_up_only_the_messages_that_it_has(
    shop: Shop, database: Database
) -> None:
    if database.kind == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    shop.send(0, id="x", delay="1h")
    other = Relay(database.url, shop.url, tables=shop.tables)
    with other._transaction() as connection:
        assert len(other._queries.lock(connection, 0)) == 1
        shop.commit(*[lambda s: shop.outbox.cancel(s, "orders", "x") for _ in range(600)])
        ids = [shop.send(delay="1h") for _ in range(5)]
        assert shop.relay_all() == 5
    other.stop()
    assert {shop.state(one) for one in ids} == {"waiting"}


def test_a_topic_that_stays_full_does_not_starve_another(shop: Shop) -> None:
    shop.producer._store.drive(_configure(shop, "small", capacity=1))
    sends = [lambda s: shop.outbox.send(s, "small", 1, delay="1h") for _ in range(1_600)]
    shop.commit(*sends)
    shop.relay_all()
    for _ in range(4):
        with shop.engine.begin() as connection:
            connection.execute(update(shop.tables.outbox).values(try_ms=1))  # due again
        shop.relay._swept, shop.relay._was_sweep = -1e9, False
        passed = max(row.seq for row in shop.rows())
        shop.relay._passed_to = passed
        sent = shop.send(delay="1h")
        shop.relay.step()
        shop.relay.step()
        assert shop.state(sent) == "waiting"
        shop.relay._passed.clear()


@pytest.mark.parametrize(
    "values",
    [{"options": '{"mode": "newer"}'}, {"due": "soon"}, {"due": ""}, {"envelope": None}],
    ids=str,
)
def test_a_row_that_cannot_be_read_is_set_aside(shop: Shop, values: dict[str, Any]) -> None:
    wrong, good = shop.send(delay="1h"), shop.send(delay="1h")
    table = shop.tables.outbox
    with shop.engine.begin() as connection:
        connection.execute(update(table).where(table.c.message_id == wrong).values(**values))
    shop.relay_all()
    assert (shop.state(wrong), shop.state(good)) == (None, "waiting")
    (row,) = shop.rows()
    assert row.try_ms is None
    assert row.reason


def test_rows_that_were_read_long_ago_are_left(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a relay that was stopped for a while: others may have taken them meanwhile."""
    sent = shop.send(delay="1h")
    monkeypatch.setattr("lisa.outbox.forwarding.STALE_S", -1.0)
    assert shop.relay.step() == 0
    assert shop.state(sent) is None
    assert len(shop.rows()) == 1


def test_databases_end_the_transactions_of_relays_that_are_gone(
    shop: Shop, database: Database
) -> None:
    if database.kind == "sqlite":
        pytest.skip("the lock of a file ends with its process")
    is_postgresql = database.kind == "postgresql"
    name = "idle_in_transaction_session_timeout" if is_postgresql else "wait_timeout"
    query = f"SHOW {name}" if is_postgresql else f"SELECT @@session.{name}"
    with shop.relay._transaction() as connection:
        assert connection.scalar(text(query)) == ("1min" if is_postgresql else 60)


def test_a_row_that_can_never_be_sent_is_set_aside(shop: Shop) -> None:
    shop.producer._store.drive(_configure(shop, "orders", max_body_bytes=1024))
    good, large = shop.send(delay="1h"), shop.send("x" * 2000, delay="1h")
    shop.commit(lambda session: shop.outbox.reschedule(session, "orders", large, delay="2h"))
    another = shop.send(delay="1h")
    assert shop.relay_all() == 3
    assert [shop.state(one) for one in (good, large, another)] == ["waiting", None, "waiting"]
    aside, behind = shop.rows()
    assert (aside.message_id, aside.try_ms) == (large, None)
    assert "2000 bytes" in aside.reason
    assert (behind.operation, behind.reason, behind.try_ms) == ("r", None, 0)
    assert shop.relay.done.numbers()["send", "set_aside"] == 1
    assert shop.relay_all() == 0  # nothing is done behind it
    with shop.engine.begin() as connection:
        connection.execute(delete(shop.tables.outbox).where(shop.tables.outbox.c.seq == aside.seq))
    shop.relay._swept = -1e9
    assert shop.relay_all() == 1


def _configure(shop: Shop, topic: str, **options: object) -> Any:
    from lisa.core.transitions.topic import Configure

    return shop.producer._store.run(Configure(topic, {k: str(v) for k, v in options.items()}))


def test_a_full_topic_delays_its_own_messages_only(shop: Shop) -> None:
    shop.producer._store.drive(_configure(shop, "small", capacity=3))
    names = [shop.send(n, topic="small", delay="1h") for n in range(8)]
    other = shop.send(delay="1h")
    shop.relay_all()
    assert shop.state(other) == "waiting"
    states = [shop.state(name, "small") for name in names]
    assert states == ["waiting"] * 3 + [None] * 5
    assert {row.reason.split(" at most")[0] for row in shop.rows()} == {
        "topic 'small' holds 3 live messages and allows"
    }
    for name in names[:3]:
        shop.producer.cancel("small", name)
    assert shop.relay_all() == 0  # not before their time
    with shop.engine.begin() as connection:
        connection.execute(update(shop.tables.outbox).values(try_ms=1))
    shop.relay._swept = -1e9
    shop.relay_all()
    assert [shop.state(name, "small") for name in names[3:6]] == ["waiting"] * 3


def test_windows_and_local_times(shop: Shop) -> None:
    local = shop.send(at_local="2040-01-02T09:00", tz="Europe/Berlin")
    windowed = shop.send(
        at=datetime(2040, 1, 1, tzinfo=UTC), window="mon-fri 9-18", tz="Europe/Berlin"
    )
    shop.commit(
        lambda s: shop.outbox.reschedule(
            s, "orders", local, at_local="2040-06-02T09:00", tz="Europe/Berlin"
        ),
        lambda s: shop.outbox.reschedule(
            s, "orders", windowed, at=datetime(2040, 1, 7, tzinfo=UTC)
        ),
    )
    shop.relay_all()
    assert shop.due_ms(local) == datetime(2040, 6, 2, 7, tzinfo=UTC).timestamp() * 1000
    assert shop.due_ms(windowed) == datetime(2040, 1, 9, 8, tzinfo=UTC).timestamp() * 1000


def test_debounced_sends_are_one_message(shop: Shop) -> None:
    ids = [shop.send(n, key="k", debounce="1h") for n in range(3)]
    shop.send(9, key="t", throttle="1h")
    shop.relay_all()
    (found,) = shop.producer.list_key("orders", "k")
    assert {found.id} == set(ids)
    assert found.body == 2
    assert shop.producer.count_key("orders", "t") == 1


def test_what_a_call_refuses(shop: Shop) -> None:
    wrong: list[tuple[str, object, dict[str, Any]]] = [
        ("no topic!", 1, {}),
        ("orders", object(), {}),
        ("orders", 1, {"delay": "-1s"}),
        ("orders", 1, {"id": ""}),
        ("orders", 1, {"on_duplicate": "reject"}),
        ("orders", 1, {"debounce": "1s"}),
    ]
    with Session(shop.engine) as session:
        for topic, body, options in wrong:
            with pytest.raises(InvalidMessage):
                shop.outbox.send(session, topic, body, **options)
        with pytest.raises(InvalidMessage):
            shop.outbox.reschedule(session, "orders", "a")
        with pytest.raises(InvalidMessage):
            shop.outbox.reschedule(session, "orders", "a", at_local="nine", tz="UTC")
        with pytest.raises(InvalidMessage):
            shop.outbox.cancel(session, "orders", "")
        with pytest.raises(TypeError):
            shop.outbox.send(session, "orders", 1, dely="1h")  # type: ignore[call-arg]
        session.commit()
    assert shop.rows() == []


def test_middleware_is_called_around_the_insert(shop: Shop) -> None:
    class Stamp(Middleware):
        def send(self, call: SendCall, call_next: Callable[[SendCall], Any]) -> Any:
            call.set_header("stamp", "1")
            return call_next(call)

    outbox = Outbox(tables=shop.tables, middleware=[Stamp()])
    (sent,) = shop.commit(lambda session: outbox.send(session, "orders", 1, delay="1h"))
    shop.relay_all()
    found = shop.producer.get("orders", sent)
    assert found is not None
    assert found.headers == {"stamp": "1"}


def test_an_open_transaction_delays_only_itself(shop: Shop, database: Database) -> None:
    """Numbers are given before commits: a row that commits late has one that was passed."""
    if database.kind == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    with Session(shop.engine) as slow:
        late = shop.outbox.send(slow, "orders", 1, delay="1h")
        others = [shop.send(delay="1h") for _ in range(3)]
        assert shop.relay_all() == 3
        shop.relay._passed_to = 1_000  # passed long ago
        shop.relay._swept = time.monotonic() + 1000
        assert shop.relay.step() == 0
        slow.commit()
    assert [shop.state(one) for one in others] == ["waiting"] * 3
    assert shop.relay.step() == 0  # a usual look does not find it,
    shop.relay._swept = -1e9
    assert shop.relay.step() == 1  # a look at everything does
    assert shop.state(late) == "waiting"


def test_relays_share_the_rows(shop: Shop, database: Database) -> None:
    if database.kind == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    other = Relay(database.url, shop.url, tables=shop.tables)
    shop.commit(*[lambda s: shop.outbox.send(s, "orders", 1, delay="1h") for _ in range(600)])
    a = shop.send(1, id="a", delay="1h")
    with shop.relay._transaction() as connection:
        held = shop.relay._queries.lock(connection, 0)
        assert len(held) == 500
        assert other.step() == 101
        # An operation on a message that another relay holds waits for it.
        shop.commit(lambda s: shop.outbox.cancel(s, "orders", shop.rows()[0].message_id))
        assert other.step() == 0
        shop.relay._forward(connection, held)
    assert other.step() == 1
    assert shop.state(a) == "waiting"
    assert shop.rows() == []
    other.stop()


def test_a_relay_runs_by_itself(shop: Shop, database: Database) -> None:
    with Relay(database.url, shop.url, tables=shop.tables):
        sent = shop.send(delay="1h")
        deadline = time.monotonic() + 30
        while shop.rows():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert shop.state(sent) == "waiting"


def test_notified_relays_do_not_wait(
    shop: Shop, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lisa.outbox.relay.IDLE_S", 600.0)
    monkeypatch.setattr("lisa.outbox.relay.BUSY_S", 600.0)
    if database.kind != "postgresql":
        with pytest.raises(ConfigError, match="notify needs PostgreSQL"):
            Relay(database.url, shop.url, notify=True)
        with pytest.raises(ConfigError, match="notify needs PostgreSQL"):
            shop.commit(lambda s: Outbox(tables=shop.tables, notify=True).send(s, "orders", 1))
        return
    outbox = Outbox(tables=shop.tables, notify=True)
    with Relay(database.url, shop.url, tables=shop.tables, notify=True) as relay:
        for _ in range(3):
            shop.commit(lambda s: outbox.send(s, "orders", 1, delay="1h"))
            deadline = time.monotonic() + 60
            while shop.rows():
                assert time.monotonic() < deadline
                time.sleep(0.01)
        assert relay.error == ""
        relay._stopping.set()
        shop.commit(lambda s: outbox.send(s, "orders", 1))  # which ends its pause


def test_names_are_free(engine: Engine, redis_url: str) -> None:
    tables = Tables(outbox="shop_outbox", inbox="shop_inbox")
    tables.metadata.create_all(engine)
    with engine.begin() as connection:
        sent = Outbox(tables=tables).send(connection, "orders", 1, delay="1h")
    relay = Relay(engine.url, redis_url, tables=tables)
    assert relay.step() == 1
    relay.stop()
    with Producer(redis_url) as producer:
        assert producer.get("orders", sent) is not None


def test_the_backlog(shop: Shop) -> None:
    shop.producer._store.drive(_configure(shop, "orders", max_body_bytes=1024))
    shop.send("x" * 2000)
    shop.relay_all()
    shop.send(1, delay="1h")
    shop.make_older(60_000)
    shop.relay._keep_house()
    rows, age_s, set_aside = shop.relay.backlog
    assert (rows, set_aside) == (1, 1)
    assert 60 <= age_s < 90


def test_postgresql_reuses_the_space(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lisa.outbox.relay.VACUUM_EVERY_S", 0.0)
    monkeypatch.setattr("lisa.outbox.relay.VACUUM_ROWS", 100)
    if shop.engine.dialect.name != "postgresql":
        pytest.skip("other databases do so themselves")
    for _ in range(3):
        for _ in range(10):
            shop.commit(*[lambda s: shop.outbox.send(s, "orders", 1) for _ in range(100)])
            shop.relay_all()
            shop.relay._keep_house()
        with shop.engine.connect() as connection:
            size = connection.scalar(func.pg_total_relation_size("lisa_outbox"))
        assert size
        assert size < 1_000_000


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("nonsense", "the database is not a URL"),
        ("oracle://localhost/shop", "use postgresql, mysql, mariadb or sqlite"),
    ],
)
def test_wrong_databases(url: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Relay(url)


@pytest.mark.parametrize(
    ("url", "driver"),
    [
        ("postgresql://u@localhost/x", "psycopg"),
        ("postgresql+asyncpg://u@localhost/x", "psycopg"),
        ("mysql://u@localhost/x", "pymysql"),
        ("mariadb+asyncmy://u@localhost/x", "pymysql"),
        ("sqlite+aiosqlite:///x.db", "pysqlite"),
    ],
)
def test_a_blocking_driver_that_is_installed_is_found(url: str, driver: str) -> None:
    from lisa.outbox.relay import engine_of

    engine = engine_of(url)
    assert engine.driver == driver
    engine.dispose()


def test_commits_go_on_while_redis_is_away(engine: Engine, own_server: EmbeddedServer) -> None:
    """Afterwards everything arrives, in the order of each message."""
    shop = Shop(engine, own_server.url)
    shop.send(0, id="o", delay="1h")
    with Relay(engine.url, own_server.url, tables=shop.tables) as relay:
        shop.wait_until_empty()
        own_server.kill()
        for n in range(1, 40):
            began = time.monotonic()
            shop.commit(
                lambda s, n=n: shop.outbox.send(  # type: ignore[misc]
                    s, "orders", n, id="o", on_duplicate="replace", delay="1h"
                ),
                lambda s, n=n: shop.outbox.send(s, "orders", n, id=f"n{n}", delay="1h"),  # type: ignore[misc]
                lambda s, n=n: shop.outbox.cancel(s, "orders", f"n{n - 1}"),  # type: ignore[misc]
            )
            assert time.monotonic() - began < 2 * PATIENCE.total_seconds()
        while not relay.error:
            time.sleep(0.01)
        own_server.restart()
        shop.wait_until_empty()
    found = shop.producer.get("orders", "o")
    assert found is not None
    assert found.body == 39
    states = {shop.state(f"n{n}") for n in range(1, 39)}
    assert (states, shop.state("n39")) == ({"cancelled"}, "waiting")
    shop.relay.stop()
    shop.producer.close()


def test_a_relay_goes_on_after_its_database_was_away(
    shop: Shop, database: Database, request: pytest.FixtureRequest
) -> None:
    if database.kind == "sqlite":
        pytest.skip("SQLite has no server")
    if database.kind == "mariadb":
        cut = "SELECT id FROM information_schema.processlist WHERE id <> CONNECTION_ID()"
        kill = "KILL {}"
    else:
        cut = (
            "SELECT pid FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND datname = 'archive'"
        )
        kill = "SELECT pg_terminate_backend({})"
    with Relay(database.url, shop.url, tables=shop.tables) as relay:
        for _ in range(3):
            sent = shop.send(delay="1h")
            shop.wait_until_empty()
            assert shop.state(sent) == "waiting"
            errors = relay.errors
            with shop.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as mine:
                for (number,) in mine.execute(text(cut)).all():
                    with suppress(DBAPIError):
                        mine.execute(text(kill.format(number)))
            while relay.errors == errors:
                time.sleep(0.01)
            shop.engine.dispose()
    assert relay.backlog.set_aside == 0
