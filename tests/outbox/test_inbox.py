"""The inbox against real databases: which deliveries have an effect."""

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, assert_type

import msgspec
import pytest
from sqlalchemy import (
    Engine,
    create_engine,
    event,
    func,
    insert,
    select,
    text,
)
from sqlalchemy.exc import IntegrityError, OperationalError
from sqlalchemy.ext.asyncio import (
    AsyncEngine,
    AsyncSession,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import Session, sessionmaker

from lisa import AsyncConsumer, Consumer, Defer, Discard, Message, Retry
from lisa.consumer.handlers import Handlers, on_message, on_message_sync
from lisa.consumer.inflight import Held, Outcome
from lisa.core.model.errors import ConfigError
from lisa.core.redis.flow import adrive
from lisa.outbox import Inbox, Tables
from lisa.outbox import inbox_rows as rows
from lisa.outbox.inbox_rows import ROLLED_BACK
from tests.outbox.conftest import Database
from tests.outbox.effects import EFFECTS, TABLES, create_tables, effect, effect_async, effects

MESSAGE = Message(id="a", topic="orders", group="lisa", body=1, due_ms=1, token="tokentok")
DUPLICATE = insert(EFFECTS).values(seq=1, message="duplicate")
YEAR_MS = 365 * 86_400_000


@pytest.fixture
def engine(engine: Engine) -> Engine:
    """An engine on a database with an inbox and the table of effects."""
    create_tables(engine)
    return engine


def inbox_size(engine: Engine) -> int:
    with engine.connect() as connection:
        return connection.scalar(select(func.count()).select_from(TABLES.inbox)) or 0


def handlers_of(handler: Callable[..., Any], once_in: Any, **options: Any) -> Handlers:
    made = Handlers()
    made.add("orders", handler, once_in=once_in, **options)
    return made


def deliver(handlers: Handlers, message: Message = MESSAGE) -> Outcome:
    """One delivery, as a consumer's thread makes it."""
    held = Held("1-1", message, b"", 0, 0.0, 0.0)
    plan = handlers.plan("orders", message.group)
    return on_message_sync(plan, held, lambda _: pytest.fail("waits"))


async def deliver_async(handlers: Handlers, message: Message = MESSAGE) -> Outcome:
    """One delivery, as a task on a consumer's event loop."""
    held = Held("1-1", message, b"", 0, 0.0, 0.0)
    return await adrive(on_message(handlers.plan("orders", message.group), held), None)


def changed(**fields: Any) -> Message:
    return msgspec.structs.replace(MESSAGE, **fields)


OTHERS = [{"id": "b"}, {"token": "tokentoK"}, {"group": "mail"}, {"topic": "mails"}]


def test_deliveries_of_one_send_to_one_group_have_one_effect(engine: Engine) -> None:
    called: list[Message] = []

    def handle(message: Message, session: Session) -> None:
        called.append(message)
        effect(message, session)

    handlers = handlers_of(handle, engine)
    for _ in range(3):
        assert deliver(handlers) is None
        assert deliver(handlers, changed(attempt=2, body=2)) is None
    assert (effects(engine), len(called)) == (["a"], 1)
    for number, other in enumerate(OTHERS, 2):
        for _ in range(2):
            assert deliver(handlers, changed(**other)) is None
        assert (len(effects(engine)), len(called)) == (number, number), other


@pytest.mark.parametrize("first", ["succeeds", "fails"])
def test_a_delivery_waits_for_another_one_at_the_same_time(engine: Engine, first: str) -> None:
    succeeds = first == "succeeds"
    began, go_on = threading.Event(), threading.Event()
    calls: list[int] = []

    def handle(message: Message, session: Session) -> None:
        calls.append(1)
        effect(message, session)
        if len(calls) == 1:
            began.set()
            assert go_on.wait(60)
            assert succeeds

    handlers = handlers_of(handle, engine)
    with ThreadPoolExecutor(2) as pool:
        earlier = pool.submit(deliver, handlers)
        assert began.wait(60)
        second = pool.submit(deliver, handlers)
        time.sleep(0.2)
        assert not second.done()
        assert len(calls) == 1
        go_on.set()
        outcomes = [earlier.result(), second.result()]
    assert (outcomes[0] is None, outcomes[1]) == (succeeds, None)
    assert len(calls) == (1 if succeeds else 2)
    assert effects(engine) == ["a"]


def raises(error: Exception) -> Callable[[], object]:
    def fail() -> object:
        raise error

    return fail


FAILURES: dict[str, Callable[[], object]] = {
    "ValueError: no": raises(ValueError("no")),
    "later": raises(Retry("later")),
    "not now": raises(Defer("not now", delay="1s")),
    "never": raises(Discard("never")),
    "returned": lambda: Retry("returned"),
    "the handler returned False": lambda: False,
    "the handler returned a generator": lambda: (n for n in range(2)),
    "IntegrityError": raises(IntegrityError("own", None, ValueError())),
}


@pytest.mark.parametrize("reason", FAILURES)
def test_a_delivery_that_fails_has_no_effect_and_the_next_one_has(
    engine: Engine, reason: str
) -> None:
    acts: list[Callable[[], object]] = [FAILURES[reason], FAILURES[reason], lambda: True]
    outcomes = iter(acts)

    def handle(message: Message, session: Session) -> object:
        effect(message, session)
        return next(outcomes)()

    handlers = handlers_of(handle, engine)
    for _ in range(2):
        outcome = deliver(handlers)
        assert outcome is not None
        assert outcome.reason.startswith(reason)
        assert (effects(engine), inbox_size(engine)) == ([], 0)
    for _ in range(2):
        assert deliver(handlers) is None
    assert effects(engine) == ["a"]


def test_a_failed_commit_is_a_failure_of_the_handler(engine: Engine) -> None:
    handlers, broken = handlers_of(effect, engine), [True]

    def fail(_: object) -> None:
        if broken:
            broken.clear()
            raise ValueError("the connection is lost")

    assert deliver(handlers, changed(id="first")) is None
    event.listen(engine, "commit", fail)
    outcome = deliver(handlers)
    assert outcome is not None
    assert outcome.reason == "ValueError: the connection is lost"
    assert deliver(handlers) is None
    assert effects(engine) == ["first", "a"]


def commits(session: Session) -> None:
    session.commit()


def rolls_back(session: Session) -> None:
    session.rollback()


def rolls_back_and_goes_on(session: Session) -> None:
    session.rollback()
    effect(MESSAGE, session)


def is_rolled_back(session: Session) -> None:
    """As by MariaDB after a deadlock, whose error the handler catches."""
    session.connection().exec_driver_sql("ROLLBACK")
    effect(MESSAGE, session)


def closes(session: Session) -> None:
    with session:
        effect(MESSAGE, session)


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (commits, "must not commit"),
        (rolls_back, ROLLED_BACK),
        (rolls_back_and_goes_on, ROLLED_BACK),
        (closes, ROLLED_BACK),
        (is_rolled_back, ROLLED_BACK),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_only_the_inbox_ends_the_transaction(
    engine: Engine, act: Callable[[Session], None], said: str
) -> None:
    def handle(message: Message, session: Session) -> None:
        effect(message, session)
        act(session)

    handlers = handlers_of(handle, engine)
    for _ in range(2):
        outcome = deliver(handlers)
        assert outcome is not None
        assert said in outcome.reason
        assert (effects(engine), inbox_size(engine)) == ([], 0)


def test_a_handler_may_use_savepoints(engine: Engine) -> None:
    def handle(message: Message, session: Session) -> None:
        effect(message, session)
        with session.begin_nested():
            effect(changed(id="kept"), session)
        savepoint = session.begin_nested()
        effect(changed(id="lost"), session)
        savepoint.rollback()
        with suppress(IntegrityError), session.begin_nested():
            session.execute(DUPLICATE)

    handlers = handlers_of(handle, engine)
    assert [deliver(handlers), deliver(handlers)] == [None, None]
    assert effects(engine) == ["a", "kept"]


def test_a_caught_error_does_not_ack_a_handler_without_effect(engine: Engine) -> None:
    """PostgreSQL makes a rollback of the commit then, and says nothing."""

    def handle(message: Message, session: Session) -> None:
        effect(message, session)
        with suppress(IntegrityError):
            session.execute(DUPLICATE)

    handlers = handlers_of(handle, engine)
    assert deliver(handlers_of(effect, engine), changed(id="first")) is None
    outcomes = [deliver(handlers), deliver(handlers)]
    if engine.dialect.name == "postgresql":
        for outcome in outcomes:
            assert outcome is not None
            assert f"{ROLLED_BACK}session.begin_nested()" in outcome.reason
        assert (effects(engine), inbox_size(engine)) == (["first"], 1)
    else:
        assert outcomes == [None, None]
        assert (effects(engine), inbox_size(engine)) == (["first", "a"], 2)


def test_the_row_of_another_delivery_is_not_that_of_a_handler_rolled_back(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "now_ms", itertools.count(2**42).__next__)
    others: list[Outcome] = []

    def handle(message: Message, session: Session) -> None:
        if not others:
            session.connection().exec_driver_sql("ROLLBACK")
            others.append(deliver(handlers_of(effect, engine)))
        effect(message, session)

    outcome = deliver(handlers_of(handle, engine))
    assert outcome is not None
    assert ROLLED_BACK in outcome.reason
    assert others == [None]
    assert effects(engine) == ["a"]


def test_an_error_of_the_row_that_is_no_duplicate_is_a_failure(engine: Engine) -> None:
    """Acking it would lose the message."""
    named = Tables(inbox="my_inbox")
    with engine.begin() as connection:
        connection.execute(
            text("CREATE TABLE my_inbox (digest INT, expires_ms BIGINT, CHECK (expires_ms = 0))")
            if engine.dialect.name == "sqlite"
            else text(
                "CREATE TABLE my_inbox (digest "
                + ("BYTEA" if engine.dialect.name == "postgresql" else "BINARY(16)")
                + ", expires_ms BIGINT, CHECK (expires_ms = 0))"
            )
        )
    outcome = deliver(handlers_of(effect, Inbox(engine, tables=named)))
    assert outcome is not None
    assert isinstance(outcome.error, (IntegrityError, OperationalError))
    assert effects(engine) == []


def test_a_database_that_keeps_what_is_rolled_back_is_refused(
    engine: Engine, database: Database
) -> None:
    """The row of a failed delivery would stay, and the message be acked without an effect."""
    autocommit = create_engine(database.url, isolation_level="AUTOCOMMIT")
    outcome = deliver(handlers_of(effect, autocommit))
    assert outcome is not None
    assert "must not use AUTOCOMMIT" in outcome.reason
    assert effects(engine) == []
    autocommit.dispose()


# Expiry


def put_old(engine: Engine, count: int) -> None:
    old = [{"digest": b"%016d" % n, "expires_ms": n} for n in range(count)]
    with engine.begin() as connection:
        connection.execute(insert(TABLES.inbox), old)


def test_expired_rows_go_a_portion_at_a_time(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lisa.outbox.inbox.PORTION", 5)
    monkeypatch.setattr(rows, "PORTION", 5)
    handlers = handlers_of(effect, Inbox(engine, keep="365d"))
    put_old(engine, 13)
    sizes = []
    for number in range(5):
        assert deliver(handlers, changed(id=str(number))) is None
        sizes.append(inbox_size(engine) - number - 1)
    assert sizes == [8, 3, 0, 0, 0]
    put_old(engine, 1)
    assert deliver(handlers, changed(id="last")) is None
    assert inbox_size(engine) == 7  # for another minute
    monkeypatch.setattr(rows, "DELETE_EVERY_S", 0.0)
    assert deliver(handlers_of(effect, Inbox(engine)), changed(id="0")) is None, "known"
    assert deliver(handlers_of(effect, Inbox(engine)), changed(id="more")) is None
    assert inbox_size(engine) == 7
    with engine.connect() as connection:
        latest = connection.scalar(select(func.max(TABLES.inbox.c.expires_ms))) or 0
    assert 0 <= time.time() * 1000 + YEAR_MS - latest < 600_000


def test_rows_that_cannot_be_deleted_do_not_change_the_outcome(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    put_old(engine, 1)

    def refuse(*call: Any) -> None:
        if call[2].startswith("DELETE"):
            raise ValueError("no deletions today")

    event.listen(engine, "before_cursor_execute", refuse)
    assert deliver(handlers_of(effect, engine)) is None
    assert effects(engine) == ["a"]
    (said,) = [one.getMessage() for one in caplog.records if one.levelno >= logging.WARNING]
    assert said == "expired rows of the inbox cannot be deleted: no deletions today"


def test_deleting_does_not_wait_for_running_handlers(engine: Engine) -> None:
    if engine.dialect.name == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    began, go_on = threading.Event(), threading.Event()

    def handle(message: Message, session: Session) -> None:
        effect(message, session)
        if message.id == "slow":
            began.set()
            assert go_on.wait(60)

    handlers = handlers_of(handle, engine)
    put_old(engine, 1)
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(deliver, handlers, changed(id="slow"))
        assert began.wait(60)
        assert deliver(handlers) is None
        assert inbox_size(engine) == 1  # the old row is gone, the slow one not committed
        go_on.set()
        assert slow.result() is None
    assert effects(engine) == ["slow", "a"]


# Asyncio


async def test_async_handlers_have_one_effect(engine: Engine, async_engine: AsyncEngine) -> None:
    outcomes: Iterator[Callable[[], object]]
    outcomes = iter([lambda: False, raises(ValueError("no")), lambda: None])

    async def handle(message: Message, session: AsyncSession) -> object:
        await effect_async(message, session)
        return next(outcomes)()

    handlers = handlers_of(handle, async_engine)
    put_old(engine, 1)
    failed = [await deliver_async(handlers) for _ in range(2)]
    assert all(outcome is not None for outcome in failed)
    assert effects(engine) == []
    assert [await deliver_async(handlers) for _ in range(2)] == [None, None]
    assert (effects(engine), inbox_size(engine)) == (["a"], 1)


async def test_async_deliveries_at_the_same_time_have_one_effect(
    engine: Engine, async_engine: AsyncEngine
) -> None:
    if engine.dialect.name == "sqlite":
        pytest.skip("its lock is polled, and no fair one")
    handlers = handlers_of(effect_async, async_sessionmaker(async_engine))
    outcomes = await asyncio.gather(*[deliver_async(handlers) for _ in range(3)])
    assert outcomes == [None] * 3
    assert effects(engine) == ["a"]


async def test_a_cancelled_handler_has_no_effect(engine: Engine, async_engine: AsyncEngine) -> None:
    began = asyncio.Event()

    async def handle(message: Message, session: AsyncSession) -> None:
        await effect_async(message, session)
        if not began.is_set():
            began.set()
            await asyncio.sleep(60)

    handlers = handlers_of(handle, async_engine)
    task = asyncio.create_task(deliver_async(handlers))
    await began.wait()
    task.cancel()
    outcome = await task
    assert outcome is not None
    assert isinstance(outcome.error, asyncio.CancelledError)
    assert effects(engine) == []
    assert await deliver_async(handlers) is None
    assert effects(engine) == ["a"]


async def test_an_async_handler_does_not_commit(engine: Engine, async_engine: AsyncEngine) -> None:
    async def handle(message: Message, session: AsyncSession) -> None:
        await effect_async(message, session)
        await session.commit()

    outcome = await deliver_async(handlers_of(handle, async_engine))
    assert outcome is not None
    assert "must not commit" in outcome.reason
    assert effects(engine) == []


# What is refused


def sync_handler(message: Message, session: Session) -> None: ...


async def async_handler(message: Message, session: AsyncSession) -> None: ...


SYNC, ASYNC = create_engine("sqlite://"), create_async_engine("sqlite+aiosqlite://")
MISTAKES: list[tuple[Callable[..., Any], Any, dict[str, Any], str]] = [
    (async_handler, SYNC, {}, "is `async def`, so once_in= must be an AsyncEngine"),
    (async_handler, sessionmaker(SYNC), {}, "must be an AsyncEngine or an async_sessionmaker"),
    (sync_handler, ASYNC, {}, "is not `async def`, so once_in= must be an Engine"),
    (sync_handler, async_sessionmaker(ASYNC), {}, "must be an Engine or a sessionmaker"),
    (sync_handler, sessionmaker(class_=AsyncSession), {}, "must be an Engine or a sessionmaker"),
    (sync_handler, "default", {}, "once_in='default' must be an Engine, a sessionmaker, an"),
    (sync_handler, Session(SYNC), {}, "must be an Engine, a sessionmaker"),
    (sync_handler, SYNC, {"batch": 10}, "a batch handler cannot have once_in="),
    (lambda message: None, SYNC, {}, "two positional arguments, the message and the session"),
    (sync_handler, None, {}, "must take one positional argument, the message"),
]


@pytest.mark.parametrize(("handler", "once_in", "options", "said"), MISTAKES)
@pytest.mark.parametrize("kind", [Consumer, AsyncConsumer])
def test_wrong_combinations_are_refused(
    kind: type[Consumer | AsyncConsumer],
    handler: Callable[..., Any],
    once_in: Any,
    options: dict[str, Any],
    said: str,
) -> None:
    consumer = kind()
    with pytest.raises(ConfigError, match=said) as raised:
        consumer.on("orders", handler, once_in=once_in, **options)
    assert str(raised.value).startswith("topic 'orders': ")
    assert consumer.topics() == []


@pytest.mark.parametrize("keep", ["0s", "-1d", "soon"])
def test_a_wrong_time_to_keep_rows_is_refused(keep: str) -> None:
    with pytest.raises(ConfigError, match="keep"):
        Inbox(SYNC, keep=keep)


def test_handlers_of_one_topic_and_group_do_not_share_the_inbox() -> None:
    """The row of the first one's effect would keep the second one from being called."""
    consumer = Consumer()
    consumer.on("orders", sync_handler, once_in=SYNC)
    consumer.on("orders", sync_handler, once_in=SYNC, group="mail")
    consumer.on("orders", lambda message: None)
    consumer.on("mails", sync_handler, once_in=SYNC)
    with pytest.raises(ConfigError, match="another handler has once_in= already"):
        consumer.on("orders", sync_handler, once_in=SYNC)


def test_a_coroutine_of_a_plain_function_has_no_effect(engine: Engine) -> None:
    """It would run after the transaction has ended."""

    def handle(message: Message, session: Session) -> Any:
        effect(message, session)
        return asyncio.sleep(0)

    outcome = deliver(handlers_of(handle, engine))
    assert outcome is not None
    assert "returned a coroutine; define it with `async def`" in outcome.reason
    assert effects(engine) == []


class Order(msgspec.Struct):
    number: int


def test_the_type_checker_knows_the_session_and_the_body() -> None:
    consumer = Consumer()

    @consumer.on("orders", model=Order, once_in=SYNC)
    def handle(message: Message[Order], session: Session) -> int:
        return assert_type(message.body, Order).number

    @consumer.on("mails", once_in=Inbox(ASYNC))
    async def handle_async(message: Message, session: AsyncSession) -> None: ...

    with pytest.raises(ConfigError, match="two positional arguments"):

        @consumer.on("shipments", model=Order, once_in=SYNC)  # type: ignore[arg-type]
        def without_session(message: Message[Order]) -> None: ...

    assert consumer.topics() == ["mails", "orders"]
