"""Sends, cancels and reschedules that wait for the commit of a session of SQLAlchemy."""

import asyncio
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
import redis
from sqlalchemy import create_engine, event, insert, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import (
    AsyncSession,
    async_scoped_session,
    async_sessionmaker,
    create_async_engine,
)
from sqlalchemy.orm import (
    DeclarativeBase,
    Mapped,
    Session,
    mapped_column,
    scoped_session,
    sessionmaker,
)
from sqlalchemy.pool import StaticPool

import lisa
from lisa import AsyncProducer, InvalidMessage, Middleware, OnCommit, Outgoing, Producer, SendCall
from lisa.testing import AsyncRecordingProducer, RecordingProducer
from tests.servers import wait_until

Story = Callable[[Session, OnCommit], object]


class Stage:
    """Runs a story in a session, in a thread or in the greenlet of an `AsyncSession`."""

    def __init__(self, kind: str, redis_url: str) -> None:
        self.is_async = kind == "async"
        self.url = redis_url

    def run(self, story: Story, **options: Any) -> Any:
        """The story's result."""
        if self.is_async:
            return asyncio.run(self._arun(story, options))
        engine = create_engine("sqlite://", poolclass=StaticPool)
        with Producer(self.url, **options) as producer, Session(engine) as session:
            result = story(session, producer.on_commit(session))
        engine.dispose()
        return result

    async def _arun(self, story: Story, options: dict[str, Any]) -> Any:
        engine = create_async_engine("sqlite+aiosqlite://", poolclass=StaticPool)
        async with AsyncProducer(self.url, **options) as producer, AsyncSession(engine) as session:
            result = await session.run_sync(story, producer.on_commit(session))
        await engine.dispose()
        return result


@pytest.fixture(params=["sync", "async"])
def stage(request: pytest.FixtureRequest, redis_url: str) -> Stage:
    return Stage(request.param, redis_url)


@contextmanager
def failing(block: AbstractContextManager[object]) -> Iterator[None]:
    """A block of a transaction that ends with an error."""
    with suppress(KeyError), block:
        yield
        raise KeyError


class Log(Middleware):
    """Bodies in the order in which they are really sent, or ids of others."""

    def __init__(self, *failing: object) -> None:
        self.bodies: list[object] = []
        self._failing = failing

    def send(self, call: SendCall, call_next: Callable[[SendCall], Any]) -> Any:
        self._note(call)
        return call_next(call)

    async def send_async(self, call: SendCall, call_next: Callable[[SendCall], Any]) -> Any:
        self._note(call)
        return await call_next(call)

    def _note(self, call: SendCall) -> None:
        self.bodies += call.bodies
        if call.bodies[0] in self._failing:
            raise OSError(f"no {call.bodies[0]}")


@pytest.fixture
def ids(client: redis.Redis) -> Callable[[], list[str]]:
    """The ids of the messages on the server."""

    def found() -> list[str]:
        keys: Any = client.keys("*:body:*")
        return sorted(key.decode().rpartition(":")[2] for key in keys)

    return found


Ids = Callable[[], list[str]]


def test_calls_are_made_after_the_commit(stage: Stage, ids: Ids) -> None:
    def story(session: Session, calls: OnCommit) -> None:
        session.execute(text("select 1"))
        made = calls.send("orders", {"order": 1}, delay="1h")
        calls.send("orders", 2, id="b", delay="1h")
        assert ids() == []
        session.commit()
        assert ids() == sorted([made, "b"])
        calls.reschedule("orders", "b", delay="2h")
        calls.cancel("orders", made)
        assert ids() == sorted([made, "b"])
        session.commit()
        assert ids() == ["b"]

    stage.run(story)


def test_a_call_before_any_statement_begins_the_transaction(stage: Stage, ids: Ids) -> None:
    def story(session: Session, calls: OnCommit) -> None:
        assert not session.in_transaction()
        calls.send("orders", 1, id="a")
        assert session.in_transaction()
        session.rollback()
        with session.begin():  # an object that is older than the block
            calls.send("orders", 1, id="b")
        assert ids() == ["b"]

    stage.run(story)


def test_a_rollback_drops_calls(stage: Stage, ids: Ids) -> None:
    def story(session: Session, calls: OnCommit) -> None:
        calls.send("orders", 1, id="a")
        session.rollback()
        with failing(session.begin()):
            calls.send("orders", 1, id="b")
        calls.send("orders", 1, id="c")
        session.close()  # without a commit
        session.execute(text("select 1"))
        session.commit()
        assert ids() == []
        calls.send("orders", 1, id="d")
        session.commit()
        assert ids() == ["d"]

    stage.run(story)


def test_a_commit_that_fails_drops_calls(stage: Stage, ids: Ids) -> None:
    def story(session: Session, calls: OnCommit) -> None:
        session.execute(text("pragma foreign_keys = on"))
        session.execute(text("create table a (id integer primary key)"))
        session.execute(
            text("create table b (a integer references a deferrable initially deferred)")
        )
        session.commit()
        calls.send("orders", 1, id="a")
        session.execute(text("insert into b values (1)"))
        with pytest.raises(IntegrityError):
            session.commit()
        session.rollback()
        session.commit()
        assert ids() == []

    stage.run(story)


def test_savepoints(stage: Stage, ids: Ids) -> None:
    def story(session: Session, calls: OnCommit) -> None:
        with session.begin():
            with session.begin_nested():
                calls.send("orders", 1, id="released")
            calls.send("orders", 1, id="between")
            with failing(session.begin_nested()):
                calls.send("orders", 1, id="x1")
                with session.begin_nested():
                    calls.send("orders", 1, id="x2")  # released into what is rolled back
                session.begin_nested()
                calls.send("orders", 1, id="x3")  # open when the outer one is rolled back
            with failing(session.begin_nested()), session.begin_nested() as innermost:
                calls.send("orders", 1, id="x6")
                innermost.commit()
            with session.begin_nested():
                calls.send("orders", 1, id="outer")
                inner = session.begin_nested()
                calls.send("orders", 1, id="x4")
                inner.rollback()
                calls.send("orders", 1, id="outer-again")
            session.begin_nested()
            calls.send("orders", 1, id="open at the commit")
            assert ids() == []
        assert ids() == sorted(
            ["released", "between", "outer", "outer-again", "open at the commit"]
        )
        savepoint = session.begin_nested()
        calls.send("orders", 1, id="x5")
        savepoint.commit()
        session.rollback()
        assert "x5" not in ids()

    stage.run(story)


class Base(DeclarativeBase):
    """The tables of the tests."""


class Order(Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    state: Mapped[str] = mapped_column(default="new")


def test_a_flush_that_fails_drops_the_calls_of_its_savepoint(stage: Stage, ids: Ids) -> None:
    def story(session: Session, calls: OnCommit) -> None:
        Base.metadata.create_all(session.connection())
        session.add(Order(id=1))
        calls.send("orders", 1, id="a")
        session.flush()
        savepoint = session.begin_nested()
        calls.send("orders", 1, id="x")
        session.execute(insert(Order).values(id=2))
        session.add(Order(id=2))
        with pytest.raises(IntegrityError):
            session.flush()
        savepoint.rollback()
        calls.send("orders", 1, id="b")
        session.commit()
        assert ids() == ["a", "b"]

    stage.run(story)


def test_calls_within_events_of_a_flush(redis_url: str, ids: Ids) -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    Base.metadata.create_all(engine)
    with Producer(redis_url) as producer, Session(engine) as session:

        @event.listens_for(session, "after_flush")
        def after_flush(session: Session, _: object) -> None:
            for order in session.new:
                producer.on_commit(session).send("orders", order.id, id=f"order-{order.id}")

        session.add(Order(id=1))
        session.commit()
        assert ids() == ["order-1"]
        session.add(Order(id=2))
        session.flush()
        session.rollback()
        session.add(Order(id=1))
        with pytest.raises(IntegrityError):
            session.flush()
        session.rollback()
        session.commit()
        assert ids() == ["order-1"]
    engine.dispose()


def test_order_over_objects_and_producers(redis_url: str) -> None:
    log = Log()
    engine = create_engine("sqlite://", poolclass=StaticPool)
    make = sessionmaker(engine)
    with Producer(redis_url, middleware=[log]) as one, Producer(redis_url, middleware=[log]) as two:
        with make.begin() as session:
            for number in range(6):
                producer = one if number % 2 else two
                producer.on_commit(session).send("orders", number)
            assert log.bodies == []
        assert log.bodies == list(range(6))
    engine.dispose()


def test_errors_after_the_commit(stage: Stage, ids: Ids) -> None:
    """The session can be used, and what failed is named."""
    log = Log(2, 3)

    def story(session: Session, calls: OnCommit) -> None:
        session.execute(text("create table t (x)"))
        for number in range(1, 5):
            calls.send("orders", number, id=f"m{number}")
        with pytest.raises(OSError, match="no 2") as caught:
            session.commit()
        assert caught.value.__notes__ == [
            "The transaction is committed. Calls that failed: send orders m2, send orders m3"
        ]
        assert ids() == ["m1", "m4"]
        assert not session.in_transaction()
        session.execute(text("insert into t values (1)"))
        calls.send("orders", 5, id="m5")
        session.commit()
        assert ids() == ["m1", "m4", "m5"]
        assert log.bodies == [1, 2, 3, 4, 5]
        with pytest.raises(OSError, match="no 2"), session.begin():
            calls.send("orders", 2)
        with session.begin():
            calls.send("orders", 6, id="m6")
        assert ids() == ["m1", "m4", "m5", "m6"]

    stage.run(story, middleware=[log])


def test_the_connection_is_back_in_the_pool_when_calls_are_made(redis_url: str) -> None:
    engine = create_engine("sqlite://", poolclass=StaticPool)
    open_then: list[bool] = []

    class Look(Middleware):
        def send(self, call: SendCall, call_next: Callable[[SendCall], Any]) -> Any:
            open_then.append(session.in_transaction())
            return call_next(call)

    with Producer(redis_url, middleware=[Look()]) as producer, Session(engine) as session:
        session.execute(text("select 1"))
        producer.on_commit(session).send("orders", 1)
        session.commit()
    assert open_then == [False]
    engine.dispose()


def test_delays_count_from_the_call(
    stage: Stage, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a transaction of 60 s."""
    now_s = [100.0]
    for producer in (Producer, AsyncProducer):
        monkeypatch.setattr(producer, "_clock", staticmethod(lambda: now_s[0]))

    def server_ms() -> int:
        seconds, micros = client.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def story(session: Session, calls: OnCommit) -> None:
        calls.send("orders", 1, id="a", delay="10m")
        calls.send("orders", 1, id="b", delay=timedelta(seconds=59))
        calls.send("orders", 1, id="c", delay="1h")
        calls.reschedule("orders", "c", delay="1m 30s")
        calls.send("orders", 1, id="d", delay="2m", window="mon-sun 0-24")
        calls.send("orders", 1, id="e", at_ms=4_000_000_000_000)
        now_s[0] += 60
        before = server_ms()
        session.commit()
        after = server_ms()
        waiting: Any = client.zrange("lisa:{orders}:waiting", 0, -1, withscores=True)
        dues = dict(waiting)
        for name, left_s in (("a", 540), ("c", 30), ("d", 60)):
            due = dues.pop(name.encode())
            assert before + left_s * 1000 <= due <= after + left_s * 1000 + 1
        assert dues.pop(b"e") == 4_000_000_000_000
        assert client.exists("lisa:{orders}:body:b")
        assert dues.pop(b"b", 0) <= after, "due at once"

    stage.run(story)


def test_real_time_passes(redis_url: str) -> None:
    with Producer(redis_url) as producer, Session() as session:
        began = time.time_ns() // 1_000_000
        producer.on_commit(session).send("orders", 1, id="a", delay="60s")
        time.sleep(0.5)
        session.commit()
        found = producer.get("orders", "a")
        assert found is not None
        assert found.due_ms is not None
        sent = time.time_ns() // 1_000_000
        assert began + 60_000 <= found.due_ms <= sent + 60_000 - 400


def test_bodies_and_headers_are_those_of_the_call(redis_url: str) -> None:
    body, headers = {"items": [1]}, {"tenant": "a"}
    with Producer(redis_url) as producer, Session() as session:
        calls = producer.on_commit(session)
        calls.send("orders", body, id="a", headers=headers)
        for name, value in (("b", b"\x00"), ("s", "text"), ("n", 2**70), ("z", None)):
            calls.send("orders", value, id=name)
        body["items"].append(2)
        headers["tenant"] = "b"
        session.commit()
        found = producer.get("orders", "a")
        assert found is not None
        assert (found.body, found.headers) == ({"items": [1]}, {"tenant": "a"})
        others = [producer.get("orders", name) for name in ("b", "s", "n", "z")]
        assert [one and one.body for one in others] == [b"\x00", "text", 2**70, None]


MISTAKES: dict[str, Callable[[Any], object]] = {
    "topic 'a b' is not allowed": lambda calls: calls.send("a b", 1),
    "no JSON form": lambda calls: calls.send("orders", object()),
    "a message id has 1 to 256": lambda calls: calls.send("orders", 1, id=""),
    "give one of delay, at": lambda calls: calls.send("orders", 1, delay="1s", at_ms=0),
    'on_duplicate="reject" would raise': (
        lambda calls: calls.send("orders", 1, on_duplicate="reject")
    ),
    "Outgoing is for send_many": lambda calls: calls.send("orders", Outgoing(1)),
    "need a key": lambda calls: calls.send("orders", 1, latest=True),
    "a message id must be a str": lambda calls: calls.cancel("orders", 1),
    "reschedule needs delay": lambda calls: calls.reschedule("orders", "a"),
    "is not a local time": lambda calls: calls.reschedule("orders", "a", at_local="soon"),
    "give one of delay, at, at_ms and at_local": (
        lambda calls: calls.reschedule("orders", "a", at_ms=4 * 10**12, at_local="2030-01-01T09:00")
    ),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_found_at_the_call(words: str) -> None:
    producer = RecordingProducer()
    with Session() as session:
        calls = producer.on_commit(session)
        with pytest.raises(InvalidMessage, match=words):
            MISTAKES[words](calls)
        mistaken: Any = calls
        with pytest.raises(TypeError, match="unexpected keyword argument 'dealy'"):
            mistaken.send("orders", 1, dealy="1s")
        session.commit()
    assert producer.sent == []


def test_ids_of_keys(stage: Stage, ids: Ids) -> None:
    def story(session: Session, calls: OnCommit) -> None:
        made = [
            calls.send("orders", 1, key="k", delay="1h"),
            calls.send("orders", 1, key="k", id="a", delay="1h"),
            calls.send("orders", 1, key="k", debounce="1h"),
        ]
        assert calls.send("orders", 2, key="k", debounce="1h") == made[2]
        session.commit()
        assert ids() == sorted(made)

    stage.run(story)


def test_listeners_stay_few_and_sessions_are_freed(redis_url: str) -> None:
    with Producer(redis_url) as producer:
        session = Session()
        counts = set()
        for _ in range(3):
            producer.on_commit(session).send("orders", 1)
            session.commit()
            counts.add(len(list(session.dispatch.after_commit)))
        assert counts == {1}
        producer.on_commit(session).send("orders", 1)  # neither committed nor closed
        freed = weakref.ref(session)
        del session
        gc.collect()
        assert freed() is None


def test_objects_without_transactions_are_refused() -> None:
    mistaken: Any = RecordingProducer()
    for given in (create_engine("sqlite://"), AsyncSession(), sessionmaker(), object()):
        with pytest.raises(TypeError, match="takes a Session, or a database of Django, not"):
            mistaken.on_commit(given).cancel("orders", "a")
    mistaken = AsyncRecordingProducer()
    for given in (Session(), None, "default"):
        with pytest.raises(AttributeError, match="has no attribute 'sync_session'"):
            mistaken.on_commit(given)


async def test_a_scoped_asynchronous_session() -> None:
    producer = AsyncRecordingProducer()
    sessions = async_scoped_session(async_sessionmaker(), scopefunc=asyncio.current_task)
    producer.on_commit(sessions).send("orders", 1)
    await sessions.commit()
    assert [message.body for message in producer.sent] == [1]
    await sessions.remove()


def test_scoped_sessions_are_those_of_the_call() -> None:
    name = ["a"]
    producer = RecordingProducer()
    sessions = scoped_session(sessionmaker(), scopefunc=lambda: name[0])
    calls = producer.on_commit(sessions)
    calls.send("orders", "a")
    name[0] = "b"
    calls.send("orders", "b")
    sessions.commit()
    assert [message.body for message in producer.sent] == ["b"]


async def test_an_asyncio_program(redis_url: str, ids: Ids) -> None:
    engine = create_async_engine("sqlite+aiosqlite://", poolclass=StaticPool)
    make = async_sessionmaker(engine)
    async with AsyncProducer(redis_url) as producer:
        async with make.begin() as session:
            calls = producer.on_commit(session)
            await session.execute(text("create table t (x)"))
            calls.send("orders", 1, id="a")
            async with session.begin_nested() as savepoint:
                calls.send("orders", 1, id="x1")
                await savepoint.rollback()
            assert ids() == []
        assert ids() == ["a"]
        async with make() as session:
            producer.on_commit(session).send("orders", 1, id="x2")
        assert ids() == ["a"]
    await engine.dispose()


async def test_a_commit_that_is_cancelled_makes_all_calls(redis_url: str, ids: Ids) -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    class Slow(Middleware):
        async def send_async(self, call: SendCall, call_next: Callable[[SendCall], Any]) -> Any:
            begun.set()
            if call.bodies == [1]:
                await go.wait()
            return await call_next(call)

    async with AsyncProducer(redis_url, middleware=[Slow()]) as producer, AsyncSession() as session:
        calls = producer.on_commit(session)
        calls.send("orders", 1, id="a")
        calls.send("orders", 2, id="b")
        commit = asyncio.create_task(session.commit())
        await begun.wait()
        commit.cancel()
        with pytest.raises(asyncio.CancelledError):
            await commit
        assert ids() == ["b"]
        go.set()
        await asyncio.to_thread(wait_until, lambda: ids() == ["a", "b"])


def test_the_shared_producer(redis_url: str, ids: Ids, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LISA_REDIS_URL", redis_url)
    with Session() as session:
        lisa.on_commit(session).send("orders", 1, id="a")
        session.commit()
    lisa.close()
    assert ids() == ["a"]


@pytest.fixture(autouse=True)
def no_shared_producer() -> Iterator[None]:
    yield
    lisa.close()


def test_recording_producers() -> None:
    producer = RecordingProducer()
    with Session() as session:
        calls = producer.on_commit(session)
        sent = calls.send("orders", 1, delay="30m")
        session.commit()
        assert [(one.id, one.delay) for one in producer.sent] == [(sent, timedelta(minutes=30))]
        calls.cancel("orders", sent)
        session.commit()
    assert [one.id for one in producer.cancelled] == [sent]
